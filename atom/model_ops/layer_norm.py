"""Root-mean-square norms with the zero-centred weight of Qwen3-Next: ``x / rms(x) * (1 + w)``."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0) -> Tensor:
    """Normalise each row by its root mean square, in float32.

    Args:
        x: ``[T, H]``, contiguous last axis.
        weight: ``[H]``.
        eps: added to the mean square.
        offset: added to the weight; 1 for Qwen3-Next, 0 for a plain RMSNorm.

    Returns:
        ``[T, H]`` in the dtype of ``x``, contiguous.
    """
    if x.is_cuda:
        from atom.model_ops import layer_norm_triton

        return layer_norm_triton.rms_norm(x, weight, eps, offset=offset)
    return rms_norm_reference(x, weight, eps, offset=offset)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0) -> Tensor:
    """:func:`rms_norm` in plain torch, for any number of leading axes."""
    wide = x.float()
    wide = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * (offset + weight.float())).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    The sum is rounded to the model's dtype before it is normalised, as when both are done apart.

    Args:
        x: ``[T, H]``, the layer's output.
        residual: ``[T, H]``, the stream.
        weight: ``[H]``.
        eps: added to the mean square.
        offset: added to the weight.

    Returns:
        The normalised sum and the sum, both ``[T, H]`` in the dtype of ``x``, contiguous.
    """
    if x.is_cuda:
        from atom.model_ops import layer_norm_triton

        return layer_norm_triton.add_rms_norm(x, residual, weight, eps, offset=offset)
    return add_rms_norm_reference(x, residual, weight, eps, offset=offset)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset), total
