# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of paged attention for the few queries of a decode step.

A batch too small for the GPU cuts each row's keys into parts; a second kernel joins them. How many
parts there are depends on host numbers alone, as a graph's grid must; how many keys a part takes
depends on the row's own context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.attention_tile_triton import HIDDEN, attend

#: most parts of a row's keys
_MOST_SPLITS = 64
#: fewest keys that are worth a part of their own
_FEWEST_KEYS: tl.constexpr = tl.constexpr(128)


def split_count(programs: int, max_keys: int, processors: int) -> int:
    """Parts that a decode row's keys are cut into: a power of two.

    Two programs a processor fit at a time; more parts than that would queue.
    """
    wanted = min(2 * processors // max(programs, 1), max_keys // _FEWEST_KEYS.value, _MOST_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@triton.jit
def _keys_a_part(end, splits, KEYS: tl.constexpr):
    """Keys of each part of a row that sees ``end`` keys: whole tiles, and not too few."""
    return tl.maximum(tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS, _FEWEST_KEYS)


@triton.jit
def decode_kernel(
    query,
    kv_cache,
    output,
    parts,
    part_sizes,
    query_start_loc,
    context_lens,
    block_tables,
    query_token,
    query_head,
    cache_half,
    table_row,
    capacity,
    scale,
    splits,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    batch_row = tl.program_id(2)
    kv_head = tl.program_id(1) // TILES
    tile = tl.program_id(1) % TILES
    split = tl.program_id(0)
    begin = tl.load(query_start_loc + batch_row)
    length = tl.load(query_start_loc + batch_row + 1) - begin
    first_query = tile * QUERIES
    context = tl.load(context_lens + batch_row)
    end = tl.minimum(context + tl.minimum(first_query + QUERIES, length), capacity)
    share = _keys_a_part(end, splits, KEYS)
    first = split * share
    # one branch, so that the loads before it do not wait for each other
    if (first_query >= length) | (first >= end):
        return
    last = tl.minimum(first + share, end)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDE)
    index = first_query + rows // RATIO
    live = (rows < QUERIES * RATIO) & (index < length)
    token = (begin + index).to(tl.int64)
    head = kv_head * RATIO + rows % RATIO
    loaded = live[:, None] & (dims < HEAD_SIZE)[None, :]
    queries = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + dims[None, :],
        mask=loaded,
        other=0.0,
    )
    accumulated, largest, total = attend(
        tl.zeros([ROWS, WIDE], tl.float32),
        tl.full([ROWS], HIDDEN, tl.float32),
        tl.zeros([ROWS], tl.float32),
        queries,
        kv_cache + kv_head * HEAD_SIZE,
        cache_half,
        block_tables + batch_row.to(tl.int64) * table_row,
        first,
        last,
        last,
        context + index + 1,
        scale,
        True,
        HEADS,
        HEAD_SIZE,
        WIDE,
        BLOCK_SIZE,
        KEYS,
    )
    result = accumulated / total[:, None]
    place = token * (HEADS * RATIO) + head
    if SPLIT:
        place = place * splits + split
        tl.store(parts + place[:, None] * HEAD_SIZE + dims[None, :], result, mask=loaded)
        tl.store(part_sizes + place, largest + tl.log2(total), mask=live)
    else:
        part = output + place[:, None] * HEAD_SIZE + dims[None, :]
        tl.store(part, result.to(output.dtype.element_ty), mask=loaded)


@triton.jit
def join_parts_kernel(
    output,
    parts,
    part_sizes,
    query_start_loc,
    context_lens,
    capacity,
    max_query_len,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch_row = tl.program_id(0) // max_query_len
    index = tl.program_id(0) % max_query_len
    begin = tl.load(query_start_loc + batch_row)
    length = tl.load(query_start_loc + batch_row + 1) - begin
    if index >= length:
        return
    context = tl.load(context_lens + batch_row)
    reached = tl.minimum((index // QUERIES + 1) * QUERIES, length)
    end = tl.minimum(context + reached, capacity)
    part = tl.arange(0, SPLITS)
    used = part * _keys_a_part(end, SPLITS, KEYS) < end

    place = ((begin + index).to(tl.int64) * HEADS + tl.program_id(1)) * SPLITS + part
    sizes = tl.load(part_sizes + place, mask=used, other=float("-inf"))
    shares = tl.exp2(sizes - tl.max(sizes, 0))
    shares /= tl.sum(shares, 0)
    dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < HEAD_SIZE
    loaded = used[:, None] & inside[None, :]
    values = tl.load(parts + place[:, None] * HEAD_SIZE + dims[None, :], mask=loaded, other=0.0)
    joined = tl.sum(values * shares[:, None], 0)
    row = (begin + index).to(tl.int64) * HEADS + tl.program_id(1)
    tl.store(output + row * HEAD_SIZE + dims, joined.to(output.dtype.element_ty), mask=inside)
