"""Decode steps of a few requests under both ways of keeping recurrent states, side by side."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gdn_batches import WIDTH, batch
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.guard import new_record
from atom.model_ops.replay_ring import ReplayRing, ring_places

#: query, key and value of a step, its two gate inputs, and the gates' weights
StepInputs = tuple[Tensor, ...]
#: head sizes: key heads, value heads, K, V
Sizes = tuple[int, int, int, int]
SMALL: Sizes = (2, 4, 8, 6)


def new_pools(
    groups: int, sizes: Sizes = SMALL, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, ReplayRing]:
    """States and rings that hold NaN until somebody writes them."""
    key_heads, heads, key, value = sizes
    ring = (groups, ring_places(WIDTH - 1))
    return torch.full((groups, heads, key, value), torch.nan, device=device), ReplayRing(
        torch.full((*ring, key_heads * key + heads * value), torch.nan, dtype=dtype, device=device),
        torch.full((*ring, 2, heads), torch.nan, device=device),
    )


def draw(
    tokens: int,
    sizes: Sizes = SMALL,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> StepInputs:
    """Inputs of a step, as views of one tensor as a layer has them, and its gates' weights."""
    key_heads, heads, key, value = sizes
    made = torch.Generator().manual_seed(seed)
    parts = [key_heads * key, key_heads * key, heads * value, heads, heads]
    mixed = torch.randn(tokens, sum(parts), generator=made).to(dtype).to(device)
    q, k, v, a, b = mixed.split(parts, 1)
    weights = torch.randn(2, heads, generator=torch.Generator().manual_seed(5)).to(device)
    return (
        *(q.unflatten(1, (-1, key)), k.unflatten(1, (-1, key)), v.unflatten(1, (-1, value))),
        *(a, b, *weights),
    )


@dataclass
class BothWays:
    """Three requests' groups out of five; each step's tokens stand as a seed says.

    Attributes:
        replay: runs a replay step: inputs, states, ring, batch, guard, record.
        per_draft: as that, over a state for each draft.
    """

    replay: Callable[..., Tensor]
    per_draft: Callable[..., Tensor]
    sizes: Sizes = SMALL
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    groups: tuple[int, ...] = (3, 0, 4)
    random: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        self.state, self.ring = new_pools(5, self.sizes, self.dtype, self.device)
        self.states = torch.full((5 * WIDTH, *self.state.shape[1:]), torch.nan, device=self.device)
        self.contexts = [9, 30, 14]
        self.counts = [1, 1, 1]
        made = torch.randn(3, *self.state.shape[1:], generator=torch.Generator().manual_seed(1))
        for group, state in zip(self.groups, made, strict=True):
            # as a prefill leaves them
            self.state[group] = state
            self.states[group * WIDTH] = state
            self.ring.keys_values[group] = 0
            self.ring.gates[group] = 0

    def step(self, number: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """One step of both. Returns outputs of the rows' tokens, and the batch."""
        lengths = [self.random.randint(1, WIDTH) for _ in self.groups]
        meta = batch(
            *(lengths, list(self.groups)),
            contexts=self.contexts,
            counts=self.counts,
            padding_rows=2,
            padding_tokens=1,
            device=self.device,
        )
        inputs = draw(sum(lengths) + 1, self.sizes, self.dtype, self.device, number)
        found = []
        for run, pools in (
            (self.per_draft, (self.states,)),
            (self.replay, (self.state, self.ring)),
        ):
            record = new_record(self.device)
            output = run(
                *inputs, *pools, meta, guard=GuardMode.REPORT, record=record, layer=1, scale=None
            )
            assert not record.any()
            found.append(output[: sum(lengths)])
        self.counts = [self.random.randint(1, length) for length in lengths]
        self.contexts = [c + n for c, n in zip(self.contexts, self.counts, strict=True)]
        return found[0], found[1], meta

    def settled(self) -> tuple[Tensor, Tensor]:
        """States behind the tokens that stood: kept, and as the ring's tokens make them."""
        kept = torch.stack(
            [
                self.states[group * WIDTH + count - 1]
                for group, count in zip(self.groups, self.counts, strict=True)
            ]
        )
        made = []
        key_heads, heads, key, value = self.sizes
        for group, count, context in zip(self.groups, self.counts, self.contexts, strict=True):
            state = self.state[group]
            for position in range(context - count, context):
                at = position % self.ring.places
                k, v = self.ring.keys_values[group, at].split([key_heads * key, heads * value])
                g, beta = self.ring.gates[group, at]
                k = k.view(1, key_heads, key)
                state = ops.gated_delta_rule_recurrence(
                    *(k, k, v.view(1, heads, value), g[None], beta[None], state, 1.0)
                )[1][0]
            made.append(state)
        return kept, torch.stack(made)
