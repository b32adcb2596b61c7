"""Runs one point of the throughput experiment as a process of its own, and watches it to its end.

Whatever becomes of the process is an outcome. It tells what it knows as it goes, one JSON object a
line of a file, so that a point that is killed still has its counters. Imports the standard library
alone: a worker of a cluster needs no more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

COMMAND = (sys.executable, "-m", "atom.benchmarks.throughput_point")
#: exit codes of a point's process beside 0
DIED = 3
OUT_OF_MEMORY = 4
START_FAILED = 5
LOAD_FAILED = 6
GUARD_ERROR = 7
_KILLED_WAIT_SECONDS = 10.0
_DUMP_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_GATE_SECONDS = 0.01
#: parts of a point's life, each with a limit of its own
START = "start"
LOAD = "load"
_TAIL_BYTES = 20_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: which of them names the one GPU of a point
_GPU_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
#: takes what a point's process knows, by name
Tell = Callable[[dict[str, Any]], None]
#: points that run in this process's children, with the sweep that each belongs to
_RUNNING: dict[subprocess.Popen[bytes], str] = {}


def run_point(job: dict[str, Any], command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Run a point in a process of its own and wait for its end.

    The process reads the job from standard input, which stays open: it ends itself when this
    process dies and the pipe closes. It is killed, with all that it has started, at either limit
    and when this call is interrupted.

    Args:
        job: JSON values. ``limit_seconds``: time limit of its load, which begins at its first
            request, when it tells ``setup_seconds``. ``start_limit_seconds``: the limit until then,
            the same by default. ``environment``: variables to set.
            ``log``: where its output goes; ``None`` forgets it. ``sweep``: see :func:`end_all`.
            All else is the process's own.
        command: starts the process.

    Returns:
        ``told``: what the process told, by name, ``wall_seconds``, ``exit_code``, ``timed_out``:
        the part of its life that outlasted its limit (``start`` or ``load``) or ``None``,
        ``last_words``: the last line that it wrote, ``gpu``: the GPU that it was shown,
        ``host``: see :func:`host_digits`.
    """
    # a kernel that one point has tuned is tuned for those after it
    environment = {"TRITON_CACHE_AUTOTUNING": "1", **os.environ, **job.get("environment", {})}
    with tempfile.TemporaryDirectory(prefix="atom-point-") as folder:
        told = Path(folder) / "told.jsonl"
        log_path = Path(job["log"]) if job.get("log") else Path(folder) / "log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            _RUNNING[process] = str(job.get("sweep"))
            try:
                assert process.stdin is not None
                line = json.dumps({**job, "told": str(told), "began": time.time()}) + "\n"
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line.encode())
                    process.stdin.flush()
                timed_out = _watch(process, job, told, began)
                if timed_out is not None:
                    # its log then says where each of its threads was
                    process.send_signal(signal.SIGABRT)
                    _wait(process, _DUMP_SECONDS)
            finally:
                _RUNNING.pop(process, None)
                _end(process)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()  # type: ignore[union-attr]
        return {
            "told": read_told(told),
            "wall_seconds": time.monotonic() - began,
            "exit_code": process.returncode,
            "timed_out": timed_out,
            "last_words": _last_line(log_path),
            "gpu": next(
                (environment[name] for name in _GPU_VARIABLES if name in environment), None
            ),
            "host": host_digits(),
        }


def host_digits() -> str | None:
    """Eight digits that tell this host, since its boot, from others; ``None`` if it has no such.

    Of a hash of what is drawn anew at each boot: nobody can tell from them which host it was.
    """
    try:
        drawn = _BOOT_ID.read_bytes().strip()
    except OSError:
        return None
    return hashlib.sha256(drawn).hexdigest()[:8]


def prepare_for_end() -> None:
    """In a point's process: end at once when whoever waits for the result dies.

    Standard input closes then. Whatever the point holds, a GPU too, is free at once. And where it
    is aborted, or faults, its threads' stacks go to the log, but no core of its memory to the disk.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()

    def wait() -> None:
        sys.stdin.read()
        if os.getpgid(0) == os.getpid():
            # with all that it has started
            os.killpg(0, signal.SIGKILL)
        os._exit(DIED)

    threading.Thread(target=wait, daemon=True).start()


def end_all(sweep: str) -> None:
    """Kill the points of a sweep that run in children of this process."""
    for process, owner in list(_RUNNING.items()):
        if owner == sweep:
            _end(process)


def read_job() -> tuple[dict[str, Any], Tell]:
    """In a point's process: the job from standard input, and what tells of it from now on."""
    job = json.loads(sys.stdin.readline())
    prepare_for_end()
    path = Path(job["told"])

    def tell(values: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    return job, tell


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """In a point's process: all that it does. ``main`` returns the exit code."""
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
        code = START_FAILED
    sys.stderr.flush()
    # tensors of a broken context raise while they are torn down: leave without teardown
    os._exit(code)


def pass_gate(job: dict[str, Any]) -> None:
    """In a point's process, before its load: say that it is ready, and wait until it may go on.

    Args:
        job: ``ready``: file to make, ``gate``: file to wait for; either may be missing.
    """
    if job.get("ready"):
        Path(job["ready"]).touch()
    while job.get("gate") and not Path(job["gate"]).exists():
        time.sleep(_GATE_SECONDS)


def _watch(
    process: subprocess.Popen[bytes], job: dict[str, Any], told: Path, began: float
) -> str | None:
    """Wait for a point's end. Returns the part of its life that outlasted its limit, if one did."""
    limit = job["limit_seconds"]
    start_ends = began + job.get("start_limit_seconds", limit)
    while _wait(process, min(_LOOK_SECONDS, start_ends - time.monotonic())):
        if "setup_seconds" in read_told(told):
            return LOAD if _wait(process, limit) else None
        if time.monotonic() >= start_ends:
            return START
    return None


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, if it still runs, and what it has started in its group."""
    # its group is there as long as one of it runs, also behind its own end
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.wait(_KILLED_WAIT_SECONDS)


def read_told(path: Path) -> dict[str, Any]:
    """All that a process told, later lines over earlier ones; a line cut by its end is left out."""
    told: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                told.update(json.loads(line))
    return told


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def exit_text(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # the kernel kills so when the host's memory is full, and so does anybody else
    return f"its process was killed by {name}"
