"""What a notebook gets from its session, in this process and under a bare papermill run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest

from atom.errors import BadInput, ClaimFell
from atom.evidence import Evidence
from atom.workbook import claims, session
from atom.workbook.claims import Claim, Predicate
from atom.workbook.results import RESULT_MIME, extract_result
from atom.workbook.session import Book, open_notebook, repository_root

_STEM = "01_fault_arithmetic"
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What was displayed: data and metadata."""
    outputs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def record(data: dict[str, Any], metadata: Any = None, *, raw: bool) -> None:
        outputs.append((data, metadata or {}))

    monkeypatch.setattr(session, "display", record)
    monkeypatch.chdir(_ROOT)
    return outputs


@pytest.fixture
def book(shown: list[Any]) -> Book:
    return open_notebook(_STEM, {"bonus": 3})


def arithmetic_claim() -> Claim:
    return next(
        claim
        for claim in claims.load_claims().values()
        if Evidence.ARITHMETIC in claim.evidence and claim.predicate is Predicate.HOLDS
    )


def test_parameters_come_from_the_notebooks_names(book: Book) -> None:
    assert book.settings.bonus == 3
    assert book.settings.conv_width == 4
    assert book.profile == "ci"
    assert book.runs_folder == Path("reports/ci/.interactive") / _STEM
    race = {"device": "accelerator", "profile": "h200"}
    assert open_notebook("02_race_microbenchmark", race).runs_folder == Path("data/runs")


@pytest.mark.parametrize(
    ("injected", "values", "message"),
    [
        ("bonsu = 3", {"bonsu": 3}, "bonsu: no such parameter; did you mean 'bonus'?"),
        ('bonus = "x"', {"bonus": "x"}, "bonus: input should be a valid integer, got 'x'"),
        ("conv_width = 1", {"conv_width": 1}, "conv_width: input should be greater than"),
        ('records = "data"', {"records": "data"}, "records: expected a list, such as [a, b]"),
    ],
)
def test_injected_parameters_are_checked(
    injected: str, values: dict[str, Any], message: str
) -> None:
    namespace = {"In": ["", "# Parameters\nbonus = 1", f"# Parameters\n{injected}\n"], **values}
    with pytest.raises(BadInput) as caught:
        open_notebook(_STEM, namespace)
    assert message in str(caught.value)
    assert f"notebook {_STEM}" in str(caught.value)


def test_other_cells_and_papermills_paths_are_no_parameters(shown: list[Any]) -> None:
    cells = ["x = 1", '# Parameters\nPAPERMILL_INPUT_PATH = "a"\nPAPERMILL_OUTPUT_PATH = "b"']
    names = {"x": 1, "PAPERMILL_INPUT_PATH": "a", "PAPERMILL_OUTPUT_PATH": "b"}
    assert open_notebook(_STEM, {"In": cells, **names}).settings.bonus == 16384


def test_a_claim_is_settled_once(book: Book, shown: list[Any]) -> None:
    claim = arithmetic_claim()
    settled = book.settle(claim.id, "arithmetic", holds=True)
    assert settled.cell == f"claim-{claim.id}-arithmetic"
    assert f'id="{settled.cell}"' in shown[-1][0]["text/html"]
    with pytest.raises(BadInput, match="before"):
        book.settle(claim.id, Evidence.ARITHMETIC, holds=True)
    with pytest.raises(BadInput, match="no claim 'nothing-01'"):
        book.settle("nothing-01", "arithmetic", holds=True)


def test_scalars(book: Book) -> None:
    book.scalar("rows", np.int64(4), "rows", "arithmetic")
    book.scalar("limit", float("inf"), "s", "arithmetic")
    assert book.result()["scalars"]["rows"] == {
        "value": 4,
        "unit": "rows",
        "evidence": "arithmetic",
    }
    json.dumps(book.result(), allow_nan=False)
    with pytest.raises(BadInput, match="before"):
        book.scalar("rows", 5, "rows", "arithmetic")
    with pytest.raises(BadInput, match="scalar 'list'"):
        book.scalar("list", [1], "", "arithmetic")
    with pytest.raises(ValueError, match="guessed"):
        book.scalar("other", 1, "", "guessed")


def test_figures_and_tables_carry_their_label(book: Book, shown: list[Any]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([1, 2])
    book.show(figure, "A <line>.", "simulated", "MI355X", run_ids=["a1"])
    (picture, metadata), (caption, _) = shown[-2:]
    assert metadata["image/png"]["alt"] == "A <line>."
    assert "simulated" in caption["text/html"]
    assert "A &lt;line&gt;." in caption["text/html"]
    (stamp,) = [text.get_text() for text in figure.texts]
    today = book.result()["provenance"]["started"][:10]
    assert stamp == f"simulated, profile MI355X; {today}, run a1"
    assert not pyplot.fignum_exists(figure.number)
    assert picture["image/png"]
    book.table(pd.DataFrame({"a": [1.5, None]}), "Two rows.", "measured", "h200")
    assert "<td>–</td>" in shown[-1][0]["text/html"]
    assert "measured" in shown[-1][0]["text/html"]


def test_close_shows_the_result_and_only_then_compares(
    book: Book, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = arithmetic_claim()
    book.settle(claim.id, "arithmetic", holds=False)
    monkeypatch.setattr(claims, "load_accepted", lambda profile: {})
    with pytest.raises(ClaimFell, match=claim.id):
        book.close()
    result = shown[-1][0][RESULT_MIME]
    assert result["verdicts"][0]["claim"] == claim.id
    assert result["settings"]["bonus"] == 3
    text = json.dumps(result)
    assert str(_ROOT) not in text
    assert str(Path.home()) not in text
    assert socket.gethostname() not in text


def test_close_passes_what_was_accepted(
    book: Book, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = arithmetic_claim()
    book.settle(claim.id, "arithmetic", holds=True)
    monkeypatch.setattr(claims, "load_accepted", lambda profile: {})
    book.close()
    assert RESULT_MIME in shown[-1][0]


def write_tiny(path: Path) -> None:
    claim = arithmetic_claim().id
    parameters = nbformat.v4.new_code_cell("bonus = 16384")
    parameters.metadata["tags"] = ["parameters"]
    opening = f"""\
from atom.workbook import claims
from atom.workbook.session import open_notebook

claims.load_accepted = lambda profile: {{}}
book = open_notebook("{_STEM}", globals())
book.settle("{claim}", "arithmetic", holds=book.settings.bonus == 16384)"""
    sources = [opening, "book.close()"]
    cells = [parameters, *(nbformat.v4.new_code_cell(source) for source in sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    nbformat.write(notebook, path)


def papermill(tmp_path: Path, *arguments: str) -> tuple[int, str, nbformat.NotebookNode]:
    source, output = tmp_path / "tiny.ipynb", tmp_path / "out.ipynb"
    write_tiny(source)
    command = [sys.executable, "-m", "papermill", str(source), str(output), "-k", "python3"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr, nbformat.read(output, as_version=4)


def test_bare_papermill_refuses_a_typo_with_one_message(tmp_path: Path) -> None:
    code, errors, _ = papermill(tmp_path, "-p", "bonsu", "3")
    assert code != 0
    assert "BadInput: notebook 01_fault_arithmetic:" in errors
    assert "bonsu: no such parameter; did you mean 'bonus'?" in errors
    assert "session.py" not in errors, "a traceback hides the message"


def test_bare_papermill_falls_with_its_claim_and_keeps_the_result(tmp_path: Path) -> None:
    code, errors, notebook = papermill(tmp_path, "-p", "bonus", "3")
    assert code != 0
    assert "ClaimFell" in errors
    assert extract_result(notebook)["settings"]["bonus"] == 3


def test_root_is_the_checkout() -> None:
    assert (repository_root() / "pyproject.toml").is_file()
