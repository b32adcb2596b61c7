"""The short causal convolution in front of a gated-delta-net layer, over ragged batches.

Each channel is convolved with its own ``W`` weights over the current input and the ``W - 1`` before
it. Between steps the inputs are kept in the conv-state pool, ``W - 1 + draft tokens`` rows a state
slot: a decode step begins at the row that the accepted tokens of the last step name, and leaves
there the inputs of all its tokens, since it is not known yet which of them will be accepted.

Each operator stands beside a plain reference with the same signature, which serves on a CPU; on a
GPU it launches :mod:`atom.model_ops.causal_conv1d_triton`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.config import GuardMode
from atom.errors import BadInput
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.guard import GuardCode, passes, unchecked

ACTIVATIONS = ("silu", None)


def packed_weight(weight: Tensor) -> Tensor:
    """``weight`` [D, W] with its channels one behind the other in memory.

    Shape and values stay; only the strides change, to ``(1, D)``. The kernels then read the weights
    in whole cache lines. A loader should do this once.
    """
    return weight.t().contiguous().t()


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    meta: AttentionMetadata,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """Convolve prompt chunks, and leave each row's last ``W - 1`` inputs in its slot.

    A row with a context begins with rows ``0 .. W - 2`` of its slot as history, one without with
    zeros. The rows of the slot behind those are not touched.

    Args:
        x: ``[T, D]``.
        weight: ``[D, W]``; see :func:`packed_weight`.
        bias: ``[D]`` or ``None``.
        conv_state: ``[slots, W - 1 + draft tokens, D]`` of one layer, written.
        meta: a prefill batch.
        activation: ``silu`` or ``None``.

    Returns:
        ``[T, D]``, dtype of ``x``. On a GPU the outputs of padding tokens are not written.

    Raises:
        BadInput: shapes that do not fit.
    """
    _check(x, weight, bias, conv_state, activation)
    if not x.is_cuda:
        return causal_conv1d_prefill_reference(
            x, weight, bias, conv_state, meta, activation=activation
        )
    from atom.model_ops.causal_conv1d_triton import launch_prefill

    return launch_prefill(x, weight, bias, conv_state, meta, activation=activation)


def causal_conv1d_update(
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
) -> Tensor:
    """Convolve a decode step's tokens: the last accepted one and the drafts behind it.

    With ``off = num_accepted_tokens - 1`` a row's history is rows ``off .. off + W - 2`` of its
    slot; afterwards the slot begins with ``old[off + 1 .. off + W - 2], x_0 .. x_{q-1}``.

    Args:
        x: ``[T, D]``.
        weight: ``[D, W]``; see :func:`packed_weight`.
        bias: ``[D]`` or ``None``.
        conv_state: ``[slots, W - 1 + draft tokens, D]`` of one layer, written.
        meta: a decode batch of at most ``1 + draft tokens`` tokens a row.
        guard: what to do about a count outside ``1 .. 1 + draft tokens`` or a slot that is not in
            the pool. ``TRAP`` works only where Triton compiles asserts in (``TRITON_DEBUG=1``).
        record: int32 ``[8]``, see :mod:`atom.model_ops.guard`; written under ``REPORT``.
        layer: goes into the record.
        activation: ``silu`` or ``None``.

    Returns:
        ``[T, D]``, dtype of ``x``; zeros in a row that the guard stopped. On a GPU the outputs of
        padding tokens are not written.

    Raises:
        BadInput: shapes that do not fit, or more tokens in a row than its slot has room for.
        DeviceError: on a CPU, a bad row under ``TRAP``, or (``IllegalAccess``) an unguarded one
            that leaves the pool.
    """
    _check(x, weight, bias, conv_state, activation)
    room = most_tokens(weight, conv_state)
    if meta.max_query_len > room:
        raise BadInput(
            f"causal_conv1d_update: up to {meta.max_query_len} tokens a row, but a slot of "
            f"{conv_state.shape[1]} rows has room for {room}"
        )
    if not x.is_cuda:
        return causal_conv1d_update_reference(
            x,
            weight,
            bias,
            conv_state,
            meta,
            guard=guard,
            record=record,
            layer=layer,
            activation=activation,
        )
    from atom.model_ops.causal_conv1d_triton import launch_update

    return launch_update(
        x,
        weight,
        bias,
        conv_state,
        meta,
        guard=guard,
        record=record,
        layer=layer,
        activation=activation,
    )


def most_tokens(weight: Tensor, conv_state: Tensor) -> int:
    """Tokens of a decode row that a slot has room for, and its highest valid count."""
    return conv_state.shape[1] - weight.shape[1] + 2


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, activation: str | None
) -> None:
    if activation not in ACTIVATIONS:
        raise BadInput(f"causal_conv1d: activation {activation!r}; known: silu, None")
    dim, width = weight.shape
    if x.dim() != 2 or conv_state.dim() != 3 or x.shape[1] != dim or conv_state.shape[2] != dim:
        raise BadInput(
            f"causal_conv1d: x {tuple(x.shape)}, weight {tuple(weight.shape)} and conv_state "
            f"{tuple(conv_state.shape)} do not have the same channels"
        )
    if width < 2 or conv_state.shape[1] < width - 1:
        raise BadInput(
            f"causal_conv1d: width {width} needs slots of at least {width - 1} rows (and 2 as its "
            f"least), got {conv_state.shape[1]}"
        )
    if bias is not None and bias.shape != (dim,):
        raise BadInput(f"causal_conv1d: bias {tuple(bias.shape)} for {dim} channels")
    if x.stride(1) != 1 or conv_state.stride(2) != 1:
        raise BadInput("causal_conv1d: the channels of x and conv_state must be contiguous")


# -- references


def _convolve(
    window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """float32 ``[q, D]`` from a window of history and inputs, ``[W - 1 + q, D]``."""
    taps = window.float().unfold(0, weight.shape[1], 1)
    out = (taps * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return torch.nn.functional.silu(out) if activation == "silu" else out


def causal_conv1d_prefill_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    meta: AttentionMetadata,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """Plain form of :func:`causal_conv1d_prefill`, in float32; reads the metadata on the host."""
    history_rows = weight.shape[1] - 1
    starts = meta.query_start_loc.tolist()
    rows = zip(meta.state_slots.tolist(), meta.context_lens.tolist(), strict=True)
    out = torch.zeros_like(x)
    for row, (slot, context) in enumerate(rows):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.stop <= tokens.start:
            continue
        history = conv_state.new_zeros(history_rows, x.shape[1])
        if context > 0 and slot >= 0:
            history = conv_state[slot, :history_rows]
        window = torch.cat([history.to(x.dtype), x[tokens]])
        out[tokens] = _convolve(window, weight, bias, activation).to(x.dtype)
        if slot >= 0:
            conv_state[slot, :history_rows] = window[-history_rows:].to(conv_state.dtype)
    return out


def causal_conv1d_update_reference(
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
) -> Tensor:
    """Plain form of :func:`causal_conv1d_update`, in float32; reads the metadata on the host.

    Unguarded it goes wherever the address leads, as the kernel does: into another slot or layer of
    the pool in silence. Past the pool's end it raises ``IllegalAccess``.
    """
    width, dim = weight.shape[1], x.shape[1]
    slots, _, _ = conv_state.shape
    slot_stride, row_stride, _ = conv_state.stride()
    starts = meta.query_start_loc.tolist()
    rows = zip(meta.state_slots.tolist(), meta.num_accepted_tokens.tolist(), strict=True)
    out = torch.zeros_like(x)
    for row, (slot, count) in enumerate(rows):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.stop <= tokens.start:
            continue
        good = passes(
            guard,
            record,
            count=count,
            slot=slot,
            highest_count=most_tokens(weight, conv_state),
            slots=slots,
            row=row,
            layer=layer,
            count_code=GuardCode.CONV_COUNT,
            slot_code=GuardCode.CONV_SLOT,
        )
        if not good:
            continue
        base = slot * slot_stride
        first = base + (count - 1) * row_stride
        history = [
            unchecked(conv_state, first + tap * row_stride, dim).clone() for tap in range(width - 1)
        ]
        window = torch.cat([torch.stack(history).to(x.dtype), x[tokens]])
        out[tokens] = _convolve(window, weight, bias, activation).to(x.dtype)
        for number, values in enumerate(window[1:]):
            unchecked(conv_state, base + number * row_stride, dim).copy_(values)
    return out
