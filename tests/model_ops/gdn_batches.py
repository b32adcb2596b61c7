"""Batches and inputs for the gated delta rule's tests; what must not be read holds NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.guard import new_record

DRAFTS = 3
WIDTH = 1 + DRAFTS
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def batch(
    lengths: list[int],
    groups: list[int],
    *,
    contexts: list[int] | None = None,
    counts: list[int] | None = None,
    padding_rows: int = 0,
    padding_tokens: int = 0,
    max_query_len: int | None = None,
    device: str = "cpu",
) -> AttentionMetadata:
    """Metadata of a batch; padding has the values that operators must not use."""
    rows = len(lengths)
    slots = groups + [-1] * padding_rows
    starts = [0]
    for length in lengths + [0] * padding_rows:
        starts.append(starts[-1] + length)
    tokens = starts[-1] + padding_tokens

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    table = ints([slot * WIDTH for slot in groups] + [2**30] * padding_rows)[:, None]
    return AttentionMetadata(
        query_start_loc=ints(starts),
        context_lens=ints((contexts or [0] * rows) + [5] * padding_rows),
        state_slots=ints(slots),
        num_accepted_tokens=ints((counts or [1] * rows) + [10**6] * padding_rows),
        state_table=table + torch.arange(WIDTH, dtype=torch.int32, device=device),
        block_tables=ints([0] * (rows + padding_rows))[:, None],
        positions=ints([0] * tokens, torch.int64),
        slot_mapping=ints([-1] * tokens, torch.int64),
        num_tokens=tokens,
        max_query_len=max_query_len or max(lengths, default=0),
        max_context_len=max(contexts or [0]),
        is_prefill=counts is None,
    )


def draw(
    tokens: int,
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 8,
    value_dim: int = 6,
    padding: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Queries, keys, values, log decays and strengths; NaN for padding tokens."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=random)

    g = -torch.rand(tokens, heads, generator=random) * 0.4
    parts = [
        normal(key_heads, key_dim).to(dtype),
        normal(key_heads, key_dim).to(dtype),
        normal(heads, value_dim).to(dtype),
        g,
        normal(heads).sigmoid(),
    ]
    for number, part in enumerate(parts):
        behind = part.new_full((padding, *part.shape[1:]), torch.nan)
        parts[number] = torch.cat((part, behind)).to(device)
    q, k, v, g, beta = parts
    return q, k, v, g, beta


def cut(inputs: Inputs, begin: int, end: int | None = None) -> Inputs:
    q, k, v, g, beta = (part[begin:end] for part in inputs)
    return q, k, v, g, beta


def states(groups: int, inputs: Inputs, *, fill: float = torch.nan) -> Tensor:
    """A pool of ``groups`` groups; NaN, so that a state that nobody wrote shows."""
    shape = (groups * WIDTH, inputs[2].shape[1], inputs[1].shape[2], inputs[2].shape[2])
    return torch.full(shape, fill, device=inputs[2].device)


def naive(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return ops.gated_delta_rule_recurrence(*inputs, state, inputs[0].shape[-1] ** -0.5)


def update(
    inputs: Inputs,
    pool: Tensor,
    meta: AttentionMetadata,
    guard: GuardMode = GuardMode.REPORT,
    record: Tensor | None = None,
) -> Tensor:
    record = new_record(pool.device) if record is None else record
    return ops.gated_delta_rule_update(*inputs, pool, meta, guard=guard, record=record, layer=7)
