"""Kernels of a run: which interpreter they start, what they inherit, and that none outlives it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from atom.errors import BadInput

REPORT_FOLDER_VARIABLE = "ATOM_REPORT_FOLDER"
#: every process that a job starts inherits it, however far down, so that all can be found again
JOB_VARIABLE = "ATOM_JOB"
#: free space below which a run does not start: executed notebooks, pages and simulated rows
LEAST_FREE_BYTES = 200 * 2**20

_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_END_SECONDS = 5.0


def refuse_unready(folder: Path) -> None:
    """Make the report folder, and refuse what would spoil a run only after minutes.

    Raises:
        BadInput: no kernel in this interpreter, a folder that cannot be written, or a full disk.
    """
    if importlib.util.find_spec("ipykernel") is None:
        raise BadInput(
            "no notebook kernel: the package ipykernel is missing from the interpreter that runs "
            "this command; run make setup and use .venv/bin/python"
        )
    refuse_unwritable(folder, "report folder")
    _refuse_full(Path(tempfile.gettempdir()), "TMPDIR")


def refuse_unwritable(folder: Path, what: str) -> None:
    """Make a folder and see whether files can be written there.

    Args:
        folder: where a command will write.
        what: it is called in the message.

    Raises:
        BadInput: it cannot be written, or its disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"the {what} {folder} cannot be written ({reason}); choose one with --out"
        ) from None
    _refuse_full(folder, "--out")


def _refuse_full(place: Path, option: str) -> None:
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES:
        raise BadInput(
            f"{place} has {free / 2**20:.0f} MiB free, and a run needs "
            f"{LEAST_FREE_BYTES / 2**20:.0f}: free some, or choose another place with {option}"
        )


def write_kernel_spec(scratch: Path) -> None:
    """Write a ``python3`` kernel of the running interpreter below ``scratch``."""
    folder = scratch / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def kernel_environment(scratch: Path, folder: Path, root: Path, mark: str) -> dict[str, str]:
    """Environment of workers and kernels: one thread each, nothing of the user's own set-up.

    Args:
        scratch: folder with the kernel spec of :func:`write_kernel_spec`.
        folder: report folder; kernels see it relative to ``root`` where it lies below.
        root: the checkout.
        mark: of the job, for :func:`end_marked`.
    """
    environment = dict(os.environ)
    environment.update(dict.fromkeys(_SINGLE_THREAD, "1"))
    inside = folder.is_relative_to(root)
    environment[REPORT_FOLDER_VARIABLE] = str(folder.relative_to(root) if inside else folder)
    environment[JOB_VARIABLE] = mark
    # the first place that a kernel spec is looked for, so before one of the user's own
    environment["JUPYTER_PATH"] = str(scratch / "jupyter")
    environment["JUPYTER_CONFIG_DIR"] = str(scratch / "config")
    environment["IPYTHONDIR"] = str(scratch / "ipython")
    environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    return environment


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited ``mark``: a job's worker, its kernel and all that they started."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(JOB_VARIABLE) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            # ended meanwhile, or another user's
            continue
    return found


def end_marked(mark: str, *, spare: Iterable[int] = ()) -> None:
    """Kill what a job left behind, processes that left its session or lost their parent included.

    Args:
        mark: of the job.
        spare: process ids to leave alone.
    """
    kept = set(spare)
    deadline = time.monotonic() + _END_SECONDS
    # again until none is left: one may start another while the list is read
    while rest := [process for process in marked(mark) if process.pid not in kept]:
        for process in rest:
            try:
                process.kill()
            except psutil.Error:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
