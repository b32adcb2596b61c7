"""What an engine will take of the device's memory, decided and shown before it takes any."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.device.interface import Device, DeviceKind
from atom.errors import BadInput
from atom.model_engine.engine_settings import EngineSettings
from atom.models.caches import bytes_per_block, bytes_per_group
from atom.models.model_config import ModelConfig

#: of CUDA or HIP itself, its libraries and graphs
_CONTEXT_BYTES = 2**30
#: KV blocks of a virtual device when none are asked for: its memory is the host's
_VIRTUAL_BLOCKS = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of an engine on its device.

    Attributes:
        total_bytes: memory of the device.
        usable_bytes: share of it that this engine may fill.
        weight_bytes: parameters.
        working_bytes: logits, hidden states and the largest activations of a step.
        state_bytes: conv and recurrent states of the running requests.
        checkpoint_bytes: states kept for prefixes to resume from.
        block_bytes: one KV block in all layers.
        num_blocks: KV blocks.
        num_groups: state groups, one a running request.
        num_checkpoints: state checkpoints.
    """

    total_bytes: int
    usable_bytes: int
    weight_bytes: int
    working_bytes: int
    state_bytes: int
    checkpoint_bytes: int
    block_bytes: int
    num_blocks: int
    num_groups: int
    num_checkpoints: int

    @property
    def kv_bytes(self) -> int:
        """The KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def planned_bytes(self) -> int:
        """Everything."""
        fixed = self.weight_bytes + self.working_bytes + self.state_bytes + self.checkpoint_bytes
        return fixed + self.kv_bytes

    def describe(self) -> str:
        """The plan, one line a part."""
        parts = [
            ("weights", self.weight_bytes, ""),
            ("working space", self.working_bytes, ""),
            ("states", self.state_bytes, f"{self.num_groups} requests"),
            ("state checkpoints", self.checkpoint_bytes, f"{self.num_checkpoints} prefixes"),
            ("KV blocks", self.kv_bytes, f"{self.num_blocks:,} of {self.block_bytes:,} bytes"),
        ]
        lines = [
            f"{name:<18}{size / 2**20:>12,.1f} MiB{f'  ({note})' if note else ''}"
            for name, size, note in parts
        ]
        used = f"{self.planned_bytes / 2**20:,.1f} of {self.usable_bytes / 2**20:,.1f} MiB"
        return "\n".join([f"memory plan: {used} that this engine may fill", *lines])


def working_bytes(config: ModelConfig, settings: EngineSettings, dtype: torch.dtype) -> int:
    """Upper estimate of a step's buffers: what is kept, and what one layer needs at once."""
    size = dtype.itemsize
    rows = settings.max_num_seqs * settings.query_tokens
    tokens = max(settings.max_num_batched_tokens, rows)
    kept = (rows * config.vocab_size + tokens * config.hidden_size) * size
    attention = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    linear = 3 * config.conv_dim + 2 * config.value_dim
    layer = max(attention + config.hidden_size, linear, 3 * config.intermediate_size)
    # staging blocks of stores and of loads
    staging = 2 * settings.offload_in_flight_bytes if settings.cpu_pool_bytes is not None else 0
    return kept + tokens * (layer + 4 * config.hidden_size) * max(size, 4) + staging


def plan_memory(
    config: ModelConfig,
    settings: EngineSettings,
    device: Device,
    *,
    dtype: torch.dtype,
    weight_bytes: int,
    with_mtp: bool,
    free_bytes: int | None = None,
) -> MemoryPlan:
    """Size the pools.

    Args:
        config: the model.
        settings: the engine.
        device: where it will run.
        dtype: of weights, KV and conv states.
        weight_bytes: parameters, the MTP layer's included.
        with_mtp: whether the MTP layer has a KV pool.
        free_bytes: free memory of the device now; ``None`` takes all of it as free.

    Returns:
        The plan. Nothing has been allocated.

    Raises:
        BadInput: the engine does not fit; says by how much, and what to lower.
    """
    virtual = device.properties.kind is DeviceKind.VIRTUAL
    total = device.properties.memory_bytes
    usable = int(total * settings.memory_utilization)
    if free_bytes is not None:
        usable = min(usable, free_bytes - _CONTEXT_BYTES)
    work = working_bytes(config, settings, dtype)
    group = bytes_per_group(
        config,
        dtype,
        draft_tokens=settings.draft_tokens,
        recurrent_states=settings.recurrent_states,
    )
    checkpoint = bytes_per_group(config, dtype, draft_tokens=0)
    checkpoints = settings.num_state_checkpoints if settings.prefix_caching else 0
    block = bytes_per_block(config, dtype, block_size=settings.block_size, with_mtp=with_mtp)
    fixed = weight_bytes + work + settings.max_num_seqs * group + checkpoints * checkpoint
    room = (usable - fixed) // block
    longest = -(-settings.max_model_len // settings.block_size)
    blocks = settings.num_kv_blocks
    if blocks is None:
        # more than every request at its longest helps only the prefix cache
        most = _VIRTUAL_BLOCKS if virtual else 4 * settings.max_num_seqs * longest
        blocks = min(room, most)
    if blocks > room or blocks < 1:
        raise BadInput(
            f"this engine does not fit: {fixed + max(blocks, 1) * block:,} bytes are needed and "
            f"{max(usable, 0):,} of {device.properties.name}'s {total:,} may be filled (weights "
            f"{weight_bytes:,}, working space {work:,}, states {settings.max_num_seqs * group:,}, "
            f"checkpoints {checkpoints * checkpoint:,}, {max(blocks, 1):,} KV blocks of {block:,})."
            " Lower max_num_seqs, max_num_batched_tokens, num_state_checkpoints or num_kv_blocks, "
            "or raise memory_utilization"
        )
    return MemoryPlan(
        total_bytes=total,
        usable_bytes=usable,
        weight_bytes=weight_bytes,
        working_bytes=work,
        state_bytes=settings.max_num_seqs * group,
        checkpoint_bytes=checkpoints * checkpoint,
        block_bytes=block,
        num_blocks=int(blocks),
        num_groups=settings.max_num_seqs,
        num_checkpoints=checkpoints,
    )
