"""From a checkpoint folder, or a preset with random weights, to an engine that runs."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from atom.device.host_room import check_host_room
from atom.device.interface import Device, DeviceKind, Stream
from atom.errors import BadInput
from atom.kv_transfer.host_memory import EntryMemory, HostMemory
from atom.kv_transfer.host_pool import HostPool
from atom.kv_transfer.lmcache_backend import LMCachePool, import_lmcache
from atom.kv_transfer.offload import Offload
from atom.kv_transfer.pool_entry import EntryKind, OffloadBackend
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.engine_settings import EngineSettings, scheduler_config
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.memory_plan import MemoryPlan, plan_memory
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.step_buffers import StepBuffers
from atom.model_engine.tiered_blocks import TieredBlockManager
from atom.model_ops.guard import caution
from atom.models.presets import EMBEDDING_SCALES, preset, random_checkpoint
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP
from atom.models.weights import LoadedModel
from atom.models.weights import load_model as load_checkpoint

_LOGGER = logging.getLogger(__name__)
PRESET = "preset:"


def load_model(
    model: str | Path,
    device: Device,
    *,
    dtype: torch.dtype | None = None,
    with_mtp: bool = True,
    seed: int = 0,
    max_positions: int | None = None,
) -> LoadedModel:
    """Weights of a checkpoint folder, or random ones of ``preset:NAME``, where they are needed.

    Args:
        model: a folder, or ``preset:NAME``.
        device: weights lie on an accelerator, or in plain host memory for a virtual device.
        dtype: of the weights; by default the checkpoint's on an accelerator, else float32.
        with_mtp: whether the MTP layer is loaded.
        seed: of a preset's weights.
        max_positions: longest position; the model's own by default.

    Raises:
        BadInput: a folder without such a checkpoint or without the MTP layer, or an unknown preset.
    """
    virtual = device.properties.kind is DeviceKind.VIRTUAL
    place = "cpu" if virtual else "cuda"
    if virtual and dtype is None:
        dtype = torch.float32
    name = str(model)
    if not name.startswith(PRESET):
        return load_checkpoint(
            name, dtype=dtype, device=place, with_mtp=with_mtp, max_positions=max_positions
        )
    size = name.removeprefix(PRESET)
    config = preset(size)
    # drafts of random weights are then sometimes right and sometimes not
    scale = EMBEDDING_SCALES[size]
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(folder, config, seed, dtype, with_mtp=with_mtp, embedding_scale=scale)
        return load_checkpoint(
            folder, dtype=dtype, device=place, with_mtp=with_mtp, max_positions=max_positions
        )


def build_engine(
    target: Qwen3NextForCausalLM,
    mtp: Qwen3NextMTP | None,
    settings: EngineSettings,
    device: Device,
    *,
    runner_class: type[ModelRunner] = ModelRunner,
    copy_stream: Stream | None = None,
) -> LLMEngine:
    """An engine over loaded weights.

    Args:
        target: the language model.
        mtp: its MTP layer, or ``None``.
        settings: the engine.
        device: where it runs.
        runner_class: a kind of runner, for experiments.
        copy_stream: stream of all host-bound copies; ``None`` makes one.

    Raises:
        BadInput: it does not fit into memory, or drafts are asked of a model without an MTP layer.
    """
    config = target.config
    if settings.draft_tokens and mtp is None:
        raise BadInput(
            f"draft_tokens={settings.draft_tokens} needs a model with an MTP layer; this one has "
            "none: set draft_tokens to 0"
        )
    check_offload(settings, device)
    simulated = device.properties.kind is DeviceKind.VIRTUAL
    debug = os.environ.get("TRITON_DEBUG")
    if said := caution(settings.guard, simulated=simulated, triton_debug=debug):
        _LOGGER.warning("%s", said)
    limits = scheduler_config(settings, config.eos_token_ids)
    plan = make_plan(target, mtp, settings, device)
    _LOGGER.info("%s", plan.describe())
    runner = runner_class(device, target, mtp, settings, plan, copy_stream=copy_stream)
    if settings.cpu_pool_bytes is None:
        manager = BlockManager(
            plan.num_blocks,
            settings.block_size,
            plan.num_groups,
            num_checkpoints=plan.num_checkpoints,
            checkpoint_spacing=settings.state_checkpoint_tokens
            if settings.prefix_caching
            else None,
            prefix_caching=settings.prefix_caching,
        )
    else:
        manager = tiered_manager(device, runner.buffers, settings, plan)
    return LLMEngine(settings, Scheduler(limits, manager), runner, vocab_size=config.vocab_size)


def tiered_manager(
    device: Device, buffers: StepBuffers, settings: EngineSettings, plan: MemoryPlan
) -> TieredBlockManager:
    """A block manager with a CPU pool below, whose memory is pinned here.

    Raises:
        BadInput: the pool cannot hold one entry of each kind.
        DeviceOutOfMemory: the host cannot pin so much.
    """
    began = time.perf_counter()
    pool, memory = host_pool_of(device, settings)
    seconds = time.perf_counter() - began
    kv_pools = [tensor.unsqueeze(0) for tensor in buffers.pools[3:]]
    offload = Offload(
        device,
        [buffers.pools[2], *kv_pools],
        (buffers.checkpoints[0], buffers.checkpoints[1]),
        memory,
        chunk_blocks=settings.offload_chunk_tokens // settings.block_size,
        most_bytes_in_flight=settings.offload_in_flight_bytes,
    )
    for kind, nbytes in (
        (EntryKind.KV, offload.chunk_bytes),
        (EntryKind.STATE, offload.state_bytes),
    ):
        taken, most = pool.occupied_bytes(nbytes), pool.share_bytes(kind)
        if taken > most:
            raise BadInput(
                f"cpu_pool_bytes {settings.cpu_pool_bytes:,}: {kind} entries take {taken:,} bytes "
                f"each, and {most:,} are there for them; raise it, or lower offload_chunk_tokens"
            )
    _LOGGER.info(
        "CPU pool: %.1f MiB (pinned in %.1f s), %s, %s; a KV entry of %d tokens takes %s bytes, "
        "a state image %s",
        pool.capacity_bytes / 2**20,
        seconds,
        settings.offload_backend,
        pool.policy,
        settings.offload_chunk_tokens,
        f"{pool.occupied_bytes(offload.chunk_bytes):,}",
        f"{pool.occupied_bytes(offload.state_bytes):,}",
    )
    return TieredBlockManager(
        plan.num_blocks,
        settings.block_size,
        plan.num_groups,
        num_checkpoints=plan.num_checkpoints,
        checkpoint_spacing=settings.state_checkpoint_tokens,
        chunk_tokens=settings.offload_chunk_tokens,
        offload=offload,
        pool=pool,
    )


def check_offload(settings: EngineSettings, device: Device) -> None:
    """Refuse a CPU pool that cannot be, before anything is loaded or allocated.

    Raises:
        BadInput: LMCache is asked for and cannot be imported.
        DeviceOutOfMemory: the host has not got so much memory to pin.
    """
    nbytes = settings.cpu_pool_bytes
    if nbytes is None:
        return
    if settings.offload_backend is OffloadBackend.LMCACHE:
        import_lmcache()
        # its one block is pinned as a power of two
        nbytes = 1 << (nbytes - 1).bit_length()
    if device.properties.kind is not DeviceKind.VIRTUAL:
        check_host_room(nbytes, "cpu_pool_bytes")


def host_pool_of(device: Device, settings: EngineSettings) -> tuple[HostPool, EntryMemory]:
    """The CPU pool of an engine, and the pinned memory that its entries lie in.

    Raises:
        BadInput: LMCache is asked for and cannot be imported.
        DeviceOutOfMemory: the host cannot pin so much.
    """
    nbytes = settings.cpu_pool_bytes
    assert nbytes is not None
    if settings.offload_backend is OffloadBackend.LMCACHE:
        theirs = LMCachePool(device, nbytes, chunk_tokens=settings.offload_chunk_tokens)
        return theirs, theirs
    pool = HostPool(nbytes, settings.offload_policy, state_share=settings.offload_state_share)
    return pool, HostMemory(device, pool.capacity_bytes)


def make_plan(
    target: Qwen3NextForCausalLM,
    mtp: Qwen3NextMTP | None,
    settings: EngineSettings,
    device: Device,
) -> MemoryPlan:
    """The memory plan of an engine over loaded weights.

    Raises:
        BadInput: it does not fit.
    """
    modules: list[nn.Module] = [target] if mtp is None else [target, mtp]
    weights = sum(
        tensor.numel() * tensor.element_size()
        for module in modules
        for tensor in module.parameters()
    )
    free = None
    if device.properties.kind is not DeviceKind.VIRTUAL:
        # the weights are there already
        free = torch.cuda.mem_get_info()[0] + weights
    return plan_memory(
        target.config,
        settings,
        device,
        dtype=target.dtype,
        weight_bytes=weights,
        with_mtp=settings.draft_tokens > 0,
        free_bytes=free,
    )


def load_engine(
    model: str | Path,
    settings: EngineSettings,
    device: Device,
    *,
    dtype: torch.dtype | None = None,
) -> LLMEngine:
    """An engine over a checkpoint folder or ``preset:NAME``. See the two functions above."""
    check_offload(settings, device)
    loaded = load_model(
        model,
        device,
        dtype=dtype,
        with_mtp=settings.draft_tokens > 0,
        seed=settings.seed,
        max_positions=settings.max_model_len + 4 * settings.query_tokens,
    )
    return build_engine(loaded.model, loaded.mtp, settings, device)
