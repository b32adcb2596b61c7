"""Models that are trained here, by name.

Small enough that their weights lie in the repository (at most 20 MB in bfloat16), and with the
layers of the family: three gated delta nets, then full attention.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from atom.errors import BadInput
from atom.models.model_config import ModelConfig
from atom.models.tokenizer_training import END_OF_TEXT, TURN_END

#: rows of the embedding are a multiple of it
_VOCAB_STEP = 64


def _config(
    layers: int, hidden: int, inner: int, heads: int, *, linear_heads: int, value_heads: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=1408,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        linear_num_key_heads=linear_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


SIZES: dict[str, ModelConfig] = {
    # 8.6 million parameters with the MTP layer
    "words8": _config(8, 256, 768, 4, linear_heads=4, value_heads=4),
    # 9.3 million: deeper and narrower
    "words16": _config(16, 192, 544, 4, linear_heads=3, value_heads=3),
    # to see the whole path on a CPU
    "words1": _config(4, 128, 256, 2, linear_heads=2, value_heads=2),
}


def for_tokenizer(config: ModelConfig, folder: str | Path) -> ModelConfig:
    """The config with the vocabulary and the end token of a tokenizer's folder.

    Raises:
        BadInput: if there is no such tokenizer.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        tokens = len(content["model"]["vocab"])
        ends = (special[TURN_END], special[END_OF_TEXT])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: {error!r}; expected a tokenizer of tokenizer_training") from None
    rows = -(-tokens // _VOCAB_STEP) * _VOCAB_STEP
    return replace(config, vocab_size=rows, eos_token_ids=ends)
