"""``python -m atom``: help that teaches, exit codes, and a start that loads nothing heavy."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom import __main__ as command_line
from atom.errors import ClaimFell, DeviceError
from atom.workbook import commands
from atom.workbook.results import Execution
from atom.workbook.runner import RunReport

_ROOT = Path(__file__).resolve().parents[1]
_HEAVY = {"torch", "pandas", "numpy", "papermill", "nbconvert", "nbformat", "matplotlib", "scipy"}


def _verbs() -> list[list[str]]:
    parser = command_line.build_parser(with_sweep=False)
    (names,) = (action.choices for action in parser._actions if action.choices)
    return [[], *([name] for name in names), ["records", "check"]]


_VERBS = _verbs()


@pytest.mark.parametrize("words", _VERBS, ids=" ".join)
def test_help_shows_an_example_that_parses(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main([*words, "--help"])
    assert end.value.code == 0
    # a long example goes on in the next line
    out = re.sub(r"\\\n\s*", "", capsys.readouterr().out)
    assert "usage: python -m atom" in out
    examples = re.findall(r"(?m)^  python -m atom (.+?)(?:   .*)?$", out.split("example")[1])
    assert examples
    for example in examples:
        line = example.split(" > ")[0]
        assert line.startswith(words[0] if words else "")
        command_line.build_parser().parse_args(shlex.split(line))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "01", "-p", "bonsu", "3"], "did you mean 'bonus'?"),
        (["run", "01", "-p", "conv_width", "1"], "conv_width: input should be greater than"),
        (["run", "01_fault_arithmetik"], "did you mean '01_fault_arithmetic'?"),
        (["run", "01", "-f", "missing.yaml"], "missing.yaml"),
        (["run", "01", "--jobs", "0"], "--jobs 0"),
        (["report", "--accept", "mech-01"], "--reason"),
        (["report", "--out", "nothing_here"], "first: python -m atom run"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors


@pytest.mark.parametrize(
    ("raised", "code"),
    [(ClaimFell("x"), 1), (DeviceError("x"), 3), (KeyboardInterrupt("stopped."), 130)],
)
def test_exit_codes(raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise raised

    monkeypatch.setattr(commands, "run", fail)
    assert command_line.main(["run"]) == code


def test_profile_gpu_without_one_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from atom.device import accelerator

    monkeypatch.setattr(accelerator, "why_no_accelerator", lambda: "none was found")
    assert command_line.main(["run", "01", "--profile", "gpu"]) == 3
    assert "needs an accelerator: none was found" in capsys.readouterr().err


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert "MI355X" in out
    assert "H200" in out
    assert "torch 2." in out


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command_line.main(["devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"MI355X", "H200"} <= {device["name"] for device in listed["devices"]}
    assert command_line.main(["records", "check", "--json", str(tmp_path)]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["valid"] is False
    assert "holds no run" in found["problems"][0]


def test_run_prints_json_and_tells_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executions = {
        "01_fault_arithmetic": Execution("failed", 2.0, 25, "", "its kernel died in cell In [3]"),
        "00_summary": Execution("skipped", 0.0, 20, "", "not executed"),
    }
    seen: dict[str, Any] = {}

    def done(*arguments: Any, **options: Any) -> RunReport:
        seen.update(options)
        tmp_path.joinpath("01_fault_arithmetic.failed.ipynb").write_text("{}")
        return RunReport(executions, ("01_fault_arithmetic",), 3)

    monkeypatch.setattr(commands, "run_notebooks", done)
    monkeypatch.setattr(commands, "_build", lambda folder, profile, fresh: folder / "index.html")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    words = ["run", "01", "00", "--out", str(tmp_path), "--json", "--time-limit", "3"]
    assert command_line.main(words) == 3
    out, errors = capsys.readouterr()
    values = json.loads(out)
    assert values["exit_code"] == 3
    one = values["notebooks"]["01_fault_arithmetic"]
    assert (one["state"], one["executed"]) == ("failed", True)
    assert one["partial"].endswith("01_fault_arithmetic.failed.ipynb")
    assert "::error file=notebooks/01_fault_arithmetic.ipynb" in errors
    assert seen["time_limit"] == 3
    assert json.loads((tmp_path / "claims.json").read_text())["claims"] == []


def test_nothing_is_coloured_in_a_pipe() -> None:
    for words in (["--help"], ["devices"], ["run", "nowhere"]):
        done = subprocess.run(
            [sys.executable, "-m", "atom", *words],
            cwd=_ROOT,
            capture_output=True,
            env={**os.environ, "FORCE_COLOR": "", "TERM": "xterm-256color"},
        )
        assert b"\x1b" not in done.stdout + done.stderr


def test_the_engines_start_command_is_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atom.entrypoints.openai_server", "--port", "8000"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "python -m atom serve" in done.stderr


def test_a_command_line_loads_nothing_heavy() -> None:
    script = (
        "import sys; from atom.__main__ import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "from atom.workbook import commands\n"
        "print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert not _HEAVY & set(done.stdout.rsplit("loaded", 1)[1].split())
