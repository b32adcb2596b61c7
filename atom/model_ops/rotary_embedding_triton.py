# mypy: disable-error-code="no-untyped-def"
"""Triton kernel of the head norms and the partial rotary embedding: queries and keys at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.launch_sizes import ceil_div, next_power_of_2
from atom.model_ops.rotary_embedding import RotaryTable

#: elements that one program takes
_ELEMENTS = 2048


@triton.jit
def _norm_rope(
    source,
    target,
    weight,
    angles,
    first_head,
    source_head,
    eps,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, WIDE)
    rotated = dims < ROTARY
    first = dims < ROTARY // 2
    # the element that a rotation mixes in: half the rotary part away, or itself
    partner = tl.where(first, dims + ROTARY // 2, tl.where(rotated, dims - ROTARY // 2, dims))
    inside = (heads < HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    row = source + heads[:, None] * source_head
    values = tl.load(row + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    others = tl.load(row + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 + tl.load(weight + dims, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
    other_scale = 1.0 + tl.load(weight + partner, mask=dims < HEAD_SIZE, other=0.0).to(tl.float32)
    angle = dims % (ROTARY // 2)
    cos = tl.load(angles + angle, mask=rotated, other=1.0)
    sin = tl.load(angles + ROTARY // 2 + angle, mask=rotated, other=0.0)
    sin = tl.where(first, -sin, sin)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / HEAD_SIZE + eps)
    turned = values * (scale * cos)[None, :] + others * (other_scale * sin)[None, :]
    result = turned * inverse[:, None]
    place = target + heads[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(place, result.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _copy_heads(
    source,
    target,
    first_head,
    source_head,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, WIDE)
    inside = (heads < HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    values = tl.load(source + heads[:, None] * source_head + dims[None, :], mask=inside)
    place = target + heads[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(place, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q,
    k,
    v,
    q_out,
    k_out,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    slot_mapping,
    max_positions,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_half,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STORE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    position = tl.minimum(tl.maximum(position, 0), max_positions - 1)
    angles = cos_sin + position * ROTARY
    q_blocks: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    part = tl.program_id(1)
    if part < q_blocks:
        _norm_rope(
            q + token * q_token,
            q_out + token * (Q_HEADS * HEAD_SIZE),
            q_weight,
            angles,
            part * BLOCK_HEADS,
            q_head,
            eps,
            Q_HEADS,
            HEAD_SIZE,
            WIDE,
            ROTARY,
            BLOCK_HEADS,
        )
    else:
        first_head = (part - q_blocks) * BLOCK_HEADS
        row = token
        if STORE:
            row = tl.load(slot_mapping + token)
        if row >= 0:
            target = k_out + row * (K_HEADS * HEAD_SIZE)
            _norm_rope(
                k + token * k_token,
                target,
                k_weight,
                angles,
                first_head,
                k_head,
                eps,
                K_HEADS,
                HEAD_SIZE,
                WIDE,
                ROTARY,
                BLOCK_HEADS,
            )
            if STORE:
                _copy_heads(
                    v + token * v_token,
                    target + cache_half,
                    first_head,
                    v_head,
                    K_HEADS,
                    HEAD_SIZE,
                    WIDE,
                    BLOCK_HEADS,
                )


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
    """:func:`atom.model_ops.rotary_embedding.qk_norm_rope` on a GPU."""
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_out = _launch(q, k, None, q_weight, k_weight, positions, table, eps, k_out, None)
    return q_out, k_out


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
    """:func:`atom.model_ops.rotary_embedding.qk_norm_rope_store` on a GPU."""
    return _launch(q, k, v, q_weight, k_weight, positions, table, eps, kv_cache, slot_mapping)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    positions: Tensor,
    table: RotaryTable,
    eps: float,
    k_out: Tensor,
    slot_mapping: Tensor | None,
) -> Tensor:
    tokens, q_heads, head_size = q.shape
    k_heads = k.shape[1]
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not tokens:
        return q_out
    wide = next_power_of_2(head_size)
    heads = max(1, min(_ELEMENTS // wide, next_power_of_2(max(q_heads, k_heads))))
    values = k if v is None else v
    qk_norm_rope_kernel[(tokens, ceil_div(q_heads, heads) + ceil_div(k_heads, heads))](
        q,
        k,
        values,
        q_out,
        k_out,
        q_weight,
        k_weight,
        positions,
        table.cos_sin,
        positions if slot_mapping is None else slot_mapping,
        table.max_positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        values.stride(0),
        values.stride(1),
        k_out.stride(0),
        eps,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HEAD_SIZE=head_size,
        WIDE=wide,
        ROTARY=table.rotary_dim,
        BLOCK_HEADS=heads,
        STORE=slot_mapping is not None,
        num_warps=4,
    )
    return q_out
