"""The bounds guard of the state kernels: its record, what the host makes of it, its reference.

A decode step addresses conv state and recurrent state with a count and a slot that nothing
upstream checks. Under ``GuardMode.REPORT`` a kernel that meets a bad one leaves the state alone,
writes zeros as the row's outputs and puts a record of five numbers into a persistent device buffer.
The first error wins (compare-and-swap on word 0) and stays until the host clears the buffer. The
record travels to the host behind the verdict of the step: it costs neither a copy nor a wait.

The kernels' side is in :mod:`atom.model_ops.guard_triton`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from atom.config import GuardMode
from atom.device.interface import Kernel
from atom.errors import AtomError, BadInput, DeviceError

#: int32 words of a record; those past the fifth are zero
RECORD_WORDS = 8


class GuardCode(IntEnum):
    """Word 0 of a record: what was found, and in which kernel."""

    NONE = 0
    CONV_COUNT = 1
    RECURRENT_COUNT = 2
    CONV_SLOT = 3
    RECURRENT_SLOT = 4

    @property
    def kernel(self) -> str:
        """Name of the kernel that found it."""
        conv = self in (GuardCode.CONV_COUNT, GuardCode.CONV_SLOT)
        return "causal_conv1d_update" if conv else "gated_delta_rule_update"

    @property
    def is_count(self) -> bool:
        """Whether the bad value is a ``num_accepted_tokens``; else it is a state slot."""
        return self in (GuardCode.CONV_COUNT, GuardCode.RECURRENT_COUNT)


@dataclass(frozen=True, slots=True)
class GuardFault:
    """The first bad value that a guarded kernel met.

    Attributes:
        code: what was found.
        row: row of the batch.
        slot: state slot of that row.
        value: the bad ``num_accepted_tokens`` or slot.
        layer: number of the layer among those with a state.
    """

    code: GuardCode
    row: int
    slot: int
    value: int
    layer: int

    def words(self, highest_count: int | None = None, slots: int | None = None) -> str:
        """The fault as a sentence.

        Args:
            highest_count: largest valid count, ``1 + draft tokens``, if known.
            slots: slots of the pool, if known.
        """
        where = f"{self.code.kernel} of state layer {self.layer}: batch row {self.row}"
        if self.code.is_count:
            allowed = "" if highest_count is None else f"; 1 to {highest_count} are possible"
            found = f"(state slot {self.slot}) has num_accepted_tokens {self.value}"
        else:
            allowed = "" if slots is None else f"; the pool has slots 0 to {slots - 1}"
            found = f"names state slot {self.value}"
        return f"{where} {found}{allowed}; the row's state was neither read nor written"


class GuardError(AtomError):
    """A guarded kernel met a count or slot that cannot be: raised before its step emits a token.

    Args:
        fault: what was found.
        request: the request of that row, if known.
        highest_count: see :meth:`GuardFault.words`.
        slots: see :meth:`GuardFault.words`.
    """

    def __init__(
        self,
        fault: GuardFault,
        *,
        request: str | int | None = None,
        highest_count: int | None = None,
        slots: int | None = None,
    ) -> None:
        self.fault = fault
        self.request = request
        named = "" if request is None else f"request {request}: "
        super().__init__(
            f"{named}{fault.words(highest_count, slots)}. The host read a status that was not this "
            f"step's, or a slot was freed too early: look at the copy protocol"
        )


class IllegalAccess(DeviceError):
    """An unguarded row lies outside the memory of its pool: a memory fault, simulated."""


def new_record(device: torch.device | str = "cpu") -> Tensor:
    """An empty record: int32 ``[8]``, to be kept for the life of an engine."""
    return torch.zeros(RECORD_WORDS, dtype=torch.int32, device=device)


def clear_record(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Kernel body: acknowledge, so that the record ``writes[0]`` takes the next fault."""
    writes[0].zero_()


CLEAR_RECORD = Kernel("clear_guard_record", clear_record)


def parse_record(words: Tensor | Sequence[int]) -> GuardFault | None:
    """Read a record that reached the host.

    Args:
        words: the 8 numbers, in host memory.

    Returns:
        The fault, or ``None`` if there was none.

    Raises:
        BadInput: not 8 numbers, or a code that no kernel writes (the bytes are not a record).
    """
    values = [int(word) for word in (words.tolist() if isinstance(words, Tensor) else words)]
    if len(values) != RECORD_WORDS:
        raise BadInput(f"guard record: {len(values)} words; it has {RECORD_WORDS}")
    if not any(values):
        return None
    try:
        code = GuardCode(values[0])
    except ValueError:
        raise BadInput(
            f"guard record: word 0 is {values[0]}, which no kernel writes; 0 to {max(GuardCode)} "
            f"are possible, so these bytes are not a record"
        ) from None
    if any(values[5:]) or code is GuardCode.NONE:
        raise BadInput(
            f"guard record: {values} is nothing that a kernel writes, so these bytes are not a "
            f"record"
        )
    return GuardFault(code, *values[1:5])


# -- reference: what kernels do, for one row at a time


def report(record: Tensor, code: GuardCode, row: int, slot: int, value: int, layer: int) -> bool:
    """Write a fault into ``record`` unless one is there. Returns whether it was written."""
    if int(record[0]) != GuardCode.NONE:
        return False
    words = [int(code), row, slot, value, layer]
    record[:5] = torch.tensor(words, dtype=record.dtype)
    return True


def passes(
    guard: GuardMode,
    record: Tensor,
    *,
    count: int,
    slot: int,
    highest_count: int,
    slots: int,
    row: int,
    layer: int,
    count_code: GuardCode,
    slot_code: GuardCode,
) -> bool:
    """Check one row as a kernel does, the slot first.

    Args:
        guard: mode; ``NONE`` lets everything pass.
        record: int32 ``[8]``.
        count: ``num_accepted_tokens`` of the row.
        slot: state slot of the row.
        highest_count: largest valid count.
        slots: slots of the pool.
        row: row of the batch.
        layer: number of the layer.
        count_code: reported for a bad count.
        slot_code: reported for a bad slot.

    Returns:
        Whether the row may touch its state.

    Raises:
        DeviceError: a bad row under ``TRAP``.
    """
    if guard is GuardMode.NONE:
        return True
    if not 0 <= slot < slots:
        fault = GuardFault(slot_code, row, slot, slot, layer)
    elif not 1 <= count <= highest_count:
        fault = GuardFault(count_code, row, slot, count, layer)
    else:
        return True
    if guard is GuardMode.TRAP:
        raise DeviceError(f"device assert: {fault.words(highest_count, slots)}")
    report(record, fault.code, row, slot, fault.value, layer)
    return False


def caution(guard: GuardMode, *, simulated: bool, triton_debug: str | None) -> str | None:
    """What a user of a guard has to know before the first request, or ``None``.

    Args:
        guard: the guard.
        simulated: whether the references run, which need no Triton.
        triton_debug: value of the environment's ``TRITON_DEBUG``.
    """
    if guard is not GuardMode.TRAP or simulated:
        return None
    if (triton_debug or "0").lower() in ("1", "true", "on", "yes", "y"):
        return "guard 'trap' ends the whole process at the first bad row, with all its requests"
    return (
        "guard 'trap' checks nothing here: Triton compiles its assert in under TRITON_DEBUG=1 "
        "alone. Set that before the start, or take guard 'report'"
    )


_pools: ContextVar[tuple[tuple[int, int], ...]] = ContextVar("mapped_pools", default=())


@contextmanager
def mapped_pool(*pools: Tensor) -> Iterator[None]:
    """Within the block, memory that is addressed in one of the contiguous ``pools`` ends with it.

    Other memory ends with the storage of the tensor that is addressed: for a view of a plain tensor
    that is the same, but a virtual device's tensors all lie in one storage.
    """
    ranges = tuple(
        (pool.data_ptr(), pool.data_ptr() + pool.numel() * pool.element_size()) for pool in pools
    )
    token = _pools.set(ranges)
    try:
        yield
    finally:
        _pools.reset(token)


def unchecked(view: Tensor, offset: int, length: int) -> Tensor:
    """The ``length`` elements at ``offset`` from the first of ``view``, wherever they lie.

    This is what an unguarded kernel reaches: other slots, other layers, or nothing at all.

    Args:
        view: one layer's part of a pool.
        offset: elements, may be negative.
        length: elements.

    Returns:
        1-D, a view of the same memory.

    Raises:
        IllegalAccess: outside the pool, see :func:`mapped_pool`.
    """
    storage = view.untyped_storage()
    size = view.element_size()
    first = view.storage_offset() + offset
    low, high = 0, storage.nbytes() // size
    for start, end in _pools.get():
        if start <= view.data_ptr() < end:
            base = view.data_ptr() - view.storage_offset() * size
            low, high = max(low, (start - base) // size), min(high, (end - base) // size)
    if first < low or first + length > high:
        address = view.data_ptr() + offset * size
        raise IllegalAccess(
            f"illegal memory access at {address:#x}: {length} elements at element {first - low} of "
            f"a pool of {high - low}"
        )
    flat = torch.empty(0, dtype=view.dtype, device=view.device)
    return flat.set_(storage, first, (length,), (1,))
