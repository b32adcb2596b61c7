"""The multi-token prediction (MTP) layer: from a state and the next id to the id after that.

Names and computation are those of public checkpoints (``mtp.*``; transformers leaves them aside)::

    x = fc([norm(embedding of the next token), norm(hidden state)])
    x = full-attention decoder layer(x)
    hidden = norm(x);  logits = the model's own output projection(hidden)

The hidden state given is the model's **behind its final norm**; for a second and later guess, it is
the MTP layer's own output, behind ``mtp.norm``. The layer at position ``p`` takes the state of
position ``p`` and the token of position ``p + 1``, and its keys and values go to place ``p``.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.layer_norm import add_rms_norm, embed_norm_join
from atom.models.decoder_layer import Attention, DecoderLayer, Parts, parameter
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.weight_part import plain


class Qwen3NextMTP(nn.Module):
    """One MTP layer beside its model, whose embedding and output projection it shares."""

    def __init__(self, target: Qwen3NextForCausalLM) -> None:
        """Allocate the weights with the target's dtype, where the target lies."""
        super().__init__()
        config, dtype, device = target.config, target.dtype, target.device
        self.config = config
        # in a tuple, so that the target's weights do not count as this module's
        self._target = (target,)
        hidden = config.hidden_size
        self.pre_fc_norm_embedding = parameter(hidden, dtype=dtype, device=device)
        self.pre_fc_norm_hidden = parameter(hidden, dtype=dtype, device=device)
        self.fc = parameter(hidden, 2 * hidden, dtype=dtype, device=device)
        self.layer = DecoderLayer(config, Attention(config, dtype, device), dtype, device)
        self.norm = parameter(hidden, dtype=dtype, device=device)

    @property
    def target(self) -> Qwen3NextForCausalLM:
        """The model that this layer belongs to."""
        return self._target[0]

    def parts(self) -> Parts:
        """Checkpoint tensors by their public names."""
        return {
            "mtp.pre_fc_norm_embedding.weight": plain(self.pre_fc_norm_embedding),
            "mtp.pre_fc_norm_hidden.weight": plain(self.pre_fc_norm_hidden),
            "mtp.fc.weight": plain(self.fc),
            **self.layer.parts("mtp.layers.0"),
            "mtp.norm.weight": plain(self.norm),
        }

    def forward(
        self, next_ids: Tensor, hidden: Tensor, meta: AttentionMetadata, kv_cache: Tensor
    ) -> Tensor:
        """Run the layer over a step's tokens.

        Args:
            next_ids: int64 ``[T]``, for each position the id of the position behind it.
            hidden: ``[T, H]``, states behind the model's final norm, or this layer's own outputs.
            meta: the batch; context lengths and slots count the positions of ``hidden``.
            kv_cache: ``[2, blocks, block size, HKV, DH]``, the layer's own; changed in place.

        Returns:
            ``[T, H]`` behind the layer's norm.
        """
        target, eps = self.target, self.config.rms_norm_eps
        joined = embed_norm_join(
            *(next_ids, target.embed_tokens, hidden),
            *(self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, eps),
        )
        merged = functional.linear(joined, self.fc)
        normed, residual = self.layer.enter(merged, None)
        mixed = self.layer.mixer(normed, meta, kv_cache, target.rotary)
        output, residual = self.layer.leave(mixed, residual)
        return add_rms_norm(output, residual, self.norm, eps)[0]

    def project(self, hidden: Tensor) -> Tensor:
        """``[N, H]`` behind the layer's norm to logits ``[N, vocabulary]`` in the model's dtype."""
        return self.target.project(hidden)
