"""Projections of a few tokens, whose time is that of reading the weights.

A library's product of a few rows starts too few programs to keep the memory busy, or a second
launch to add their sums. Here a narrow projection leaves its partial sums to the norm behind it,
which has to read its output anyway; a gated projection applies the gate while it holds both.

Anything else goes to the library: many tokens, small or odd matrices, a bias, a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from atom.model_ops.activation import silu_and_mul

#: tokens up to which these kernels are used: with 128, reading the parts costs more than it saves
MOST_TOKENS = 64
#: rows and columns of the smallest matrix that they are used for
_LEAST_SIZE = 512
_DTYPES = (torch.bfloat16, torch.float16)


def reads_weights_only(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels of this module take ``x @ weight.T``: on a GPU, few tokens, large matrix.

    Args:
        x: ``[T, K]``.
        weight: ``[N, K]``.
    """
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MOST_TOKENS
        and x.dtype in _DTYPES
        and weight.dtype == x.dtype
        and min(weight.shape) >= _LEAST_SIZE
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 64 == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T``.

    Args:
        x: ``[T, K]``.
        weight: ``[N, K]``, contiguous.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[T, N]`` in the dtype of ``x``.
    """
    if bias is None and reads_weights_only(x, weight):
        from atom.model_ops import decode_linear_triton

        return decode_linear_triton.linear(x, weight)
    return functional.linear(x, weight, bias)


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T``, perhaps in parts that the next norm adds up.

    Args:
        x: ``[T, K]``.
        weight: ``[N, K]``, contiguous.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[T, N]`` in the dtype of ``x``, or float32 ``[parts, T, N]``: what
        :func:`atom.model_ops.layer_norm.add_rms_norm` takes.
    """
    if bias is None and reads_weights_only(x, weight):
        from atom.model_ops import decode_linear_triton

        return decode_linear_triton.linear_parts(x, weight)
    return functional.linear(x, weight, bias)


def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    """:func:`~atom.model_ops.activation.silu_and_mul` of ``x @ weight.T``.

    Args:
        x: ``[T, K]``.
        weight: ``[2 * I, K]``, contiguous: gates, then what they are for.

    Returns:
        ``[T, I]`` in the dtype of ``x``.
    """
    if reads_weights_only(x, weight) and weight.shape[0] % 32 == 0:
        from atom.model_ops import decode_linear_triton

        return decode_linear_triton.linear_silu_and_mul(x, weight)
    return silu_and_mul(functional.linear(x, weight))
