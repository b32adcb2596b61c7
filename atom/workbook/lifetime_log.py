"""What a virtual device tells of a run of the transfer code, with the functions that did it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from atom.device.operations import Operation, OperationKind

_ROOMS = ("atom.transfer.", "atom.model_engine.", "atom.spec_decode.")
_COPIES = (OperationKind.ENGINE_COPY, OperationKind.KERNEL_COPY)
#: longest chain of attributes and places that is followed from an owner
_MOST_HOPS = 6


@dataclass(frozen=True)
class Moment:
    """Something that happened, and the transfer code's functions that were running.

    Attributes:
        what: ``owned`` (a block by a new tensor), ``observed`` (the host knows that an event
            completed), ``died`` (a block's last view), ``recorded`` (an event), ``copied`` (a copy
            was queued) or ``told`` (record_stream).
        about: the event, the block, or the operation.
        stream_id: where, if it is a matter of a stream.
        callers: qualified names, outermost first; the last is the one that acted.
    """

    what: str
    about: Any
    stream_id: int | None
    callers: tuple[str, ...]


@dataclass
class TransferLog:
    """An observer that keeps moments in their order. See :class:`DeviceObserver`."""

    moments: list[Moment] = field(default_factory=list)
    _returned: str = ""

    def _add(self, what: str, about: Any, stream_id: int | None = None) -> None:
        callers = _callers(sys._getframe(2))
        if what == "died" and not callers and self._returned:
            callers = (f"return of {self._returned}",)
        self.moments.append(Moment(what, about, stream_id, callers))

    @contextmanager
    def noting_returns(self) -> Iterator[None]:
        """A block that dies with a function's locals dies behind its return: note which it was."""

        def note(frame: FrameType, event: str, argument: Any) -> None:
            if event == "return" and frame.f_globals.get("__name__", "").startswith(_ROOMS):
                self._returned = frame.f_code.co_qualname

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._returned = ""

    def owned(self, block: Any) -> None:
        """See :class:`DeviceObserver`."""
        self._add("owned", block)

    def died(self, block: Any) -> None:
        """See :class:`DeviceObserver`."""
        self._add("died", block)

    def stream_recorded(self, block: Any, stream_id: int) -> None:
        """See :class:`DeviceObserver`."""
        self._add("told", block, stream_id)

    def queued(self, operation: Operation, stream_id: int) -> None:
        """See :class:`DeviceObserver`."""
        if operation.kind in _COPIES:
            self._add("copied", operation, stream_id)

    def event_recorded(self, event: object, stream_id: int) -> None:
        """See :class:`DeviceObserver`."""
        self._add("recorded", event, stream_id)

    def event_waited_by(self, event: object, stream_id: int) -> None:
        """See :class:`DeviceObserver`."""

    def event_observed(self, event: object) -> None:
        """See :class:`DeviceObserver`."""
        self._add("observed", event)

    def stream_waited(self, stream_id: int) -> None:
        """See :class:`DeviceObserver`."""

    def device_waited(self) -> None:
        """See :class:`DeviceObserver`."""

    def of(self, what: str, stream_id: int | None = None) -> list[Moment]:
        """Moments of one kind, on one stream if it is given."""
        return [
            moment
            for moment in self.moments
            if moment.what == what and stream_id in (None, moment.stream_id)
        ]

    def place(self, what: str, about: object, start: int = 0) -> int | None:
        """Place of the first such moment from ``start`` on, ``None`` if there is none."""
        for number, moment in enumerate(self.moments):
            if number >= start and moment.what == what and moment.about is about:
                return number
        return None


def _callers(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_ROOMS):
            # a generator or comprehension belongs to its function
            name = frame.f_code.co_qualname.split(".<locals>")[0]
            if not names or names[-1] != name:
                names.append(name)
        frame = frame.f_back
    return tuple(reversed(names))


def where_it_lives(root: Any, target: object, name: str) -> str | None:
    """The shortest chain from ``root`` that refers to ``target``, in Python's notation.

    Args:
        root: an owner in the transfer code.
        target: what is looked for, by identity.
        name: what to call ``root``.

    Returns:
        E.g. ``TokenIDProcessor.cpu_tensor_handle[0].source[1]``; ``None`` if nothing refers to it.
    """
    waiting: deque[tuple[Any, str, int]] = deque([(root, name, 0)])
    seen = {id(root)}
    while waiting:
        thing, path, hops = waiting.popleft()
        for child, step in _children(thing):
            if child is target:
                return path + step
            if hops < _MOST_HOPS and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, path + step, hops + 1))
    return None


def _children(thing: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(thing, dict):
        yield from ((value, f"[{key!r}]") for key, value in thing.items())
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        yield from ((getattr(thing, name), f".{name}") for name in thing._fields)
    elif isinstance(thing, list | tuple | deque | set):
        yield from ((value, f"[{number}]") for number, value in enumerate(thing))
    elif type(thing).__module__.startswith(_ROOMS):
        for name in (*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", ())):
            if hasattr(thing, name):
                yield getattr(thing, name), f".{name}"
