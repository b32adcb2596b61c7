"""Progress of a run: bars on a terminal, plain lines elsewhere, and about how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TextIO

#: seconds between two plain lines
LINE_SECONDS = 10.0


def seconds_left(
    expected: Mapping[str, float], elapsed: Mapping[str, float], done: set[str], lanes: int
) -> float:
    """About how long a run still takes.

    Args:
        expected: seconds of each notebook.
        elapsed: seconds so far of each that runs.
        done: those that have ended.
        lanes: notebooks at a time.
    """
    rest = [max(0.0, expected[stem] - spent) for stem, spent in elapsed.items()]
    waiting = [s for stem, s in expected.items() if stem not in done and stem not in elapsed]
    # no shorter than the longest of them, and no shorter than all of them on all lanes
    return max([sum(rest + waiting) / max(1, lanes), *rest, *waiting], default=0.0)


class Progress:
    """Shows how far each notebook is. A context manager; used from one thread.

    Args:
        stems: notebooks to be executed.
        expected: seconds that each will take, as far as can be told.
        lanes: notebooks at a time.
        stream: where to write; bars are drawn only if it is a terminal.
    """

    def __init__(
        self,
        stems: list[str],
        expected: Mapping[str, float] | None = None,
        lanes: int = 1,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._stems = stems
        self._expected = dict(expected or {})
        self._lanes = lanes
        self._done: set[str] = set()
        self._began: dict[str, float] = {}
        self._cells: dict[str, str] = {}
        self._last_line = time.monotonic()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.description:24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("cells"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(file=self._stream),
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, stem: str) -> None:
        """A notebook's process was started."""
        self._began[stem] = time.monotonic()
        if self._bars is not None:
            self._tasks[stem] = self._bars.add_task(stem, total=None, left="")
        else:
            about = self._expected.get(stem)
            text = "" if about is None else f", about {about:.0f} s"
            print(f"{stem}: started{text}", file=self._stream, flush=True)

    def unchanged(self, stem: str) -> None:
        """A notebook needs no execution."""
        self._done.add(stem)

    def cells(self, stem: str, done: int, total: int) -> None:
        """``done`` of ``total`` cells have run."""
        self._cells[stem] = f"{done} of {total} cells"
        if self._bars is not None:
            self._bars.update(self._tasks[stem], completed=done, total=total)
        self.tick()

    def tick(self) -> None:
        """Some time has passed."""
        now = time.monotonic()
        if self._bars is not None:
            left = self._left_text(now)
            for stem in self._began:
                self._bars.update(self._tasks[stem], left=left)
        elif now - self._last_line >= LINE_SECONDS and self._began:
            self._last_line = now
            running = ", ".join(f"{stem} {self._cells.get(stem, '')}" for stem in self._began)
            print(f"{running}; {self._left_text(now)}", file=self._stream, flush=True)

    def _left_text(self, now: float) -> str:
        elapsed = {stem: now - began for stem, began in self._began.items()}
        known = {stem: self._expected.get(stem, 0.0) for stem in self._stems}
        left = seconds_left(known, elapsed, self._done, self._lanes)
        return f"about {left:.0f} s left" if left >= 1 else "longer than expected"

    def end(self, stem: str, state: str, seconds: float) -> None:
        """A notebook ended in ``state``."""
        self._done.add(stem)
        self._began.pop(stem, None)
        line = f"{stem}: {state} after {seconds:.1f} s ({len(self._done)} of {len(self._stems)})"
        if self._bars is not None:
            self._bars.update(self._tasks[stem], left="")
            self._bars.stop_task(self._tasks[stem])
            self._bars.console.print(line, highlight=False)
        else:
            print(line, file=self._stream, flush=True)
