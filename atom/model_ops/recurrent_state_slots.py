"""Which recurrent-state slots a decode row reads and writes, guarded or as upstream: a reference.

The hole is in the table: ``state_table[row, num_accepted_tokens - 1]`` with a count that is too
large reads another row's entries, or behind the table, and takes what it finds there for a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.guard import GuardCode, passes, unchecked


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Slots of one decode row.

    Attributes:
        initial: slot of the state that the row starts from.
        written: slot of the state behind each of the row's tokens.
    """

    initial: int
    written: tuple[int, ...]


def row_slots(
    meta: AttentionMetadata,
    row: int,
    tokens: int,
    pool_slots: int,
    guard: GuardMode,
    record: Tensor,
    layer: int,
) -> RowSlots | None:
    """Look up the slots of a row as the kernel does.

    The group and the count are checked first, then every entry of the row's table.

    Args:
        meta: the batch.
        row: its row.
        tokens: query tokens of the row.
        pool_slots: slots of one layer's pool.
        guard: what happens to a bad row.
        record: int32 ``[8]``, the guard's record.
        layer: number of the layer, for the record.

    Returns:
        The slots, or ``None`` if the guard refused the row.

    Raises:
        DeviceError: a bad row under ``trap``.
        IllegalAccess: under ``none``, a table read outside of the table's memory.
    """
    table = meta.state_table
    width = int(table.shape[1])
    count, group = int(meta.num_accepted_tokens[row]), int(meta.state_slots[row])
    entries = [int(slot) for slot in table[row]]

    def fits(slot: int, slots: int) -> bool:
        return passes(
            guard,
            record,
            count=count,
            slot=slot,
            highest_count=width,
            slots=slots,
            row=row,
            layer=layer,
            count_code=GuardCode.RECURRENT_COUNT,
            slot_code=GuardCode.RECURRENT_SLOT,
        )

    # of the entries the kernel keeps the lowest and the highest
    worst = min(entries) if min(entries) < 0 else max(entries)
    if not (fits(group, pool_slots // width) and fits(worst, pool_slots)):
        return None
    initial = int(unchecked(table, row * width + count - 1, 1))
    return RowSlots(initial, tuple(entries[:tokens]))


class RecurrentStatePool:
    """One layer's recurrent states, addressed by slot wherever the slot lies.

    Args:
        view: ``[slots, HV, K, V]``, contiguous, perhaps a part of a larger pool.
    """

    def __init__(self, view: Tensor) -> None:
        self._view = view

    @property
    def slots(self) -> int:
        """Slots of the layer."""
        return int(self._view.shape[0])

    def read(self, slot: int) -> Tensor:
        """``[HV, K, V]`` of a slot, a copy.

        Raises:
            IllegalAccess: outside of the memory that the view lies in.
        """
        return self._at(slot).clone()

    def write(self, slot: int, state: Tensor) -> None:
        """Store ``[HV, K, V]``; errors as :meth:`read`."""
        self._at(slot).copy_(state)

    def _at(self, slot: int) -> Tensor:
        shape = self._view.shape[1:]
        length = shape.numel()
        return unchecked(self._view, slot * self._view.stride(0), length).view(shape)
