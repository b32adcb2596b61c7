# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of the projections of a few tokens: each weight is read once, by one program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and inputs that a program multiplies at a time, and how many such loads are ahead.

    Attributes:
        outputs: rows of the weight.
        inputs: columns of the weight.
        stages: loads ahead.
        warps: of a program.
        parts: programs that share the inputs of an output.
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int = 1


#: tiles by the power of two that the tokens are padded to, 32 at least: fewer are not faster
WIDE = {
    32: Tile(32, 128, 4, 4),
    64: Tile(32, 128, 3, 4),
}
GATED = {
    32: Tile(32, 128, 3, 4),
    64: Tile(32, 64, 4, 4),
}
NARROW = {
    32: Tile(32, 128, 3, 4, 4),
    64: Tile(32, 128, 3, 4, 4),
}


@triton.jit(do_not_specialize=["tokens"])
def decode_linear_kernel(
    x,
    weight,
    out,
    tokens,
    x_row,
    outputs,
    inputs,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Program ``(tile, part)``; ``weight`` has twice as many rows as ``outputs`` if ``GATED``.

    Sizes are no constants, so that layers of different shapes share a binary.
    """
    part = tl.program_id(1)
    token = tl.arange(0, BLOCK_T)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    here = token < tokens
    real = output < outputs
    length = tl.cdiv(inputs, BLOCK_K * PARTS) * BLOCK_K
    begin = part * length
    end = tl.minimum(begin + length, inputs)
    rows = x + token[:, None].to(tl.int64) * x_row + column[None, :]
    weights = weight + output[:, None].to(tl.int64) * inputs + column[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    other = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_K):
        inside = first + column < end
        values = tl.load(rows + first, mask=here[:, None] & inside[None, :], other=0.0)
        read = real[:, None] & inside[None, :]
        total = tl.dot(values, tl.trans(tl.load(weights + first, mask=read, other=0.0)), total)
        if GATED:
            more = tl.load(weights + outputs * inputs + first, mask=read, other=0.0)
            other = tl.dot(values, tl.trans(more), other)
    if GATED:
        # rounded first, as a projection of its own rounds them
        gate = total.to(out.dtype.element_ty).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * other.to(out.dtype.element_ty).to(tl.float32)
    place = (part * tokens + token)[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here[:, None] & real[None, :])


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, *, gated: bool) -> Tensor:
    outputs = out.shape[-1]
    decode_linear_kernel[(triton.cdiv(outputs, tile.outputs), tile.parts)](
        *(x, weight, out, x.shape[0], x.stride(0), outputs, weight.shape[1]),
        BLOCK_T=_padded(x),
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        PARTS=tile.parts,
        GATED=gated,
        num_warps=tile.warps,
        # AMD's compiler keeps one load ahead, in registers
        num_stages=2 if torch.version.hip else tile.stages,
    )
    return out


def _padded(x: Tensor) -> int:
    return max(32, int(triton.next_power_of_2(x.shape[0])))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`atom.model_ops.decode_linear.linear`."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, WIDE[_padded(x)], gated=False)


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`atom.model_ops.decode_linear.linear_parts`."""
    tile = NARROW[_padded(x)]
    shape = (tile.parts, x.shape[0], weight.shape[0])
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    return _launch(x, weight, out, tile, gated=False)


def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`atom.model_ops.decode_linear.linear_silu_and_mul`."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, GATED[_padded(x)], gated=True)
