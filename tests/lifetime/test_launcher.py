"""The launcher: exit codes, JSON, suppressions, and children by fork, spawn and subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.errors import BadInput
from atom.lifetime.findings import Finding, Report, Suppression, Use, read_suppressions
from atom.lifetime.launcher import main, parse_suppression

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

PROGRAM = """\
import multiprocessing, os, subprocess, sys

def work(name):
    import scenarios
    from atom.device import open_device
    scenarios.SCENARIOS[name].program(open_device("virtual"))

if __name__ == "__main__":
    how, name = sys.argv[1:3]
    if how == "here":
        work(name)
    elif how == "subprocess":
        subprocess.run([sys.executable, __file__, "here", name], check=True)
    elif how == "isolated":
        subprocess.run([sys.executable, "-I", "-c", f"print({name!r})"], check=True)
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-ES", "-c", "pass"])
        os.wait()
    elif how == "killed":
        if os.fork() == 0:
            work(name)
            os._exit(0)
        os.wait()
    elif how == "late":
        import threading, time
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=lambda: (time.sleep(0.2), work(name)))
        thread = threading.Thread(target=lambda: (child.start(), time.sleep(0.2), work(name)))
        thread.start()
    elif how == "ends itself":
        work(name)
        os._exit(7)
    elif how == "exit":
        sys.exit(int(name))
    elif how == "raise":
        raise ValueError(name)
    elif how == "import":
        import no_such_package
    elif how == "print":
        import atexit
        atexit.register(print, "at exit")
        print("by python", flush=True)
        os.write(1, b"by descriptor\\n")
        subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)
        work(name)
    else:
        process = multiprocessing.get_context(how).Process(target=work, args=(name,))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def launch(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(PROJECT), str(HERE)])
    return subprocess.run(
        [sys.executable, "-m", "atom.lifetime.launcher", "run", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places},
        timeout=120,
    )


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("how", ["here", "fork", "spawn", "subprocess", "killed"])
def test_findings_of_every_process_are_gathered(program: Path, how: str) -> None:
    done = launch("--json", str(program), how, "status_dropped")
    assert done.returncode == 1, done.stderr
    report = found(done)
    (finding,) = report["findings"]
    assert finding["kind"] == "freed-in-use"
    assert finding["second"] is not None
    assert report["processes"] == (1 if how == "here" else 2)
    assert (finding["process"] != os.getpid()) is True
    assert any("without a summary" in text for text in report["cannot_see"]) is (how == "killed")
    if how != "killed":
        assert report["operations"] == 4
    assert "sitecustomize" not in done.stderr


def test_the_watch_goes_on_to_the_end_of_the_process(program: Path) -> None:
    """Threads and children that the program's last line does not wait for."""
    done = launch("--json", str(program), "late", "status_dropped")
    assert done.returncode == 1, done.stderr
    report = found(done)
    assert (len(report["findings"]), report["findings"][0]["count"]) == (1, 2)
    assert (report["processes"], report["operations"]) == (2, 8)


def test_a_program_that_ends_itself_hides_nothing(program: Path) -> None:
    done = launch("--json", str(program), "ends itself", "status_dropped")
    assert done.returncode == 1, done.stderr
    report = found(done)
    assert (len(report["findings"]), report["program_exit_code"]) == (1, 7)
    assert any("without a summary" in text for text in report["cannot_see"])


def test_a_correct_program_ends_with_zero_and_is_a_module(program: Path) -> None:
    done = launch("-m", "program", "here", "status_held", folder=program.parent)
    assert done.returncode == 0, done.stderr
    assert "0 findings" in done.stderr
    assert "4 device operations" in done.stderr


def test_children_that_keep_the_watch_out_are_named(program: Path) -> None:
    done = launch("--json", str(program), "isolated", "x")
    assert done.returncode == 0, done.stderr
    report = found(done)
    named = sorted(text for text in report["cannot_see"] if text.startswith("the Python child"))
    assert len(named) == 2
    assert "with -I, which keeps the watch out" in named[0]
    assert "with -E -S, which keeps the watch out" in named[1]
    assert "program.py:15" in named[0]
    assert "-I -c" in named[0]


@pytest.mark.parametrize(("how", "what", "code"), [("exit", "7", 7), ("raise", "why", 3)])
def test_the_programs_own_end_is_passed_on(program: Path, how: str, what: str, code: int) -> None:
    done = launch(str(program), how, what)
    assert done.returncode == code
    assert ("ValueError: why" in done.stderr) is (how == "raise")


@pytest.mark.parametrize(("name", "code"), [("status_held", 0), ("status_dropped", 1)])
def test_json_on_stdout_stands_alone(program: Path, name: str, code: int) -> None:
    done = launch("--json", str(program), "print", name)
    assert done.returncode == code, done.stderr
    report = found(done)
    assert (bool(report["findings"]), report["program_exit_code"]) == (bool(code), 0)
    for words in ("by python", "by descriptor", "by a child", "at exit"):
        assert words in done.stderr
    plain = launch(str(program), "print", name)
    assert plain.stdout.split("\n")[-2:] == ["at exit", ""]


def test_a_run_that_saw_nothing_says_so(program: Path, tmp_path: Path) -> None:
    nothing = "anything at all: the program made no device operation"
    done = launch("--json", str(program), "exit", "0")
    assert done.returncode == 0
    assert any(nothing in text for text in found(done)["cannot_see"])
    assert f"not seen in this run: {nothing}" in done.stderr
    output = tmp_path / "found.txt"
    for words in ([], ["--output", str(output)]):
        assert nothing in launch(*words, str(program), "exit", "0").stderr
    assert nothing in output.read_text()
    watched = launch("--json", str(program), "here", "status_held")
    blind = found(watched)["cannot_see"]
    assert not any(nothing in text for text in blind)
    if not torch.cuda.is_available():
        assert any("only the virtual device was watched" in text for text in blind)
        assert "only the virtual device was watched" in watched.stderr


def test_findings_and_the_programs_own_end_are_told_apart(program: Path) -> None:
    both = program.with_name("both.py")
    both.write_text(PROGRAM + "    sys.exit(5)\n")
    done = launch("--json", str(both), "here", "status_dropped")
    assert (done.returncode, found(done)["program_exit_code"]) == (1, 5)
    assert len(found(done)["findings"]) == 1
    done = launch("--findings-exit-code", "86", str(both), "here", "status_dropped")
    assert done.returncode == 86
    assert "the program itself ended with exit code 5" in done.stderr
    done = launch("--findings-exit-code", "86", str(both), "here", "status_held")
    assert done.returncode == 5


def test_a_module_that_is_not_there_is_bad_input(program: Path) -> None:
    for name in ("no_such_module", "json.no_such", "multiprocessing"):
        done = launch("-m", name, folder=program.parent)
        assert done.returncode == 2, name
        assert f"error: -m {name}: " in done.stderr
        assert "Traceback" not in done.stderr
    # an import that fails inside the program is the program's own failure
    done = launch("-m", "program", "import", "x", folder=program.parent)
    assert done.returncode == 3
    assert "No module named 'no_such_package'" in done.stderr


def test_a_suppression_needs_a_reason_and_counts_with_it(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("# known\nscenarios.py  shows the fault on purpose\ngone.py:3  it moved\n")
    done = launch("--suppressions", str(file), "--json", str(program), "spawn", "status_dropped")
    assert done.returncode == 0, done.stderr
    assert found(done)["suppressed"][0]["suppressed"] == "shows the fault on purpose"
    assert found(done)["unused_suppressions"] == ["gone.py:3"]
    assert "this suppression covered nothing: gone.py:3" in done.stderr
    file.write_text("scenarios.py:3\n")
    done = launch("--suppressions", str(file), str(program), "here", "status_held")
    assert done.returncode == 2
    assert "known.txt:1" in done.stderr
    assert "reason" in done.stderr


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no_such_script.py"]) == 2
    assert "no_such_script.py" in capsys.readouterr().err
    for place in ("file.py:3", "file.py", "x"):
        assert main(["run", "--suppress", f"{place}=", __file__]) == 2
        assert f"suppression '{place}': a file and a reason" in capsys.readouterr().err
    assert main(["run", "--output", "no_such_folder/found.txt", __file__]) == 2
    assert "--output no_such_folder/found.txt: cannot be written" in capsys.readouterr().err
    assert main(["run", "--findings-exit-code", "256", __file__]) == 2
    assert "1 to 255" in capsys.readouterr().err


def test_suppressions_are_read() -> None:
    assert parse_suppression("a/b.py:12=why") == Suppression("a/b.py", 12, "why")
    assert parse_suppression("b.py=why = so") == Suppression("b.py", None, "why = so")
    with pytest.raises(BadInput, match="No such file"):
        read_suppressions("no_such_file.txt")


def test_findings_survive_json() -> None:
    from scenarios import SCENARIOS

    from atom.device import open_device
    from atom.lifetime.sanitizer import sanitizer

    with sanitizer() as report:
        SCENARIOS["status_dropped"].program(open_device("virtual"))
    (finding,) = report.findings
    again = Finding.from_json(json.loads(json.dumps(finding.as_json())))
    assert again == finding
    assert isinstance(again.first, Use)
    merged = Report()
    merged.merge([again], ["blind"], 4)
    merged.merge([Finding.from_json(again.as_json())], ["blind"], 4)
    assert (merged.findings[0].count, merged.operations, merged.processes) == (2, 8, 3)
    assert merged.cannot_see == ["blind"]


PYTEST = """\
import pytest
from scenarios import SCENARIOS
from atom.device import open_device

@pytest.fixture
def device():
    return open_device("virtual")

def test_faulty(device):
    SCENARIOS["status_dropped"].program(device)

@pytest.mark.parametrize("again", [1, 2])
def test_faulty_twice(device, again):
    SCENARIOS["two_writers"].program(device)

def test_correct(device):
    SCENARIOS["status_held"].program(device)

@pytest.mark.lifetime_findings("on purpose")
def test_expected(device):
    SCENARIOS["ring_slot_reused_early"].program(device)

@pytest.mark.lifetime_findings("on purpose")
def test_expected_in_vain(device):
    SCENARIOS["double_buffer"].program(device)
"""


def test_the_pytest_plugin_fails_what_it_must(tmp_path: Path) -> None:
    (tmp_path / "test_given.py").write_text(PYTEST)

    quiet = ["-q", "-p", "no:cacheprovider", "-rA", str(tmp_path)]

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "atom.lifetime.pytest_plugin", *words, *quiet],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), str(HERE)])},
            timeout=120,
        )
        return done.stdout + done.stderr

    (tmp_path / "known.txt").write_text("gone.py:3  it moved\n")
    watched = run("--lifetime-sanitizer", "--lifetime-suppressions", "known.txt")
    assert "this suppression covered nothing: gone.py:3" in watched
    assert "4 failed, 2 passed" in watched, watched
    for name in ("test_faulty", "test_faulty_twice[1]", "test_faulty_twice[2]"):
        assert f"FAILED test_given.py::{name}" in watched
    assert "FAILED test_given.py::test_expected_in_vain" in watched
    assert "missing edge (c)" in watched
    assert "processes that tests start" in watched
    assert "6 passed" in run()
    refused = run("--lifetime-sanitizer", "--lifetime-suppressions", "nofile")
    assert "nofile" in refused
    assert "INTERNALERROR" not in refused
