"""Which child processes the watch will not see: from their command lines, and as they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.lifetime.unseen_children import (
    options_that_keep_out,
    own_options,
    watch_starts,
    why_unseen,
)

SITE = "/folder/site"
KEPT = {"PYTHONPATH": f"/other{os.pathsep}{SITE}"}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("-I worker.py", "-I"),
        ("-u -IS worker.py", "-I -S"),
        ("-uE -m package -I", "-E"),
        ("-W ignore -S x.py", "-S"),
        ("-Wignore::I -X dev x.py -I", ""),
        ("-X importtime -c print(1) -E", ""),
        ("-s -B -OO x.py", ""),
        ("worker.py -I", ""),
        ("--help-all -E", "-E"),
        ("- -I", ""),
        ("", ""),
    ],
)
def test_options_ahead_of_the_script_count(line: str, options: str) -> None:
    assert options_that_keep_out(line.split()) == options


@pytest.mark.parametrize(
    ("program", "line", "reason"),
    [
        ("/usr/bin/python3.12", "python3.12 -I x.py", "-I"),
        (None, "python -E x.py", "-E"),
        (sys.executable, "anything -S x.py", "-S"),
        ("/bin/sh", "sh -c cd_x;_exec_python3_-I_x.py", "-I"),
        ("/usr/bin/env", "env -S A=1 python -I x.py", "-I"),
        ("/usr/bin/python3", "python3 x.py", None),
        ("/bin/sh", "sh -c ls_-I", None),
        ("/bin/ls", "ls -I x", None),
        ("/no/such/file", "file -I", None),
    ],
)
def test_a_command_line_is_read(program: str | None, line: str, reason: str | None) -> None:
    words = [word.replace("_", " ") for word in line.split()]
    found = why_unseen(program, words, None, SITE)
    assert found == (None if reason is None else f"with {reason}, which keeps the watch out")


def test_an_environment_of_its_own_counts() -> None:
    assert why_unseen("python3", ["python3", "x.py"], KEPT, SITE) is None
    assert why_unseen("ls", ["ls"], {}, SITE) is None
    for lost in ({}, {"PYTHONPATH": "/other"}, {b"PYTHONPATH": b"/other"}):
        found = why_unseen("python3", ["python3", "x.py"], lost, SITE)
        assert found is not None
        assert "without this run's PYTHONPATH" in found


def test_a_script_says_with_its_first_line_what_runs_it(tmp_path: Path) -> None:
    script = tmp_path / "tool"
    for line, seen in (("#!/usr/bin/env -S python3 -I", False), ("#!/usr/bin/python3", True)):
        script.write_text(f"{line}\npass\n")
        found = why_unseen(str(script), ["tool", "-E"], None, SITE)
        assert (found is None) is seen


def test_a_start_is_told_once_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SITE)
    told: list[str] = []
    stop = watch_starts(SITE, told.append)
    isolated = [sys.executable, "-I", "-c", "pass"]
    try:
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert told == []
        subprocess.run(isolated, check=True)
        assert os.system("exit 0") == 0
        assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", "pass"]) == 0
    finally:
        stop()
    assert len(told) == 1
    assert "test_unseen_children.py" in told[0]
    assert told[0].endswith("-I -c pass")
    subprocess.run(isolated, check=True)
    assert len(told) == 1
    assert own_options() == ""


def test_a_listener_that_fails_stops_no_program() -> None:
    def fails(text: str) -> None:
        raise ValueError(text)

    stop = watch_starts(SITE, fails)
    try:
        assert subprocess.run([sys.executable, "-I", "-c", "pass"], check=True).returncode == 0
    finally:
        stop()


def test_a_process_whose_children_inherit_such_an_option_says_so(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from atom.lifetime.unseen_children import own_options\nprint(own_options())\n"
    )
    project = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-E", str(script), project], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "-E"
