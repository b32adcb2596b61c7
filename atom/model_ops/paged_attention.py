"""Attention over a paged KV cache, for prompt chunks and for the few queries of a decode step.

The cache of one layer is ``[2, blocks, block size, KV heads, head size]``, keys first. A step's own
keys and values are stored before it attends, so query token ``i`` of a row with ``c`` tokens in
cache sees the keys ``0 .. c + i`` of its block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata

#: queries that the reference attends for at a time, which bounds its score matrix
_REFERENCE_QUERIES = 512


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one step's keys and values into their cache slots.

    Args:
        key: ``[T, KV heads, head size]``, any strides with a contiguous last axis.
        value: as ``key``.
        kv_cache: ``[2, blocks, block size, KV heads, head size]``, contiguous; written in place.
        slot_mapping: int64 ``[T]``, ``block * block size + offset``; a negative slot is skipped.
    """
    if key.is_cuda:
        from atom.model_ops import paged_attention_triton

        paged_attention_triton.store_kv(key, value, kv_cache, slot_mapping)
    else:
        store_kv_reference(key, value, kv_cache, slot_mapping)


def store_kv_reference(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """:func:`store_kv` in plain torch."""
    used = (slot_mapping >= 0).nonzero().flatten()
    flat = kv_cache.view(2, -1, *kv_cache.shape[3:])
    slots = slot_mapping[used]
    flat[0, slots] = key[used].to(kv_cache.dtype)
    flat[1, slots] = value[used].to(kv_cache.dtype)


def paged_attention(
    query: Tensor, kv_cache: Tensor, meta: AttentionMetadata, *, scale: float
) -> Tensor:
    """Causal attention of a packed batch over its block tables.

    Rows of the batch may have any query lengths up to ``meta.max_query_len``. A context that
    reaches past its block table is cut there, and a negative table entry is read as block 0: a
    wrong length gives wrong values, never an access outside the cache.

    Args:
        query: ``[T, query heads, head size]``; query heads are a multiple of KV heads, and head
            ``h`` reads KV head ``h // (query heads / KV heads)``.
        kv_cache: ``[2, blocks, block size, KV heads, head size]``, contiguous.
        meta: the batch.
        scale: factor of the scores, above 0.

    Returns:
        ``[T, query heads, head size]`` in the query's dtype. Rows of padding tokens hold nothing
        meaningful.
    """
    if query.is_cuda:
        from atom.model_ops import paged_attention_triton

        return paged_attention_triton.paged_attention(query, kv_cache, meta, scale=scale)
    return paged_attention_reference(query, kv_cache, meta, scale=scale)


def paged_attention_reference(
    query: Tensor, kv_cache: Tensor, meta: AttentionMetadata, *, scale: float
) -> Tensor:
    """:func:`paged_attention` in plain torch: softmax over the gathered blocks, in float32."""
    output = torch.zeros_like(query)
    ratio = query.shape[1] // kv_cache.shape[3]
    starts = meta.query_start_loc.tolist()
    for row, context in enumerate(meta.context_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        keys, values = _gather(kv_cache, meta.block_tables[row], context + stop - start)
        keys = keys.repeat_interleave(ratio, dim=0)
        values = values.repeat_interleave(ratio, dim=0)
        for first in range(start, stop, _REFERENCE_QUERIES):
            last = min(first + _REFERENCE_QUERIES, stop)
            seen = context + torch.arange(first - start, last - start, device=query.device)
            hidden = torch.arange(keys.shape[1], device=query.device)[None, :] > seen[:, None]
            scores = query[first:last].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            output[first:last] = (weights @ values).transpose(0, 1).to(query.dtype)
    return output


def _gather(kv_cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row, float32 ``[KV heads, tokens, head size]``."""
    block_size = kv_cache.shape[2]
    blocks = min(-(-length // block_size), table.shape[0])
    both = kv_cache[:, table[:blocks].long().clamp(min=0)].flatten(1, 2)[:, :length]
    keys, values = both.float().transpose(1, 2)
    return keys, values
