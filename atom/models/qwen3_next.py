"""The dense Qwen3-Next language model over paged caches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.layer_norm import add_rms_norm
from atom.model_ops.prefill_plan import PrefillPlan
from atom.model_ops.replay_ring import clear_rings
from atom.model_ops.rotary_embedding import RotaryTable
from atom.models.caches import ModelCaches
from atom.models.decoder_layer import (
    Attention,
    DecoderLayer,
    GatedDeltaNet,
    Parts,
    parameter,
)
from atom.models.model_config import FULL, ModelConfig
from atom.models.weight_part import plain


class Qwen3NextForCausalLM(nn.Module):
    """Embedding, decoder layers, final norm, output projection. Weights are uninitialised.

    Attributes:
        config: the model's sizes.
        rotary: cosines and sines, shared with an MTP layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        """Allocate the weights.

        Args:
            config: the model.
            dtype: dtype of the weights; the checkpoint's by default.
            device: where they lie.
            max_positions: positions of the rotary table; the model's longest sequence by default.
        """
        super().__init__()
        dtype = dtype or config.dtype
        self.config = config
        self.embed_tokens = parameter(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        layers: list[DecoderLayer] = []
        states = 0
        for kind in config.layer_types:
            mixer: Attention | GatedDeltaNet
            if kind == FULL:
                mixer = Attention(config, dtype, device)
            else:
                mixer = GatedDeltaNet(config, states, dtype, device)
                states += 1
            layers.append(DecoderLayer(config, mixer, dtype, device))
        self.layers = nn.ModuleList(layers)
        self.norm = parameter(config.hidden_size, dtype=dtype, device=device)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )
        self.rotary = RotaryTable.build(
            rotary_dim=config.rotary_dim,
            max_positions=max_positions or config.max_position_embeddings,
            theta=config.rope_theta,
            device=device,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of the caches but the recurrent state."""
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed_tokens.device

    def parts(self) -> Parts:
        """Checkpoint tensors by their Hugging Face names, in the order of the layers."""
        found = {"model.embed_tokens.weight": plain(self.embed_tokens)}
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= layer.parts(f"model.layers.{number}")
        found["model.norm.weight"] = plain(self.norm)
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = plain(self.lm_head)
        return found

    def forward(
        self,
        input_ids: Tensor,
        meta: AttentionMetadata,
        caches: ModelCaches,
        *,
        guard: GuardMode,
        record: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run a step's tokens through all layers.

        Args:
            input_ids: int64 ``[T]``; padding tokens need a valid id, too.
            meta: the batch.
            caches: changed in place.
            guard: what the state kernels do about a bad count or slot (decode only).
            record: int32 ``[8]``, their record.
            out: contiguous ``[T, H]`` for what is returned; ``None`` makes one.

        Returns:
            ``[T, H]`` behind the final norm: what the output projection takes, and what the MTP
            layer takes (it is trained on normed states).
        """
        plan = None
        if meta.is_prefill and meta.num_rows:
            replays = caches.replay is not None
            plan = PrefillPlan(meta, meta.state_slots if replays else None)
            if caches.replay is not None:
                clear_rings(caches.replay, meta)
        output: Tensor = functional.embedding(input_ids, self.embed_tokens)
        residual: Tensor | None = None
        attention = 0
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            normed, residual = layer.enter(output, residual)
            mixer = layer.mixer
            if isinstance(mixer, Attention):
                mixed = mixer(normed, meta, caches.kv_cache[attention], self.rotary)
                attention += 1
            else:
                number = mixer.state_layer
                mixed = mixer(
                    *(normed, meta, caches.conv_state[number], caches.recurrent_state[number]),
                    None if caches.replay is None else caches.replay.layer(number),
                    plan,
                    guard,
                    record,
                )
            output, residual = layer.leave(mixed, residual)
        assert residual is not None
        return add_rms_norm(output, residual, self.norm, self.config.rms_norm_eps, out=out)[0]

    def project(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[N, H]`` behind the final norm to logits ``[N, vocabulary]`` in the model's dtype."""
        return torch.mm(hidden, self.lm_head.t(), out=out)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[N, H]`` behind the final norm to float32 ``[N, vocabulary]``."""
        return self.project(hidden).float()
