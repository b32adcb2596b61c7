"""Follows child processes and gathers what they find.

A folder collects one file a process. Each line is one finding as far as it was known then, written
at once, so that a killed worker loses none; the last line of a process that ends well says how
much it saw. Children find the folder through the environment: a forked child has the watch already
and only changes its file; any other Python child imports a ``sitecustomize`` that starts a watch as
soon as the program imports torch. Children that do not are named, see ``unseen_children``.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.lifetime.findings import Finding, Report, Suppression
from atom.lifetime.unseen_children import watch_starts

if TYPE_CHECKING:
    from atom.lifetime.sanitizer import Sanitizer

FOLDER_VARIABLE = "ATOM_LIFETIME_FOLDER"
_PROJECT = str(Path(__file__).resolve().parents[2])

# written into the folder, so that no installed file has to be named so
_SITE = """\
import os, sys
_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _here]
_own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # the one that this one hides
except ImportError:
    sys.modules["sitecustomize"] = _own
if os.environ.get("{variable}") and "torch" not in sys.modules:
    class _Loader:
        def __init__(self, loader):
            self._loader = loader
        def __getattr__(self, name):
            return getattr(self._loader, name)
        def create_module(self, spec):
            return self._loader.create_module(spec)
        def exec_module(self, module):
            module.__spec__.loader = module.__loader__ = self._loader
            self._loader.exec_module(module)
            sys.path.append({project!r})
            try:
                from atom.lifetime.children import start_in_child
                start_in_child()
            finally:
                sys.path.remove({project!r})
    class _Finder:
        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            import importlib.util
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
            return spec
    sys.meta_path.insert(0, _Finder())
"""


class Journal:
    """Writes one process's findings into the folder.

    Args:
        folder: the folder of all processes.
        report: whose findings to write, from now on.
    """

    def __init__(self, folder: str | Path, report: Report) -> None:
        self._folder = Path(folder)
        self._report = report
        #: ends the look at children that are started
        self.stop: Callable[[], None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        self._file = self._folder / f"process-{os.getpid()}-{id(self):x}.jsonl"
        self._numbers: dict[int, int] = {}
        self._ended = False
        self._report.on_change = self._changed
        self._write({"start": os.getpid()})

    def _write(self, line: dict[str, Any]) -> None:
        # the folder may be gone when a straggler ends after its parent
        if self._folder.is_dir():
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def mute(self) -> None:
        """This process is a forked child that nobody follows."""
        self._ended = True
        self._report.on_change = None

    def _changed(self, finding: Finding) -> None:
        number = self._numbers.setdefault(id(finding), len(self._numbers))
        self._write({"number": number, "finding": finding.as_json()})

    def forked(self) -> None:
        """This process is a forked child: start afresh, in a file of its own."""
        report = self._report
        report.findings.clear()
        report.suppressed.clear()
        report._by_key.clear()
        report.operations = 0
        self._begin()

    def tell(self, text: str) -> None:
        """Note what cannot be seen, and write it at once: the process may be replaced next."""
        if text not in self._report.cannot_see:
            self._report.note(text)
            self._write({"notes": [text]})

    def end(self) -> None:
        """Write the counts and what could not be seen. Once."""
        if self._ended:
            return
        self._ended = True
        report = self._report
        for finding in (*report.findings, *report.suppressed):
            self._changed(finding)
        self._write({"operations": report.operations, "cannot_see": report.cannot_see})


def make_folder(*, follow: bool = True) -> str:
    """A folder for the files of all processes; ``follow`` makes Python children look for it."""
    folder = tempfile.mkdtemp(prefix="lifetime-")
    if not follow:
        return folder
    site = Path(folder) / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        _SITE.format(variable=FOLDER_VARIABLE, project=_PROJECT), encoding="utf-8"
    )
    os.environ[FOLDER_VARIABLE] = folder
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(site) + (os.pathsep + path if path else "")
    return folder


def remove_folder(folder: str) -> None:
    """Undo :func:`make_folder`."""
    os.environ.pop(FOLDER_VARIABLE, None)
    site = str(Path(folder) / "site")
    places = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != site]
    if places:
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
    else:
        os.environ.pop("PYTHONPATH", None)
    shutil.rmtree(folder, ignore_errors=True)


def follow_forks(watch: Sanitizer, folder: str | Path, *, follow: bool = True) -> Journal:
    """Write this process's findings into the folder, and with ``follow`` its forked children's.

    The watch ends with the process: behind its threads and what it has registered to run at exit,
    and before Python takes its modules apart.
    """
    journal = Journal(folder, watch.report)

    def in_child() -> None:
        if follow and os.environ.get(FOLDER_VARIABLE) == str(folder):
            journal.forked()
        elif not follow:
            journal.mute()

    def in_multiprocessing_child(_: object) -> None:
        # such children end with os._exit, which runs these finalizers and no atexit functions
        multiprocessing.util.Finalize(None, journal.end, exitpriority=-1000)

    os.register_at_fork(after_in_child=in_child)
    multiprocessing.util.register_after_fork(journal, in_multiprocessing_child)

    def at_exit() -> None:
        watch.stop()
        journal.end()
        journal.stop()
        watch.report.on_change = None

    atexit.register(at_exit)
    if follow:
        journal.stop = watch_starts(str(Path(folder) / "site"), journal.tell)
    return journal


def start_in_child() -> None:
    """Start a watch in a fresh child process; called by the ``sitecustomize`` of the folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not os.path.isdir(folder):
        return
    from atom.errors import DeviceError
    from atom.lifetime.sanitizer import Sanitizer

    watch = Sanitizer()
    journal = follow_forks(watch, folder)
    multiprocessing.util.Finalize(None, journal.end, exitpriority=-1000)
    try:
        watch.start()
    except DeviceError as error:
        watch.report.note(f"process {os.getpid()}: {error}")
        print(f"lifetime sanitizer: process {os.getpid()}: {error}", file=sys.stderr)


def gather(folder: str | Path, report: Report, suppressions: Iterable[Suppression] = ()) -> None:
    """Add what the other processes wrote to ``report``."""
    for file in sorted(Path(folder).glob("process-*.jsonl")):
        findings: dict[int, Finding] = {}
        operations = 0
        notes: list[str] = []
        process = 0
        ended = False
        for text in file.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                # the process was killed in the middle of a line
                continue
            process = line.get("start", process)
            if "finding" in line:
                findings[line["number"]] = Finding.from_json(line["finding"])
            notes += line.get("notes", [])
            if "operations" in line:
                ended, operations = True, line["operations"]
                notes += line["cannot_see"]
        if not ended:
            notes.append(f"process {process} ended without a summary: its last work may be missing")
        report.merge(findings.values(), notes, operations)
