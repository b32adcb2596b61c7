"""The tables of the fault arithmetic: what each reading of the published figures implies.

Every sentence in these tables is put together from a result found here; none is typed for the
published case, so that another width, pool or row gives sentences that are right for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pandas import DataFrame

from atom.config import FaultArithmeticSettings
from atom.model_ops.conv_state_layout import (
    ConvStateLayout,
    IntArray,
    Landing,
    landing,
    layers_needed,
    solutions,
)
from atom.model_ops.status_overwrite import (
    Fit,
    Reading,
    block_bytes,
    largest_batch,
    payload_bytes,
)


def single_layout(settings: FaultArithmeticSettings) -> ConvStateLayout:
    """The layout in which a request owns one slot."""
    return ConvStateLayout(
        slots=settings.slots,
        conv_width=settings.conv_width,
        draft_tokens=settings.draft_tokens,
        dim=settings.conv_dim,
        element_bytes=settings.element_bytes,
        layers=settings.layers,
    )


def grouped_layout(settings: FaultArithmeticSettings, first_slot: int = 0) -> ConvStateLayout:
    """The layout in which a request owns a group of slots and the convolution uses its first."""
    return ConvStateLayout(
        slots=settings.slots,
        conv_width=settings.conv_width,
        draft_tokens=settings.draft_tokens,
        slots_per_request=settings.slots_per_request,
        first_slot=first_slot,
        dim=settings.conv_dim,
        element_bytes=settings.element_bytes,
        layers=settings.layers,
    )


def possible_starts(settings: FaultArithmeticSettings) -> range:
    """Slots at which the first group may begin; a later start repeats one of them."""
    spare = settings.slots - settings.slots_per_request
    return range(min(settings.slots_per_request, spare + 1))


def steps(layout: ConvStateLayout, slot: int, bonus: int) -> DataFrame:
    """The path from a bonus count to the bytes that the kernel reads: columns step, how, value."""
    count = bonus + 1
    rows = layout.rows_read(slot, count)
    first = int(layout.byte_offset(rows[0]))
    end = int(layout.byte_offset(rows[-1])) + layout.row_bytes
    own_end = (slot + 1) * layout.rows_per_slot * layout.row_bytes
    lines = [
        ("bonus count that the host read", "num_bonus", f"{bonus:,}"),
        ("accepted tokens", "bonus + 1", f"{count:,}"),
        ("history taps", f"conv width {layout.conv_width} - 1", f"{layout.taps}"),
        (
            "rows of a slot",
            f"taps {layout.taps} + draft tokens {layout.draft_tokens}",
            f"{layout.rows_per_slot}",
        ),
        (
            "base row",
            f"slot {slot} x {layout.rows_per_slot} + {count:,} - 1",
            f"{int(rows[0]):,}",
        ),
        ("rows read", "one a tap", ", ".join(f"{int(row):,}" for row in rows)),
        (
            "bytes of a row",
            f"{layout.dim:,} channels x {layout.element_bytes} bytes",
            f"{layout.row_bytes:,}",
        ),
        ("bytes read, from the layer's first", "row x row bytes", f"{first:,} to {end - 1:,}"),
        (
            "distance past the end of the own slot",
            f"{first:,} - {own_end:,}",
            f"{(first - own_end) / 2**20:,.1f} MiB",
        ),
        (
            "distance past the end of the layer's pool",
            f"{first:,} - {layout.rows_per_layer * layout.row_bytes:,}",
            f"{(first - layout.rows_per_layer * layout.row_bytes) / 2**20:,.1f} MiB",
        ),
    ]
    return DataFrame(lines, columns=["step", "how", "value"])


@dataclass(frozen=True)
class RowReading:
    """One reading of "the faulting row" and what follows from it.

    Attributes:
        layout: slots of a request and where the first group begins.
        base_only: the row is a base row; else any row that a step reads.
        by_bonus: int64 [N, 3] (slot, count, tap), how the stale bonus reaches the row, any slot.
        by_valid: int64 [N, 3], how honest counts reach it, at any slot.
    """

    layout: ConvStateLayout
    base_only: bool
    by_bonus: IntArray
    by_valid: IntArray

    @property
    def explained(self) -> bool:
        """Whether the stale bonus reaches the row from a slot that the pool has."""
        return bool((self.by_bonus[:, 0] < self.layout.slots).any())

    @property
    def excludes_valid(self) -> bool:
        """Whether no honest count reaches the row at any slot: the count alone is to blame."""
        return len(self.by_valid) == 0

    @property
    def conclusion(self) -> str:
        """What follows about count and slot."""
        count = "the count is wrong, whatever the slot"
        if not self.excludes_valid:
            slot = int(self.by_valid[:, 0].min())
            count = f"the count is wrong only if slot {slot} is none (the pool has no such slot)"
            if slot < self.layout.slots:
                count = f"an honest count at slot {slot} reads this row: nothing is wrong with it"
        if self.explained:
            return f"{count}; the stale bonus explains the row"
        return f"{count}; the stale bonus does not explain the row"


def read_row(layout: ConvStateLayout, row: int, bonus: int, *, base_only: bool) -> RowReading:
    """Solve one reading for the stale bonus and for all honest counts."""
    by_bonus = solutions(layout, row, bonus + 1)
    by_valid = solutions(layout, row, layout.valid_counts)
    if base_only:
        by_bonus = by_bonus[by_bonus[:, 2] == 0]
        by_valid = by_valid[by_valid[:, 2] == 0]
    return RowReading(layout, base_only, by_bonus, by_valid)


def all_readings(settings: FaultArithmeticSettings) -> list[RowReading]:
    """Both meanings of the row, in both layouts, with each slot that the groups may begin at."""
    layouts = [single_layout(settings)]
    if settings.slots_per_request > 1:
        layouts += [grouped_layout(settings, start) for start in possible_starts(settings)]
    return [
        read_row(layout, settings.faulting_row, settings.bonus, base_only=base_only)
        for layout in layouts
        for base_only in (True, False)
    ]


def layout_name(layout: ConvStateLayout) -> str:
    """Short words for a layout, for tables and titles."""
    if layout.slots_per_request == 1:
        return "one slot a request"
    return f"groups of {layout.slots_per_request}, first at slot {layout.first_slot}"


def triples(found: IntArray) -> str:
    """Solutions as text: ``slot 17, count 16385, tap 1``; ``none`` if there are none."""
    words = [f"slot {slot}, count {count}, tap {tap}" for slot, count, tap in found.tolist()]
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if words[3:] else "") or "none"


def readings_table(readings: list[RowReading], row: int, bonus: int) -> DataFrame:
    """One line a reading: residues, solutions, and what follows."""
    return DataFrame(
        [
            {
                "layout": layout_name(reading.layout),
                "the row is": "a base row" if reading.base_only else "any row of a step",
                "stride": reading.layout.stride,
                "row mod stride": (row - reading.layout.first_slot * reading.layout.rows_per_slot)
                % reading.layout.stride,
                "bonus mod stride": bonus % reading.layout.stride,
                "by the stale bonus": triples(reading.by_bonus),
                "by an honest count": triples(reading.by_valid),
                "what follows": reading.conclusion,
            }
            for reading in readings
        ]
    )


def bonus_for_base_row(layout: ConvStateLayout, row: int) -> DataFrame:
    """The bonus that each of the pool's first slots would need to have ``row`` as its base row."""
    slots = layout.request_slots
    bonus = row - slots * layout.rows_per_slot
    return DataFrame({"slot": slots, "bonus needed": bonus})[bonus >= 0]


def landing_table(layout: ConvStateLayout, layer: int, slot: int, counts: list[int]) -> DataFrame:
    """For each count: the rows read, where each lands, and the layers a pool needs to hold them."""
    places = landing(layout, layer, slot, counts)
    lines = []
    for count, place in zip(counts, places, strict=True):
        rows = layout.rows_read(slot, count)
        kinds = [Landing(int(kind)).label for kind in place]
        where = kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)
        lines.append(
            {
                "count": count,
                "honest": "yes" if 1 <= count <= layout.highest_valid_count else "no",
                "rows read": f"{int(rows[0]):,} to {int(rows[-1]):,}",
                "where, tap by tap": where,
                "MiB past the whole pool": _past(layout, layer, int(rows[-1])),
                "layers that would hold it": layer + layers_needed(layout, slot, count),
            }
        )
    return DataFrame(lines)


def _past(layout: ConvStateLayout, layer: int, row: int) -> str:
    rows = row + 1 + layer * layout.rows_per_layer - layout.rows
    return f"{rows * layout.row_bytes / 2**20:,.2f}" if rows > 0 else "inside"


def interesting_counts(layout: ConvStateLayout, bonus: int, slot: int) -> list[int]:
    """Counts worth a line: honest, the first bad one, one a kind of place, the stale one."""
    honest = layout.highest_valid_count
    to_next_layer = layout.rows_per_layer - slot * layout.rows_per_slot + 1
    outside = layout.rows - slot * layout.rows_per_slot + 1
    found = {1, honest, honest + 1, layout.stride + 1, to_next_layer // 2, to_next_layer}
    found |= {outside, bonus + 1}
    return sorted(count for count in found if count >= 1)


def budget_predictions(layout: ConvStateLayout, slot: int, budgets: list[int]) -> DataFrame:
    """What the story predicts for other token budgets: the stale bonus is the budget itself."""
    lines = []
    for budget in budgets:
        row = int(layout.base_row(slot, budget + 1))
        kind = Landing(int(landing(layout, 0, slot, budget + 1).max()))
        lines.append((budget, budget, budget + 1, row, kind.label))
    names = ["token budget", "stale bonus", "accepted", f"row at slot {slot}", "first layer lands"]
    return DataFrame(lines, columns=names)


def puzzle_table(readings: list[Reading], *, fits_only: bool = True) -> DataFrame:
    """The candidates that give the logged values (or all of them), one line each."""
    return DataFrame(
        [
            {
                "next step's tensor": reading.tensor.name,
                "its dtype": reading.dtype,
                "verdict's dtype": reading.verdict_dtype,
                "bytes written": reading.bytes_written,
                "host reads": list(reading.read),
                "comparison": str(reading.fit),
                "needs prefill and decode in one batch": reading.tensor.mixed_batch,
            }
            for reading in readings
            if reading.fit is Fit.FITS or not fits_only
        ]
    )


def block_table(batches: list[int], *, rows: int = 2, element_bytes: int = 4) -> DataFrame:
    """Bytes and block of the status verdict by batch, with and without the epoch tags."""
    plain = payload_bytes(batches, rows=rows, element_bytes=element_bytes)
    tagged = payload_bytes(batches, rows=rows, element_bytes=element_bytes, tagged=True)
    return DataFrame(
        {
            "batch": batches,
            "verdict (bytes)": plain,
            "block (bytes)": block_bytes(plain),
            "with tags (bytes)": tagged,
            "block with tags (bytes)": block_bytes(tagged),
        }
    )


def block_edges() -> DataFrame:
    """Largest batch in one 512-byte block, by what is not published about the verdict."""
    lines = []
    for rows in (1, 2, 3, 4):
        for element_bytes in (4, 8):
            edges = [
                largest_batch(rows=rows, element_bytes=element_bytes, tagged=tagged)
                for tagged in (False, True)
            ]
            lines.append((rows, element_bytes, *edges))
    names = ["values a request", "bytes a value", "largest batch", "largest batch with tags"]
    return DataFrame(lines, columns=names)


def batch_steps(settings: FaultArithmeticSettings) -> list[int]:
    """Batch sizes around the edges of a block, the powers of two, and the one that was asked."""
    edges = [largest_batch(), largest_batch(tagged=True)]
    near = [edge + offset for edge in edges for offset in (0, 1)]
    return sorted({*(int(2**power) for power in np.arange(0, 10)), *near, settings.batch_size})
