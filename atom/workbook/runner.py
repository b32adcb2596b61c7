"""Executes notebooks headless: two at a time, in order, only what changed, and survives a stop."""

from __future__ import annotations

import fcntl
import json
import os
import queue
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
from atom.workbook.fingerprint import fingerprint, source_hash
from atom.workbook.notebooks import NOTEBOOKS, NotebookSpec, execution_order, find_notebook
from atom.workbook.parameters import ReportTarget, assign
from atom.workbook.progress import Progress
from atom.workbook.results import Execution, load_executions, save_executions

REPORT_FOLDER_VARIABLE = "ATOM_REPORT_FOLDER"

_EXIT_CODES = {"finished": 0, "fell": 1, "bad input": 2, "failed": 3, "skipped": 3}
_STOP_SECONDS = 8.0
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One notebook of a run.

    Attributes:
        spec: registry entry.
        source: its file.
        parameters: validated parameters, as they are injected.
    """

    spec: NotebookSpec
    source: Path
    parameters: Mapping[str, Any]


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
) -> RunReport:
    """Execute what changed and put executed notebooks and results into the report folder.

    Args:
        specs: notebooks in execution order.
        given: the user's parameters.
        target: profile and report folder.
        root: the checkout, the notebooks' working directory.
        jobs: notebooks at a time, each on one thread.
        force: execute also what did not change.

    Raises:
        BadInput: parameters, or another run that writes to the same folder.
        KeyboardInterrupt: stopped; all that had finished is kept.
    """
    if jobs < 1:
        raise BadInput(f"--jobs {jobs}: at least 1")
    parameters = assign(specs, given, target)
    selected = [
        Job(spec, root / "notebooks" / f"{spec.stem}.ipynb", parameters[spec.stem])
        for spec in specs
    ]
    target.folder.mkdir(parents=True, exist_ok=True)
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
        self.running: dict[str, tuple[Job, str, subprocess.Popen[str]]] = {}
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.scratch = Path()

    def execute(self) -> RunReport:
        with (
            tempfile.TemporaryDirectory(prefix="atom-run-") as scratch,
            _stop_signal_interrupts(),
            Progress(list(self.stems)) as progress,
        ):
            self.scratch = Path(scratch)
            write_kernel_spec(self.scratch)
            try:
                self._start_ready(progress)
                while self.running:
                    stem, event = self.events.get()
                    if event["event"] == "cell":
                        progress.cells(stem, event["done"], event["total"])
                        continue
                    self._end(stem, event)
                    progress.end(stem, event["state"], event["seconds"])
                    self._start_ready(progress)
            except KeyboardInterrupt:
                self._stop()
                raise KeyboardInterrupt(self._interrupted()) from None
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
        }
        with open(self.scratch / f"{stem}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "atom.workbook.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.root,
                env=kernel_environment(self.scratch, self.folder, self.root),
                # Ctrl-C reaches the runner alone, which then stops its workers in order
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        self.running[stem] = (job, key, process)
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
            log = (self.scratch / f"{stem}.log").read_text(encoding="utf-8", errors="replace")
            tail = "\n".join(f"    {line}" for line in log.splitlines()[-12:])
            event = {
                "event": "end",
                "state": "failed",
                "message": f"its process ended with code {code}\n{tail}",
                "seconds": round(time.perf_counter() - started, 2),
            }
            self.events.put((stem, event))

    def _end(self, stem: str, event: Mapping[str, Any]) -> None:
        job, key, process = self.running.pop(stem)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        state = event["state"]
        self.executed.append(stem)
        self._record(
            stem,
            Execution(
                state,
                event["seconds"],
                job.spec.budget_seconds,
                key if state == "finished" else "",
                event["message"],
            ),
        )

    def _record(self, stem: str, execution: Execution) -> None:
        self.settled.add(stem)
        self.executions[stem] = execution
        save_executions(self.folder, self.executions)

    def _stop(self) -> None:
        processes = [process for _, _, process in self.running.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.running.clear()

    def _interrupted(self) -> str:
        done = [stem for stem in self.stems if stem in self.settled]
        rest = [stem for stem in self.stems if stem not in self.settled]
        return (
            f"stopped. Finished and kept: {', '.join(done) or 'none'}. "
            f"Not finished: {', '.join(rest) or 'none'}. The same command goes on from here."
        )


def write_kernel_spec(scratch: Path) -> None:
    """Write a ``python3`` kernel of the running interpreter below ``scratch``."""
    folder = scratch / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def kernel_environment(scratch: Path, folder: Path, root: Path) -> dict[str, str]:
    """Environment of workers and kernels: one thread each, nothing of the user's own set-up.

    Args:
        scratch: folder with the kernel spec of :func:`write_kernel_spec`.
        folder: report folder; kernels see it relative to ``root`` where it lies below.
        root: the checkout.
    """
    environment = dict(os.environ)
    environment.update(dict.fromkeys(_SINGLE_THREAD, "1"))
    inside = folder.is_relative_to(root)
    environment[REPORT_FOLDER_VARIABLE] = str(folder.relative_to(root) if inside else folder)
    # the first place that a kernel spec is looked for, so before one of the user's own
    environment["JUPYTER_PATH"] = str(scratch / "jupyter")
    environment["JUPYTER_CONFIG_DIR"] = str(scratch / "config")
    environment["IPYTHONDIR"] = str(scratch / "ipython")
    environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    return environment


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
            raise BadInput(f"another run is writing to the folder {folder.name}/") from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _stop_signal_interrupts() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C (main thread only; elsewhere signals stay as they are)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
