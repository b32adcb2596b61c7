# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of the gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.launch_sizes import ceil_div, next_power_of_2

#: elements that one program takes
_ELEMENTS = 1024


@triton.jit
def silu_and_mul_kernel(gate_up, output, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < WIDTH
    source = gate_up + row * row_stride + places
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH + places, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid_gate_kernel(
    attention,
    gate,
    output,
    gate_row,
    gate_head,
    WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < WIDTH
    source = gate + row * gate_row + places // HEAD_SIZE * gate_head + places % HEAD_SIZE
    opening = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(attention + row * WIDTH + places, mask=inside, other=0.0).to(tl.float32)
    result = values / (1.0 + tl.exp(-opening))
    tl.store(output + row * WIDTH + places, result.to(output.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """:func:`atom.model_ops.activation.silu_and_mul` on a GPU."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(next_power_of_2(width), _ELEMENTS)
        silu_and_mul_kernel[(rows, ceil_div(width, block))](
            gate_up, output, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=4
        )
    return output


def sigmoid_gate(attention: Tensor, gate: Tensor) -> Tensor:
    """:func:`atom.model_ops.activation.sigmoid_gate` on a GPU."""
    flat = attention.flatten(1)
    rows, width = flat.shape
    output = torch.empty((rows, width), dtype=flat.dtype, device=flat.device)
    head_size = gate.shape[-1]
    gate_head = gate.stride(1) if gate.dim() == 3 else 0
    if rows:
        block = min(next_power_of_2(width), _ELEMENTS)
        sigmoid_gate_kernel[(rows, ceil_div(width, block))](
            flat,
            gate,
            output,
            gate.stride(0),
            gate_head,
            WIDTH=width,
            HEAD_SIZE=head_size,
            BLOCK=block,
            num_warps=4,
        )
    return output
