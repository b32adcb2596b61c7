# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of the root-mean-square norms: one pass, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, normed, normed, eps, offset, add=False)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:func:`atom.model_ops.layer_norm.add_rms_norm` on a GPU."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed)
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
    block = triton.next_power_of_2(width)
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
