"""The runner on tiny notebooks: order, change detection, failures, stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from atom.config import NotebookSettings
from atom.errors import BadInput
from atom.workbook.fingerprint import fingerprint, source_hash
from atom.workbook.notebooks import (
    NOTEBOOKS,
    NotebookSpec,
    execution_order,
    find_notebook,
)
from atom.workbook.parameters import ReportTarget, assign, read_given, resolve_target
from atom.workbook.results import load_executions
from atom.workbook.runner import RunReport, run_notebooks, select

_RESULT = """\
from IPython.display import display
value = {"notebook": "tiny", "verdicts": [], "provenance": {}, "seen": times}
display({"application/vnd.atom.result+json": value, "text/plain": "result"}, raw=True)
"""


class TinySettings(NotebookSettings):
    """Parameters of a tiny notebook."""

    times: int = 1
    """How often."""


def tiny(stem: str, after: tuple[str, ...] = ()) -> NotebookSpec:
    return NotebookSpec(stem, stem, TinySettings, 10, after=after)


def write_notebook(root: Path, stem: str, body: str = "", end: str = "") -> None:
    parameters = nbformat.v4.new_code_cell('# Parameters\nprofile = "ci"\nrecords = []\ntimes = 1')
    parameters.metadata["tags"] = ["parameters"]
    cells = [nbformat.v4.new_markdown_cell(f"# {stem}"), parameters]
    if body:
        cells.append(nbformat.v4.new_code_cell(textwrap.dedent(body)))
    cells.append(nbformat.v4.new_code_cell(_RESULT + textwrap.dedent(end)))
    notebook = nbformat.v4.new_notebook(cells=cells)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    nbformat.write(notebook, root / "notebooks" / f"{stem}.ipynb")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("notebooks", "atom", "data/runs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "environment.yml").write_text("name: tiny\n")
    return tmp_path


def run(root: Path, *specs: NotebookSpec, force: bool = False, **given: Any) -> RunReport:
    target = ReportTarget("ci", "ci", root / "reports" / "ci")
    return run_notebooks(execution_order(specs), given, target, root, force=force)


def test_executes_once_and_again_only_after_a_change(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a kernel of the user's own by the same name, which cannot start, must not be taken
    kernel = root / "home" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "broken", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(root / "home"))
    write_notebook(root, "one", "import os, sys\nprint(os.getcwd(), sys.prefix)")
    write_notebook(root, "two")
    one, two = tiny("one"), tiny("two", after=("one",))

    first = run(root, one, two)
    assert (first.exit_code, first.executed) == (0, ("one", "two"))
    folder = root / "reports" / "ci"
    text = (folder / "one.ipynb").read_text()
    assert str(root) not in text
    assert sys.prefix not in text
    assert json.loads((folder / "one.json").read_text())["seen"] == 1
    assert not (folder / ".partial").exists()

    assert run(root, one, two).executed == ()
    assert run(root, one, two, times=3).executed == ("one", "two")
    assert json.loads((folder / "one.json").read_text())["seen"] == 3
    (folder / "two.json").unlink()
    assert run(root, one, two, times=3).executed == ("two",)
    assert run(root, two, times=3, force=True).executed == ("two",)


def test_what_a_fingerprint_covers(root: Path) -> None:
    write_notebook(root, "one")
    notebook = root / "notebooks" / "one.ipynb"
    earlier = root / "earlier.json"
    (root / "atom" / "code.py").write_text("a = 1\n")

    def key(runs: bool = True, **parameters: Any) -> str:
        return fingerprint(notebook, parameters, source_hash(root, runs=runs), {"e": earlier})

    seen = {key(), key(times=2)}
    without_runs = key(runs=False)
    for path in ("atom/code.py", "data/table.csv", "environment.yml", "earlier.json"):
        (root / path).write_text("changed")
        seen.add(key())
    assert len(seen) == 6
    write_notebook(root, "one", "1 + 1")
    assert key() not in seen
    write_notebook(root, "one")
    for path in ("data/runs/new.csv", "data/runs/.partial/p.json"):
        (root / path).parent.mkdir(exist_ok=True)
    before = key(), key(runs=False)
    (root / "data/runs/.partial/p.json").write_text("{}")
    assert (key(), key(runs=False)) == before
    (root / "data/runs/new.csv").write_text("1")
    assert key() != before[0]
    assert key(runs=False) == before[1] != without_runs


def test_a_failure_names_its_cell_and_keeps_the_last_good_page(root: Path) -> None:
    one, two, other = tiny("one"), tiny("two", after=("one",)), tiny("other")
    for stem in ("one", "two", "other"):
        write_notebook(root, stem)
    run(root, one)
    good = (root / "reports/ci/one.ipynb").read_bytes()
    write_notebook(root, "one", "number = 3\nprint(number / 0)")

    report = run(root, one, two, other)
    assert report.exit_code == 3
    assert [report.executions[s].state for s in ("one", "two", "other")] == [
        "failed",
        "skipped",
        "finished",
    ]
    message = report.executions["one"].message
    assert "begins with: number = 3" in message
    assert "ZeroDivisionError" in message
    assert (root / "reports/ci/one.ipynb").read_bytes() == good
    # nothing that failed counts as done
    assert "one" in run(root, one).executed


@pytest.mark.parametrize(("error", "code"), [("ClaimFell", 1), ("BadInput", 2)])
def test_exit_codes_of_a_notebooks_own_errors(root: Path, error: str, code: int) -> None:
    end = f'from atom.errors import {error}\nraise {error}("mech-01 is worse")'
    write_notebook(root, "one", end=end)
    report = run(root, tiny("one"))
    assert report.exit_code == code
    assert "mech-01 is worse" in report.executions["one"].message
    assert (root / "reports/ci/one.json").is_file() == (error == "ClaimFell")
    if error == "ClaimFell":
        # the page is ours: papermill's words around the cell are gone, the error stands
        shown = (root / "reports/ci/one.ipynb").read_text()
        assert "An Exception was encountered" not in shown
        assert "papermill-error-cell" not in shown
        assert "ClaimFell" in shown


def test_a_notebook_without_a_result_fails(root: Path) -> None:
    write_notebook(root, "one")
    path = root / "notebooks" / "one.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.pop()
    nbformat.write(notebook, path)
    report = run(root, tiny("one"))
    assert report.exit_code == 3
    assert "book.close()" in report.executions["one"].message


_STOPPED = """\
import signal, sys
from pathlib import Path
# a shell starts background commands with Ctrl-C ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
from test_runner import run, tiny
run(Path({root!r}), tiny("fast"), tiny("slow"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stop_keeps_what_finished_and_leaves_no_process(root: Path, number: int) -> None:
    write_notebook(root, "fast")
    mark = root / "slow_started"
    write_notebook(
        root,
        "slow",
        f"""\
        import os, subprocess, sys, time
        wait = [sys.executable, "-c", "import time; time.sleep(120)"]
        # its own session and no parent: nothing of the system's ends it with the kernel
        child = subprocess.Popen(wait, start_new_session=True)
        print("was here", flush=True)
        open({str(mark)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} end")
        time.sleep(120)
        """,
    )
    script = _STOPPED.format(tests=str(Path(__file__).parent), root=str(root))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    folder = root / "reports" / "ci"
    wait_until(
        lambda: mark.is_file() and "end" in mark.read_text() and "fast" in load_executions(folder)
    )
    children = psutil.Process(process.pid).children(recursive=True)
    kernel, grandchild = map(int, mark.read_text().split()[:2])
    assert {kernel, grandchild} <= {child.pid for child in children}
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    wait_until(lambda: not any(alive(child) for child in children))
    if number != signal.SIGKILL:
        cause = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert f"stopped by {cause}. Finished and kept: fast. Not finished: slow." in errors
        assert "slow: stopped in cell In [3], which begins with: import os, subprocess" in errors
        assert "its outputs so far: reports/ci/slow.failed.ipynb" in errors
        assert "was here" in (folder / "slow.failed.ipynb").read_text()
    write_notebook(root, "slow")
    assert run(root, tiny("fast"), tiny("slow")).executed == ("slow",)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(done: Any, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_parameters_are_checked_before_anything_starts(root: Path) -> None:
    write_notebook(root, "one")
    with pytest.raises(BadInput, match=r"tmies: no selected notebook .* did you mean 'times'\?"):
        run(root, tiny("one"), tmies=3)
    with pytest.raises(BadInput, match=r"notebook one:\s+times: .*'x'"):
        run(root, tiny("one"), times="x")
    with pytest.raises(BadInput, match="use --profile"):
        run(root, tiny("one"), profile="h200")
    assert not (root / "reports").exists()


def test_a_parameter_goes_to_every_notebook_that_has_it() -> None:
    bare = NotebookSpec("bare", "bare", NotebookSettings, 10)
    target = ReportTarget("ci", "ci", Path("out"))
    given = assign([tiny("one"), bare], {"times": 4}, target)
    assert given == {"one": {"profile": "ci", "times": 4}, "bare": {"profile": "ci"}}


def test_values_are_yaml(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("times: 2\nname: abc\n")
    pairs = [("times", "3"), ("sizes", "[1, 8]"), ("share", "2e-3"), ("on", "true")]
    assert read_given(pairs, str(file)) == {
        "times": 3,
        "name": "abc",
        "sizes": [1, 8],
        "share": 0.002,
        "on": True,
    }
    file.write_text("- 1\n")
    with pytest.raises(BadInput, match="one mapping"):
        read_given([], str(file))


def test_two_runs_do_not_write_to_one_folder(root: Path) -> None:
    import fcntl
    import os

    folder = root / "reports" / "ci"
    folder.mkdir(parents=True)
    write_notebook(root, "one")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another run"):
            run(root, tiny("one"))
    finally:
        os.close(handle)


def test_names_of_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_notebook("02").stem == "02_race_microbenchmark"
    assert find_notebook("notebooks/01_fault_arithmetic.ipynb").number == "01"
    with pytest.raises(BadInput, match="did you mean '01_fault_arithmetic'"):
        find_notebook("01_fault_aritmetic")
    monkeypatch.setitem(NOTEBOOKS, "04_accuracy", replace(NOTEBOOKS["04_accuracy"], planned=True))
    with pytest.raises(BadInput, match="planned"):
        find_notebook("04")


def test_order_and_missing_files(root: Path) -> None:
    specs = [tiny("a", after=("b", "c")), tiny("b", after=("c",)), tiny("c")]
    assert [spec.stem for spec in execution_order(specs)] == ["c", "b", "a"]
    with pytest.raises(BadInput, match="circle"):
        execution_order([tiny("a", after=("b",)), tiny("b", after=("a",))])
    with pytest.raises(BadInput, match="missing"):
        select(["01"], root)


def test_a_machines_name_is_for_recorded_runs_only(tmp_path: Path) -> None:
    target = resolve_target("h200", None, tmp_path)
    assert target.folder == (tmp_path / "reports" / "h200").resolve()
    with pytest.raises(BadInput, match="only recorded runs"):
        assign([tiny("one")], {}, target)
    assert (
        assign([tiny("one")], {"records": ["data/runs/h200"]}, target)["one"]["profile"] == "h200"
    )
