"""Random batches for the convolution's tests, and what they have in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata


def metadata(
    lengths: Sequence[int],
    slots: Sequence[int],
    *,
    counts: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    padding_tokens: int = 0,
    is_prefill: bool = False,
    max_query_len: int | None = None,
) -> AttentionMetadata:
    """What the convolution reads of a batch; a row of length 0 and slot -1 is padding."""
    rows = len(lengths)
    starts = [sum(lengths[:row]) for row in range(rows + 1)]
    nothing = torch.zeros(0, dtype=torch.int64)

    def words(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    return AttentionMetadata(
        query_start_loc=words(starts),
        context_lens=words(contexts or [0] * rows),
        state_slots=words(slots),
        num_accepted_tokens=words(counts or [1] * rows),
        state_table=nothing,
        block_tables=nothing,
        positions=nothing,
        slot_mapping=nothing,
        num_tokens=starts[-1] + padding_tokens,
        max_query_len=max([0, *lengths]) if max_query_len is None else max_query_len,
        max_context_len=max([0, *(contexts or [])]),
        is_prefill=is_prefill,
    )


def moved(meta: AttentionMetadata, device: str) -> AttentionMetadata:
    """The metadata with the tensors that the convolution reads on ``device``."""
    names = ("query_start_loc", "context_lens", "state_slots", "num_accepted_tokens")
    return replace(meta, **{name: getattr(meta, name).to(device) for name in names})


@dataclass
class ConvBatch:
    """A batch with everything that an operator takes.

    Attributes:
        x: ``[T, D]``, NaN in padding tokens.
        weight: ``[D, W]``.
        bias: ``[D]`` or ``None``.
        pool: ``[layers, slots, rows, D]``.
        meta: of the batch.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    pool: Tensor
    meta: AttentionMetadata

    def on(self, device: str, dtype: torch.dtype | None = None) -> ConvBatch:
        """A copy on ``device``."""
        x, weight, bias, pool = (
            None if tensor is None else tensor.clone().to(device, dtype or tensor.dtype)
            for tensor in (self.x, self.weight, self.bias, self.pool)
        )
        assert x is not None
        assert weight is not None
        assert pool is not None
        # a clone of packed weights keeps their strides
        return ConvBatch(x, weight, bias, pool, moved(self.meta, device))


def random_batch(
    seed: int,
    *,
    is_prefill: bool = False,
    dim: int | None = None,
    longest: int = 9,
    rows: int | None = None,
    draft_tokens: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> ConvBatch:
    """A valid ragged batch, padding rows and padding tokens included, drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width = width or draw(2, 5)
    drafts = draw(0, 4) if draft_tokens is None else draft_tokens
    dim = dim or draw(1, 70)
    rows = rows or draw(1, 6)
    slots = rows + draw(0, 3)
    most = longest if is_prefill else 1 + drafts
    lengths = [draw(0 if is_prefill else 1, most) for _ in range(rows)]
    # one row in five has nothing to do
    lengths = [0 if draw(1, 5) == 1 else length for length in lengths]
    order = torch.randperm(slots, generator=generator)[:rows].tolist()
    counts = [draw(1, 1 + drafts) for _ in range(rows)]
    contexts = [draw(0, 1) * draw(1, 99) for _ in range(rows)]
    padding_rows, padding_tokens = draw(0, 2), draw(0, 3)
    meta = metadata(
        lengths + [0] * padding_rows,
        order + [-1] * padding_rows,
        # what stands in a padding row is nobody's business
        counts=counts + [16385] * padding_rows,
        contexts=contexts + [0] * padding_rows,
        padding_tokens=padding_tokens,
        is_prefill=is_prefill,
    )
    x = numbers(meta.num_tokens, dim)
    x[sum(lengths) :] = torch.nan
    weight = numbers(dim, width)
    if draw(0, 1):
        weight = weight.t().contiguous().t()
    bias = numbers(dim) if draw(0, 1) else None
    return ConvBatch(x, weight, bias, numbers(2, slots, width - 1 + drafts, dim), meta)


def tokens_of(meta: AttentionMetadata) -> int:
    """Tokens of the batch that are not padding."""
    return int(meta.query_start_loc[-1])


#: bad ``num_accepted_tokens`` and bad slots, as changes to a row of :func:`bad_batch`
BAD_COUNTS = (0, -1, 5, 16385)
BAD_SLOTS = (-1, 6, 16385)


def bad_batch(row: int, *, count: int | None = None, slot: int | None = None) -> ConvBatch:
    """Four rows of a pool of six slots (counts 1 to 4), of which ``row`` is bad."""
    batch = random_batch(11, dim=40, rows=4, draft_tokens=3, width=4)
    lengths, slots, counts = [4, 1, 2, 3], [5, 2, 0, 3], [4, 1, 2, 3]
    if count is not None:
        counts[row] = count
    if slot is not None:
        slots[row] = slot
    generator = torch.Generator().manual_seed(12)
    batch.meta = metadata(lengths, slots, counts=counts)
    batch.x = torch.randn(10, 40, generator=generator)
    batch.pool = torch.randn(2, 6, 6, 40, generator=generator)
    return batch


def without_row(batch: ConvBatch, row: int) -> ConvBatch:
    """The same batch with ``row`` emptied: what the other rows must still get."""
    starts = batch.meta.query_start_loc.tolist()
    kept = [t for t in range(starts[-1]) if not starts[row] <= t < starts[row + 1]]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    lengths[row] = 0
    slots, counts = (
        tensor.tolist() for tensor in (batch.meta.state_slots, batch.meta.num_accepted_tokens)
    )
    slots[row] = -1
    return replace(
        batch,
        x=batch.x[kept],
        pool=batch.pool.clone(),
        meta=metadata(lengths, slots, counts=counts),
    )
