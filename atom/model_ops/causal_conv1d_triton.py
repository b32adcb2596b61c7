# mypy: disable-error-code="no-untyped-def,assignment"
# Triton knows no unpacking inside a tuple
# ruff: noqa: RUF005
"""Triton kernels of the causal convolution, for CUDA and HIP alike.

Both are bound by memory: a program takes a tile of channels of one row. The update reads every
input once, keeps it in registers and writes every output and state row once. Channels are
contiguous, so that a thread moves 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty_like

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.causal_conv1d import most_tokens
from atom.model_ops.guard import GuardCode
from atom.model_ops.guard_triton import GUARD_NUMBER, refuse_row, row_passes
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2

#: channels and warps of a program of the update
UPDATE_BLOCK, UPDATE_WARPS = 512, 4
#: tokens, channels and warps of a program of the prefill
PREFILL_TOKENS, PREFILL_BLOCK, PREFILL_WARPS = 16, 256, 4
#: programs along the tokens of all rows of a prefill, at most
_PREFILL_PROGRAMS = 4096


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` of float32, with a reciprocal root where a division takes far longer.

    Where the exponential overflows the root is zero, and so is the result.
    """
    # exp(-x) as a power of two
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * root * root


# one binary for all layers and pool sizes
@triton.jit(do_not_specialize=["slots", "layer"])
def causal_conv1d_update_kernel(
    x,
    weight,
    bias,
    conv_state,
    out,
    query_start_loc,
    state_slots,
    num_accepted_tokens,
    record,
    slots,
    dim,
    layer,
    x_stride,
    weight_channel_stride,
    weight_tap_stride,
    slot_stride,
    row_stride,
    out_stride,
    WIDTH: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GUARD: tl.constexpr,
    COUNT_CODE: tl.constexpr,
    SLOT_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tiles of channels, rows. A row has at most ``TOKENS`` tokens."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    # no branch for padding: what is read behind one waits for the length
    start = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - start
    slot = tl.load(state_slots + row)
    count = tl.load(num_accepted_tokens + row)
    channels = tile * BLOCK + tl.arange(0, BLOCK)
    inside = channels < dim
    weights = ()
    for tap in tl.static_range(WIDTH):
        place = weight + channels * weight_channel_stride + tap * weight_tap_stride
        weights = weights + (tl.load(place, mask=inside, other=0.0),)
    added = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    inputs = x + start.to(tl.int64) * x_stride + channels
    fresh = ()
    for token in tl.static_range(TOKENS):
        here = inside & (token < length)
        fresh = fresh + (tl.load(inputs + token * x_stride, mask=here, other=0.0),)
    # what does not depend on the slot has been asked for: the branch holds only the state back
    good = row_passes(length > 0, count, slot, MOST_TOKENS, slots, GUARD)
    outputs = out + start.to(tl.int64) * out_stride + channels
    # two conditions: the first is known when the kernel is compiled
    if GUARD == 2:  # noqa: SIM102
        if good == 0:
            refuse_row(
                *(record, tile == 0, count, slot, slots, row, layer, COUNT_CODE, SLOT_CODE),
                *(outputs, length, out_stride, inside, TOKENS, BLOCK),
            )
            return
    touches = inside & (length > 0)
    state = conv_state + slot.to(tl.int64) * slot_stride + channels
    newest = state + (count.to(tl.int64) - 1) * row_stride

    # everything is read before anything is written: rows read and rows written overlap
    window = ()
    for tap in tl.static_range(WIDTH - 1):
        window = window + (tl.load(newest + tap * row_stride, mask=touches, other=0.0),)
    window = window + fresh
    # a thread may write a channel that another one of the program has read
    tl.debug_barrier()

    for number in tl.static_range(WIDTH - 2):
        tl.store(state + number * row_stride, window[number + 1], mask=touches)
    for token in tl.static_range(TOKENS):
        here = token < length
        row_place = state + (WIDTH - 2 + token) * row_stride
        tl.store(row_place, window[WIDTH - 1 + token], mask=touches & here)
        result = added
        for tap in tl.static_range(WIDTH):
            result += weights[tap].to(tl.float32) * window[token + tap].to(tl.float32)
        if SILU:
            result = silu(result)
        tl.store(outputs + token * out_stride, result, mask=inside & here)


@triton.jit
def causal_conv1d_prefill_kernel(
    x,
    weight,
    bias,
    conv_state,
    out,
    query_start_loc,
    state_slots,
    context_lens,
    dim,
    x_stride,
    weight_channel_stride,
    weight_tap_stride,
    slot_stride,
    row_stride,
    out_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: tiles of channels, chunks of tokens (each program takes every n-th), rows."""
    tile = tl.program_id(0)
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - start
    first = tl.program_id(1)
    if first * TOKENS >= length:
        return
    slot = tl.load(state_slots + row)
    has_history = (tl.load(context_lens + row) > 0) & (slot >= 0)
    channels = tile * BLOCK + tl.arange(0, BLOCK)
    inside = channels < dim
    state = conv_state + slot.to(tl.int64) * slot_stride + channels
    inputs = x + start.to(tl.int64) * x_stride + channels
    outputs = out + start.to(tl.int64) * out_stride + channels
    added = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)

    for chunk in range(first, tl.cdiv(length, TOKENS), tl.num_programs(1)):
        tokens = chunk * TOKENS + tl.arange(0, TOKENS)
        result = tl.zeros((TOKENS, BLOCK), tl.float32) + added[None, :]
        for tap in tl.static_range(WIDTH):
            # negative: a place in the history
            source = tokens + tap - (WIDTH - 1)
            here = ((source >= 0) & (tokens < length))[:, None] & inside[None, :]
            place = inputs[None, :] + source[:, None].to(tl.int64) * x_stride
            value = tl.load(place, mask=here, other=0.0).to(tl.float32)
            if chunk == 0:
                old = ((source < 0) & has_history)[:, None] & inside[None, :]
                place = state[None, :] + (source[:, None] + (WIDTH - 1)) * row_stride
                value += tl.load(place, mask=old, other=0.0).to(tl.float32)
            place = weight + channels * weight_channel_stride + tap * weight_tap_stride
            result += tl.load(place, mask=inside, other=0.0).to(tl.float32)[None, :] * value
        if SILU:
            result = silu(result)
        place = outputs[None, :] + tokens[:, None].to(tl.int64) * out_stride
        tl.store(place, result, mask=(tokens < length)[:, None] & inside[None, :])

    if first == 0:
        # The program that read the old history writes the new one; no other touches the state.
        last = ()
        for number in tl.static_range(WIDTH - 1):
            source = length - (WIDTH - 1) + number
            place = inputs + source.to(tl.int64) * x_stride
            value = tl.load(place, mask=inside & (source >= 0), other=0.0).to(tl.float32)
            old = inside & (source < 0) & has_history
            place = state + (source + (WIDTH - 1)) * row_stride
            last = last + (value + tl.load(place, mask=old, other=0.0).to(tl.float32),)
        tl.debug_barrier()
        for number in tl.static_range(WIDTH - 1):
            tl.store(state + number * row_stride, last[number], mask=inside & (slot >= 0))


def launch_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    meta: AttentionMetadata,
    *,
    guard: GuardMode,
    record: Tensor,
    layer: int,
    activation: str | None = "silu",
    block: int = UPDATE_BLOCK,
    warps: int = UPDATE_WARPS,
) -> Tensor:
    """Kernel form of ``causal_conv1d_update``; ``block`` channels and ``warps`` a program."""
    out = empty_like(x)
    dim, width = weight.shape
    grid = (ceil_div(dim, block), meta.num_rows)
    if not meta.num_rows:
        return out
    causal_conv1d_update_kernel[grid](
        x,
        weight,
        bias,
        conv_state,
        out,
        meta.query_start_loc,
        meta.state_slots,
        meta.num_accepted_tokens,
        record,
        conv_state.shape[0],
        dim,
        layer,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        conv_state.stride(0),
        conv_state.stride(1),
        out.stride(0),
        WIDTH=width,
        MOST_TOKENS=most_tokens(weight, conv_state),
        TOKENS=max(1, meta.max_query_len),
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        GUARD=GUARD_NUMBER[guard],
        COUNT_CODE=int(GuardCode.CONV_COUNT),
        SLOT_CODE=int(GuardCode.CONV_SLOT),
        BLOCK=block,
        num_warps=warps,
    )
    return out


def launch_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    meta: AttentionMetadata,
    *,
    activation: str | None = "silu",
    tokens: int = PREFILL_TOKENS,
    block: int = PREFILL_BLOCK,
    warps: int = PREFILL_WARPS,
) -> Tensor:
    """Kernel form of ``causal_conv1d_prefill``; ``tokens`` x ``block`` outputs at a time."""
    out = empty_like(x)
    dim, width = weight.shape
    rows = meta.num_rows
    if not rows or meta.max_query_len <= 0:
        return out
    # only the first chunk may need the old history, which the first program overwrites
    tokens = max(tokens, next_power_of_2(width - 1))
    # a long row beside many short ones would else start a program for every chunk of each
    chunks = min(ceil_div(meta.max_query_len, tokens), max(8, _PREFILL_PROGRAMS // rows))
    causal_conv1d_prefill_kernel[(ceil_div(dim, block), chunks, rows)](
        x,
        weight,
        bias,
        conv_state,
        out,
        meta.query_start_loc,
        meta.state_slots,
        meta.context_lens,
        dim,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        conv_state.stride(0),
        conv_state.stride(1),
        out.stride(0),
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        TOKENS=tokens,
        BLOCK=block,
        num_warps=warps,
    )
    return out
