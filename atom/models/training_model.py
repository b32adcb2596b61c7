"""A dense Qwen3-Next model with its MTP layer, as training needs it.

The MTP layer is trained as it will draft (:mod:`atom.spec_decode.mtp`): its first pass runs over
all positions on the model's own states; from chosen positions it then goes on, a token a pass, on
its own output as hidden state, attending to the first pass up to where it started and to its own
drafts. Ids of accepted drafts are those of the text, so the text's are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from atom.models.model_config import FULL, ModelConfig
from atom.models.training_layers import Norm, TrainingLayer

#: passes of the MTP layer, the first one included: as many as drafts of a step (MTP-3)
DRAFT_PASSES = 3


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean losses of a batch, in nats a token, as 0-dimensional float32 tensors.

    Attributes:
        total: what is minimised.
        model: next token, weighted over all positions.
        drafts: ``[DRAFT_PASSES]``, each pass of the MTP layer, on answers only.
        right: share of answer tokens that are the model's likeliest.
        drafts_right: ``[DRAFT_PASSES]``, the same of each pass, given that the text before is.
    """

    total: Tensor
    model: Tensor
    drafts: Tensor
    right: Tensor
    drafts_right: Tensor


class MultiTokenPrediction(nn.Module):
    """The MTP layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Norm(hidden, eps)
        self.pre_fc_norm_hidden = Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([TrainingLayer(config, FULL)])
        self.norm = Norm(hidden, eps)

    def merge(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What the layer takes: the next token's embedding and a state, ``[B, T, H]`` each."""
        pair = (self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden))
        merged: Tensor = self.fc(torch.cat(pair, dim=-1))
        return merged


class _Trunk(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TrainingLayer(config, kind) for kind in config.layer_types])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class TrainingModel(nn.Module):
    """The model; float32 parameters under Hugging Face names.

    Args:
        config: the model's sizes.
        seed: of the parameters.
        compiled: whether torch.compile makes kernels of the layers, once for each of two kinds.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0, compiled: bool = False) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = _Trunk(config)
            self.mtp = MultiTokenPrediction(config)
            if not config.tie_word_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self._initialise()
        wrap = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        # functions, not bound methods: all layers of a kind share one compilation
        self._linear = wrap(TrainingLayer.linear)
        self._full = wrap(TrainingLayer.full)

    def _initialise(self) -> None:
        layers = self.config.num_hidden_layers
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or "conv1d" in name:
                continue
            scale = parameter.shape[-1] ** -0.5
            if "embed_tokens" in name:
                scale = 0.02
            elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                scale *= (2 * layers) ** -0.5
            nn.init.normal_(parameter, std=scale)

    @property
    def head(self) -> Tensor:
        """The output projection ``[vocabulary, H]``."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[..., rotary / 2]`` of positions ``[...]``."""
        rotary = self.config.rotary_dim
        index = torch.arange(0, rotary, 2, device=positions.device, dtype=torch.float32)
        angle = positions[..., None].float() * self.config.rope_theta ** (-index / rotary)
        return angle.cos(), angle.sin()

    def hidden(self, ids: Tensor) -> Tensor:
        """States behind the final norm.

        Args:
            ids: int64 ``[B, T]``; T is a multiple of 64.
        """
        cos, sin = self.angles(torch.arange(ids.shape[1], device=ids.device))
        state = self.model.embed_tokens(ids)
        for layer, kind in zip(self.model.layers, self.config.layer_types, strict=True):
            if kind == FULL:
                state, _, _ = self._full(layer, state, cos, sin)
            else:
                state = self._linear(layer, state)
        normed: Tensor = self.model.norm(state)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` behind a final norm to ``[..., vocabulary]``."""
        return functional.linear(hidden, self.head)

    def losses(
        self,
        ids: Tensor,
        answers: Tensor,
        chosen: Tensor,
        *,
        question_weight: float,
        draft_weight: float,
        passes: int = DRAFT_PASSES,
    ) -> Losses:
        """Losses of a batch.

        Args:
            ids: int64 ``[B, T + 1 + DRAFT_PASSES]``.
            answers: bool, like ``ids``: tokens that the model shall write.
            chosen: int64 ``[B, Q]``, positions below T that drafts go on from.
            question_weight: weight of a token that it need not write, beside 1 of one that it must.
            draft_weight: weight of each pass of the MTP layer.
            passes: passes that are learned; the others are only watched.
        """
        tokens = ids.shape[1] - 1 - DRAFT_PASSES
        hidden = self.hidden(ids[:, :tokens])
        written = answers[:, 1 : tokens + 1].float()
        weight = written + question_weight * (1.0 - written)
        model, right = _score(hidden, self.head, ids[:, 1 : tokens + 1], weight, written)

        cos, sin = self.angles(torch.arange(tokens, device=ids.device))
        merged = self.mtp.merge(self.model.embed_tokens(ids[:, 1 : tokens + 1]), hidden)
        layer = self.mtp.layers[0]
        state, key, value = self._full(layer, merged, cos, sin)
        state = self.mtp.norm(state)
        written = answers[:, 2 : tokens + 2].float()
        found = [_score(state, self.head, ids[:, 2 : tokens + 2], written, written)]

        state = state.gather(1, chosen[..., None].expand(-1, -1, state.shape[-1]))
        seen = torch.arange(tokens, device=ids.device) <= chosen[..., None]
        own: list[tuple[Tensor, Tensor]] = []
        for number in range(1, DRAFT_PASSES):
            embedding = self.model.embed_tokens(ids.gather(1, chosen + 1 + number))
            cos, sin = self.angles(chosen + number)
            state, pair = _draft_pass(
                *(self.mtp, embedding, state, cos, sin, key, value, seen, own)
            )
            own = [*own, pair]
            target = chosen + 2 + number
            written = answers.gather(1, target).float()
            found.append(_score(state, self.head, ids.gather(1, target), written, written))
        drafts = torch.stack([loss for loss, _ in found])
        return Losses(
            total=model + draft_weight * drafts[:passes].sum(),
            model=model.detach(),
            drafts=drafts.detach(),
            right=right,
            drafts_right=torch.stack([share for _, share in found]),
        )

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The checkpoint: tensors on the CPU by name."""
        return {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }


def _draft_pass(
    mtp: MultiTokenPrediction,
    embedding: Tensor,
    state: Tensor,
    cos: Tensor,
    sin: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    own: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One more token through the MTP layer, from each chosen position.

    Args:
        mtp: the layer.
        embedding: ``[B, Q, H]``, of the ids behind.
        state: ``[B, Q, H]``, the pass before's output.
        cos: ``[B, Q, rotary / 2]``.
        sin: like ``cos``.
        key: ``[B, HKV, T, DH]``, of the first pass.
        value: like ``key``.
        seen: bool ``[B, Q, T]``, what of the first pass is attended to.
        own: keys and values ``[B, HKV, Q, DH]`` of the passes between.

    Returns:
        The output ``[B, Q, H]`` behind the layer's norm, and this pass's keys and values.
    """
    layer = mtp.layers[0]
    assert isinstance(layer, TrainingLayer)
    hidden = mtp.merge(embedding, state)
    query, new_key, new_value, gate = layer.self_attn.project(
        layer.input_layernorm(hidden), cos, sin
    )
    group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5
    queries = query.unflatten(1, (-1, group))
    scores = (queries @ key.unsqueeze(2).transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    pairs = [*own, (new_key, new_value)]
    near = [(queries.float() * k.unsqueeze(2).float()).sum(-1, keepdim=True) for k, _ in pairs]
    share = torch.cat([scores, *(s * scale for s in near)], dim=-1).softmax(-1)
    tokens = key.shape[2]
    output = (share[..., :tokens].to(value.dtype) @ value.unsqueeze(2)).float()
    for place, (_, v) in enumerate(pairs):
        output = output + share[..., tokens + place, None] * v.unsqueeze(2).float()
    mixed = layer.self_attn.finish(output.flatten(1, 2).to(gate.dtype), gate)
    return mtp.norm(layer.leave(hidden, mixed)), (new_key, new_value)


def _score(
    hidden: Tensor, head: Tensor, targets: Tensor, weight: Tensor, written: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted mean loss, and the share of written tokens that are the likeliest."""
    logits = functional.linear(hidden, head).float()
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    weight, written = weight.flatten(), written.flatten()
    mean = (loss * weight).sum() / weight.sum().clamp(min=1.0)
    right = (logits.flatten(0, 1).argmax(-1) == targets.flatten()).float()
    return mean, (right * written).sum() / written.sum().clamp(min=1.0)
