"""The site: self-contained pages, a complete ledger, links that lead somewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest

from atom.__main__ import main
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import accepted
from atom.workbook.claims import Claim, Predicate, judge, load_claims
from atom.workbook.commands import run_table
from atom.workbook.results import Execution, count_verdicts, save_executions, scrub
from atom.workbook.runner import RunReport
from atom.workbook.site import build_site

_STEM = "01_fault_arithmetic"


def arithmetic_claim() -> Claim:
    return next(
        claim
        for claim in load_claims().values()
        if Evidence.ARITHMETIC in claim.evidence and claim.predicate is Predicate.HOLDS
    )


def write_report(folder: Path, stem: str = _STEM) -> None:
    settled = judge(arithmetic_claim(), "arithmetic", holds=True, cell="claim-here")
    provenance = {"ended": "2026-01-02T03:04:05+00:00", "device": "none", "commit": "abc123"}
    result = {"verdicts": [json.loads(settled.model_dump_json())], "provenance": provenance}
    output = nbformat.v4.new_output(
        "display_data",
        {"text/html": '<div id="claim-here">verdict</div>', "image/png": "iVBORw0KGgo="},
    )
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "iVBORw0KGgo="}, metadata={"image/png": {"alt": "A picture"}}
    )
    code = nbformat.v4.new_code_cell("value = 1", outputs=[output, picture], execution_count=1)
    text = nbformat.v4.new_markdown_cell("# Title\n\nA <b>word</b>.")
    nbformat.write(nbformat.v4.new_notebook(cells=[text, code]), folder / f"{stem}.ipynb")
    (folder / f"{stem}.json").write_text(json.dumps(result))
    save_executions(folder, {stem: Execution("finished", 3.2, 25, "k")})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_report(tmp_path)
    return tmp_path


class Page(HTMLParser):
    """Ids, links and loaded addresses of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.alternatives: list[str] = []
        self.rows: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append(tag)
        if values.get("id"):
            assert values["id"] not in self.ids, f"id {values['id']} stands twice"
            self.ids.add(str(values["id"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        elif values.get("src") or values.get("href"):
            self.loaded.append(str(values.get("src") or values.get("href")))
        if tag == "img":
            self.alternatives.append(str(values.get("alt")))
        if tag == "tr" and "data-verdict" in values:
            self.rows.append(str(values["data-verdict"]))


def test_pages_load_nothing(folder: Path) -> None:
    build_site(folder, "ci")
    for name in ("index", _STEM):
        page = Page(folder / f"{name}.html")
        assert all(address.startswith("data:") for address in page.loaded), page.loaded
        text = (folder / f"{name}.html").read_text()
        assert not re.search(r"@import|url\((?!data:)|\bimport\(", text)
        assert 'name="viewport"' in text
    assert "http" not in "".join(Page(folder / "index.html").links)


def test_the_ledger_has_each_claim_and_kind_of_evidence_once(folder: Path) -> None:
    index = Page(build_site(folder, "ci"))
    claims = load_claims().values()
    assert len(index.rows) == sum(len(claim.evidence) for claim in claims)
    assert index.rows.count("reproduced") == 1
    for claim in claims:
        assert {f"{claim.id}-{kind}" for kind in claim.evidence} <= index.ids


def test_links_lead_to_a_page_and_a_place(folder: Path) -> None:
    build_site(folder, "ci")
    pages = {path.name: Page(path) for path in folder.glob("*.html")}
    settled = f"{_STEM}.html#claim-here"
    assert settled in pages["index.html"].links
    for name, page in pages.items():
        for link in page.links:
            target, _, place = link.partition("#")
            target = target.partition("?")[0] or name
            assert target in pages, link
            if place:
                assert place in pages[target].ids, link


def test_a_notebook_page_folds_code_and_describes_pictures(folder: Path) -> None:
    build_site(folder, "ci")
    page = Page(folder / f"{_STEM}.html")
    assert page.tags.count("details") == 1
    assert "A picture" in page.alternatives
    assert page.tags.count("h1") == 1


def test_two_notebooks_may_not_settle_the_same(folder: Path) -> None:
    write_report(folder, "00_summary")
    with pytest.raises(BadInput, match="settled by notebooks"):
        build_site(folder, "ci")


def test_a_damaged_result_names_its_file(folder: Path) -> None:
    (folder / f"{_STEM}.json").write_text("{")
    with pytest.raises(BadInput, match=f"{_STEM}.json: damaged"):
        build_site(folder, "ci")


def test_report_accepts_a_verdict_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accepted, "VERDICTS", folder / "verdicts")
    claim = arithmetic_claim().id
    command = ["report", "--out", str(folder)]
    # a verdict that needs no decision is accepted by its full key alone
    assert main([*command, "--accept", claim, "--reason", "seen twice"]) == 2
    assert not (folder / "verdicts" / "ci.json").exists()
    key = f"{claim}/arithmetic"
    assert main([*command, "--accept", key, "--reason", "seen twice"]) == 0
    assert f"accepted: {key} as 'reproduced'" in capsys.readouterr().out
    kept = json.loads((folder / "verdicts" / "ci.json").read_text())
    assert kept[f"{claim}/arithmetic"]["reason"] == "seen twice"
    assert (folder / "index.html").is_file()
    assert main([*command, "--accept", "nothing-01", "--reason", "x"]) == 2


def test_failed_notebooks_are_told_with_their_message(folder: Path) -> None:
    failed = Execution("failed", 1.0, 75, "", "cell In [3] <broken>")
    save_executions(folder, {"02_race_microbenchmark": failed})
    text = build_site(folder, "ci").read_text()
    assert "state-failed" in text
    assert "cell In [3] &lt;broken&gt;" in text


def test_the_closing_table(folder: Path) -> None:
    executions = {
        _STEM: Execution("finished", 30.0, 25, "k"),
        "02_race_microbenchmark": Execution("failed", 1.0, 75),
    }
    lines = run_table(RunReport(executions, (_STEM,), 3), folder).splitlines()
    assert lines[0].split() == ["notebook", "seconds", "budget", "claims", "by", "verdict"]
    assert "30.0!" in lines[1], "over budget"
    assert lines[1].endswith("1 reproduced")
    assert "FAILED" in lines[2]


def test_verdicts_are_counted_best_first() -> None:
    verdicts: list[dict[str, Any]] = [{"verdict": v} for v in ("not run", "differs", "reproduced")]
    assert list(count_verdicts(verdicts)) == ["reproduced", "differs", "not run"]


def test_paths_are_taken_out() -> None:
    root, home = Path("/some/checkout"), Path.home()
    text = f"/some/checkout/atom/a.py {home}/x /any/ipykernel_12/345.py /some/checkout/out/y"
    assert scrub(text, root, root / "out") == "./atom/a.py ~/x cell report/y"
