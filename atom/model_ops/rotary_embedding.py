"""Head norms and partial rotary embedding of queries and keys, in one pass.

As in Qwen3-Next: each head is normalised by its root mean square with weight ``1 + w``; then its
first ``rotary_dim`` elements are rotated in pairs ``(i, i + rotary_dim / 2)`` by the angle
``position * theta ** (-2 i / rotary_dim)``, and the others pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atom.model_ops.layer_norm import rms_norm_reference
from atom.model_ops.paged_attention import store_kv_reference


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of every position a model can reach.

    Attributes:
        cos_sin: float32 ``[positions, rotary_dim]``, contiguous: cosines, then sines.
    """

    cos_sin: Tensor

    @classmethod
    def build(
        cls,
        *,
        rotary_dim: int,
        max_positions: int,
        theta: float,
        device: torch.device | str = "cpu",
    ) -> RotaryTable:
        """Compute the table.

        Args:
            rotary_dim: rotated elements of a head (head size times the partial rotary factor).
            max_positions: positions to hold, at least 1.
            theta: base of the frequencies (``rope_theta``).
            device: where the table shall lie.

        Raises:
            ValueError: if ``rotary_dim`` is odd or a size is not positive.
        """
        if rotary_dim < 2 or rotary_dim % 2 or max_positions < 1:
            raise ValueError(
                f"rotary table: rotary_dim must be even and positive, and there must be positions; "
                f"got rotary_dim {rotary_dim}, {max_positions} positions"
            )
        steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / (theta**steps)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        return cls(torch.cat([angles.cos(), angles.sin()], dim=-1).to(device))

    @property
    def max_positions(self) -> int:
        """Positions that the table holds."""
        return int(self.cos_sin.shape[0])

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head."""
        return int(self.cos_sin.shape[1])


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    table: RotaryTable,
    eps: float,
    rotary_dim: int,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate the heads of a step's queries and keys, in float32.

    Args:
        q: ``[T, query heads, head size]``; any strides with a contiguous last axis, so the query
            half of a projection that interleaves queries and gates needs no copy.
        k: ``[T, KV heads, head size]``, likewise.
        q_weight: ``[head size]``, zero-centred.
        k_weight: ``[head size]``, zero-centred.
        positions: int64 ``[T]``. One outside the table is moved to its nearest entry.
        table: cosines and sines.
        eps: added to the mean square.
        rotary_dim: rotated elements of a head; that of the table.

    Returns:
        Queries and keys, contiguous, in their own dtypes and shapes.

    Raises:
        ValueError: if ``rotary_dim`` is not the table's or exceeds the head size.
    """
    _check(q, table, rotary_dim)
    if q.is_cuda:
        from atom.model_ops import rotary_embedding_triton

        return rotary_embedding_triton.qk_norm_rope(
            q, k, q_weight, k_weight, positions, table, eps, rotary_dim
        )
    return qk_norm_rope_reference(q, k, q_weight, k_weight, positions, table, eps, rotary_dim)


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    table: RotaryTable,
    eps: float,
    rotary_dim: int,
) -> tuple[Tensor, Tensor]:
    """:func:`qk_norm_rope` in plain torch."""
    rows = table.cos_sin[positions.clamp(0, table.max_positions - 1)]
    cos, sin = rows[:, None, :].chunk(2, dim=-1)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm_reference(x.float(), weight, eps)
        first, second = normed[..., :rotary_dim].chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([*rotated, normed[..., rotary_dim:]], dim=-1).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


def qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    table: RotaryTable,
    eps: float,
    rotary_dim: int,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """:func:`qk_norm_rope`, with keys and values written to their cache slots in the same launch.

    Args:
        q: ``[T, query heads, head size]``, contiguous last axis.
        k: ``[T, KV heads, head size]``, likewise.
        v: as ``k``; stored as it is.
        q_weight: ``[head size]``, zero-centred.
        k_weight: ``[head size]``, zero-centred.
        positions: int64 ``[T]``.
        table: cosines and sines.
        eps: added to the mean square.
        rotary_dim: rotated elements of a head; that of the table.
        kv_cache: ``[2, blocks, block size, KV heads, head size]``, contiguous; written in place.
        slot_mapping: int64 ``[T]``; a negative slot is skipped.

    Returns:
        The queries, contiguous, in their own dtype and shape.

    Raises:
        ValueError: if ``rotary_dim`` is not the table's or exceeds the head size.
    """
    _check(q, table, rotary_dim)
    arguments = (q_weight, k_weight, positions, table, eps, rotary_dim)
    if q.is_cuda:
        from atom.model_ops import rotary_embedding_triton

        return rotary_embedding_triton.qk_norm_rope_store(
            q, k, v, *arguments, kv_cache, slot_mapping
        )
    return qk_norm_rope_store_reference(q, k, v, *arguments, kv_cache, slot_mapping)


def qk_norm_rope_store_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    table: RotaryTable,
    eps: float,
    rotary_dim: int,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """:func:`qk_norm_rope_store` in plain torch."""
    q, k = qk_norm_rope_reference(q, k, q_weight, k_weight, positions, table, eps, rotary_dim)
    store_kv_reference(k, v, kv_cache, slot_mapping)
    return q


def _check(q: Tensor, table: RotaryTable, rotary_dim: int) -> None:
    if rotary_dim != table.rotary_dim or rotary_dim > q.shape[-1]:
        raise ValueError(
            f"head norm and rotary embedding: rotary_dim {rotary_dim} must be the table's "
            f"{table.rotary_dim} and at most the head size {q.shape[-1]}"
        )
