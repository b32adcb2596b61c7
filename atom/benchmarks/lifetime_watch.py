"""What the host read from pinned slots, told apart from what the steps wrote.

While a watch is on, every read of a pinned slot by the transfer code is seen: on an explored device
it becomes a step of its own that may come at any place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor

from atom.benchmarks.lifetime_paths import value_of
from atom.device.interface import Device
from atom.errors import StalePayload
from atom.lifetime.explore_device import ExploredDevice
from atom.transfer.d2h_queue import landed_fault
from atom.transfer.payload import PayloadLayout, tag_fault
from atom.transfer.pinned_ring import PinnedSlot

#: counts that a bounds guard lets pass: none to all of three draft tokens
LEGAL_COUNTS = range(4)


@dataclass
class Observation:
    """What the host got of one transfer.

    Attributes:
        step: the step that was sent.
        values: the data as it was read; empty if only its tags were.
        foreign: whether any byte was not that step's.
        tag_caught: whether the epoch tags gave it away.
        guard_caught: whether a value was outside the legal counts.
    """

    step: int
    values: tuple[float, ...] = ()
    foreign: bool = False
    tag_caught: bool = False
    guard_caught: bool = False


class _Reading(AbstractContextManager[None]):
    """See :meth:`Watch.reading`.

    No generator: from Python 3.12 on, an exception that ends in one stays in a reference cycle, and
    with it the frames it went through and their tensors, until a cyclic collection.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._watch.read_ended(error)


@dataclass
class Watch:
    """Sent transfers and what the host read of them.

    Attributes:
        device: where they run.
        observations: by what was sent, oldest first.
    """

    device: Device
    observations: dict[tuple[str, int], Observation] = field(default_factory=dict)
    # by identity: a watch must not keep a one-off buffer alive
    _sent: dict[int, tuple[str, int, PayloadLayout]] = field(default_factory=dict)
    _expected: int | None = None
    _judged: list[Observation] = field(default_factory=list)

    def sent(self, slot: PinnedSlot, step: int, layout: PayloadLayout) -> None:
        """Step ``step`` was sent into ``slot``."""
        self._sent[id(slot)] = (layout.kind.label, step, layout)

    def reading(self, step: int | None) -> AbstractContextManager[None]:
        """The block receives ``step`` (``None``: whatever its slots were sent last)."""
        self._expected = step
        self._judged = []
        return _Reading(self)

    def read_ended(self, error: BaseException | None) -> bool:
        """A receive has ended. Returns whether ``error`` was the tags' doing."""
        self._expected = None
        if not isinstance(error, StalePayload):
            return False
        if not self._judged:
            # read through an entry whose slot was sent again since
            seen = self.observations.setdefault(("stale", 0), Observation(0))
            self._judge(seen, (), str(error))
        for seen in self._judged:
            # one wrong tag stops everything that is received with it
            seen.tag_caught = True
        return True

    def _of(self, slot: PinnedSlot) -> Observation | None:
        found = self._sent.get(id(slot))
        if found is None:
            return None
        step = found[1] if self._expected is None else self._expected
        return self.observations.setdefault((found[0], step), Observation(step))

    def tags_read(self, slot: PinnedSlot, layout: PayloadLayout) -> None:
        """The host has read the tags of ``slot``, now."""
        seen = self._of(slot)
        if seen is None:
            return
        fault = _fault(layout, seen.step, slot)
        if fault is not None:
            seen.foreign = seen.tag_caught = True
            self._judge(seen, _values(_DATA(slot, layout)), fault)

    def data_read(self, slot: PinnedSlot, data: Tensor) -> None:
        """The host has read the data of ``slot``, now."""
        seen = self._of(slot)
        if seen is not None:
            seen.values = _values(data)
            expected = value_of(seen.step)
            wrong = [value for value in seen.values if value != expected]
            if wrong:
                self._judge(seen, seen.values, f"{wrong[0]:g} in place of {expected}")

    def _judge(self, seen: Observation, values: tuple[float, ...], what: str) -> None:
        self._judged.append(seen)
        seen.foreign = True
        seen.guard_caught |= any(value not in LEGAL_COUNTS for value in values)
        if isinstance(self.device, ExploredDevice):
            self.device.fail("foreign bytes", f"the host read of step {seen.step}: {what}")

    def peek(self, slot: PinnedSlot) -> None:
        """Look at what landed in ``slot``, whether the transfer code reads it or not."""
        _, step, layout = self._sent[id(slot)]
        if landed_fault(layout, step, slot) is None:
            slot.data(layout)

    def outcome(self) -> tuple[Any, ...]:
        """Everything that was read, for comparing executions."""
        return tuple(
            (label, step, seen.values, seen.tag_caught)
            for (label, step), seen in sorted(self.observations.items())
        )


def _values(data: Tensor) -> tuple[float, ...]:
    return tuple(data.flatten().tolist())


_DATA, _TAGS = PinnedSlot.data, PinnedSlot.tags


def _fault(layout: PayloadLayout, step: int, slot: PinnedSlot) -> str | None:
    # as landed_fault, without being seen
    return tag_fault(layout, step, *_TAGS(slot, layout)) if layout.tagged else None


@contextmanager
def watching(device: Device) -> Iterator[Watch]:
    """See every read of a pinned slot in the block."""
    watch = Watch(device)

    def data(slot: PinnedSlot, layout: PayloadLayout) -> Tensor:
        found = _DATA(slot, layout)
        if id(slot) in watch._sent:
            _host_read(device, found, f"read {layout.kind.label}")
            watch.data_read(slot, found)
        return found

    def tags(slot: PinnedSlot, layout: PayloadLayout) -> tuple[int, int]:
        if id(slot) in watch._sent:
            _host_read(device, slot.target(layout), f"read {layout.kind.label} tags")
            watch.tags_read(slot, layout)
        return _TAGS(slot, layout)

    PinnedSlot.data = data  # type: ignore[assignment, method-assign]
    PinnedSlot.tags = tags  # type: ignore[assignment, method-assign]
    try:
        yield watch
    finally:
        PinnedSlot.data = _DATA  # type: ignore[method-assign]
        PinnedSlot.tags = _TAGS  # type: ignore[method-assign]


def _host_read(device: Device, tensor: Tensor, what: str) -> None:
    if isinstance(device, ExploredDevice):
        device.host_read(tensor, what)


def section(device: Device, name: str) -> AbstractContextManager[None]:
    """The block does this duty: send, receive, drain, clean, ell."""
    return device.section(name) if isinstance(device, ExploredDevice) else nullcontext()
