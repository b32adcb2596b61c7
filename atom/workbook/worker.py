"""A process that executes one notebook with papermill and reports to the runner.

Protocol: the first line of standard input is the task as JSON; the pipe then stays open, and its
end means that the runner is gone. Standard output carries one JSON object a line: ``cell`` events,
then one ``end`` event.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from atom.errors import NotebookFailed
from atom.workbook import endings
from atom.workbook.endings import Trace
from atom.workbook.kernels import JOB_VARIABLE, end_marked
from atom.workbook.notebook_progress import PROGRESS_VARIABLE, progress_file
from atom.workbook.results import extract_result, scrub, write_atomically

_STATES = {"ClaimFell": "fell", "BadInput": "bad input"}
_LATEST_END_SECONDS = 6.0


def main() -> int:
    """Run the task that standard input describes."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # nothing that a library prints may get between the events
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=_watch_runner, daemon=True).start()
    started = time.perf_counter()
    state, message = execute(task, events)
    seconds = time.perf_counter() - started
    end = {"event": "end", "state": state, "message": message, "seconds": round(seconds, 2)}
    # from here on the end of standard input is the runner's answer
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        print(json.dumps(end), file=events, flush=True)
    _end_all()
    return 0


def execute(task: dict[str, Any], events: TextIO) -> tuple[str, str]:
    """Execute the notebook, then put it and its result in place.

    Args:
        task: ``stem``, ``source``, ``folder``, ``root``, ``parameters``, and ``cell_seconds``, the
            time limit of a cell or ``None``.
        events: where cell events go.

    Returns:
        State and message of the execution (see ``results.Execution``), or ``stopped``.
    """
    import papermill
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    root, folder = Path(task["root"]), Path(task["folder"])
    partial = folder / ".partial" / f"{task['stem']}.ipynb"
    failed = folder / f"{task['stem']}.failed.ipynb"
    limit = task.get("cell_seconds")
    trace = Trace()
    # the kernel inherits it
    os.environ[PROGRESS_VARIABLE] = str(progress_file(folder, task["stem"]))
    papermill_engines.register("atom", _reporting_engine(events, trace, partial))
    try:
        papermill.execute_notebook(
            task["source"],
            str(partial),
            parameters=task["parameters"],
            engine_name="atom",
            kernel_name="python3",
            progress_bar=False,
            request_save_on_cell_execute=False,
            execution_timeout=None if limit is None else max(1, math.ceil(limit)),
            # what a kernel records is closed by then; a graceful end waits for a busy one
            shutdown_kernel="immediate",
            cwd=str(root),
        )
    except PapermillExecutionError as error:
        state = _STATES.get(error.ename, "failed")
        # a fallen claim has its result and its page; another error leaves the last good page alone
        if state == "fell":
            _publish(task, partial)
            return state, str(error.evalue)
        write_atomically(failed, scrub(partial.read_text(encoding="utf-8"), root, folder))
        partial.unlink()
        text = str(error.evalue) if state == "bad input" else endings.describe(error)
        return state, text
    except (Exception, SystemExit) as error:
        state, name, message = _sudden_end(error, trace, limit)
        kept = endings.keep_partial(trace, name, message, failed, (root, folder))
        return state, f"{message}\nits outputs so far: {kept}" if kept else message
    try:
        _publish(task, partial)
    except NotebookFailed as error:
        return "failed", str(error)
    return "finished", ""


def _sudden_end(error: BaseException, trace: Trace, limit: float | None) -> tuple[str, str, str]:
    """State, short name and message of an end that no cell raised."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    where = endings.place_of(trace)
    if isinstance(error, SystemExit):
        return "stopped", "Stopped", f"stopped in {where}"
    if isinstance(error, DeadKernelError):
        cause = endings.death_cause(trace.exit_code, trace.memory_kills, endings.memory_kills())
        return "failed", "KernelDied", f"its kernel died in {where}\n{cause}"
    if isinstance(error, CellTimeoutError):
        text = f"past its time limit of {limit:.0f} s in {where}\nlikely a hang, or a slow machine"
        return "failed", "TimeLimit", f"{text}: --time-limit FACTOR allows more, 0 any time"
    if trace.notebook is None:
        return "failed", "NoKernel", f"its kernel did not start: {error}"
    return "failed", type(error).__name__, f"{type(error).__name__} in {where}: {error}"


def _publish(task: dict[str, Any], partial: Path) -> None:
    """Move an executed notebook and its result into the report folder."""
    stem, folder, root = task["stem"], Path(task["folder"]), Path(task["root"])
    notebook = json.loads(scrub(partial.read_text(encoding="utf-8"), root, folder))
    # what papermill puts around a cell that raised: the report says it in its own words
    notebook["cells"] = [
        cell
        for cell in notebook["cells"]
        if endings.ERROR_CELL_TAG not in cell["metadata"].get("tags", ())
    ]
    facts = notebook["metadata"].get("papermill", {})
    facts.pop("environment_variables", None)
    facts["input_path"], facts["output_path"] = f"notebooks/{stem}.ipynb", f"{stem}.ipynb"
    result = extract_result(notebook)
    write_atomically(folder / f"{stem}.ipynb", json.dumps(notebook, indent=1) + "\n")
    write_atomically(folder / f"{stem}.json", json.dumps(result, indent=1) + "\n")
    (folder / f"{stem}.failed.ipynb").unlink(missing_ok=True)
    partial.unlink()


def _reporting_engine(events: TextIO, trace: Trace, partial: Path) -> Any:
    """papermill's own engine, which tells of every cell and notes how its kernel ended."""
    from nbclient.exceptions import DeadKernelError
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    class WatchingClient(PapermillNotebookClient):
        """Keeps the exit code of a dead kernel, which nbclient drops."""

        async def _async_check_alive(self) -> None:
            try:
                await super()._async_check_alive()
            except DeadKernelError:
                process = getattr(getattr(self.km, "provisioner", None), "process", None)
                trace.exit_code = getattr(process, "returncode", None)
                raise

    class ReportingEngine(NBClientEngine):
        """Runs cells in the client above."""

        @classmethod
        def execute_managed_notebook(
            cls,
            nb_man: Any,
            kernel_name: str,
            start_timeout: int = 60,
            execution_timeout: int | None = None,
            **options: Any,
        ) -> Any:
            start, complete, total = nb_man.cell_start, nb_man.cell_complete, len(nb_man.nb.cells)

            def started(cell: Any, cell_index: int, **rest: Any) -> None:
                start(cell, cell_index, **rest)
                runs = cell.cell_type == "code" and bool(cell.source.strip())
                trace.notebook, trace.index, trace.running = nb_man.nb, cell_index, True
                trace.number += runs
                where = endings.place(cell.source, trace.number) if runs else ""
                event = {"event": "cell", "done": cell_index, "total": total, "where": where}
                print(json.dumps(event), file=events)

            def completed(cell: Any, cell_index: int, **rest: Any) -> None:
                complete(cell, cell_index, **rest)
                # also behind an error of the cell: then the interpreter is about to handle it
                trace.running = sys.exc_info()[0] is not None
                endings.save_partial(trace, partial)
                event = {"event": "cell", "done": cell_index + 1, "total": total, "where": ""}
                print(json.dumps(event), file=events)

            nb_man.cell_start, nb_man.cell_complete = started, completed
            client = WatchingClient(
                nb_man,
                kernel_name=kernel_name,
                timeout=execution_timeout,
                startup_timeout=start_timeout,
                shutdown_kernel=options.get("shutdown_kernel", "immediate"),
            )
            return client.execute()

    return ReportingEngine


def _watch_runner() -> None:
    """End this process, and by that its kernel, when the runner is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LATEST_END_SECONDS)
    _end_all()
    os._exit(1)


def _end_all() -> None:
    """Kill what the kernel started and left behind."""
    mark = os.environ.get(JOB_VARIABLE)
    if mark:
        end_marked(mark, spare=[os.getpid()])


def _stop(number: int, frame: Any) -> None:
    # once: a second signal must not cut the clean-up of the first short
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
