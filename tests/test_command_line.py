"""``python -m atom``: help that teaches, exit codes, and a start that loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom import __main__ as command_line
from atom.errors import ClaimFell, DeviceError
from atom.workbook import commands

_ROOT = Path(__file__).resolve().parents[1]
_HEAVY = {"torch", "pandas", "numpy", "papermill", "nbconvert", "nbformat", "matplotlib", "scipy"}


@pytest.mark.parametrize("words", [[], ["run"], ["report"], ["records"], ["records", "check"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main([*words, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "usage: python -m atom" in out
    if len(words) < 2 and words != ["records"]:
        assert "examples" in out


def test_sweep_teaches_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(["sweep", "--help"])
    assert end.value.code == 0
    assert "--quick" in capsys.readouterr().out


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
