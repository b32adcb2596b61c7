"""A report on a code host: one Markdown file, small pictures, links that lead to notebooks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from markdown_it import MarkdownIt
from sample_report import picture
from test_site import write_report

from atom.workbook.claims import load_claims
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.report_manifest import load_manifest, source_sha256
from atom.workbook.report_readme import key_figures, smaller
from atom.workbook.site import build_site

_STEM = "02_race_microbenchmark"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_report(tmp_path, _STEM)
    notebook = nbformat.read(tmp_path / f"{_STEM}.ipynb", as_version=4)
    for output in notebook.cells[1].outputs:
        output.data["image/png"] = picture()
    nbformat.write(notebook, tmp_path / f"{_STEM}.ipynb")
    build_site(tmp_path, "ci")
    return tmp_path


def test_every_claim_stands_in_the_readme(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    for claim in load_claims():
        assert text.count(f'<a id="claim-{claim}"></a>') == 1
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") - line.count("\\|") == 10 for line in rows if "claim-" in line)


def test_links_and_pictures_of_the_readme_are_there(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    targets = set(re.findall(r"\]\(([^)]+)\)", text))
    assert f"{_STEM}.ipynb" in targets
    assert f"figures/{_STEM}-1.png" in targets
    assert all((folder / target).is_file() for target in targets), targets
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<table>") == 4
    assert html.count("<tr>") > len(load_claims())


def test_the_same_notebooks_give_the_same_bytes(folder: Path) -> None:
    files = [folder / "README.md", folder / "manifest.json", *(folder / "figures").iterdir()]
    before = [file.read_bytes() for file in files]
    build_site(folder, "ci")
    assert [file.read_bytes() for file in files] == before


def test_pictures_get_smaller_and_old_ones_go(folder: Path) -> None:
    (found,) = key_figures(folder, _STEM, {})
    assert found.caption
    assert found.content.startswith(b"\x89PNG")
    assert len(found.content) < 60_000
    assert smaller(b"no picture") == b"no picture"
    old = folder / "figures" / "00_summary-9.png"
    old.write_bytes(b"old")
    build_site(folder, "ci")
    assert not old.exists()


def test_figures_of_one_caption_keep_their_own_evidence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(folder / f"{_STEM}.ipynb", as_version=4)
    shown = next(o for o in notebook.cells[1].outputs if "image/png" in o.get("data", {}))
    shown.metadata["image/png"] = {"alt": "one caption"}
    notebook.cells[1].outputs = [shown, shown]
    nbformat.write(notebook, folder / f"{_STEM}.ipynb")
    two = replace(NOTEBOOKS[_STEM], key_figures=(0, 1))
    monkeypatch.setitem(NOTEBOOKS, _STEM, two)
    kinds = ("simulated", "measured")
    figures = [{"caption": "one caption", "evidence": kind, "source": "x"} for kind in kinds]
    pictures = key_figures(folder, _STEM, {"figures": figures})
    assert [one.origin for one in pictures] == ["simulated, x", "measured, x"]


def test_the_manifest_knows_a_source_from_its_executed_copy(folder: Path) -> None:
    manifest = load_manifest(folder)
    assert manifest is not None
    assert manifest["notebooks"][_STEM]["source_sha256"] == source_sha256(folder / f"{_STEM}.ipynb")
    notebook = nbformat.read(folder / f"{_STEM}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    injected = nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["injected-parameters"]})
    notebook.cells.insert(1, injected)
    nbformat.write(notebook, folder / "source.ipynb")
    before = source_sha256(folder / "source.ipynb")
    assert before == source_sha256(folder / f"{_STEM}.ipynb")
    notebook.cells[0].source += " "
    nbformat.write(notebook, folder / "source.ipynb")
    assert source_sha256(folder / "source.ipynb") != before


def test_executed_notebooks_have_an_output_that_a_code_host_shows(folder: Path) -> None:
    notebook = nbformat.read(folder / f"{_STEM}.ipynb", as_version=4)
    nbformat.validate(notebook)
    shown = {"text/html", "text/plain", "image/png", "text/markdown"}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "display_data" or shown & set(output.data)
