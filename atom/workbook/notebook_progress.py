"""Progress of a sweep that a notebook runs itself, told to the runner through a small file.

A kernel's output lands in its notebook, where a line that was true for ten seconds has no business.
So the runner names a file, and reads the latest line there.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from atom.workbook.sweep_progress import NoProgress, SweepProgress

#: names the file, in a kernel's environment
PROGRESS_VARIABLE = "WORKBOOK_PROGRESS"
_EVERY_SECONDS = 1.0
_LONGEST = 200


class FileProgress:
    """A :class:`SweepProgress` whose latest line stands in a file.

    Args:
        path: the file; its folder exists. A file that cannot be written is passed over in silence.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total = self._done = 0
        self._seconds = 0.0
        self._began = self._written = 0.0

    def start(self, trials: int, seconds: float) -> None:
        """See :class:`SweepProgress`."""
        self._total, self._done, self._seconds = trials, 0, seconds
        self._began = time.monotonic()
        self._write(f"{trials} trials, about {seconds:.0f} s")

    def advance(self, trials: int) -> None:
        """See :class:`SweepProgress`."""
        self._done += trials
        now = time.monotonic()
        if now - self._written >= _EVERY_SECONDS:
            spent = now - self._began
            left = spent * (self._total - self._done) / max(1, self._done)
            self._write(f"{self._done} of {self._total} trials, about {left:.0f} s left")

    def note(self, text: str) -> None:
        """Ignored: the notebook itself says what matters."""

    def stop(self) -> None:
        """See :class:`SweepProgress`."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        self._written = time.monotonic()
        fresh = self._path.with_suffix(".writing")
        with contextlib.suppress(OSError):
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, self._path)


def notebook_progress() -> SweepProgress:
    """Where a notebook's sweep tells how far it is: the runner's file, or nowhere."""
    named = os.environ.get(PROGRESS_VARIABLE)
    return FileProgress(Path(named)) if named else NoProgress()


def progress_file(folder: Path, stem: str) -> Path:
    """The file of a notebook that is executed into a report folder."""
    return folder / ".partial" / f"{stem}.progress"


def latest(path: Path) -> str:
    """The latest line, empty if no sweep is running."""
    try:
        return path.read_text(encoding="utf-8")[:_LONGEST].strip()
    except OSError:
        return ""
