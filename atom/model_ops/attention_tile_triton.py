# mypy: disable-error-code="no-untyped-def"
"""What the kernels of paged attention share: their tiles, and the pass over a tile's keys.

A tile's rows are the queries of a few tokens times the query heads of one KV head, so that a block
of keys serves all of them: a decode step of four tokens with eight heads a KV head fills 32 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from atom.model_ops.launch_sizes import next_power_of_2

#: score of a key that a query does not see; finite, so that a part without any key is no NaN. A
#: power of two: its product with the scale is exact, also where the compiler fuses the subtraction
#: of that product from itself, and what a rounded product left there would be a power to infinity
HIDDEN: tl.constexpr = tl.constexpr(-(2.0**100))


@dataclass(frozen=True)
class Tiling:
    """How a launch cuts its work.

    Attributes:
        queries: tokens of a tile.
        rows: rows of a tile, a power of two of at least ``queries * query heads a KV head``.
        keys: keys of a tile.
        warps: warps of a program.
        stages: stages of the software pipeline.
    """

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


@cache
def prefill_tiling(ratio: int, head_size: int, element_bytes: int, hip: bool) -> Tiling:
    """Tiles of a prompt chunk; 128 rows by 64 keys where the shared memory holds them."""
    wide = next_power_of_2(head_size)
    if element_bytes > 2:
        rows, keys, stages = 32, 32, 1
    elif hip:
        # 64 KiB of local memory hold one tile of keys and one of values
        rows, keys, stages = 128, 8192 // wide, 1
    else:
        # stages for two buffers of keys and values, or three: the block table's load takes one too
        rows, keys, stages = 128, 64 if wide > 64 else 128, 3 if wide > 128 else 5
    queries = max(1, rows // ratio)
    rows = max(rows, next_power_of_2(ratio))
    return Tiling(queries, rows, keys, 8 if rows >= 128 else 4, stages)


@cache
def decode_tiling(
    max_query_len: int, ratio: int, head_size: int, element_bytes: int, hip: bool
) -> Tiling:
    """Tiles of a decode step: all queries of a row if 64 rows hold them, and 32 KiB of cache."""
    wide = next_power_of_2(head_size)
    queries = max(1, min(max_query_len, 64 // ratio))
    rows = max(16, next_power_of_2(queries * ratio))
    keys = min(128, 8192 // wide) // (2 if element_bytes > 2 else 1)
    # on CUDA two buffers of keys and values, and the block table's load before them
    stages = 1 if element_bytes > 2 else 2 if hip else 5
    return Tiling(queries, rows, keys, 8 if rows > 64 else 4, stages)


@triton.jit
def attend(
    accumulated,
    largest,
    total,
    queries,
    kv_cache,
    cache_half,
    table,
    first,
    last,
    end,
    seen,
    scale,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Take the keys ``first .. last - 1`` into a running softmax; ``first`` is a whole tile's.

    ``MASKED`` drops keys from ``end`` on and, for each row, from ``seen`` on.
    """
    dims = tl.arange(0, WIDE)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        if MASKED:
            present = keys < end
            block = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            block = tl.load(table + keys // BLOCK_SIZE)
        slot = tl.maximum(block, 0).to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        place = kv_cache + slot[:, None] * (HEADS * HEAD_SIZE) + dims[None, :]
        if MASKED:
            loaded = present[:, None] & (dims < HEAD_SIZE)[None, :]
            key = tl.load(place, mask=loaded, other=0.0)
        elif WIDE != HEAD_SIZE:
            key = tl.load(place, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        else:
            key = tl.load(place)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
        if MASKED:
            visible = present[None, :] & (keys[None, :] < seen[:, None])
            scores = tl.where(visible, scores, HIDDEN)
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED:
            value = tl.load(place + cache_half, mask=loaded, other=0.0)
        elif WIDE != HEAD_SIZE:
            value = tl.load(place + cache_half, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        else:
            value = tl.load(place + cache_half)
        accumulated = tl.dot(
            weights.to(value.dtype), value, accumulated * shrink[:, None], input_precision="ieee"
        )
        largest = larger
    return accumulated, largest, total
