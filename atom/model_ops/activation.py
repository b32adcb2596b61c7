"""Gates: SiLU of the gate projection times the up projection, and the attention output's gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, in float32.

    Args:
        gate_up: ``[T, 2 * I]``, contiguous last axis; gates first.

    Returns:
        ``[T, I]`` in the input's dtype, contiguous.
    """
    if gate_up.is_cuda:
        from atom.model_ops import activation_triton

        return activation_triton.silu_and_mul(gate_up)
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """:func:`silu_and_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def sigmoid_gate(attention: Tensor, gate: Tensor) -> Tensor:
    """``attention * sigmoid(gate)``, in float32.

    Args:
        attention: ``[T, heads * head size]`` or ``[T, heads, head size]``, contiguous.
        gate: ``[T, heads * head size]`` or ``[T, heads, head size]``; any strides with a contiguous
            last axis, so the gate half of an interleaved projection needs no copy.

    Returns:
        ``[T, heads * head size]`` in the dtype of ``attention``, contiguous.
    """
    if attention.is_cuda:
        from atom.model_ops import activation_triton

        return activation_triton.sigmoid_gate(attention, gate)
    return sigmoid_gate_reference(attention, gate)


def sigmoid_gate_reference(attention: Tensor, gate: Tensor) -> Tensor:
    """:func:`sigmoid_gate` in plain torch."""
    flat = attention.flatten(1)
    return (flat.float() * torch.sigmoid(gate.flatten(1).float())).to(attention.dtype)
