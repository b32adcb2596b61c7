"""Executes notebooks headless: two at a time, in order, only what changed, and survives a stop."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.workbook.endings import death_cause
from atom.workbook.fingerprint import fingerprint, source_hash
from atom.workbook.kernels import (
    end_marked,
    kernel_environment,
    refuse_unready,
    write_kernel_spec,
)
from atom.workbook.notebook_progress import latest, progress_file
from atom.workbook.notebooks import NOTEBOOKS, NotebookSpec, execution_order, find_notebook
from atom.workbook.parameters import ReportTarget, assign
from atom.workbook.progress import Progress
from atom.workbook.results import (
    Execution,
    load_executions,
    save_executions,
    scrub,
    write_atomically,
)

#: a cell may take so many times its notebook's budget; hardware runs are full sweeps
TIME_LIMIT_FACTORS = {"ci": 10.0, "gpu": 60.0}

_EXIT_CODES = {"finished": 0, "fell": 1, "bad input": 2, "failed": 3, "skipped": 3}
_STOP_SECONDS = 8.0
_TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """One notebook of a run.

    Attributes:
        spec: registry entry.
        source: its file.
        parameters: validated parameters, as they are injected.
        cell_seconds: time limit of a cell, ``None`` for none.
    """

    spec: NotebookSpec
    source: Path
    parameters: Mapping[str, Any]
    cell_seconds: float | None = None


@dataclass
class _Running:
    """A job with a process: its mark, and where its notebook is."""

    job: Job
    key: str
    process: subprocess.Popen[str]
    mark: str
    where: str = ""


@dataclass(frozen=True)
class RunReport:
    """What a run did.

    Attributes:
        executions: state of every selected notebook, those that did not change included.
        executed: stems that this run executed.
        exit_code: 0, 1, 2 or 3.
    """

    executions: dict[str, Execution]
    executed: tuple[str, ...]
    exit_code: int


def select(names: Sequence[str], root: Path) -> list[NotebookSpec]:
    """Notebooks by stem, number or path; all that are written if ``names`` is empty.

    Raises:
        BadInput: an unknown name, or a notebook whose file is missing.
    """
    if names:
        chosen = {spec.stem: spec for spec in map(find_notebook, names)}
    else:
        chosen = {stem: spec for stem, spec in NOTEBOOKS.items() if not spec.planned}
    for stem in chosen:
        if not (root / "notebooks" / f"{stem}.ipynb").is_file():
            raise BadInput(f"notebooks/{stem}.ipynb is missing")
    return execution_order(chosen.values())


def run_notebooks(
    specs: Sequence[NotebookSpec],
    given: Mapping[str, Any],
    target: ReportTarget,
    root: Path,
    *,
    jobs: int = 2,
    force: bool = False,
    time_limit: float | None = None,
) -> RunReport:
    """Execute what changed and put executed notebooks and results into the report folder.

    Args:
        specs: notebooks in execution order.
        given: the user's parameters.
        target: profile and report folder.
        root: the checkout, the notebooks' working directory.
        jobs: notebooks at a time, each on one thread.
        force: execute also what did not change.
        time_limit: a cell may take so many times its notebook's budget; 0 is no limit; by default
            as :data:`TIME_LIMIT_FACTORS` says.

    Raises:
        BadInput: parameters, a place that is not ready (see ``kernels.refuse_unready``), or
            another run that writes to the same folder.
        KeyboardInterrupt: stopped; all that had finished is kept.
    """
    if jobs < 1:
        raise BadInput(f"--jobs {jobs}: at least 1")
    if time_limit is not None and not 0 <= time_limit < float("inf"):
        raise BadInput(f"--time-limit {time_limit}: a factor, or 0 for no limit")
    factor = time_limit
    if factor is None:
        factor = TIME_LIMIT_FACTORS.get(target.option, TIME_LIMIT_FACTORS["ci"])
    parameters = assign(specs, given, target)
    selected = [
        Job(
            spec,
            root / "notebooks" / f"{spec.stem}.ipynb",
            parameters[spec.stem],
            spec.budget_seconds * factor or None,
        )
        for spec in specs
    ]
    refuse_unready(target.folder)
    with _exclusive(target.folder):
        return _Run(selected, target, root, jobs, force).execute()


class _Run:
    """State of one run; everything but the reader threads is on the calling thread."""

    def __init__(
        self, selected: list[Job], target: ReportTarget, root: Path, jobs: int, force: bool
    ) -> None:
        self.waiting = selected
        self.stems = [job.spec.stem for job in selected]
        self.folder = target.folder
        self.root = root
        self.jobs = jobs
        self.force = force
        self.sources = source_hash(root, runs=target.option != "gpu")
        self.executions = load_executions(target.folder)
        self.executed: list[str] = []
        self.settled: set[str] = set()
        self.running: dict[str, _Running] = {}
        self.stopped: dict[str, str] = {}
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.scratch = Path()

    def execute(self) -> RunReport:
        with (
            tempfile.TemporaryDirectory(prefix="atom-run-") as scratch,
            _stop_signal_interrupts() as signals,
            Progress(
                list(self.stems),
                self._expected(),
                self.jobs,
                {job.spec.stem: job.spec.after for job in self.waiting},
            ) as progress,
        ):
            self.scratch = Path(scratch)
            write_kernel_spec(self.scratch)
            try:
                self._start_ready(progress)
                while self.running:
                    try:
                        stem, event = self.events.get(timeout=_TICK_SECONDS)
                    except queue.Empty:
                        for stem in self.running:
                            progress.sweep(stem, latest(progress_file(self.folder, stem)))
                        progress.tick()
                        continue
                    if event["event"] == "cell":
                        self.running[stem].where = event["where"]
                        progress.cells(stem, event["done"], event["total"])
                        continue
                    self._end(stem, event)
                    progress.end(stem, self.executions[stem].state, event["seconds"])
                    self._start_ready(progress)
            except KeyboardInterrupt:
                self._stop()
                raise KeyboardInterrupt(self._interrupted(signals)) from None
            finally:
                self._stop()
                shutil.rmtree(self.folder / ".partial", ignore_errors=True)
        executions = {stem: self.executions[stem] for stem in self.stems}
        code = max((_EXIT_CODES[e.state] for e in executions.values()), default=0)
        return RunReport(executions, tuple(self.executed), code)

    def _start_ready(self, progress: Progress) -> None:
        """Start what may start; take over what did not change; skip what cannot run."""
        for job in list(self.waiting):
            before = [stem for stem in job.spec.after if stem in self.stems]
            if not self.settled.issuperset(before):
                continue
            if len(self.running) >= self.jobs:
                return
            self.waiting.remove(job)
            stem = job.spec.stem
            failed = [b for b in before if self.executions[b].state not in ("finished", "fell")]
            if failed:
                message = f"not executed: {', '.join(failed)} did not finish"
                self._record(stem, Execution("skipped", 0.0, job.spec.budget_seconds, "", message))
                continue
            key = self._key(job)
            if not self.force and self._is_current(stem, key):
                self.settled.add(stem)
                progress.unchanged(stem)
                continue
            self._start(job, key)
            progress.start(stem)

    def _key(self, job: Job) -> str:
        inputs = {stem: self.folder / f"{stem}.json" for stem in job.spec.after}
        return fingerprint(job.source, job.parameters, self.sources, inputs)

    def _is_current(self, stem: str, key: str) -> bool:
        execution = self.executions.get(stem)
        made = (self.folder / f"{stem}.ipynb", self.folder / f"{stem}.json")
        return execution is not None and execution.key == key and all(p.is_file() for p in made)

    def _start(self, job: Job, key: str) -> None:
        stem = job.spec.stem
        # rows of an earlier execution on a virtual device; hardware runs lie in data/runs
        shutil.rmtree(self.folder / "runs" / stem, ignore_errors=True)
        (self.folder / ".partial").mkdir(exist_ok=True)
        task = {
            "stem": stem,
            "source": str(job.source),
            "folder": str(self.folder),
            "root": str(self.root),
            "parameters": dict(job.parameters),
            "cell_seconds": job.cell_seconds,
        }
        mark = secrets.token_hex(8)
        with open(self.scratch / f"{stem}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atom.workbook.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.root,
                env=kernel_environment(self.scratch, self.folder, self.root, mark),
                # Ctrl-C reaches the runner alone, which then stops its workers in order
                start_new_session=True,
            )
        self.running[stem] = _Running(job, key, process, mark)
        assert process.stdin is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        threading.Thread(target=self._read, args=(stem, process), daemon=True).start()

    def _read(self, stem: str, process: subprocess.Popen[str]) -> None:
        started = time.perf_counter()
        ended = False
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            ended = ended or event["event"] == "end"
            self.events.put((stem, event))
        code = process.wait()
        if not ended:
            event = {
                "event": "end",
                "state": "died",
                "code": code,
                "seconds": round(time.perf_counter() - started, 2),
            }
            self.events.put((stem, event))

    def _end(self, stem: str, event: Mapping[str, Any]) -> None:
        running = self.running.pop(stem)
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.process.wait()
        end_marked(running.mark)
        state, message = event["state"], event.get("message", "")
        if state == "died":
            state, message = "failed", self._died(stem, running, event["code"])
        elif state == "stopped":
            # from outside: the runner's own stop takes its events elsewhere
            state, message = "failed", f"{message}, by a signal to its process"
        self.executed.append(stem)
        self._record(
            stem,
            Execution(
                state,
                event["seconds"],
                running.job.spec.budget_seconds,
                running.key if state == "finished" else "",
                self._readable(message),
            ),
        )

    def _died(self, stem: str, running: _Running, code: int) -> str:
        """What is known of a worker that ended without a word; keeps its notebook so far."""
        where = running.where or "between two cells"
        lines = [f"its process died in {where}", death_cause(code, None, None)]
        partial = self.folder / ".partial" / f"{stem}.ipynb"
        if partial.is_file():
            text = scrub(partial.read_text(encoding="utf-8"), self.root, self.folder)
            kept = self.folder / f"{stem}.failed.ipynb"
            write_atomically(kept, text)
            lines.append(f"its outputs so far: {kept.name}")
        log = (self.scratch / f"{stem}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join([*lines, *(f"    {line}" for line in log.splitlines()[-12:])])

    def _readable(self, message: str) -> str:
        """``message`` with the kept file's folder in front of its name."""
        folder = self.folder
        shown = folder.relative_to(self.root) if folder.is_relative_to(self.root) else folder
        return message.replace("its outputs so far: ", f"its outputs so far: {shown.as_posix()}/")

    def _record(self, stem: str, execution: Execution) -> None:
        self.settled.add(stem)
        self.executions[stem] = execution
        save_executions(self.folder, self.executions)

    def _expected(self) -> dict[str, float]:
        """Seconds that each notebook will take: as the last time, else its budget."""
        known = {stem: e.seconds for stem, e in self.executions.items() if e.state == "finished"}
        return {
            job.spec.stem: known.get(job.spec.stem, job.spec.budget_seconds) for job in self.waiting
        }

    def _stop(self) -> None:
        if not self.running:
            return
        for running in self.running.values():
            running.process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for stem, running in self.running.items():
            try:
                running.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(running.process.pid, signal.SIGKILL)
                running.process.wait()
            end_marked(running.mark)
            self.stopped[stem] = f"stopped in {running.where or 'no cell yet'}"
        # what the workers said at their end comes through their reader threads
        ends = len(self.running)
        while ends:
            try:
                stem, event = self.events.get(timeout=1.0)
            except queue.Empty:
                break
            if event["event"] == "end":
                ends -= 1
                if event.get("message"):
                    self.stopped[stem] = event["message"]
        self.running.clear()

    def _interrupted(self, signals: list[int]) -> str:
        done = [stem for stem in self.stems if stem in self.settled]
        rest = [stem for stem in self.stems if stem not in self.settled]
        cause = "SIGTERM" if signal.SIGTERM in signals else "Ctrl-C"
        places = "".join(
            f"\n{stem}: {self._readable(text)}" for stem, text in sorted(self.stopped.items())
        )
        return (
            f"stopped by {cause}. Finished and kept: {', '.join(done) or 'none'}. "
            f"Not finished: {', '.join(rest) or 'none'}.{places}\n"
            "The same command goes on from here."
        )


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold the report folder for this process.

    Raises:
        BadInput: another run holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another run is writing to the folder {folder.name}/; wait for it, or give this "
                "one a folder of its own with --out"
            ) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _stop_signal_interrupts() -> Iterator[list[int]]:
    """Treat SIGTERM like Ctrl-C, and list it when it came (main thread only)."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def interrupt(number: int, frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, previous)
