"""Root-mean-square norms with the zero-centred weight of Qwen3-Next: ``x / rms(x) * (1 + w)``."""

from __future__ import annotations

import torch
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
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 1.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    The sum is rounded to the model's dtype before it is normalised, as when both are done apart.

    Args:
        x: ``[T, H]``, the layer's output.
        residual: ``[T, H]``, the stream.
        weight: ``[H]``.
        eps: added to the mean square.
        offset: added to the weight.
        out: contiguous ``[T, H]`` for the normalised sum; ``None`` makes one.

    Returns:
        The normalised sum and the sum, both ``[T, H]`` in the dtype of ``x``, contiguous.
    """
    if x.is_cuda:
        from atom.model_ops import layer_norm_triton

        return layer_norm_triton.add_rms_norm(x, residual, weight, eps, offset=offset, out=out)
    return add_rms_norm_reference(x, residual, weight, eps, offset=offset, out=out)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 1.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` in plain torch."""
    total = x + residual
    normed = rms_norm_reference(total, weight, eps, offset=offset)
    return normed if out is None else out.copy_(normed), total


def embed_norm_join(
    ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """The norm of each id's embedding and that of a hidden state, side by side.

    Args:
        ids: int64 ``[T]``, of any stride.
        embedding: ``[vocabulary, H]``.
        hidden: ``[T, H]``, contiguous last axis.
        embedding_weight: ``[H]``, zero-centred like the next.
        hidden_weight: ``[H]``.
        eps: added to the mean squares.

    Returns:
        ``[T, 2 * H]`` in the dtype of ``hidden``, contiguous.
    """
    if hidden.is_cuda:
        from atom.model_ops import layer_norm_triton

        run = layer_norm_triton.embed_norm_join
    else:
        run = embed_norm_join_reference
    return run(ids, embedding, hidden, embedding_weight, hidden_weight, eps)


def embed_norm_join_reference(
    ids: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """:func:`embed_norm_join` in plain torch."""
    rows = torch.nn.functional.embedding(ids, embedding)
    normed = rms_norm_reference(rows, embedding_weight, eps)
    return torch.cat([normed, rms_norm_reference(hidden, hidden_weight, eps)], dim=-1)
