"""Progress of a run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self, TextIO


class Progress:
    """Shows how far each notebook is. A context manager; used from one thread.

    Args:
        stems: notebooks to be executed.
        stream: where to write; bars are drawn only if it is a terminal.
    """

    def __init__(self, stems: list[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._stems = stems
        self._finished = 0
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
        if self._bars is not None:
            self._tasks[stem] = self._bars.add_task(stem, total=None)
        else:
            print(f"{stem}: started", file=self._stream, flush=True)

    def cells(self, stem: str, done: int, total: int) -> None:
        """``done`` of ``total`` cells have run. Plain lines leave this out."""
        if self._bars is not None:
            self._bars.update(self._tasks[stem], completed=done, total=total)

    def end(self, stem: str, state: str, seconds: float) -> None:
        """A notebook ended in ``state``."""
        self._finished += 1
        line = f"{stem}: {state} after {seconds:.1f} s ({self._finished} of {len(self._stems)})"
        if self._bars is not None:
            self._bars.stop_task(self._tasks[stem])
            self._bars.console.print(line, highlight=False)
        else:
            print(line, file=self._stream, flush=True)
