"""Reports from recorded rows alone, and the check of a committed one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_report import write_sample

from atom.__main__ import main
from atom.benchmarks.race_rows import RaceRow, TimelineRow
from atom.config import RaceMicrobenchmarkSettings
from atom.errors import BadInput
from atom.workbook import report_check, report_rebuild
from atom.workbook.notebooks import NOTEBOOKS, NotebookSpec
from atom.workbook.parameters import ReportTarget
from atom.workbook.report_check import (
    check_report,
    compare_sources,
    compare_verdicts,
    stderr_of,
)
from atom.workbook.report_rebuild import Plan, make_plan, rebuild
from atom.workbook.results import Execution, load_result
from atom.workbook.runner import RunReport
from atom.workbook.site import build_site
from atom.workbook.tables import csv_text, sha256_of

_ROOT = Path(__file__).resolve().parents[2]
_RACE = "02_race_microbenchmark"


def write_run(root: Path, machine: str = "h200", tail: str = "3fa2c1", **changes: Any) -> Path:
    """An empty but complete run folder."""
    run_id = f"20260131T101112Z-race-{tail}"
    folder = root / machine / run_id
    folder.mkdir(parents=True)
    files = {}
    for name, model in (("trials", RaceRow), ("timeline", TimelineRow)):
        content = csv_text([], model).encode()
        (folder / f"{name}.csv").write_bytes(content)
        files[f"{name}.csv"] = {"sha256": sha256_of(content), "rows": 0}
    provenance = {
        "run_id": run_id,
        "experiment": "race",
        "evidence": "measured",
        "machine": machine,
        "device": "NVIDIA H200",
        "profile": None,
        "driver": None,
        "triton": None,
        "commit": None,
        "dirty": None,
        "kind": "cuda",
        "runtime": "CUDA 13",
        "torch": "2.13.0",
        "python": "3.11.7",
        "numpy": "2.4.6",
        "settings": {},
        "environment": {},
        "facts": {},
        "started": "2026-01-31T10:11:12Z",
        "ended": "2026-01-31T10:12:12Z",
        "exit_state": "finished",
        "files": files,
        **changes,
    }
    (folder / "run.json").write_text(json.dumps(provenance))
    return folder


def write_race_report(folder: Path, run: Path, **settings: Any) -> None:
    """A result of notebook 02 that cites a measured run."""
    defaults = json.loads(RaceMicrobenchmarkSettings.parse({"profile": "h200"}).model_dump_json())
    verdict = {"claim": "micro-01", "evidence": "measured", "run_ids": [run.name]}
    result = {
        "profile": "h200",
        "settings": {**defaults, "device": "accelerator", **settings},
        "verdicts": [verdict],
        "figures": [{"run_ids": ["20260131T101213Z-race-aaaaaa", run.name]}],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{_RACE}.json").write_text(json.dumps(result))


def test_runs_make_a_report_named_after_their_machine(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for given in (run, run / "run.json", run / "trials.csv", tmp_path):
        plan = make_plan([str(given)], _ROOT)
        assert plan.profile == "h200"
        assert plan.folder is None
        assert plan.parameters[_RACE] == {"records": [str(run)]}
        assert plan.parameters["00_summary"] == {"records": [str(run)]}
        assert plan.parameters["01_fault_arithmetic"] == {}
        assert not [stem for stem in plan.parameters if NOTEBOOKS[stem].planned]


def test_runs_of_two_machines_need_a_name(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path, "mi300x", "aaaaaa")
    with pytest.raises(BadInput, match=r"several machines \(h200, mi300x\)"):
        make_plan([str(tmp_path)], _ROOT)
    assert make_plan([str(tmp_path)], _ROOT, "both").profile == "both"


def test_a_damaged_run_is_named_and_hides_no_other(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    damaged = write_run(tmp_path, tail="bbbbbb")
    (damaged / "trials.csv").write_text("nonsense\n")
    plan = make_plan([str(tmp_path)], _ROOT)
    assert plan.parameters[_RACE]["records"] == [str(run)]
    assert "bbbbbb/trials.csv" in "\n".join(plan.problems)
    with pytest.raises(BadInput, match="no recorded run"):
        make_plan([str(damaged)], _ROOT)


def test_what_cannot_be_rebuilt_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no such file"):
        make_plan([str(tmp_path / "nothing")], _ROOT)
    with pytest.raises(BadInput, match="holds no run"):
        make_plan([str(tmp_path / "empty")], _ROOT)
    write_race_report(tmp_path / "report", write_run(tmp_path / "runs"))
    (tmp_path / "note.txt").touch()
    with pytest.raises(BadInput, match=r"note.txt: no file of a run"):
        make_plan([str(tmp_path / "note.txt")], _ROOT)
    with pytest.raises(BadInput, match="not both"):
        make_plan([str(tmp_path / "report"), str(tmp_path / "runs")], _ROOT)


def test_a_report_is_rebuilt_with_its_parameters_on_the_rows_it_cites(tmp_path: Path) -> None:
    run = write_run(tmp_path / "data" / "runs")
    report = tmp_path / "reports" / "h200"
    write_race_report(report, run, trials=7)
    for given in (report, report / f"{_RACE}.json"):
        plan = make_plan([str(given)], tmp_path)
        assert plan.profile == "h200"
        assert plan.folder == report
        # the device is left to the virtual one; the simulated run that is not here is made again
        assert plan.parameters == {_RACE: {"trials": 7, "records": [f"data/runs/h200/{run.name}"]}}
    # nor does it count as a record where it is still here: its notebook's start deletes it
    simulated = write_run(report / "runs" / _RACE, "virtual-mi355x", "aaaaaa")
    simulated.rename(simulated.with_name("20260131T101213Z-race-aaaaaa"))
    write_race_report(report, run, trials=7, records=[f"reports/h200/runs/{_RACE}"])
    assert make_plan([str(report)], tmp_path).parameters == plan.parameters
    shutil.rmtree(run)
    with pytest.raises(BadInput, match=f"not in data/runs: {run.name}"):
        make_plan([str(report)], tmp_path)


def test_the_summary_keeps_the_records_that_it_read(tmp_path: Path) -> None:
    report = tmp_path / "reports" / "h200"
    write_race_report(report, write_run(tmp_path / "data" / "runs"))
    read = ["data/runs/h200", "reports/h200/runs", "data/gone"]
    summary = {
        "profile": "h200",
        "settings": {"profile": "h200", "records": read, "results": ""},
        "verdicts": [],
        "figures": [],
    }
    (report / "00_summary.json").write_text(json.dumps(summary))
    plan = make_plan([str(report)], tmp_path)
    assert plan.parameters["00_summary"] == {"records": ["data/runs/h200"]}
    assert plan.own_runs
    summary["settings"] = {"profile": "h200", "records": [], "results": ""}
    (report / "00_summary.json").write_text(json.dumps(summary))
    plan = make_plan([str(report)], tmp_path)
    assert plan.parameters["00_summary"] == {}
    assert not plan.own_runs


def test_a_rebuild_runs_in_order_on_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], dict[str, Any], str, str]] = []

    def pretend(
        specs: Sequence[NotebookSpec],
        given: Mapping[str, Any],
        target: ReportTarget,
        root: Path,
        **options: Any,
    ) -> RunReport:
        stems = [spec.stem for spec in specs]
        seen.append((stems, dict(given), target.option, target.profile))
        code = 1 if "00_summary" in stems else 0
        return RunReport({s: Execution("finished", 1, 1) for s in stems}, tuple(stems), code)

    monkeypatch.setattr(report_rebuild, "run_notebooks", pretend)
    records = {"records": ["data/runs/x"]}
    parameters = {"00_summary": records, "01_fault_arithmetic": {}, _RACE: records}
    report = rebuild(Plan("h200", parameters, own_runs=True), tmp_path / "out", tmp_path)
    assert [stems for stems, *_ in seen] == [["01_fault_arithmetic"], [_RACE], ["00_summary"]]
    assert seen[1][1:] == (records, "ci", "h200")
    assert seen[2][1] == {"records": ["data/runs/x", "out/runs"]}
    assert records == {"records": ["data/runs/x"]}
    assert report.exit_code == 1
    assert len(report.executions) == 3


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sample report in a checkout of its own, whose rebuild gives the same."""
    folder = tmp_path / "reports" / "ci"
    folder.mkdir(parents=True)
    write_sample(folder)
    build_site(folder, "ci")
    (tmp_path / "notebooks").mkdir()
    for path in folder.glob("*.ipynb"):
        shutil.copy(path, tmp_path / "notebooks")

    def pretend(plan: Plan, out: Path, root: Path) -> RunReport:
        out.mkdir(parents=True)
        for stem in plan.parameters:
            shutil.copy(folder / f"{stem}.json", out)
        return RunReport({s: Execution("fell", 1, 1) for s in plan.parameters}, (), 1)

    monkeypatch.setattr(report_check, "rebuild", pretend)
    return folder


def test_a_report_that_stands_passes(committed: Path, tmp_path: Path) -> None:
    check = check_report(committed, tmp_path)
    assert check.differences == ()
    assert check.exit_code == 0
    assert check.notebooks == 2


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("notebooks/00_summary.ipynb", "Half is", "A half is", "SHA-256 of its cells"),
        ("reports/ci/00_summary.json", "reproduced", "differs", "not the result that"),
        ("reports/ci/00_summary.ipynb", "word word", "words", "that manifest.json names"),
    ],
)
def test_a_changed_file_is_found(
    committed: Path, tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    check = check_report(committed, tmp_path)
    assert check.exit_code == 1
    (line,) = check.differences
    assert said in line
    assert "00_summary" in line


def test_a_page_that_shows_what_went_to_stderr_is_found(committed: Path, tmp_path: Path) -> None:
    path = committed / "00_summary.ipynb"
    notebook = json.loads(path.read_text())
    code = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    words = ["findfont: no such family\n", "second line\n"]
    stream = {"output_type": "stream", "name": "stdout", "text": words}
    code["outputs"].insert(0, stream)
    assert stderr_of(notebook) == ""
    stream["name"] = "stderr"
    path.write_text(json.dumps(notebook))
    (shown, changed) = check_report(committed, tmp_path).differences
    assert shown == "00_summary: its page shows what went to stderr: findfont: no such family"
    assert "that manifest.json names" in changed


def test_a_report_without_manifest_or_with_a_notebook_too_few_is_found(
    committed: Path, tmp_path: Path
) -> None:
    (committed / "manifest.json").unlink()
    shutil.copy(
        tmp_path / "notebooks" / "00_summary.ipynb", tmp_path / "notebooks" / f"{_RACE}.ipynb"
    )
    results = {s: load_result(committed, s) or {} for s in ("00_summary", "01_fault_arithmetic")}
    lines = compare_sources(committed, tmp_path, results)
    assert len(lines) == 2
    assert "manifest.json is missing" in lines[0]
    assert lines[1] == f"{_RACE}: not in this report"


def test_changed_verdicts_are_found() -> None:
    def result(verdict: str, value: str, evidence: str, claim: str = "mech-01") -> dict[str, Any]:
        one = {"claim": claim, "evidence": evidence, "verdict": verdict, "value": value}
        return {"verdicts": [one]}

    same = {"a": result("reproduced", "1", "measured")}
    assert compare_verdicts(same, same) == []
    (line,) = compare_verdicts(same, {"a": result("differs", "1", "measured")})
    assert line == "mech-01/measured: 'reproduced' became 'differs'"
    (line,) = compare_verdicts(same, {"a": result("reproduced", "2", "measured")})
    assert "found was '1', is '2'" in line
    simulated = {"a": result("reproduced", "1", "simulated")}
    assert compare_verdicts(simulated, {"a": result("reproduced", "2", "simulated")}) == []
    lines = compare_verdicts(same, {"a": result("reproduced", "1", "measured", "mech-02")})
    assert len(lines) == 2
    assert compare_verdicts(same, {}) == ["a: no result when rebuilt"]


def test_the_check_says_what_differs(committed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # the sample's sources are not the notebooks of this checkout
    assert main(["report", "--check", str(committed)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "SHA-256 of its cells" in said.err
    assert f"python -m atom report {committed}" in said.err
    assert main(["report", "--json", "--check", str(committed)]) == 1
    (check,) = json.loads(capsys.readouterr().out)["reports"].values()
    assert check["exit_code"] == 1
    assert len(check["differences"]) > 1


def test_the_check_names_a_report_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--check", str(tmp_path / "h200")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["report", "--check"]) == 2
