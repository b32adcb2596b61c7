# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of paged attention for prompt chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.attention_tile_triton import HIDDEN, attend


@triton.jit
def prefill_kernel(
    query,
    kv_cache,
    output,
    query_start_loc,
    context_lens,
    block_tables,
    batch_rows,
    query_token,
    query_head,
    cache_half,
    table_row,
    capacity,
    scale,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # late tiles see the most keys: begin with them
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # tiles of batch row b begin at query_start_loc[b] // QUERIES + b, which rises with b
    low = tl.full((), 0, tl.int32)
    high = low + batch_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(query_start_loc + low)
    length = tl.load(query_start_loc + low + 1) - begin
    first_query = (tile - begin // QUERIES - low) * QUERIES
    if first_query >= length:
        return

    context = tl.load(context_lens + low)
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

    end = tl.minimum(context + tl.minimum(first_query + QUERIES, length), capacity)
    whole = tl.minimum(context + first_query + 1, end) // KEYS * KEYS
    seen = context + index + 1
    table = block_tables + low.to(tl.int64) * table_row
    base = kv_cache + kv_head * HEAD_SIZE
    accumulated = tl.zeros([ROWS, WIDE], tl.float32)
    largest = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated, largest, total = attend(
        accumulated,
        largest,
        total,
        queries,
        base,
        cache_half,
        table,
        0,
        whole,
        end,
        seen,
        scale,
        False,
        HEADS,
        HEAD_SIZE,
        WIDE,
        BLOCK_SIZE,
        KEYS,
    )
    accumulated, largest, total = attend(
        accumulated,
        largest,
        total,
        queries,
        base,
        cache_half,
        table,
        whole,
        end,
        end,
        seen,
        scale,
        True,
        HEADS,
        HEAD_SIZE,
        WIDE,
        BLOCK_SIZE,
        KEYS,
    )
    place = output + (token * (HEADS * RATIO) + head)[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(place, (accumulated / total[:, None]).to(output.dtype.element_ty), mask=loaded)
