"""What arrived in a trial, told from the bytes alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atom.benchmarks.race_rows import Outcome
from atom.errors import DeviceError

Bytes = NDArray[np.uint8]


def classify(received: Bytes, this: Bytes, following: Bytes, offset: int = 0) -> Outcome:
    """Tell from the bytes what the host received.

    Bytes in which both steps agree say nothing and are left out.

    Args:
        received: uint8 ``[n]``, what landed.
        this: uint8 ``[n]``, what this step wrote.
        following: uint8 ``[m]``, what the next step wrote.
        offset: where ``following`` begins, in bytes after the source's first byte; may be negative.

    Raises:
        DeviceError: a byte belongs to neither step: the copy ran before the producer, or was read
            before its end, or the two steps agree everywhere.
    """
    begin, end = max(offset, 0), min(offset + following.size, this.size)
    after = this.copy()
    if end > begin:
        after[begin:end] = following[begin - offset : end - offset]
    telling = this != after
    is_next = telling & (received == after)
    foreign = (received != this) & ~is_next
    if foreign.any():
        place = int(np.flatnonzero(foreign)[0])
        raise DeviceError(
            f"byte {place} of {this.size} is {int(received[place])}: neither this step's "
            f"{int(this[place])} nor the next step's {int(after[place])}. The copy ran before its "
            "producer, or the host read before the copy ended"
        )
    if end > begin and not telling.any():
        raise DeviceError("both steps wrote the same bytes: nothing can be told from them")
    found = int(is_next.sum())
    if not found:
        return Outcome.CLEAN
    if found < int(telling.sum()):
        return Outcome.TORN
    return Outcome.OVERWRITTEN if (begin, end) == (0, this.size) else Outcome.PARTIAL
