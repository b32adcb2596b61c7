"""Sizes read and written as transformers reads and writes them; models with experts refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_requests import small_config

from atom.errors import BadInput
from atom.models.model_config import FULL, LINEAR, ModelConfig
from atom.models.presets import PRESETS

#: of a dense model; a test adds to them
DENSE: dict[str, Any] = {"model_type": "qwen3_next", "num_experts": 0}

CONFIGS = [
    *PRESETS.values(),
    small_config(tie_word_embeddings=True, attention_bias=True, eos_token_ids=(3,)),
    small_config(eos_token_ids=(3, 5), bos_token_id=1, rope_theta=5e6, partial_rotary_factor=1.0),
    small_config(num_hidden_layers=3, layer_types=(FULL, LINEAR, FULL), dtype=torch.bfloat16),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_round_trip(config: ModelConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_transformers_reads_and_writes_the_same_model(config: ModelConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    peer = transformers.Qwen3NextConfig.from_pretrained(tmp_path)
    for field in fields(config):
        if hasattr(peer, field.name) and field.name not in ("layer_types", "dtype"):
            assert getattr(peer, field.name) == getattr(config, field.name), field.name
    assert tuple(peer.layer_types) == config.layer_types
    assert peer.rope_parameters["rope_theta"] == config.rope_theta
    assert peer.rope_parameters["partial_rotary_factor"] == config.partial_rotary_factor
    peer.save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path) == config


def test_a_field_left_out_has_transformers_value() -> None:
    ours = ModelConfig.from_dict(DENSE)
    peer = transformers.Qwen3NextConfig(num_experts=0)
    for field in fields(ours):
        if hasattr(peer, field.name) and field.name not in ("layer_types", "dtype"):
            assert getattr(peer, field.name) == getattr(ours, field.name), field.name
    assert tuple(peer.layer_types) == ours.layer_types
    assert peer.rope_parameters["partial_rotary_factor"] == ours.partial_rotary_factor
    assert peer.rope_parameters["rope_theta"] == ours.rope_theta


def test_fields_as_older_files_have_them() -> None:
    older = {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "torch_dtype": "float16"}
    config = ModelConfig.from_dict(
        DENSE | older | {"num_hidden_layers": 6, "full_attention_interval": 3, "head_dim": 64}
    )
    assert (config.rope_theta, config.rotary_dim, config.dtype) == (1e7, 32, torch.float16)
    assert config.full_layers == (2, 5)


@pytest.mark.parametrize("experts", [None, 0, 8])
@pytest.mark.parametrize("step", [None, 1, 2, 5])
@pytest.mark.parametrize("dense", [None, [], [1, 3], [0, 1, 2, 3]])
def test_a_model_is_refused_just_where_transformers_makes_experts(
    experts: int | None, step: int | None, dense: list[int] | None
) -> None:
    given = {"num_experts": experts, "decoder_sparse_step": step, "mlp_only_layers": dense}
    given = {name: value for name, value in given.items() if value is not None}
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    with torch.device("meta"):
        peer = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **given))
    has_experts = any("experts" in name for name, _ in peer.named_parameters())
    values = {"model_type": "qwen3_next", **sizes, **given}
    if not has_experts:
        ModelConfig.from_dict(values)
        return
    with pytest.raises(BadInput, match="have experts") as caught:
        ModelConfig.from_dict(values)
    for name in ("num_experts", "decoder_sparse_step", "mlp_only_layers"):
        assert f"{name}=" in str(caught.value)


def test_the_refusal_says_which_layers_and_why() -> None:
    with pytest.raises(BadInput) as caught:
        ModelConfig.from_dict({"model_type": "qwen3_next", "decoder_sparse_step": 24})
    assert str(caught.value) == (
        "config.json: layers 23, 47 have experts (num_experts=512 (its default), "
        "decoder_sparse_step=24, mlp_only_layers=[] (its default)); this engine runs dense models: "
        "num_experts=0, or mlp_only_layers naming every layer"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type is 'yarn'"),
        ({"rope_scaling": "yarn"}, "rope parameters are 'yarn'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"num_experts": "many"}, "cannot tell"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "no multiple"),
        ({"linear_num_value_heads": 24}, "no multiple of linear_num_key_heads=16"),
        ({"head_dim": 12}, "turn 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"num_hidden_layers": 2, "layer_types": [FULL]}, "names 1 layers"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding"]}, "'sliding'"),
        ({"full_attention_interval": 0}, "full_attention_interval=0"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=r"config\.json") as caught:
        ModelConfig.from_dict(DENSE | changes)
    assert words in str(caught.value)


def test_a_sequence_longer_than_the_model_was_made_for_is_refused() -> None:
    config = ModelConfig.from_dict(DENSE | {"max_position_embeddings": 64})
    config.refuse_longer(64, "--max-model-len")
    with pytest.raises(BadInput, match="--max-model-len 65: the model was made for 64 positions"):
        config.refuse_longer(65, "--max-model-len")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        ModelConfig.from_pretrained(tmp_path)
    for text, words in (("{", "not JSON"), (json.dumps([1]), "found list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadInput, match=words):
            ModelConfig.from_pretrained(tmp_path)


def test_derived_sizes() -> None:
    config = PRESETS["m395"]
    assert config.conv_dim == 2 * 8 * 128 + 16 * 128
    assert (len(config.linear_layers), config.full_layers) == (12, (3, 7, 11, 15))
