"""How a notebook ended that did not finish: the cell, the likely cause, and what is kept of it."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atom.workbook.results import scrub, write_atomically

#: tag of the cells that papermill adds around one that raised
ERROR_CELL_TAG = "papermill-error-cell-tag"
_TRACEBACK_LINES = 12
_CGROUP_EVENTS = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


@dataclass
class Trace:
    """Where an execution is.

    Attributes:
        notebook: the notebook as papermill fills it; ``None`` until the first cell starts.
        index: place of the latest started cell among all cells.
        number: its number among code cells, which is its ``In [number]``.
        running: whether that cell has not ended.
        exit_code: of a dead kernel; negative for a signal.
    """

    notebook: Any = None
    index: int = -1
    number: int = 0
    running: bool = False
    exit_code: int | None = None
    memory_kills: int | None = field(default_factory=lambda: memory_kills())


def memory_kills() -> int | None:
    """How often the kernel's out-of-memory killer struck in this control group, if it says."""
    for path in _CGROUP_EVENTS:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.M)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def place(source: str, number: int) -> str:
    """``cell In [3], which begins with: x = 1``."""
    stripped = source.strip()
    first = stripped.splitlines()[0] if stripped else "(nothing)"
    return f"cell In [{number}], which begins with: {first}"


def place_of(trace: Trace) -> str:
    """The latest started cell of ``trace``, in words."""
    if trace.notebook is None or trace.index < 0:
        return "before its first cell"
    where = place(trace.notebook.cells[trace.index].source, trace.number)
    return where if trace.running else f"after {where}"


def death_cause(exit_code: int | None, kills_before: int | None, kills_now: int | None) -> str:
    """Why a kernel is gone, as far as its exit code and the control group tell.

    Args:
        exit_code: negative for a signal, ``None`` where it is not known.
        kills_before: out-of-memory kills counted when the notebook started.
        kills_now: the same count now.
    """
    if kills_before is not None and kills_now is not None and kills_now > kills_before:
        return "out of memory: the system killed the largest process of this container"
    if exit_code is None:
        return "how it ended is not known"
    if exit_code >= 0:
        return f"it ended by itself with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    cause = {
        "SIGKILL": "most often the system's out-of-memory killer; try --jobs 1 or smaller sizes",
        "SIGTERM": "something outside asked it to stop",
        "SIGSEGV": "a crash in native code: a driver, torch or another extension",
        "SIGABRT": "native code gave up: a driver, torch or another extension",
        "SIGBUS": "a mapped file vanished or shared memory is full",
    }.get(name, "a signal")
    return f"killed by {name}: {cause}"


def describe(error: Any) -> str:
    """The failing cell of a papermill error and the end of its traceback."""
    lines = [line for part in error.traceback for line in part.splitlines()]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    shown = "\n".join(f"    {line}" for line in plain[-_TRACEBACK_LINES:])
    return f"{place(error.source, error.exec_count)}\n{shown}"


def save_partial(trace: Trace, path: Path) -> None:
    """Write the notebook as it is, for whoever finds it after a sudden end."""
    if trace.notebook is not None:
        write_atomically(path, json.dumps(trace.notebook, indent=1) + "\n")


def keep_partial(
    trace: Trace, name: str, message: str, path: Path, roots: tuple[Path, Path]
) -> str:
    """Keep the outputs so far, with the end written into the cell where it came.

    papermill leaves such a cell marked as completed and without an error; both are put right.

    Args:
        trace: of the execution.
        name: of the error that the cell shows.
        message: what happened.
        path: where to.
        roots: the checkout and the report folder, whose paths are cut out.

    Returns:
        The file's name, or nothing if no cell had started.
    """
    if trace.notebook is None or trace.index < 0:
        return ""
    notebook = json.loads(json.dumps(trace.notebook))
    for index, cell in enumerate(notebook["cells"]):
        facts = cell["metadata"].setdefault("papermill", {})
        if index > trace.index:
            facts["status"] = "pending"
    cell = notebook["cells"][trace.index]
    cell["metadata"]["papermill"].update(status="failed", exception=True)
    notebook["metadata"].setdefault("papermill", {})["exception"] = True
    if cell["cell_type"] == "code":
        lines = [f"{name}: {line}" for line in message.splitlines()]
        error = {"output_type": "error", "ename": name, "evalue": message, "traceback": lines}
        cell["outputs"] = [*cell.get("outputs", []), error]
    write_atomically(path, scrub(json.dumps(notebook, indent=1), *roots) + "\n")
    return path.name
