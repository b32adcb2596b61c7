# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the root-mean-square norms: one pass, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.launch_sizes import next_power_of_2


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    x_row,
    residual_row,
    eps,
    offset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < WIDTH
    scales = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + offset
    values = tl.load(x + row * x_row + places, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        stream = tl.load(residual + row * residual_row + places, mask=inside, other=0.0)
        # rounded first: the norm is that of the stream as later layers read it
        rounded = (values + stream.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    result = values * inverse * scales
    tl.store(normed + row * WIDTH + places, result.to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0) -> Tensor:
    """:func:`atom.model_ops.layer_norm.rms_norm` on a GPU."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, x, weight, normed, normed, eps, offset, add=False)
    return normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 1.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`atom.model_ops.layer_norm.add_rms_norm` on a GPU."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total) if out is None else out
    _launch(x, residual, weight, normed, total, eps, offset, add=True)
    return normed, total


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    eps: float,
    offset: float,
    *,
    add: bool,
) -> None:
    rows, width = x.shape
    if not rows:
        return
    block = next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        offset,
        WIDTH=width,
        BLOCK=block,
        ADD=add,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def embed_norm_join_kernel(
    ids,
    embedding,
    hidden,
    embedding_weight,
    hidden_weight,
    joined,
    ids_stride,
    embedding_row,
    hidden_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program ``(token, half)``: the embedding's half, then the hidden state's."""
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    places = tl.arange(0, BLOCK)
    inside = places < WIDTH
    if half == 0:
        row = embedding + tl.load(ids + token * ids_stride) * embedding_row
        weight = embedding_weight
    else:
        row = hidden + token * hidden_row
        weight = hidden_weight
    values = tl.load(row + places, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32) + 1.0
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    result = (values * inverse * scales).to(joined.dtype.element_ty)
    tl.store(joined + (token * 2 + half) * WIDTH + places, result, mask=inside)


def embed_norm_join(
    ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """:func:`atom.model_ops.layer_norm.embed_norm_join` on a GPU."""
    tokens, width = hidden.shape
    joined = torch.empty((tokens, 2 * width), dtype=hidden.dtype, device=hidden.device)
    if tokens:
        block = next_power_of_2(width)
        embed_norm_join_kernel[(tokens, 2)](
            *(ids, embedding, hidden, embedding_weight, hidden_weight, joined),
            *(ids.stride(0), embedding.stride(0), hidden.stride(0), eps),
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return joined
