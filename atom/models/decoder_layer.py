"""The layers of Qwen3-Next over paged caches, with projections merged so that launches are few.

Names in Hugging Face checkpoints are kept by :meth:`parts` of each layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from atom.config import GuardMode
from atom.model_ops.activation import sigmoid_gate, silu_and_mul
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from atom.model_ops.gated_delta_rule import (
    gated_delta_rule_prefill,
    gated_delta_rule_update_from_gates,
    gdn_gating,
    rms_norm_gated,
)
from atom.model_ops.gated_delta_rule_replay import gated_delta_rule_replay_from_gates
from atom.model_ops.layer_norm import add_rms_norm, rms_norm
from atom.model_ops.paged_attention import paged_attention
from atom.model_ops.prefill_plan import PrefillPlan
from atom.model_ops.replay_ring import ReplayRing
from atom.model_ops.rotary_embedding import RotaryTable, qk_norm_rope_store
from atom.models.model_config import ModelConfig
from atom.models.weight_part import (
    WeightPart,
    merged,
    plain,
    qkvz_ba_parts,
    query_gate_key_value_parts,
)

Parts = dict[str, WeightPart]


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter that takes no part in differentiation."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """Linear attention: causal convolution, gated delta rule, gated norm."""

    def __init__(
        self, config: ModelConfig, state_layer: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate the weights.

        Args:
            config: the model.
            state_layer: number of the layer among those with a state.
            dtype: dtype of the weights.
            device: where they lie.
        """
        super().__init__()
        self.config, self.state_layer = config, state_layer
        heads, hidden = config.linear_num_value_heads, config.hidden_size
        rows = config.conv_dim + config.value_dim + 2 * heads
        self.in_proj = parameter(rows, hidden, dtype=dtype, device=device)
        taps = parameter(config.linear_conv_kernel_dim, config.conv_dim, dtype=dtype, device=device)
        # [D, W] with the channels one behind the other in memory, as the kernels read them
        self.conv_weight = nn.Parameter(taps.data.t(), requires_grad=False)
        # the gates are computed in float32, so their few weights are kept in it
        self.A_log = parameter(heads, dtype=torch.float32, device=device)
        self.dt_bias = parameter(heads, dtype=torch.float32, device=device)
        self.norm = parameter(config.linear_value_head_dim, dtype=dtype, device=device)
        self.out_proj = parameter(hidden, config.value_dim, dtype=dtype, device=device)

    def parts(self, prefix: str) -> Parts:
        """Checkpoint tensors of this layer by name."""
        qkvz, ba = qkvz_ba_parts(self.config, self.in_proj)
        dim, width = self.conv_weight.shape
        return {
            f"{prefix}.in_proj_qkvz.weight": qkvz,
            f"{prefix}.in_proj_ba.weight": ba,
            f"{prefix}.conv1d.weight": plain(self.conv_weight, dim, 1, width),
            f"{prefix}.A_log": plain(self.A_log),
            f"{prefix}.dt_bias": plain(self.dt_bias),
            f"{prefix}.norm.weight": plain(self.norm),
            f"{prefix}.out_proj.weight": plain(self.out_proj),
        }

    def forward(
        self,
        hidden: Tensor,
        meta: AttentionMetadata,
        conv_state: Tensor,
        recurrent_state: Tensor,
        ring: ReplayRing | None,
        plan: PrefillPlan | None,
        guard: GuardMode,
        record: Tensor,
    ) -> Tensor:
        """``[T, H]`` to ``[T, H]``; states and ring are this layer's and change in place.

        Before prompt chunks the rings are cleared, once for all layers.
        """
        config = self.config
        heads = config.linear_num_value_heads
        projected = functional.linear(hidden, self.in_proj)
        qkv, z, b, a = projected.split([config.conv_dim, config.value_dim, heads, heads], dim=-1)
        checks: dict[str, Any] = {"guard": guard, "record": record, "layer": self.state_layer}
        if meta.is_prefill:
            qkv = causal_conv1d_prefill(qkv, self.conv_weight, None, conv_state, meta)
        else:
            qkv = causal_conv1d_update(qkv, self.conv_weight, None, conv_state, meta, **checks)
        query, key, value = qkv.split([config.key_dim, config.key_dim, config.value_dim], dim=-1)
        query = query.unflatten(-1, (-1, config.linear_key_head_dim))
        key = key.unflatten(-1, (-1, config.linear_key_head_dim))
        value = value.unflatten(-1, (-1, config.linear_value_head_dim))
        parts = query, key, value
        if meta.is_prefill:
            gates = gdn_gating(a, b, self.A_log, self.dt_bias)
            output = gated_delta_rule_prefill(*parts, *gates, recurrent_state, meta, plan=plan)
        else:
            raw = a, b, self.A_log, self.dt_bias
            if ring is None:
                output = gated_delta_rule_update_from_gates(
                    *parts, *raw, recurrent_state, meta, **checks
                )
            else:
                output = gated_delta_rule_replay_from_gates(
                    *parts, *raw, recurrent_state, ring, meta, **checks
                )
        gate = z.unflatten(-1, (-1, config.linear_value_head_dim))
        output = rms_norm_gated(output, gate, self.norm, config.rms_norm_eps)
        return functional.linear(output.flatten(1), self.out_proj)


class Attention(nn.Module):
    """Full attention: head norms, partial rotary embedding, and a sigmoid gate on the output."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        size = config.head_dim
        self.query_dim = config.num_attention_heads * size
        self.key_dim = config.num_key_value_heads * size
        rows, hidden = 2 * self.query_dim + 2 * self.key_dim, config.hidden_size
        self.qkv_gate_proj = parameter(rows, hidden, dtype=dtype, device=device)
        self.o_proj = parameter(hidden, self.query_dim, dtype=dtype, device=device)
        self.q_norm = parameter(size, dtype=dtype, device=device)
        self.k_norm = parameter(size, dtype=dtype, device=device)
        bias = config.attention_bias
        self.qkv_gate_bias = parameter(rows, dtype=dtype, device=device) if bias else None
        self.o_bias = parameter(hidden, dtype=dtype, device=device) if bias else None

    def parts(self, prefix: str) -> Parts:
        """Checkpoint tensors of this layer by name."""
        names = [f"{prefix}.{kind}_proj" for kind in "qkv"]
        weights = query_gate_key_value_parts(self.config, self.qkv_gate_proj)
        found = {f"{name}.weight": part for name, part in zip(names, weights, strict=True)}
        found[f"{prefix}.o_proj.weight"] = plain(self.o_proj)
        found[f"{prefix}.q_norm.weight"] = plain(self.q_norm)
        found[f"{prefix}.k_norm.weight"] = plain(self.k_norm)
        if self.qkv_gate_bias is not None and self.o_bias is not None:
            biases = query_gate_key_value_parts(self.config, self.qkv_gate_bias)
            found |= {f"{name}.bias": part for name, part in zip(names, biases, strict=True)}
            found[f"{prefix}.o_proj.bias"] = plain(self.o_bias)
        return found

    def forward(
        self, hidden: Tensor, meta: AttentionMetadata, kv_cache: Tensor, table: RotaryTable
    ) -> Tensor:
        """``[T, H]`` to ``[T, H]``; this step's keys and values are stored first."""
        config, size = self.config, self.config.head_dim
        projected = functional.linear(hidden, self.qkv_gate_proj, self.qkv_gate_bias)
        sizes = [self.query_dim, self.key_dim, self.key_dim, self.query_dim]
        query, key, value, gate = projected.split(sizes, dim=-1)
        query = qk_norm_rope_store(
            query.unflatten(-1, (-1, size)),
            key.unflatten(-1, (-1, size)),
            value.unflatten(-1, (-1, size)),
            self.q_norm,
            self.k_norm,
            meta.positions,
            table,
            config.rms_norm_eps,
            config.rotary_dim,
            kv_cache,
            meta.slot_mapping,
        )
        output = paged_attention(query, kv_cache, meta, scale=size**-0.5)
        output = sigmoid_gate(output.flatten(1), gate)
        return functional.linear(output, self.o_proj, self.o_bias)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_up_proj = parameter(2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = parameter(hidden, inner, dtype=dtype, device=device)

    def parts(self, prefix: str) -> Parts:
        """Checkpoint tensors of this layer by name."""
        inner = self.down_proj.shape[1]
        gate, up = merged(self.gate_up_proj, inner, inner)
        return {
            f"{prefix}.gate_proj.weight": gate,
            f"{prefix}.up_proj.weight": up,
            f"{prefix}.down_proj.weight": plain(self.down_proj),
        }

    def forward(self, hidden: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        gated = silu_and_mul(functional.linear(hidden, self.gate_up_proj))
        return functional.linear(gated, self.down_proj)


class DecoderLayer(nn.Module):
    """Norm, token mixer, norm, MLP; the residual stream runs beside them.

    The sum of the last layer's output and the stream is taken by the next norm, in its launch.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: GatedDeltaNet | Attention,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.mixer = mixer
        self.mlp = GatedMLP(config, dtype, device)
        self.input_layernorm = parameter(config.hidden_size, dtype=dtype, device=device)
        self.post_attention_layernorm = parameter(config.hidden_size, dtype=dtype, device=device)

    def parts(self, prefix: str) -> Parts:
        """Checkpoint tensors of this layer by name."""
        mixer = "self_attn" if isinstance(self.mixer, Attention) else "linear_attn"
        return {
            **self.mixer.parts(f"{prefix}.{mixer}"),
            **self.mlp.parts(f"{prefix}.mlp"),
            f"{prefix}.input_layernorm.weight": plain(self.input_layernorm),
            f"{prefix}.post_attention_layernorm.weight": plain(self.post_attention_layernorm),
        }

    def enter(self, output: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """First norm.

        Args:
            output: ``[T, H]``, the last layer's output, or what the first layer is given.
            residual: ``[T, H]``, the stream before ``output`` was added; ``None`` at the start.

        Returns:
            The mixer's input and the stream.
        """
        if residual is None:
            return rms_norm(output, self.input_layernorm, self.eps), output
        return add_rms_norm(output, residual, self.input_layernorm, self.eps)

    def leave(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Second norm and MLP.

        Returns:
            The layer's output, not yet added, and the stream.
        """
        normed, residual = add_rms_norm(mixed, residual, self.post_attention_layernorm, self.eps)
        return self.mlp(normed), residual
