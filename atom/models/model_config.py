"""Sizes of a dense Qwen3-Next model, read from and written to Hugging Face's ``config.json``.

Field names and defaults are those of transformers' ``Qwen3NextConfig``: a field that a file leaves
out has the same value here as there. That includes the mixture-of-experts fields, whose defaults
describe a model with experts; such a model is refused before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from atom.errors import BadInput
from atom.models.config_checks import DEFAULT_LAYERS, DTYPES, refuse_unrunnable
from atom.models.json_file import write_json

LINEAR = "linear_attention"
FULL = "full_attention"

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense Qwen3-Next model.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream, ``H``.
        intermediate_size: width of the gated MLP, ``I``.
        num_hidden_layers: decoder layers, without the MTP layer.
        layer_types: ``linear_attention`` or ``full_attention`` of each layer.
        num_attention_heads: query heads of a full-attention layer, ``HQ``.
        num_key_value_heads: its key and value heads, ``HKV``.
        head_dim: their size, ``DH``.
        linear_num_key_heads: query and key heads of a gated-delta-net layer, ``HK``.
        linear_num_value_heads: its value heads, ``HV``.
        linear_key_head_dim: ``K``.
        linear_value_head_dim: ``V``.
        linear_conv_kernel_dim: width of its causal convolution in tokens, ``W``.
        rms_norm_eps: epsilon of every norm.
        rope_theta: base of the rotary frequencies.
        partial_rotary_factor: share of a head's elements that turn.
        max_position_embeddings: longest sequence that the model was made for.
        tie_word_embeddings: whether the embedding is the output projection, too.
        attention_bias: whether a full-attention layer's projections have a bias.
        initializer_range: standard deviation of random projections.
        eos_token_ids: ids that end a sequence.
        bos_token_id: id that begins one, or ``None``.
        dtype: dtype that the checkpoint was made with.

    Raises:
        BadInput: naming the field, for sizes that no model can have.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = DEFAULT_LAYERS
    layer_types: tuple[str, ...] = ()
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", layer_pattern(self.num_hidden_layers, 4))
        for field in fields(self):
            value = getattr(self, field.name)
            wrong_int = field.type == "int" and (type(value) is not int or value < 1)
            wrong_float = field.type == "float" and not (
                type(value) in (int, float) and 0 < value < float("inf")
            )
            if wrong_int or wrong_float:
                kind = "a whole number of at least 1" if wrong_int else "a number above 0"
                raise BadInput(f"model config: {field.name}={value!r}; expected {kind}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise BadInput(
                f"model config: layer_types names {len(self.layer_types)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if wrong := sorted(set(self.layer_types) - {LINEAR, FULL}):
            raise BadInput(f"model config: layer_types has {wrong[0]!r}; known: {LINEAR}, {FULL}")
        self._divides("num_attention_heads", "num_key_value_heads")
        self._divides("linear_num_value_heads", "linear_num_key_heads")
        if self.linear_conv_kernel_dim < 2:
            raise BadInput("model config: linear_conv_kernel_dim=1; expected at least 2")
        rotary = int(self.head_dim * self.partial_rotary_factor)
        if not 2 <= rotary <= self.head_dim or rotary % 2:
            raise BadInput(
                f"model config: head_dim={self.head_dim} and partial_rotary_factor="
                f"{self.partial_rotary_factor} turn {rotary} elements of a head; expected an even "
                f"number from 2 to {self.head_dim}"
            )

    def _divides(self, many: str, few: str) -> None:
        if getattr(self, many) % getattr(self, few):
            raise BadInput(
                f"model config: {many}={getattr(self, many)} is no multiple of "
                f"{few}={getattr(self, few)}"
            )

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that turn, from its first on."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """``HK * K``."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """``HV * V``."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution, ``D``: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the gated-delta-net layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read ``config.json`` of a checkpoint folder.

        Raises:
            BadInput: if there is none, it is no JSON object, or :meth:`from_dict` refuses it.
        """
        path = Path(folder) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}; expected a checkpoint folder") from None
        except ValueError as error:
            raise BadInput(f"{path}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadInput(f"{path}: expected a JSON object, found {type(values).__name__}")
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "config.json") -> Self:
        """Take the fields of a ``config.json``. Unknown fields are left aside, as there.

        Args:
            values: the file's content.
            where: named in errors.

        Raises:
            BadInput: for another architecture, a model with experts, or a value that this engine
                cannot compute with.
        """
        layers = refuse_unrunnable(values, where)
        own = {field.name for field in fields(cls)} - {"layer_types", "eos_token_ids", "dtype"}
        chosen = {name: values[name] for name in own if values.get(name) is not None}
        given = values.get("layer_types")
        interval = values.get("full_attention_interval", 4)
        if given:
            chosen["layer_types"] = tuple(given)
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        for name in ("rope_theta", "partial_rotary_factor"):
            if rope.get(name) is not None:
                chosen[name] = rope[name]
        ends = values.get("eos_token_id")
        chosen["eos_token_ids"] = (
            tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        )
        dtype = values.get("dtype") or values.get("torch_dtype")
        if dtype is not None:
            chosen["dtype"] = _DTYPES[dtype]
        try:
            if not given:
                chosen["layer_types"] = layer_pattern(layers, interval)
            return cls(**chosen)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None

    def refuse_longer(self, length: int, option: str) -> None:
        """Raise unless the model was made for sequences of so many tokens.

        Args:
            length: tokens that a sequence may grow to.
            option: what set it, named in the error.

        Raises:
            BadInput: ``length`` is above ``max_position_embeddings``.
        """
        most = self.max_position_embeddings
        if length > most:
            raise BadInput(f"{option} {length}: the model was made for {most} positions")

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` of this model; transformers reads it to an equal model."""
        apart = ("layer_types", "eos_token_ids", "dtype", "rope_theta", "partial_rotary_factor")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        ends = list(self.eos_token_ids)
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **plain,
            "layer_types": list(self.layer_types),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "hidden_act": "silu",
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` into an existing folder."""
        write_json(Path(folder) / "config.json", self.to_dict())


def layer_pattern(layers: int, interval: int) -> tuple[str, ...]:
    """Every ``interval``-th layer has full attention, the others a gated delta net."""
    if type(interval) is not int or interval < 1:
        raise BadInput(f"model config: full_attention_interval={interval!r}; expected at least 1")
    return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
