# mypy: disable-error-code="no-untyped-def"
"""Launches of the kernels of paged attention, and the kernel that stores keys and values."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.attention_tile_triton import Tiling, decode_tiling, prefill_tiling
from atom.model_ops.decode_attention_triton import decode_kernel, join_parts_kernel, split_count
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2
from atom.model_ops.prefill_attention_triton import prefill_kernel


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@triton.jit
def store_kv_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_half,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    width: tl.constexpr = HEADS * HEAD_SIZE
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    head = places // HEAD_SIZE
    dim = places % HEAD_SIZE
    keys = tl.load(key + token * key_token + head * key_head + dim, mask=inside)
    values = tl.load(value + token * value_token + head * value_head + dim, mask=inside)
    place = kv_cache + slot * width + places
    tl.store(place, keys.to(kv_cache.dtype.element_ty), mask=inside)
    tl.store(place + cache_half, values.to(kv_cache.dtype.element_ty), mask=inside)


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """:func:`atom.model_ops.paged_attention.store_kv` on a GPU."""
    tokens, heads, head_size = key.shape
    if not tokens:
        return
    block = min(next_power_of_2(heads * head_size), 1024)
    store_kv_kernel[(tokens, ceil_div(heads * head_size, block))](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        HEADS=heads,
        HEAD_SIZE=head_size,
        BLOCK=block,
        num_warps=4,
    )


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    tiling: Tiling | None = None,
    splits: int | None = None,
) -> Tensor:
    """:func:`atom.model_ops.paged_attention.paged_attention` on a GPU.

    Args:
        query: ``[T, query heads, head size]``, contiguous last axis.
        kv_cache: ``[2, blocks, block size, KV heads, head size]``, contiguous.
        meta: the batch.
        scale: factor of the scores.
        tiling: other tiles than the default ones, for tuning and tests.
        splits: parts of a decode row's keys, a power of two; by default :func:`split_count`.

    Returns:
        ``[T, query heads, head size]``; rows of padding tokens are not written.
    """
    _, _, block_size, kv_heads, head_size = kv_cache.shape
    tokens, heads, _ = query.shape
    output = torch.empty((tokens, heads, head_size), dtype=query.dtype, device=query.device)
    if not tokens or not meta.num_rows:
        return output
    hip = torch.version.hip is not None
    ratio = heads // kv_heads
    capacity = meta.block_tables.shape[1] * block_size
    # the kernels' exponentials are powers of two
    scale *= math.log2(math.e)
    shape = {
        "HEADS": kv_heads,
        "HEAD_SIZE": head_size,
        "WIDE": next_power_of_2(head_size),
        "BLOCK_SIZE": block_size,
        "RATIO": ratio,
    }
    strides = (query.stride(0), query.stride(1), kv_cache.stride(0), meta.block_tables.stride(0))
    batch = (meta.query_start_loc, meta.context_lens, meta.block_tables)
    if meta.is_prefill:
        cut = tiling or prefill_tiling(ratio, head_size, query.element_size(), hip)
        prefill_kernel[(kv_heads, tokens // cut.queries + meta.num_rows)](
            query,
            kv_cache,
            output,
            *batch,
            meta.num_rows,
            *strides,
            capacity,
            scale,
            **shape,
            QUERIES=cut.queries,
            ROWS=cut.rows,
            KEYS=cut.keys,
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
        return output
    cut = tiling or decode_tiling(meta.max_query_len, ratio, head_size, query.element_size(), hip)
    tiles = ceil_div(meta.max_query_len, cut.queries)
    if splits is None:
        max_keys = min(meta.max_context_len + meta.max_query_len, capacity)
        splits = split_count(meta.num_rows * kv_heads * tiles, max_keys, _device(query))
    parts, part_sizes = output, output
    if splits > 1:
        sizes = (tokens, heads, splits)
        parts = torch.empty((*sizes, head_size), dtype=torch.float32, device=query.device)
        part_sizes = torch.empty(sizes, dtype=torch.float32, device=query.device)
    decode_kernel[(splits, kv_heads * tiles, meta.num_rows)](
        query,
        kv_cache,
        output,
        parts,
        part_sizes,
        *batch,
        *strides,
        capacity,
        scale,
        splits,
        **shape,
        QUERIES=cut.queries,
        TILES=tiles,
        ROWS=cut.rows,
        KEYS=cut.keys,
        SPLIT=splits > 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if splits > 1:
        block = max(16, min(shape["WIDE"], 4096 // splits))
        join_parts_kernel[(meta.num_rows * meta.max_query_len, heads, ceil_div(head_size, block))](
            output,
            parts,
            part_sizes,
            *batch[:2],
            capacity,
            meta.max_query_len,
            HEADS=heads,
            HEAD_SIZE=head_size,
            QUERIES=cut.queries,
            KEYS=cut.keys,
            SPLITS=splits,
            BLOCK=block,
            num_warps=4,
        )
    return output


def _device(tensor: Tensor) -> int:
    """Processors of a tensor's GPU; a few in the interpreter, so that it splits too."""
    return _processors(tensor.get_device()) if tensor.is_cuda else 4
