"""The layout of the conv-state pool: from a bonus count to a row, and from a row to its causes.

The GDN causal convolution keeps, for each request, the last ``conv_width - 1`` inputs and room for
the draft tokens of a step. A decode step starts at the row that the last step's accepted tokens
left as the newest history::

    base row = slot * rows_per_slot + num_accepted_tokens - 1
    rows read = base row .. base row + conv_width - 2

A count of 1 to ``draft_tokens + 1`` stays inside the slot; nothing in the kernel enforces that.
Rows are counted inside one layer's pool; the pools of the layers lie one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atom.errors import BadInput

IntArray = NDArray[np.int64]


class Landing(IntEnum):
    """What lies at a row that the kernel reads, in order of how far it is from home."""

    OWN_SLOT = 0  #: the request's own state
    UNUSED_SLOT = 1  #: a slot of the same layer that no convolution uses (draft or reserved)
    ANOTHER_SLOT = 2  #: another request's state in the same layer
    ANOTHER_LAYER = 3  #: the pool of another layer
    OUTSIDE = 4  #: before the first or past the last row of the whole pool

    @property
    def label(self) -> str:
        """Lower-case words for a legend or a table."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class ConvStateLayout:
    """Shape of a conv-state pool.

    Attributes:
        slots: slots in one layer's pool.
        conv_width: width of the convolution in tokens.
        draft_tokens: draft tokens a step (0: no speculation).
        slots_per_request: consecutive slots a request owns; the convolution uses the first.
        first_slot: slots in front of the first request's group (a reserved slot, for example).
        dim: channels of a row.
        element_bytes: bytes an element.
        layers: pools of this shape, one behind the other.

    Raises:
        BadInput: if a number is out of range or no request fits into the pool.
    """

    slots: int
    conv_width: int = 4
    draft_tokens: int = 3
    slots_per_request: int = 1
    first_slot: int = 0
    dim: int = 8192
    element_bytes: int = 2
    layers: int = 1

    def __post_init__(self) -> None:
        least = {"slots": 1, "conv_width": 2, "draft_tokens": 0, "slots_per_request": 1}
        least |= {"first_slot": 0, "dim": 1, "element_bytes": 1, "layers": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise BadInput(
                    f"conv-state layout: {name} must be at least {low}, got {getattr(self, name)}"
                )
        if self.first_slot + self.slots_per_request > self.slots:
            raise BadInput(
                f"conv-state layout: a request owns {self.slots_per_request} slots behind "
                f"{self.first_slot} reserved ones, but the pool has {self.slots}: no request fits; "
                f"raise slots or lower slots_per_request"
            )

    @property
    def taps(self) -> int:
        """History rows that a step reads: ``conv_width - 1``."""
        return self.conv_width - 1

    @property
    def rows_per_slot(self) -> int:
        """Rows of a slot: the history, and one more for each draft token."""
        return self.taps + self.draft_tokens

    @property
    def highest_valid_count(self) -> int:
        """Largest honest ``num_accepted_tokens``: every draft, and the token after them."""
        return self.draft_tokens + 1

    @property
    def valid_counts(self) -> IntArray:
        """int64 [draft_tokens + 1], the counts 1 to ``draft_tokens + 1``."""
        return np.arange(1, self.highest_valid_count + 1, dtype=np.int64)

    @property
    def request_slots(self) -> IntArray:
        """int64 [requests], the slot in which each request's conv state begins."""
        end = self.last_request_slot + 1
        return np.arange(self.first_slot, end, self.slots_per_request, dtype=np.int64)

    @property
    def last_request_slot(self) -> int:
        """The last of :attr:`request_slots`."""
        spare = self.slots - self.slots_per_request - self.first_slot
        return self.first_slot + spare // self.slots_per_request * self.slots_per_request

    @property
    def stride(self) -> int:
        """Rows from one request's base to the next one's."""
        return self.rows_per_slot * self.slots_per_request

    @property
    def rows_per_layer(self) -> int:
        """Rows in the pool of one layer."""
        return self.slots * self.rows_per_slot

    @property
    def rows(self) -> int:
        """Rows in the pools of all layers."""
        return self.rows_per_layer * self.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dim * self.element_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools of all layers."""
        return self.rows * self.row_bytes

    def aligned(self, first_slot: int) -> ConvStateLayout:
        """The same pool with the first group at ``first_slot``."""
        return replace(self, first_slot=first_slot)

    def base_row(self, slot: ArrayLike, count: ArrayLike) -> IntArray:
        """Row at which a step begins to read, by the kernel's unchecked formula.

        Args:
            slot: int, any shape; the slot in which a request's conv state begins.
            count: int, broadcast with ``slot``; ``num_accepted_tokens``.
        """
        slots = np.asarray(slot, dtype=np.int64)
        return np.asarray(slots * self.rows_per_slot + np.asarray(count, dtype=np.int64) - 1)

    def rows_read(self, slot: ArrayLike, count: ArrayLike) -> IntArray:
        """Rows that a step reads: int64, the broadcast shape with ``taps`` as a last axis."""
        return self.base_row(slot, count)[..., None] + np.arange(self.taps, dtype=np.int64)

    def byte_offset(self, row: ArrayLike, layer: int = 0) -> IntArray:
        """Bytes from the first byte of the whole pool to ``row`` of ``layer``."""
        rows = np.asarray(row, dtype=np.int64) + layer * self.rows_per_layer
        return np.asarray(rows * self.row_bytes)

    def highest_row(self, highest_count: int) -> int:
        """Highest row that any request of the pool reads with a count up to ``highest_count``."""
        return int(self.rows_read(self.last_request_slot, highest_count)[-1])

    def check_slot(self, slot: int) -> None:
        """Refuse a slot in which no request's conv state begins.

        Raises:
            BadInput: with the slots that would do.
        """
        if slot not in self.request_slots:
            few = ", ".join(str(value) for value in self.request_slots[:4])
            raise BadInput(
                f"conv-state layout: no request begins at slot {slot}; the pool has "
                f"{len(self.request_slots)} such slots: {few}, ... up to {self.request_slots[-1]}"
            )


@dataclass(frozen=True, slots=True)
class RowSources:
    """Every (slot, count, tap) of a pool that reads one row: one count for each slot and tap.

    Attributes:
        slots: int64 [S], slots in which a request begins.
        counts: int64 [S, T], the count that makes the slot read the row with the tap; below 1 where
            none does (the row lies in front of the slot).
        valid: bool [S, T], whether that count is an honest one.
    """

    slots: IntArray
    counts: IntArray
    valid: NDArray[np.bool_]

    @property
    def possible(self) -> NDArray[np.bool_]:
        """bool [S, T], whether any count of 1 or more does it."""
        return self.counts >= 1


def row_sources(layout: ConvStateLayout, row: int) -> RowSources:
    """Which count each request slot of the pool needs, at each tap, to read ``row``.

    Args:
        layout: the pool.
        row: row counted from the first row of the layer's pool.
    """
    slots = layout.request_slots
    taps = np.arange(layout.taps, dtype=np.int64)
    counts = row + 1 - (slots * layout.rows_per_slot)[:, None] - taps[None, :]
    return RowSources(slots, counts, (counts >= 1) & (counts <= layout.highest_valid_count))


def solutions(layout: ConvStateLayout, row: int, counts: ArrayLike) -> IntArray:
    """Every (slot, count, tap) with a count of ``counts`` that reads ``row``, at any slot at all.

    The number of slots is not a bound here (it is not published): the slot follows from the count
    and the tap, because ``row - tap - count + 1`` must be a multiple of the rows of a slot, and its
    quotient a slot in which a group begins.

    Returns:
        int64 [N, 3], columns slot, count, tap, ordered by slot, then count.
    """
    count, tap = np.meshgrid(
        np.atleast_1d(np.asarray(counts, dtype=np.int64)),
        np.arange(layout.taps, dtype=np.int64),
        indexing="ij",
    )
    base = row - tap - count + 1
    slot = base // layout.rows_per_slot
    group_offset = slot - layout.first_slot
    fits = (base % layout.rows_per_slot == 0) & (group_offset >= 0)
    fits &= group_offset % layout.slots_per_request == 0
    found = np.stack([slot[fits], count[fits], tap[fits]], axis=1)
    return np.asarray(found[np.lexsort((found[:, 1], found[:, 0]))])


def reachable_residues(layout: ConvStateLayout, *, with_taps: bool) -> IntArray:
    """Residues of a row, modulo the stride, that honest counts reach from any request slot.

    Args:
        layout: the pool.
        with_taps: count every row that a step reads, not its base row alone.

    Returns:
        int64 [N], sorted, without repeats.
    """
    rows = layout.rows_read(layout.first_slot, layout.valid_counts)
    return np.unique((rows if with_taps else rows[:, :1]) % layout.stride)


def landing(layout: ConvStateLayout, layer: int, slot: int, counts: ArrayLike) -> NDArray[np.int8]:
    """What the kernel of one layer reads for a request, for each count and tap.

    Args:
        layout: the pool.
        layer: layer whose kernel runs, 0 to ``layers - 1``.
        slot: slot in which the request's conv state begins.
        counts: int [C], any values, 0 and negative ones too.

    Returns:
        int8 [C, taps] of :class:`Landing` values.

    Raises:
        BadInput: if the layer or the slot does not exist.
    """
    layout.check_slot(slot)
    if not 0 <= layer < layout.layers:
        raise BadInput(f"conv-state layout: layer {layer} of {layout.layers} (0 is the first)")
    rows = layout.rows_read(slot, np.atleast_1d(np.asarray(counts, dtype=np.int64)))
    whole = rows + layer * layout.rows_per_layer
    target = rows // layout.rows_per_slot
    result = np.full(rows.shape, Landing.ANOTHER_SLOT, dtype=np.int8)
    group_offset = target - layout.first_slot
    begins = (group_offset >= 0) & (target <= layout.last_request_slot)
    begins &= group_offset % layout.slots_per_request == 0
    result[~begins] = Landing.UNUSED_SLOT
    result[target == slot] = Landing.OWN_SLOT
    result[(rows < 0) | (rows >= layout.rows_per_layer)] = Landing.ANOTHER_LAYER
    result[(whole < 0) | (whole >= layout.rows)] = Landing.OUTSIDE
    return result


def landing_ranges(
    layout: ConvStateLayout, layer: int, slot: int, counts: IntArray
) -> list[tuple[int, int, Landing]]:
    """Ranges of counts whose farthest tap lands in the same kind of place.

    Args:
        layout: the pool.
        layer: layer whose kernel runs.
        slot: slot in which the request's conv state begins.
        counts: int64 [C], increasing; each stands for all counts up to the next.

    Returns:
        (first count, last count, kind), in order and without gaps; the kind is that of the worst
        row read.
    """
    worst = landing(layout, layer, slot, counts).max(axis=1)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(worst)) + 1])
    firsts = counts[starts]
    lasts = np.concatenate([firsts[1:] - 1, counts[-1:]])
    return [
        (int(first), int(last), Landing(int(worst[start])))
        for start, first, last in zip(starts, firsts, lasts, strict=True)
    ]


def layers_needed(layout: ConvStateLayout, slot: int, count: int) -> int:
    """Layers a pool must have so that the first layer's kernel, with this count, stays inside it.

    A fault needs an access outside; with at least so many layers the first layer reads a later
    layer's state in silence instead.
    """
    return int(layout.rows_read(slot, count)[-1]) // layout.rows_per_layer + 1
