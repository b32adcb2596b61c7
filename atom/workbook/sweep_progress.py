"""Progress of a sweep: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol, TextIO

_LINE_SECONDS = 10.0
#: seldom, because a sweep may measure in this process
_TICK_SECONDS = 2.0


class SweepProgress(Protocol):
    """What a sweep tells while it runs."""

    def start(self, trials: int, seconds: float) -> None:
        """So many trials are planned; the whole takes about ``seconds``."""

    def advance(self, trials: int) -> None:
        """So many more trials are done."""

    def note(self, text: str) -> None:
        """Something that the user should read."""

    def stop(self) -> None:
        """The sweep has ended."""


class NoProgress:
    """Says nothing."""

    def start(self, trials: int, seconds: float) -> None:
        """Ignored."""

    def advance(self, trials: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def stop(self) -> None:
        """Ignored."""


class TerminalProgress:
    """A bar on a terminal, a line every ten seconds elsewhere.

    Args:
        stream: standard error unless told otherwise.
        name: of the sweep.
        unit: what is counted.
    """

    def __init__(
        self, stream: TextIO | None = None, name: str = "race", unit: str = "trials"
    ) -> None:
        self._name, self._unit = name, unit
        self._stream = stream or sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._total = self._done = 0
        self._began = self._last_line = self._end = 0.0
        self._stopped = threading.Event()

    def start(self, trials: int, seconds: float) -> None:
        """See :class:`SweepProgress`."""
        self._total, self._done = trials, 0
        self._began = self._last_line = time.monotonic()
        self._end = self._began + seconds
        self.note(f"{trials} {self._unit}, about {seconds:.0f} s")
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn(self._name),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._name, total=trials)
        else:
            self._stopped.clear()
            threading.Thread(target=self._tick, daemon=True).start()

    def advance(self, trials: int) -> None:
        """See :class:`SweepProgress`."""
        self._done += trials
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        now = time.monotonic()
        # told anew here alone: while one stands still, the time left must not rise
        self._end = now + (now - self._began) * (self._total - self._done) / max(1, self._done)
        if now - self._last_line >= _LINE_SECONDS:
            self._line(now)

    def _tick(self) -> None:
        """Lines also while one unit takes long."""
        while not self._stopped.wait(_TICK_SECONDS):
            now = time.monotonic()
            # a little later than the lines of units that have ended
            if now - self._last_line >= _LINE_SECONDS + _TICK_SECONDS:
                self._line(now)

    def _line(self, now: float) -> None:
        self._last_line = now
        left = max(0.0, self._end - now)
        late = left < 0.5 and self._done < self._total
        rest = "longer than expected" if late else f"about {left:.0f} s left"
        spent = now - self._began
        self.note(f"{self._done} of {self._total} {self._unit} after {spent:.0f} s, {rest}")

    def note(self, text: str) -> None:
        """See :class:`SweepProgress`."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def stop(self) -> None:
        """See :class:`SweepProgress`."""
        self._stopped.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
