"""Model sizes with a name, and checkpoints of random weights.

* ``tiny``: 4 layers, 512 ids; for tests on a CPU.
* ``m395``: 16 layers, 395 million parameters with both embeddings (the MTP layer comes on top).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from atom.errors import BadInput
from atom.models.model_config import ModelConfig
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP
from atom.models.weights import checkpoint_parts, write_checkpoint

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.1,
        dtype=torch.float32,
    ),
    "m395": ModelConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4032,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=32768,
        dtype=torch.bfloat16,
    ),
}

#: ``embedding_scale`` of :func:`random_checkpoint` with which about half of the first drafts of a
#: random model are right (measured in float32: 0.4 and 0.6)
EMBEDDING_SCALES: dict[str, float] = {"tiny": 20.0, "m395": 800.0}


def preset(name: str) -> ModelConfig:
    """A config by name.

    Raises:
        BadInput: with the names that exist.
    """
    if name not in PRESETS:
        raise BadInput(f"no model size is named {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def _known(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"no model size has that name; known: {', '.join(PRESETS)}")
    return name


#: name of a size as a setting: refused before anything runs
PresetName = Annotated[str, AfterValidator(_known)]


def count_parameters(config: ModelConfig, *, with_mtp: bool = False) -> int:
    """Parameters of a model; tied embeddings count once."""
    return sum(_size(shape) for shape in checkpoint_shapes(config, with_mtp=with_mtp).values())


def checkpoint_shapes(config: ModelConfig, *, with_mtp: bool = True) -> dict[str, tuple[int, ...]]:
    """Shape of each checkpoint tensor by name, without any memory for it."""
    model = Qwen3NextForCausalLM(config, device="meta", max_positions=1)
    mtp = Qwen3NextMTP(model) if with_mtp else None
    return {name: part.shape for name, part in checkpoint_parts(model, mtp).items()}


def random_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    *,
    with_mtp: bool = True,
    embedding_scale: float = 1.0,
) -> None:
    """Write a checkpoint of random weights.

    Random layers say nothing about each other, so an MTP layer of plain noise would guess right
    once in a vocabulary. Here its ``fc`` mostly passes the embedding on. The model's own residual
    stream begins with that embedding too, so both often prefer the same next id, the more so the
    more the embedding outweighs the layers: drafts are sometimes accepted and sometimes not, as
    with a trained model. :data:`EMBEDDING_SCALES` has a scale for each preset.

    Args:
        folder: made if need be; its files are overwritten.
        config: the model; its dtype is replaced by ``dtype``.
        seed: of the weights.
        dtype: dtype in the file; the config's by default.
        with_mtp: whether to write an MTP layer.
        embedding_scale: standard deviation of the embedding beside that of the projections.
    """
    dtype = dtype or config.dtype
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: random_tensor(name, shape, config, generator, embedding_scale).to(dtype)
        for name, shape in checkpoint_shapes(config, with_mtp=with_mtp).items()
    }
    write_checkpoint(folder, replace(config, dtype=dtype), tensors)


def random_tensor(
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    generator: torch.Generator,
    embedding_scale: float,
) -> Tensor:
    """A float32 tensor such as a trained model could have at that place."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("norm.weight") or "_norm_" in name:
        # zero-centred
        return 0.1 * noise
    if name.endswith("A_log"):
        # a memory of some ten tokens: a wrong state is seen long after, and outputs are not so
        # small that their norm blows rounding errors up
        return noise - 2.5
    if name.endswith("dt_bias"):
        return 1 + 0.1 * noise
    if name.endswith("conv1d.weight"):
        return noise * shape[-1] ** -0.5
    if name.endswith("embed_tokens.weight"):
        return noise * config.initializer_range * embedding_scale
    if name == "mtp.fc.weight":
        return embedding_scale * torch.eye(shape[0], shape[1]) + 0.1 * noise * shape[1] ** -0.5
    return noise * config.initializer_range


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
