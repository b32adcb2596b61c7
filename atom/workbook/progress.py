"""Progress of a run: bars on a terminal, plain lines elsewhere, and about how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

#: seconds between two plain lines
LINE_SECONDS = 10.0


def seconds_left(
    rest: Mapping[str, float], after: Mapping[str, Sequence[str]], lanes: int
) -> float:
    """About how long a run still takes: the longest chain, or all the work on all lanes.

    Args:
        rest: seconds that each notebook still needs; those that have ended are left out.
        after: notebooks that one waits for.
        lanes: notebooks at a time.
    """

    def end(stem: str) -> float:
        return rest[stem] + max((end(b) for b in after.get(stem, ()) if b in rest), default=0.0)

    return max([sum(rest.values()) / max(1, lanes), *map(end, rest)], default=0.0)


def seconds_of_one(expected: float, elapsed: float, share: float) -> float:
    """About how long a notebook still takes: as expected, or once it is late, by its cells.

    Args:
        expected: seconds for the whole.
        elapsed: seconds so far.
        share: of its cells that have run, 0 to 1.
    """
    if elapsed < expected:
        return expected - elapsed
    return elapsed * (1 - share) / share if share > 0 else expected


class Progress:
    """Shows how far each notebook is. A context manager; used from one thread.

    Args:
        stems: notebooks to be executed.
        expected: seconds that each will take, as far as can be told.
        lanes: notebooks at a time.
        after: notebooks that one waits for.
        stream: where to write; bars are drawn only if it is a terminal.
    """

    def __init__(
        self,
        stems: list[str],
        expected: Mapping[str, float] | None = None,
        lanes: int = 1,
        after: Mapping[str, Sequence[str]] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._stems = stems
        self._expected = dict(expected or {})
        self._lanes = lanes
        self._after = dict(after or {})
        self._done: set[str] = set()
        self._began: dict[str, float] = {}
        self._cells: dict[str, tuple[int, int]] = {}
        self._ends: dict[str, float] = {}
        self._sweeps: dict[str, str] = {}
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
        self._ends[stem] = self._began[stem] + self._expected.get(stem, 0.0)
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
        self._cells[stem] = (done, total)
        now = time.monotonic()
        # estimated here alone: while a cell stands still, the time left must not rise
        spent = now - self._began.get(stem, now)
        left = seconds_of_one(self._expected.get(stem, 0.0), spent, done / max(1, total))
        self._ends[stem] = now + left
        if self._bars is not None:
            self._bars.update(self._tasks[stem], completed=done, total=total)
        self.tick()

    def sweep(self, stem: str, text: str) -> None:
        """How far the sweep is that a notebook runs; empty if it runs none."""
        self._sweeps[stem] = text

    def tick(self) -> None:
        """Some time has passed."""
        now = time.monotonic()
        if self._bars is not None:
            left = self._left_text(now)
            for stem in self._began:
                sweep = self._sweeps.get(stem, "")
                self._bars.update(self._tasks[stem], left=f"{sweep or left}")
        elif now - self._last_line >= LINE_SECONDS and self._began:
            self._last_line = now
            running = ", ".join(self._where(stem) for stem in self._began)
            print(f"{running}; {self._left_text(now)}", file=self._stream, flush=True)

    def _where(self, stem: str) -> str:
        if stem not in self._cells:
            return f"{stem} starting"
        done, total = self._cells[stem]
        sweep = self._sweeps.get(stem, "")
        return f"{stem} {done} of {total} cells" + (f" ({sweep})" if sweep else "")

    def _left_text(self, now: float) -> str:
        rest = {}
        for stem in self._stems:
            if stem in self._done:
                continue
            rest[stem] = self._expected.get(stem, 0.0)
            if stem in self._began:
                rest[stem] = max(0.0, self._ends[stem] - now)
        seconds = seconds_left(rest, self._after, self._lanes)
        if any(rest.get(stem) == 0 for stem in self._began):
            more = f", at least {seconds:.0f} s left" if seconds >= 1 else ""
            return f"longer than expected{more}"
        return f"about {seconds:.0f} s left"

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
