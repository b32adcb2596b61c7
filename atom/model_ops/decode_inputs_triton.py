# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of a step's inputs: one launch for a decode batch or for prompt chunks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.decode_inputs import StepDrafts, StepInputs
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2


@triton.jit
def step_inputs_kernel(
    metadata,
    block_tables,
    token_table,
    query_start_loc,
    positions,
    slot_mapping,
    input_ids,
    state_table,
    draft_ids,
    num_drafts,
    draft_positions,
    table_rows,
    metadata_row,
    table_row,
    table_blocks,
    groups,
    rows,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    listed = row < rows
    given = tl.load(metadata + metadata_row + row, mask=listed, other=0)
    lengths = tl.maximum(given, 0)
    if HAS_IDS:
        lengths = tl.minimum(lengths, COLUMNS)
    ends = tl.minimum(tl.cumsum(lengths, 0), num_tokens)

    if tl.program_id(0) == 0:
        tl.store(query_start_loc + row + 1, ends, mask=listed)
        tl.store(query_start_loc + row, tl.zeros([ROWS], tl.int32), mask=row == 0)
        group = tl.load(metadata + 2 * metadata_row + row, mask=listed, other=-1)
        column = tl.arange(0, WIDE_COLUMNS)
        states = group[:, None] * COLUMNS + column[None, :]
        states = tl.where(group[:, None] >= 0, states, -1)
        place = state_table + row[:, None] * COLUMNS + column[None, :]
        tl.store(place, states, mask=listed[:, None] & (column < COLUMNS)[None, :])
        if HAS_DRAFTS:
            # the table's last row is for padding, and for a group that it has not
            held = tl.where((group >= 0) & (group < groups - 1), group, groups - 1)
            tl.store(table_rows + row, held, mask=listed)
            tl.store(num_drafts + row, given - 1, mask=listed)
            context = tl.load(metadata + row, mask=listed, other=0)
            tl.store(draft_positions + row, context.to(tl.int64) + 1, mask=listed)
            drafts = listed[:, None] & (column < COLUMNS - 1)[None, :]
            place = token_table + held[:, None].to(tl.int64) * COLUMNS + column[None, :] + 1
            ids = tl.load(place, mask=drafts, other=0)
            place = draft_ids + row[:, None] * (COLUMNS - 1) + column[None, :]
            tl.store(place, ids, mask=drafts)

    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    written = token < num_tokens
    before = (ends[None, :] <= token[:, None]) & listed[None, :]
    owner = tl.sum(before.to(tl.int32), 1)
    start = tl.max(tl.where(before, ends[None, :], 0), 1)
    used = written & (owner < rows)
    index = token - start
    context = tl.load(metadata + owner, mask=used, other=0)
    position = tl.where(used, (context + index).to(tl.int64), 0)
    tl.store(positions + token, position, mask=written)

    block = position // BLOCK_SIZE
    inside = used & (position >= 0) & (block < table_blocks)
    entry = tl.load(
        block_tables + owner.to(tl.int64) * table_row + block, mask=inside, other=-1
    ).to(tl.int64)
    slot = tl.where(entry >= 0, entry * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping + token, slot, mask=written)

    if HAS_IDS:
        group = tl.load(metadata + 2 * metadata_row + owner, mask=used, other=-1)
        owned = used & (group >= 0) & (group < groups)
        place = token_table + group.to(tl.int64) * COLUMNS + index
        tl.store(input_ids + token, tl.load(place, mask=owned, other=0), mask=written)


def step_inputs(
    metadata: Tensor,
    block_tables: Tensor,
    token_table: Tensor | None,
    num_tokens: int,
    block_size: int,
    *,
    out: StepInputs,
    drafts: StepDrafts | None = None,
) -> None:
    """:func:`~atom.model_ops.decode_inputs.decode_inputs` or ``prefill_inputs`` on a GPU."""
    rows = metadata.shape[1]
    columns = out.state_table.shape[1]
    wide_rows = next_power_of_2(max(rows, 1))
    # every token of a program is compared with every row
    tokens = max(16, min(128, 16384 // wide_rows))
    step_inputs_kernel[(max(1, ceil_div(num_tokens, tokens)),)](
        metadata,
        block_tables,
        out.input_ids if token_table is None else token_table,
        out.query_start_loc,
        out.positions,
        out.slot_mapping,
        out.input_ids,
        out.state_table,
        *(drafts.ids, drafts.number, drafts.positions, drafts.table_rows)
        if drafts is not None
        # absent tensors are never written
        else (out.input_ids, out.state_table, out.positions, out.state_table),
        metadata.stride(0),
        block_tables.stride(0),
        block_tables.shape[1],
        0 if token_table is None else token_table.shape[0],
        rows,
        num_tokens,
        BLOCK_SIZE=block_size,
        COLUMNS=columns,
        WIDE_COLUMNS=next_power_of_2(columns),
        ROWS=wide_rows,
        TOKENS=tokens,
        HAS_IDS=token_table is not None,
        HAS_DRAFTS=drafts is not None,
        num_warps=4,
    )
