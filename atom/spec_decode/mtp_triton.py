# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of drafting: a step's plan in one go, and the likeliest id of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2
from atom.spec_decode.mtp import DraftPlan

#: tokens, or blocks of a table, that a program handles at a time
_CHUNK = 1024
#: logits that a program looks through for the likeliest id
_PART = 4096


@triton.jit
def draft_plan_kernel(
    query_start_loc,
    positions,
    block_tables,
    input_ids,
    sampled_ids,
    num_bonus,
    known_next_ids,
    next_ids,
    last_index,
    new_start_loc,
    new_positions,
    new_contexts,
    new_slots,
    table_row,
    table_blocks,
    rows,
    num_tokens,
    PASSES: tl.constexpr,
    WIDE_PASSES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_PREFILL: tl.constexpr,
    HAS_SAMPLED: tl.constexpr,
    HAS_KNOWN: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(query_start_loc + row)
    end = tl.load(query_start_loc + row + 1)
    filled = end > start

    # one token for each row with tokens
    every = tl.arange(0, ROWS)
    until = every <= row
    begins = tl.load(query_start_loc + every, mask=until, other=0)
    ends = tl.load(query_start_loc + every + 1, mask=until, other=0)
    tl.store(new_start_loc + row + 1, tl.sum((ends > begins).to(tl.int32), 0))
    if row == 0:
        tl.store(new_start_loc, 0)

    last = end - 1
    after = tl.full([], 0, tl.int64)
    if IS_PREFILL:
        after = after - 1
        if HAS_KNOWN:
            after = tl.load(known_next_ids + row)
        if HAS_SAMPLED:
            after = tl.where(after >= 0, after, tl.load(sampled_ids + row * COLUMNS))
    else:
        bonus = tl.maximum(tl.load(num_bonus + row), 0)
        last = tl.minimum(start + bonus, last)
    last = tl.where(filled, last, 0)
    tl.store(last_index + row, last.to(tl.int64))

    # a program of its own for the padding tokens behind the last row
    stop = tl.where(row == rows - 1, num_tokens, end)
    for first in range(start, stop, CHUNK):
        token = first + tl.arange(0, CHUNK)
        inside = token < end
        if IS_PREFILL:
            given = tl.load(input_ids + token + 1, mask=token + 1 < end, other=0)
            ids = tl.where(token + 1 == end, after, given)
        else:
            offset = tl.minimum(token - start, COLUMNS - 1)
            ids = tl.load(sampled_ids + row * COLUMNS + offset, mask=inside, other=0)
        ids = tl.where(inside, tl.maximum(ids, 0), 0)
        tl.store(next_ids + token, ids, mask=token < stop)

    blocks = tl.full([], 0, tl.int32)
    for first in range(0, table_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        place = block_tables + row.to(tl.int64) * table_row + column
        entry = tl.load(place, mask=column < table_blocks, other=-1)
        blocks += tl.sum((entry >= 0).to(tl.int32), 0)
    capacity = blocks.to(tl.int64) * BLOCK_SIZE
    number = tl.arange(0, WIDE_PASSES)
    listed = number < PASSES
    wished = tl.load(positions + last, mask=filled, other=0) + number
    position = tl.maximum(tl.minimum(wished, capacity - 1), 0)
    fits = filled & (wished < capacity)
    place = block_tables + row.to(tl.int64) * table_row + position // BLOCK_SIZE
    block = tl.load(place, mask=fits & listed, other=0).to(tl.int64)
    slot = tl.where(fits, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    position = tl.where(filled, position, 0)
    into = number * rows + row
    tl.store(new_positions + into, position, mask=listed)
    tl.store(new_contexts + into, position.to(tl.int32), mask=listed)
    tl.store(new_slots + into, slot, mask=listed)


def draft_plan(
    input_ids: Tensor,
    meta: AttentionMetadata,
    draft_tokens: int,
    block_size: int,
    *,
    sampled_ids: Tensor | None = None,
    num_bonus: Tensor | None = None,
    known_next_ids: Tensor | None = None,
) -> DraftPlan:
    """:func:`~atom.spec_decode.mtp.draft_plan` on a GPU."""
    rows, device = meta.num_rows, input_ids.device
    plan = DraftPlan(
        next_ids=torch.empty(meta.num_tokens, dtype=torch.int64, device=device),
        last_index=torch.empty(rows, dtype=torch.int64, device=device),
        query_start_loc=torch.empty_like(meta.query_start_loc),
        positions=torch.empty((draft_tokens, rows), dtype=torch.int64, device=device),
        context_lens=torch.empty((draft_tokens, rows), dtype=torch.int32, device=device),
        slot_mapping=torch.empty((draft_tokens, rows), dtype=torch.int64, device=device),
    )
    columns = 1
    if sampled_ids is not None:
        sampled_ids = sampled_ids.contiguous()
        columns = sampled_ids.shape[1]
    draft_plan_kernel[(rows,)](
        meta.query_start_loc,
        meta.positions,
        meta.block_tables,
        input_ids,
        # an absent tensor is never read
        input_ids if sampled_ids is None else sampled_ids,
        meta.query_start_loc if num_bonus is None else num_bonus,
        input_ids if known_next_ids is None else known_next_ids,
        plan.next_ids,
        plan.last_index,
        plan.query_start_loc,
        plan.positions,
        plan.context_lens,
        plan.slot_mapping,
        meta.block_tables.stride(0),
        meta.block_tables.shape[1],
        rows,
        meta.num_tokens,
        PASSES=draft_tokens,
        WIDE_PASSES=next_power_of_2(draft_tokens),
        BLOCK_SIZE=block_size,
        COLUMNS=columns,
        ROWS=next_power_of_2(rows),
        CHUNK=_CHUNK if meta.is_prefill else 64,
        IS_PREFILL=meta.is_prefill,
        HAS_SAMPLED=sampled_ids is not None,
        HAS_KNOWN=known_next_ids is not None,
        num_warps=4,
    )
    return plan


@triton.jit
def likeliest_part_kernel(
    logits, part_best, part_place, part_sum, stride, vocabulary, parts, CHUNK: tl.constexpr
):
    """Program ``(s, part)``: the part's highest logit, its place, and the sum of its softmax."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * CHUNK + tl.arange(0, CHUNK)
    here = column < vocabulary
    values = tl.load(logits + row * stride + column, mask=here, other=float("-inf"))
    values = values.to(tl.float32)
    # rows of padding may hold anything; what is not a number is no entry's logit
    values = tl.where(values == values, values, float("-inf"))
    top = tl.max(values, 0)
    # a part without any number has no maximum to count from
    peak = tl.where(top == float("-inf"), 0.0, top)
    at = row * parts + part
    tl.store(part_best + at, top)
    tl.store(part_place + at, tl.min(tl.where(values == top, column, vocabulary), 0))
    tl.store(part_sum + at, tl.sum(tl.exp(values - peak), 0))


@triton.jit
def likeliest_join_kernel(
    part_best,
    part_place,
    part_sum,
    ids,
    confidence,
    ids_stride,
    confidence_stride,
    parts,
    PARTS: tl.constexpr,
):
    """Program ``s``: the highest logit of row ``s``, the first of equals, and its softmax.

    The id is one of the vocabulary's whatever the logits are: it is an index of the next pass.
    """
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    there = part < parts
    at = row * parts + part
    best = tl.load(part_best + at, mask=there, other=float("-inf"))
    place = tl.load(part_place + at, mask=there, other=2**31 - 1)
    share = tl.load(part_sum + at, mask=there, other=0.0)
    top = tl.max(best, 0)
    peak = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(share * tl.exp(best - peak), 0)
    first = tl.min(tl.where(best == top, place, 2**31 - 1), 0)
    tl.store(ids + row * ids_stride, first.to(tl.int64))
    tl.store(confidence + row * confidence_stride, 1.0 / total)


def likeliest(logits: Tensor, ids: Tensor, confidence: Tensor) -> None:
    """The Triton side of ``likeliest_reference``."""
    rows, vocabulary = logits.shape
    parts = ceil_div(vocabulary, _PART)
    scratch = torch.empty((3, rows, parts), dtype=torch.float32, device=logits.device)
    places = scratch[1].view(torch.int32)
    likeliest_part_kernel[(rows, parts)](
        *(logits, scratch[0], places, scratch[2], logits.stride(0), vocabulary, parts),
        CHUNK=_PART,
        num_warps=4,
    )
    likeliest_join_kernel[(rows,)](
        *(scratch[0], places, scratch[2], ids, confidence),
        *(ids.stride(0), confidence.stride(0), parts),
        PARTS=next_power_of_2(parts),
        num_warps=1,
    )


@triton.jit
def keep_drafts_kernel(
    token_table, state_slots, ids, spare, ids_row, K: tl.constexpr, WIDE: tl.constexpr
):
    """Program ``s``: drafts of row ``s`` into its group's row of the table, or into the last."""
    row = tl.program_id(0)
    group = tl.load(state_slots + row)
    group = tl.where((group >= 0) & (group < spare), group, spare).to(tl.int64)
    column = tl.arange(0, WIDE)
    draft = tl.load(ids + row * ids_row + column, mask=column < K, other=0)
    tl.store(token_table + group * (K + 1) + 1 + column, draft, mask=column < K)


def keep_drafts(token_table: Tensor, groups: Tensor, ids: Tensor) -> None:
    """The Triton side of ``keep_drafts_reference``."""
    rows, drafts = ids.shape
    keep_drafts_kernel[(rows,)](
        *(token_table, groups, ids, token_table.shape[0] - 1, ids.stride(0)),
        K=drafts,
        WIDE=next_power_of_2(drafts),
        num_warps=1,
    )
