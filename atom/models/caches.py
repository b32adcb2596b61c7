"""The memory that a model's layers keep between steps: KV blocks and recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor

from atom.config import RecurrentStates
from atom.model_ops.replay_ring import ReplayRing, ring_places
from atom.models.model_config import ModelConfig

#: ``empty(shape, dtype)``, an uninitialised tensor
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """Pools of one model. Each pool is one tensor over all layers of its kind.

    No pool needs a fill: states are taken as zero where a request has no context, and a KV place is
    written before it is read.

    Attributes:
        conv_state: ``[gdn layers, groups, W - 1 + draft tokens, D]``, model dtype.
        recurrent_state: float32 ``[gdn layers, groups * (1 + draft tokens), HV, K, V]``; one state
            a group where there is a ring.
        kv_cache: ``[attention layers, 2, blocks, block size, HKV, DH]``, keys before values.
        mtp_kv_cache: ``[2, blocks, block size, HKV, DH]`` of the MTP layer, or ``None``.
        replay: the rings of all gdn layers, or ``None`` if there is a state for each draft.
    """

    conv_state: Tensor
    recurrent_state: Tensor
    kv_cache: Tensor
    mtp_kv_cache: Tensor | None = None
    replay: ReplayRing | None = None

    @property
    def kv_caches(self) -> list[Tensor]:
        """One attention layer's view each."""
        return list(self.kv_cache.unbind(0))

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return int(self.kv_cache.shape[3])

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_groups: int,
        draft_tokens: int,
        dtype: torch.dtype,
        block_size: int = 16,
        with_mtp: bool = True,
        recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT,
        empty: Empty | None = None,
    ) -> Self:
        """Uninitialised pools.

        Args:
            config: the model.
            num_blocks: KV blocks.
            num_groups: state groups: requests, plus checkpoints kept for the prefix cache.
            draft_tokens: ``k``; 0 without speculation.
            dtype: dtype of the conv state and of keys and values.
            block_size: tokens of a block.
            with_mtp: whether there is an MTP layer.
            recurrent_states: a state for each draft, or one and a ring.
            empty: allocates; ``torch.empty`` on the CPU by default.
        """
        make = empty or _empty_on_cpu
        shapes = pool_shapes(
            config, num_blocks, num_groups, draft_tokens, block_size, recurrent_states
        )
        replay = None
        if recurrent_states is RecurrentStates.REPLAY:
            replay = ReplayRing(
                make(shapes["replay_keys_values"], dtype),
                make(shapes["replay_gates"], torch.float32),
            )
        return cls(
            conv_state=make(shapes["conv_state"], dtype),
            recurrent_state=make(shapes["recurrent_state"], torch.float32),
            kv_cache=make(shapes["kv_cache"], dtype),
            mtp_kv_cache=make(shapes["mtp_kv_cache"], dtype) if with_mtp else None,
            replay=replay,
        )


def _empty_on_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def pool_shapes(
    config: ModelConfig,
    num_blocks: int,
    num_groups: int,
    draft_tokens: int,
    block_size: int = 16,
    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT,
) -> dict[str, tuple[int, ...]]:
    """Shape of each pool of :class:`ModelCaches`; those of a ring stand there for both ways."""
    block = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    linear, heads = len(config.linear_layers), config.linear_num_value_heads
    rows = config.linear_conv_kernel_dim - 1 + draft_tokens
    ring = (linear, num_groups, ring_places(draft_tokens))
    states = 1 if recurrent_states is RecurrentStates.REPLAY else 1 + draft_tokens
    return {
        "conv_state": (linear, num_groups, rows, config.conv_dim),
        "recurrent_state": (
            linear,
            num_groups * states,
            heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        ),
        "kv_cache": (len(config.full_layers), *block),
        "mtp_kv_cache": block,
        "replay_keys_values": (*ring, config.key_dim + config.value_dim),
        "replay_gates": (*ring, 2, heads),
    }


def bytes_per_block(
    config: ModelConfig, dtype: torch.dtype, *, block_size: int = 16, with_mtp: bool = True
) -> int:
    """Bytes of one KV block in all attention layers, the MTP layer included."""
    layers = len(config.full_layers) + with_mtp
    row = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return layers * block_size * row


def bytes_per_group(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    draft_tokens: int,
    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT,
) -> int:
    """Bytes of one request's recurrent and conv states in all gated-delta-net layers."""
    shapes = pool_shapes(config, 0, 1, draft_tokens, recurrent_states=recurrent_states)
    kinds = [("conv_state", dtype), ("recurrent_state", torch.float32)]
    if recurrent_states is RecurrentStates.REPLAY:
        kinds += [("replay_keys_values", dtype), ("replay_gates", torch.float32)]
    return sum(prod(shapes[name]) * kind.itemsize for name, kind in kinds)
