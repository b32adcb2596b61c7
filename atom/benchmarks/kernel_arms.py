"""What the kernel-speed experiment times: implementations of one job, each ready to be launched.

The job is one decode step of a batch: every row brings ``queries`` tokens, and its count says where
in its state they go on. An arm of another library gets its own layout, with the same history.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atom.benchmarks.kernel_rows import KernelArm
from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.causal_conv1d import causal_conv1d_update, packed_weight
from atom.model_ops.gated_delta_rule import (
    gated_delta_rule_recurrence,
    gated_delta_rule_update_from_gates,
    gdn_gating_reference,
)
from atom.model_ops.guard import new_record

CONV_WIDTH = 4
_STATE_LAYER = 0
#: ours, and the guard that each launches with
GUARDS = {
    KernelArm.REPORT: GuardMode.REPORT,
    KernelArm.NONE: GuardMode.NONE,
    KernelArm.NULL: GuardMode.NONE,
    KernelArm.TRAP: GuardMode.TRAP,
}
_CONV_PLACES = ("fla.modules.causal_conv1d", "fla.modules.convolution")
_QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


@dataclass(frozen=True)
class Arm:
    """One implementation.

    Attributes:
        name: which.
        launch: runs the job once on buffer set ``i``; returns what it allocated, which is kept
            until the set is used again: :func:`outputs_of` finds the outputs in it.
        buffers: sets that there are.
        left_out: why it cannot run here; then it has no launch.
    """

    name: KernelArm
    launch: Callable[[int], Any] | None
    buffers: int = 1
    left_out: str | None = None


@dataclass(frozen=True)
class Job:
    """A job and its arms.

    Attributes:
        bytes_moved: that one launch of ours must read and write.
        arms: implementations.
        expected: float32 outputs ``[T, ...]`` of a first launch on set 0; rows of tokens in
            ``checked``.
        checked: tokens that ``expected`` holds.
        record: the guard's record of our arms; stays empty.
        reset: puts shared states back to what they were, before an arm is checked.
    """

    bytes_moved: int
    arms: tuple[Arm, ...]
    expected: Tensor
    checked: Tensor
    record: Tensor
    reset: Callable[[], None] = lambda: None


def outputs_of(result: Any) -> Tensor | None:
    """``[T, features]`` of what a launch returned; ``None`` for a copy."""
    if result is None:
        return None
    if isinstance(result, list):
        result = torch.stack(result, 1).flatten(0, 1)
    if isinstance(result, tuple):
        # outputs and the last states
        result = result[0].flatten(0, 1)
    return torch.as_tensor(result)


def _imported(places: Sequence[str], names: Sequence[str]) -> Any:
    """The first of ``names`` in the first of ``places`` that has one; ``None`` if none has."""
    for place in places:
        try:
            module = importlib.import_module(place)
        except Exception:
            continue
        for name in names:
            if hasattr(module, name):
                return getattr(module, name)
    return None


def _plain(function: Any) -> Any:
    """The torch code itself: transformers' wrapper takes another package's kernel if it can."""
    return None if function is None else inspect.unwrap(function)


def _peer(name: KernelArm, function: Any, package: str, device: torch.device) -> str | None:
    """Why a peer cannot be timed, or ``None``."""
    if function is None:
        return f"{package} is not installed, or has no such function"
    if name is KernelArm.FLA and device.type != "cuda":
        return f"{package} needs a GPU"
    return None


def _metadata(batch: int, queries: int, draft_tokens: int, device: torch.device) -> Any:
    """A full decode batch with slots in random order and every valid count in it."""
    generator = torch.Generator().manual_seed(batch)
    slots = torch.randperm(batch, generator=generator)
    counts = torch.randint(1, draft_tokens + 2, (batch,), generator=generator)
    width = draft_tokens + 1
    nothing = torch.zeros(0, dtype=torch.int64, device=device)

    def words(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    return AttentionMetadata(
        query_start_loc=words(torch.arange(batch + 1) * queries),
        context_lens=words(torch.full((batch,), 1000)),
        state_slots=words(slots),
        num_accepted_tokens=words(counts),
        state_table=words(slots[:, None] * width + torch.arange(width)),
        block_tables=nothing,
        positions=nothing,
        slot_mapping=nothing,
        num_tokens=batch * queries,
        max_query_len=queries,
        max_context_len=1000,
        is_prefill=False,
    )


def _copies(nbytes: int, buffers: int, device: torch.device) -> tuple[Arm, Arm]:
    """Arms that move ``nbytes``: half of them read, half of them written."""
    words = max(1, nbytes // 16)
    source = torch.ones(buffers, words, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)

    def copy(i: int) -> None:
        target[i].copy_(source[i])

    def copy_by_kernel(i: int) -> None:
        torch.bitwise_or(source[i], 0, out=target[i])

    return (
        Arm(KernelArm.COPY, copy, buffers),
        Arm(KernelArm.COPY_KERNEL, copy_by_kernel, buffers),
    )


def conv_job(
    names: Sequence[KernelArm],
    *,
    batch: int,
    channels: int,
    queries: int,
    draft_tokens: int,
    buffers: Callable[[int], int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Job:
    """The convolution's update.

    Args:
        names: arms to build.
        batch: rows.
        channels: of the convolution.
        queries: tokens a row.
        draft_tokens: the pool has room for; a slot has ``3 + draft_tokens`` rows.
        buffers: number of buffer sets, from the bytes that a launch moves.
        device: where.
        dtype: of inputs, weights and state.
    """
    taps = CONV_WIDTH - 1
    rows_moved = (taps + queries) + (taps - 1 + queries + queries)
    nbytes = batch * rows_moved * channels * dtype.itemsize
    sets = buffers(nbytes)
    random = partial(torch.randn, device=device, dtype=dtype)
    weight, bias = random(channels, CONV_WIDTH), random(channels)
    packed = packed_weight(weight)
    x = random(sets, batch * queries, channels)
    meta = _metadata(batch, queries, draft_tokens, device)
    record = new_record(device)
    # every set and every arm has a copy: they are written
    first_pool = random(batch, taps + draft_tokens, channels)
    newest = meta.num_accepted_tokens.long()[:, None] - 1 + torch.arange(taps, device=device)
    history = first_pool[meta.state_slots.long()[:, None], newest]

    def ours(weights: Tensor, guard: GuardMode) -> Callable[[int], Any]:
        pool = first_pool.repeat(sets, 1, 1, 1)

        def launch(i: int) -> Tensor:
            return causal_conv1d_update(
                x[i],
                weights,
                bias,
                pool[i],
                meta,
                guard=guard,
                record=record,
                layer=_STATE_LAYER,
            )

        return launch

    def own_cache() -> Tensor:
        """``[sets, batch, channels, width]``, the oldest column unused."""
        columns = torch.cat([history[:, :1], history], 1).transpose(1, 2)
        return columns.repeat(sets, 1, 1, 1)

    def fla(function: Any) -> Callable[[int], Any]:
        cache = own_cache()

        def launch(i: int) -> list[Tensor]:
            tokens = x[i].view(batch, queries, channels)
            # its update takes one token a row
            return [
                function(
                    x=tokens[:, token],
                    cache=cache[i],
                    weight=weight,
                    bias=bias,
                    activation="silu",
                )[0]
                for token in range(queries)
            ]

        return launch

    def transformers(function: Any) -> Callable[[int], Any]:
        cache = own_cache()

        def launch(i: int) -> Tensor:
            tokens = x[i].view(batch, queries, channels).transpose(1, 2)
            out = function(tokens, cache[i], weight, bias, "silu")
            return out.transpose(1, 2).flatten(0, 1)

        return launch

    makers: dict[KernelArm, tuple[Any, str, Callable[[Any], Callable[[int], Any]]]] = {
        KernelArm.FLA: (
            _imported(_CONV_PLACES, ["causal_conv1d_update"]),
            "flash-linear-attention",
            fla,
        ),
        KernelArm.TRANSFORMERS: (
            _plain(_imported([_QWEN], ["torch_causal_conv1d_update", "causal_conv1d_update"])),
            "transformers",
            transformers,
        ),
    }
    arms = []
    for name in names:
        if name in GUARDS:
            arms.append(Arm(name, ours(packed, GUARDS[name]), sets))
        elif name is KernelArm.UNPACKED:
            arms.append(Arm(name, ours(weight, GuardMode.REPORT), sets))
        elif name in makers:
            function, package, make = makers[name]
            why = _peer(name, function, package, device)
            arms.append(Arm(name, None if why else make(function), sets, why))
    arms += [arm for arm in _copies(nbytes, sets, device) if arm.name in names]
    window = torch.cat([history, x[0].view(batch, queries, channels)], 1).float()
    sums = (window.unfold(1, CONV_WIDTH, 1) * weight.float()).sum(-1) + bias.float()
    expected = torch.nn.functional.silu(sums).flatten(0, 1)
    checked = torch.arange(batch * queries, device=device)
    return Job(nbytes, tuple(arms), expected, checked, record)


def recurrent_job(
    names: Sequence[KernelArm],
    *,
    batch: int,
    key_heads: int,
    value_heads: int,
    head_size: int,
    queries: int,
    draft_tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Job:
    """The gated delta rule's update. Its states alone are several times any L2 cache.

    Ours keeps the state behind every token, which speculation needs, and computes decays and
    strengths from the gates, as in a decode step; the other libraries keep the last state alone,
    and get finished decays and strengths, and the states that they start from without a look-up.

    Args:
        names: arms to build.
        batch: rows.
        key_heads: heads of queries and keys.
        value_heads: heads of values and states.
        head_size: of keys and values.
        queries: tokens a row.
        draft_tokens: a row has ``1 + draft_tokens`` states.
        device: where.
        dtype: of queries, keys, values and gates; states, and the decays and strengths that the
            others get, are float32.
    """
    width = draft_tokens + 1
    tokens = batch * queries
    state_bytes = value_heads * head_size * head_size * 4
    token_bytes = 2 * ((key_heads + value_heads) * head_size + value_heads) * dtype.itemsize
    nbytes = batch * (1 + queries) * state_bytes + tokens * token_bytes
    q, k = (torch.randn(tokens, key_heads, head_size, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(tokens, value_heads, head_size, device=device, dtype=dtype)
    a, b = (torch.randn(tokens, value_heads, device=device, dtype=dtype) for _ in range(2))
    A_log = torch.rand(value_heads, device=device)
    dt_bias = -torch.rand(value_heads, device=device)
    g, beta = gdn_gating_reference(a, b, A_log, dt_bias)
    meta = _metadata(batch, queries, draft_tokens, device)
    record = new_record(device)
    pool = torch.empty(batch * width, value_heads, head_size, head_size, device=device)
    # every slot of a row begins with the same state: it is also what the other libraries get
    initial = torch.randn(batch, value_heads, head_size, head_size, device=device)

    def reset() -> None:
        pool.view(batch, width, *pool.shape[1:])[meta.state_slots.long()] = initial[:, None]

    reset()

    def ours(guard: GuardMode) -> Callable[[int], Any]:
        def launch(_: int) -> Tensor:
            return gated_delta_rule_update_from_gates(
                *(q, k, v, a, b, A_log, dt_bias, pool, meta),
                guard=guard,
                record=record,
                layer=_STATE_LAYER,
            )

        return launch

    def batched(tensor: Tensor) -> Tensor:
        return tensor.view(batch, queries, *tensor.shape[1:])

    def peer(function: Any, name: KernelArm) -> Callable[[int], Any]:
        first, second = batched(q), batched(k)
        if name is KernelArm.TRANSFORMERS:
            # its older versions want as many key heads as value heads: not timed
            group = value_heads // key_heads
            first, second = (tensor.repeat_interleave(group, 2) for tensor in (first, second))

        def launch(_: int) -> Any:
            return function(
                first,
                second,
                batched(v),
                g=batched(g),
                beta=batched(beta),
                initial_state=initial,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

        return launch

    functions = {
        KernelArm.FLA: (
            _imported(["fla.ops.gated_delta_rule"], ["fused_recurrent_gated_delta_rule"]),
            "flash-linear-attention",
        ),
        KernelArm.TRANSFORMERS: (
            _plain(_imported([_QWEN], ["torch_recurrent_gated_delta_rule"])),
            "transformers",
        ),
    }
    arms = []
    for name in names:
        if name in GUARDS:
            arms.append(Arm(name, ours(GUARDS[name])))
        elif name in functions:
            function, package = functions[name]
            why = _peer(name, function, package, device)
            arms.append(Arm(name, None if why else peer(function, name), 1, why))
    arms += [arm for arm in _copies(nbytes, 1, device) if arm.name in names]
    some = sorted({0, batch - 1})
    expected, checked = [], []
    for row in some:
        part = slice(row * queries, (row + 1) * queries)
        out, _ = gated_delta_rule_recurrence(
            q[part], k[part], v[part], g[part], beta[part], initial[row], head_size**-0.5
        )
        expected.append(out)
        checked += list(range(part.start, part.stop))
    places = torch.tensor(checked, device=device)
    return Job(nbytes, tuple(arms), torch.cat(expected), places, record, reset)
