"""What a CI reads: annotations, the job's summary, claims.json."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from atom.workbook import ci_output
from atom.workbook.results import Execution

_FELL = (
    "01_fault_arithmetic, profile ci: worse than accepted:\n"
    "  arith-04/arithmetic: 'differs' was never accepted: 100% off, by far\n"
    "  arith-05/arithmetic: no longer settled\n"
    "Look into it; if it is right, record the reason with\n"
    "  python -m atom report --profile ci --accept CLAIM --reason TEXT"
)
_EXECUTIONS = {
    "01_fault_arithmetic": Execution("fell", 3.0, 25, "", _FELL),
    "02_race_microbenchmark": Execution("failed", 9.0, 75, "", "its kernel died in cell In [4]"),
    "00_summary": Execution("skipped", 0.0, 20, "", "not executed"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    verdict = {"claim": "arith-04", "evidence": "arithmetic", "verdict": "differs", "value": "a|b"}
    result = {"verdicts": [verdict]}
    (tmp_path / "01_fault_arithmetic.json").write_text(json.dumps(result))
    return tmp_path


def test_each_fallen_claim_and_each_failed_notebook_is_an_annotation() -> None:
    lines = ci_output.error_lines(_EXECUTIONS)
    start = "::error file=notebooks/01_fault_arithmetic.ipynb,title=claim fell%3A "
    assert lines[0] == (
        f"{start}arith-04/arithmetic::arith-04/arithmetic: 'differs' was never accepted: "
        "100%25 off, by far"
    )
    assert lines[1].startswith(f"{start}arith-05/arithmetic::")
    assert lines[2] == (
        "::error file=notebooks/02_race_microbenchmark.ipynb,"
        "title=02_race_microbenchmark%3A failed::its kernel died in cell In [4]"
    )
    assert len(lines) == 3


def test_a_message_of_several_lines_stays_one_command() -> None:
    lines = ci_output.error_lines({"01_fault_arithmetic": Execution("failed", 1, 1, "", "a\nb")})
    assert lines[0].endswith("::a%0Ab")


def test_claims_are_written_for_scripts(folder: Path) -> None:
    ci_output.tell({}, folder, "ci")
    written = json.loads((folder / "claims.json").read_text())
    assert written["counts"] == {"differs": 1}
    assert written["claims"][0]["key"] == "arith-04/arithmetic"
    assert written["claims"][0]["notebook"] == "01_fault_arithmetic"


def test_only_github_actions_gets_commands_and_a_summary(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    stream = io.StringIO()
    ci_output.tell(_EXECUTIONS, folder, "ci", stream)
    assert stream.getvalue() == ""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary.md"))
    (folder / "summary.md").write_text("before\n")
    ci_output.tell(_EXECUTIONS, folder, "ci", stream)
    assert stream.getvalue().count("::error ") == 3
    text = (folder / "summary.md").read_text()
    assert text.startswith("before\n## Workbook, profile ci")
    assert "| arith-04 | arithmetic | differs | a\\|b | 01_fault_arithmetic |" in text
    assert "| 02_race_microbenchmark | failed | 9.0 | 75 |" in text
