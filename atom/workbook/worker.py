"""A process that executes one notebook with papermill and reports to the runner.

Protocol: the first line of standard input is the task as JSON; the pipe then stays open, and its
end means that the runner is gone. Standard output carries one JSON object a line: ``cell`` events,
then one ``end`` event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from atom.errors import NotebookFailed
from atom.workbook.results import extract_result, scrub, write_atomically

_STATES = {"ClaimFell": "fell", "BadInput": "bad input"}
_TRACEBACK_LINES = 12


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
    print(json.dumps(end), file=events)
    return 0


def execute(task: dict[str, Any], events: TextIO) -> tuple[str, str]:
    """Execute the notebook, then put it and its result in place.

    Args:
        task: ``stem``, ``source``, ``folder``, ``root`` and ``parameters``.
        events: where cell events go.

    Returns:
        State and message of the execution (see ``results.Execution``).
    """
    import papermill
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    root, folder = Path(task["root"]), Path(task["folder"])
    partial = folder / ".partial" / f"{task['stem']}.ipynb"
    papermill_engines.register("atom", _reporting_engine(events))
    try:
        papermill.execute_notebook(
            task["source"],
            str(partial),
            parameters=task["parameters"],
            engine_name="atom",
            kernel_name="python3",
            progress_bar=False,
            request_save_on_cell_execute=False,
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
        os.replace(partial, folder / f"{task['stem']}.failed.ipynb")
        return state, str(error.evalue) if state == "bad input" else _describe(error)
    try:
        _publish(task, partial)
    except NotebookFailed as error:
        return "failed", str(error)
    return "finished", ""


def _publish(task: dict[str, Any], partial: Path) -> None:
    """Move an executed notebook and its result into the report folder."""
    stem, folder, root = task["stem"], Path(task["folder"]), Path(task["root"])
    notebook = json.loads(scrub(partial.read_text(encoding="utf-8"), root, folder))
    facts = notebook["metadata"].get("papermill", {})
    facts.pop("environment_variables", None)
    facts["input_path"], facts["output_path"] = f"notebooks/{stem}.ipynb", f"{stem}.ipynb"
    result = extract_result(notebook)
    write_atomically(folder / f"{stem}.ipynb", json.dumps(notebook, indent=1) + "\n")
    write_atomically(folder / f"{stem}.json", json.dumps(result, indent=1) + "\n")
    (folder / f"{stem}.failed.ipynb").unlink(missing_ok=True)
    partial.unlink()


def _describe(error: Any) -> str:
    """The failing cell and the end of its traceback."""
    import re

    lines = [line for part in error.traceback for line in part.splitlines()]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    first = error.source.strip().splitlines()[0] if error.source.strip() else ""
    shown = "\n".join(f"    {line}" for line in plain[-_TRACEBACK_LINES:])
    return f"cell In [{error.exec_count}], which begins with: {first}\n{shown}"


def _reporting_engine(events: TextIO) -> Any:
    from papermill.engines import NBClientEngine

    class ReportingEngine(NBClientEngine):
        """papermill's own engine, which tells of every finished cell."""

        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, *args: Any, **kwargs: Any) -> Any:
            complete, total = nb_man.cell_complete, len(nb_man.nb.cells)

            def report(cell: Any, cell_index: int | None = None, **rest: Any) -> None:
                complete(cell, cell_index, **rest)
                done = total if cell_index is None else cell_index + 1
                event = {"event": "cell", "done": done, "total": total}
                print(json.dumps(event), file=events)

            nb_man.cell_complete = report
            return super().execute_managed_notebook(nb_man, *args, **kwargs)

    return ReportingEngine


def _watch_runner() -> None:
    """End this process, and by that its kernel, when the runner is gone."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
