"""Kernels that die, cells past their time, places that are not ready: named, kept, cleaned up."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_runner import tiny, write_notebook

from atom.errors import BadInput
from atom.workbook import kernels
from atom.workbook.endings import Trace, death_cause, keep_partial
from atom.workbook.kernels import JOB_VARIABLE, end_marked, marked
from atom.workbook.notebooks import execution_order
from atom.workbook.parameters import ReportTarget
from atom.workbook.progress import Progress, seconds_left, seconds_of_one
from atom.workbook.runner import run_notebooks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("notebooks", "atom", "data/runs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "environment.yml").write_text("name: tiny\n")
    return tmp_path


_FAMILY = """\
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True
)
open({mark!r}, "w").write(str(child.pid))
print("was here", flush=True)
time.sleep(0.5)
"""

_ENDS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL: most often"),
    "crashed": ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV: a crash in native"),
    "left": ("os._exit(7)", "it ended by itself with exit code 7"),
    "slow": ("time.sleep(120)", "past its time limit of 3 s in cell In [3]"),
    "worker": ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(120)", "its process died in"),
}


@pytest.mark.parametrize("end", _ENDS)
def test_an_end_is_named_and_nothing_is_left(root: Path, end: str) -> None:
    line, cause = _ENDS[end]
    mark = root / "child"
    write_notebook(root, "one", _FAMILY.format(mark=str(mark)) + line)
    write_notebook(root, "two")
    write_notebook(root, "reads")
    specs = execution_order([tiny("one"), tiny("two"), tiny("reads", after=("one",))])
    target = ReportTarget("ci", "ci", root / "reports" / "ci")
    limit = 0.3 if end == "slow" else None

    report = run_notebooks(specs, {}, target, root, time_limit=limit)

    assert report.exit_code == 3
    states = {stem: execution.state for stem, execution in report.executions.items()}
    assert states == {"one": "failed", "two": "finished", "reads": "skipped"}
    message = report.executions["one"].message
    assert "cell In [3], which begins with: import os, signal" in message
    assert cause in message
    assert "its outputs so far: reports/ci/one.failed.ipynb" in message
    kept = json.loads((target.folder / "one.failed.ipynb").read_text())
    cells = kept["cells"]
    if end != "worker":
        failing = next(cell for cell in cells if "child =" in "".join(cell["source"]))
        assert failing["metadata"]["papermill"]["status"] == "failed"
        assert failing["metadata"]["papermill"]["exception"] is True
        assert cells[-1]["metadata"]["papermill"]["status"] == "pending"
        assert "was here" in json.dumps(failing["outputs"])
    assert not (target.folder / "one.ipynb").exists()
    assert not psutil.pid_exists(int(mark.read_text())) or (
        psutil.Process(int(mark.read_text())).status() == psutil.STATUS_ZOMBIE
    )


def test_causes() -> None:
    assert "out of memory" in death_cause(-9, 3, 4)
    assert "killed by SIGKILL" in death_cause(-9, 3, 3)
    assert death_cause(None, None, None) == "how it ended is not known"
    assert "signal 99" in death_cause(-99, None, None)


def test_nothing_is_kept_of_a_notebook_that_never_began(tmp_path: Path) -> None:
    assert keep_partial(Trace(), "X", "x", tmp_path / "a", (tmp_path, tmp_path)) == ""
    assert not (tmp_path / "a").exists()


def test_only_marked_processes_are_ended(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = psutil.Popen(wait, env={**os.environ, JOB_VARIABLE: "mine"}, start_new_session=True)
    other = psutil.Popen(wait, env={**os.environ, JOB_VARIABLE: "other"})
    try:
        assert [process.pid for process in marked("mine")] == [mine.pid]
        end_marked("mine")
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert other.is_running()
        end_marked("other", spare=[other.pid])
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def refuse(root: Path, folder: Path) -> str:
    write_notebook(root, "one")
    with pytest.raises(BadInput) as caught:
        run_notebooks([tiny("one")], {}, ReportTarget("ci", "ci", folder), root)
    assert not list(root.rglob("executions.json"))
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "file").write_text("")
    assert f"{root / 'file' / 'ci'} cannot be written (Not a directory)" in refuse(
        root, root / "file" / "ci"
    )

    def read_only(**options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(kernels.tempfile, "TemporaryFile", read_only)
    assert "cannot be written (Read-only file system); choose one with --out" in refuse(
        root, root / "reports" / "ci"
    )


def test_a_full_disk_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1, 1, 5 * 2**20))
    message = refuse(root, root / "reports" / "ci")
    assert "has 5 MiB free, and a run needs 200: free some" in message


def test_a_missing_kernel_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipykernel" else find(name)
    )
    assert "ipykernel is missing" in refuse(root, root / "reports" / "ci")


_ALONE = """\
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_runner import ReportTarget, run_notebooks, tiny
root = Path({root!r})
target = ReportTarget("ci", "ci", root / "reports" / sys.argv[1])
sys.exit(run_notebooks([tiny("one")], {{"times": int(sys.argv[2])}}, target, root).exit_code)
"""


def test_two_runs_in_one_checkout_do_not_harm_each_other(root: Path) -> None:
    write_notebook(root, "one", "import time\ntime.sleep(2)")
    script = _ALONE.format(tests=str(Path(__file__).parent), root=str(root))
    started = [
        subprocess.Popen([sys.executable, "-c", script, name, times], stderr=subprocess.PIPE)
        for name, times in (("a", "3"), ("b", "4"), ("b", "5"))
    ]
    codes = [process.wait(timeout=120) for process in started]
    errors = [process.stderr.read().decode() for process in started if process.stderr]
    assert codes[0] == 0
    # one of the two that share a folder is refused, whichever came second
    first, second = (1, 2) if codes[1] == 0 else (2, 1)
    assert codes[first] == 0
    assert "another run is writing to the folder b/" in errors[second]
    seen = [json.loads((root / f"reports/{n}/one.json").read_text())["seen"] for n in "ab"]
    assert seen == [3, 4 if first == 1 else 5]


def test_a_time_limit_is_a_factor(root: Path) -> None:
    write_notebook(root, "one")
    target = ReportTarget("ci", "ci", root / "reports" / "ci")
    with pytest.raises(BadInput, match="--time-limit -1"):
        run_notebooks([tiny("one")], {}, target, root, time_limit=-1)


def test_time_left() -> None:
    assert seconds_left({"a": 10, "b": 20, "c": 40}, {}, 2) == 40
    assert seconds_left({"a": 10, "b": 20, "c": 40}, {}, 1) == 70
    assert seconds_left({"a": 10, "c": 40}, {"a": ("b", "c")}, 2) == 50
    assert seconds_left({}, {}, 2) == 0
    assert seconds_of_one(30, 10, 0.9) == 20
    # late: by its cells
    assert seconds_of_one(30, 60, 0.75) == pytest.approx(20)
    assert seconds_of_one(30, 60, 0.0) == 30


def test_the_time_left_never_rises_while_a_cell_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from atom.workbook import progress as module

    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Progress(["a", "b"], {"a": 30.0, "b": 5.0}, 1, stream=stream) as progress:
        progress.start("a")
        now += 20
        progress.cells("a", 2, 8)
        for _ in range(4):
            now += 10
            progress.tick()
        # late, and one more cell is done: told anew by the cells
        progress.cells("a", 3, 8)
    said = [line.partition("; ")[2] for line in stream.getvalue().splitlines()[1:]]
    late = "longer than expected, at least 5 s left"
    assert said == ["about 15 s left", late, late, late, late, "about 105 s left"]


def test_plain_progress_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(["a", "b"], {"a": 30.0, "b": 5.0}, 1) as progress:
        progress.start("a")
        progress._last_line -= 60
        progress.cells("a", 3, 9)
        progress.end("a", "finished", 30.0)
    out, errors = capsys.readouterr()
    assert out == ""
    assert "a: started, about 30 s" in errors
    assert "a 3 of 9 cells; about 35 s left" in errors
    assert "a: finished after 30.0 s (1 of 2)" in errors
    assert "\x1b" not in errors
