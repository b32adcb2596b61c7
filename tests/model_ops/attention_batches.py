"""Batches over a paged cache for the attention tests: ragged rows, shuffled blocks, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.decode_inputs import StepInputs, prefill_inputs
from atom.model_ops.paged_attention import store_kv


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention layer: query heads, KV heads, head size, tokens of a block."""

    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass
class PagedBatch:
    """A batch and the contiguous keys and values behind it.

    Attributes:
        meta: the batch.
        query: ``[T, heads, head size]``.
        kv_cache: the paged cache; blocks that no row owns hold NaN.
        keys: for each row, ``[context + queries, KV heads, head size]``.
        values: as ``keys``.
        used: tokens that are no padding.
    """

    meta: AttentionMetadata
    query: Tensor
    kv_cache: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    used: int


def metadata_tensor(contexts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """int32 ``[4, S]`` with group ``b`` for row ``b``, and none for empty rows."""
    groups = [row if length else -1 for row, length in enumerate(lengths)]
    return torch.tensor(
        [list(contexts), list(lengths), groups, [1] * len(groups)], dtype=torch.int32
    )


def paged_batch(
    shape: Shape,
    contexts: Sequence[int],
    lengths: Sequence[int],
    *,
    is_prefill: bool = False,
    padding_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedBatch:
    """Draw a batch; rows own shuffled blocks of a pool in which nothing else is a number."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), sum(lengths) + padding_tokens
    size = shape.block_size
    totals = [
        context + length if length else 0 for context, length in zip(contexts, lengths, strict=True)
    ]
    width = max(1, -(-max(totals) // size))
    owned = [-(-total // size) for total in totals]
    pool = torch.randperm(sum(owned) + 2, generator=generator).tolist()
    tables = torch.full((rows, width), -1, dtype=torch.int32)
    for row, count in enumerate(owned):
        for place in range(count):
            tables[row, place] = pool.pop()

    out = StepInputs.allocate(rows, tokens, 3, "cpu")
    metadata = metadata_tensor(contexts, lengths)
    prefill_inputs(metadata, tables, tokens, size, out=out)
    cache_shape = (2, sum(owned) + 2, size, shape.kv_heads, shape.head_size)
    kv_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    # the rest of an owned block is finite, as in a pool that was zeroed once
    kv_cache[:, tables[tables >= 0].long()] = 0
    keys, values = [], []
    for row, total in enumerate(totals):
        both = torch.randn(2, total, shape.kv_heads, shape.head_size, generator=generator)
        key, value = both.to(dtype)
        place = torch.arange(total)
        slots = tables[row, place // size].long() * size + place % size
        store_kv(key, value, kv_cache, slots)
        keys.append(key)
        values.append(value)
    query = torch.randn(tokens, shape.heads, shape.head_size, generator=generator).to(dtype)

    out = StepInputs(*(getattr(out, name).to(device) for name in StepInputs.__slots__))
    meta = out.attention_metadata(
        metadata.to(device),
        tables.to(device),
        tokens,
        max_query_len=max(lengths),
        max_context_len=max(contexts),
        is_prefill=is_prefill,
    )
    return PagedBatch(meta, query.to(device), kv_cache.to(device), keys, values, sum(lengths))


def contiguous_attention(batch: PagedBatch, scale: float) -> Tensor:
    """torch's own attention over each row's contiguous keys: ``[used, heads, head size]``."""
    outputs = []
    starts = batch.meta.query_start_loc.tolist()
    for row, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[starts[row] : starts[row + 1]].cpu()
        queries, total = len(query), len(key)
        if not queries:
            continue
        seen = torch.ones(queries, total, dtype=torch.bool).tril(total - queries)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)
