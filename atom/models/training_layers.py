"""The layers of Qwen3-Next as training needs them: whole sequences, no caches, differentiable.

Names of modules and parameters are those of a Hugging Face checkpoint, and so are the orders of
rows in merged projections: the state dict of a model made of them is its checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atom.model_ops.gated_delta_rule import gdn_gating_reference, rms_norm_gated_reference
from atom.model_ops.gated_delta_rule_chunked import l2_normalize
from atom.model_ops.layer_norm import rms_norm_reference
from atom.models.model_config import FULL, ModelConfig
from atom.models.training_scan import scan

#: tokens of a chunk of the gated delta rule; sequences are multiples of it
CHUNK_TOKENS = 64


class _UnitLowerInverse(torch.autograd.Function):
    """``(1 + A) ** -1`` of strictly lower triangular ``A``, by inverting ever larger blocks.

    Blocks of twice the size follow from ``X - X @ O @ X``, where ``X`` holds the inverses so far
    and ``O`` what of ``A`` joins two of their blocks. Only matrix products: no solver is called.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        block = 1
        while block < size:
            same = (index[:, None] // (2 * block)) == (index[None, :] // (2 * block))
            apart = (index[:, None] // block) != (index[None, :] // block)
            joins = torch.where(same & apart, lower, 0.0)
            inverse = inverse - (joins if block == 1 else inverse @ joins @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of ``1 + lower``.

    Args:
        lower: float32 ``[..., C, C]``, zero on and above the diagonal; C is a power of two.
    """
    inverse: Tensor = _UnitLowerInverse.apply(lower)
    return inverse


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK_TOKENS
) -> Tensor:
    """The recurrence of :mod:`atom.model_ops.gated_delta_rule` from a state of zeros.

    In chunks, as batched matrix products that autograd follows; under autocast these are of 16 bits
    except where the triangular system is inverted.

    Args:
        q: ``[B, T, HK, K]``; normalised here, like ``k``. T is a multiple of ``chunk``.
        k: ``[B, T, HK, K]``.
        v: ``[B, T, HV, V]``.
        g: float32 ``[B, T, HV]``, log decay.
        beta: float32 ``[B, T, HV]``.
        chunk: tokens of a chunk, a power of two.

    Returns:
        ``[B, T, HV, V]``.
    """
    batch, tokens, heads, size = v.shape
    group = heads // k.shape[2]

    def split(x: Tensor) -> Tensor:
        # [B, T, H, ...] -> [B, H, N, C, ...]
        return x.transpose(1, 2).unflatten(2, (tokens // chunk, chunk))

    q = split(l2_normalize(q).to(v.dtype)) * k.shape[-1] ** -0.5
    k = split(l2_normalize(k).to(v.dtype))
    v, beta = split(v), split(beta)[..., None]
    past = split(g).float().cumsum(-1)
    passed = past.exp()[..., None]
    between = past[..., :, None] - past[..., None, :]
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    between = between.masked_fill(above, -torch.inf).exp()
    overlap = (k @ k.transpose(-1, -2)).repeat_interleave(group, 1)
    attention = ((q @ k.transpose(-1, -2)).repeat_interleave(group, 1) * between).to(v.dtype)
    q = q.repeat_interleave(group, 1)
    k = k.repeat_interleave(group, 1)
    lower = (overlap.float() * between * beta).tril(-1)
    with torch.autocast(v.device.type, enabled=False):
        solve = unit_lower_inverse(lower).to(v.dtype)
    known = solve @ torch.cat((v * beta, k * (beta * passed)), -1).to(v.dtype)
    values, reads = known.split((size, k.shape[-1]), -1)
    # what a state is multiplied with, for what it stores and for what it answers
    reads = torch.cat((reads, (q * passed).to(v.dtype)), -2)
    keys = (k * (past[..., -1:] - past).exp()[..., None]).to(v.dtype).transpose(-1, -2)
    kept = passed[..., -1, 0]
    written, answers = scan(*(x.flatten(0, 1) for x in (reads, values, keys, kept)))
    output = answers.unflatten(0, (batch, heads)) + attention @ written.unflatten(0, (batch, heads))
    return output.flatten(2, 3).transpose(1, 2).contiguous()


class Norm(nn.Module):
    """Root-mean-square norm with a zero-centred weight, as :func:`layer_norm.rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` in float32."""
        return rms_norm_reference(x.float(), self.weight, self.eps)


class GatedNorm(nn.Module):
    """Norm of each head times ``silu(gate)``, its weight not centred."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """``[..., size]`` in float32."""
        return rms_norm_gated_reference(x.float(), gate, self.weight, self.eps)


class LinearAttention(nn.Module):
    """Gated delta net."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.linear_num_value_heads, config.hidden_size
        self.in_proj_qkvz = nn.Linear(hidden, config.conv_dim + config.value_dim, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * heads, bias=False)
        self.conv1d = nn.Conv1d(
            *(config.conv_dim, config.conv_dim, config.linear_conv_kernel_dim),
            groups=config.conv_dim,
            bias=False,
        )
        # memories of about one token to about a thousand, as the layer's authors begin
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, T, H]`` to ``[B, T, H]``."""
        config = self.config
        keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
        ratio, size = heads // keys, config.linear_value_head_dim * (heads // keys)
        wide, key = config.linear_value_head_dim, config.linear_key_head_dim
        qkvz = self.in_proj_qkvz(hidden).unflatten(-1, (keys, -1))
        q, k, v, z = qkvz.split([key, key, size, size], dim=-1)
        b, a = self.in_proj_ba(hidden).unflatten(-1, (keys, -1)).split([ratio, ratio], dim=-1)
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
        width = config.linear_conv_kernel_dim
        padded = functional.pad(mixed, (0, 0, width - 1, 0))
        tokens = mixed.shape[1]
        taps = self.conv1d.weight[:, 0].unbind(-1)
        mixed = sum(
            (padded[:, tap : tap + tokens] * weight for tap, weight in enumerate(taps)),
            start=torch.zeros((), device=mixed.device),
        )
        mixed = functional.silu(mixed).to(qkvz.dtype)
        q, k, v = mixed.split([config.key_dim, config.key_dim, config.value_dim], dim=-1)
        g, beta = gdn_gating_reference(a.flatten(2), b.flatten(2), self.A_log, self.dt_bias)
        output = gated_delta_rule(
            q.unflatten(-1, (keys, key)),
            k.unflatten(-1, (keys, key)),
            v.unflatten(-1, (heads, wide)),
            g,
            beta,
        )
        output = self.norm(output, z.reshape(*z.shape[:2], heads, wide))
        mixed_out: Tensor = self.out_proj(output.to(qkvz.dtype).flatten(2))
        return mixed_out


class FullAttention(nn.Module):
    """Causal attention with head norms, partial rotary embedding and an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        heads, keys = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, 2 * heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, keys * size, bias=bias)
        self.v_proj = nn.Linear(hidden, keys * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, hidden, bias=bias)
        self.q_norm = Norm(size, config.rms_norm_eps)
        self.k_norm = Norm(size, config.rms_norm_eps)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values by head, and the output's gate.

        Args:
            hidden: ``[B, T, H]``.
            cos: float32 ``[T or B x T, rotary / 2]``, of the tokens' positions.
            sin: like ``cos``.

        Returns:
            ``[B, HQ, T, DH]``, ``[B, HKV, T, DH]`` twice, and ``[B, T, HQ * DH]``.
        """
        size = self.config.head_dim
        query, gate = self.q_proj(hidden).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        key = self.k_proj(hidden).unflatten(-1, (-1, size))
        value = self.v_proj(hidden).unflatten(-1, (-1, size)).transpose(1, 2)
        query = rotate(self.q_norm(query), cos, sin).to(value.dtype).transpose(1, 2)
        key = rotate(self.k_norm(key), cos, sin).to(value.dtype).transpose(1, 2)
        return query, key, value, gate.flatten(2)

    def finish(self, output: Tensor, gate: Tensor) -> Tensor:
        """``[B, HQ, T, DH]`` and the gate to ``[B, T, H]``."""
        gated = output.transpose(1, 2).flatten(2) * gate.sigmoid()
        mixed: Tensor = self.o_proj(gated)
        return mixed

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, H]`` to ``[B, T, H]``, and the keys and values ``[B, HKV, T, DH]``."""
        query, key, value, gate = self.project(hidden, cos, sin)
        group = query.shape[1] // key.shape[1]
        output = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            is_causal=True,
        )
        return self.finish(output, gate), key, value


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first elements of each head of ``[B, T, heads, size]``."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, H]`` to ``[B, T, H]``."""
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        output: Tensor = self.down_proj(inner)
        return output


class TrainingLayer(nn.Module):
    """A decoder layer of either kind."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        if kind == FULL:
            self.self_attn = FullAttention(config)
        else:
            self.linear_attn = LinearAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def linear(self, hidden: Tensor) -> Tensor:
        """A gated-delta-net layer: ``[B, T, H]`` to ``[B, T, H]``."""
        return self.leave(hidden, self.linear_attn(self.input_layernorm(hidden)))

    def full(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A full-attention layer: as above, with its keys and values."""
        mixed, key, value = self.self_attn(self.input_layernorm(hidden), cos, sin)
        return self.leave(hidden, mixed), key, value

    def leave(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Add the mixer's output, then the MLP's."""
        hidden = hidden + mixed
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
