"""Checkpoints under Hugging Face names: loaded, saved, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from paged_requests import small_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom.errors import BadInput
from atom.model_ops.rotary_embedding import RotaryTable
from atom.models import weights
from atom.models.model_config import ModelConfig
from atom.models.presets import random_checkpoint
from atom.models.weight_part import WeightPart
from atom.models.weights import load_model, save_model, write_checkpoint

CONFIGS = {
    "grouped": small_config(),
    "tied": small_config(tie_word_embeddings=True, num_key_value_heads=4),
    "biased": small_config(attention_bias=True, linear_num_key_heads=1, linear_key_head_dim=24),
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(str(folder / "model.safetensors"))
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    random_checkpoint(folder, small_config(), seed=1)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_saved_as_it_was_loaded(config: ModelConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "a", config, seed=1, dtype=dtype)
    loaded = load_model(tmp_path / "a")
    assert loaded.model.dtype == dtype
    save_model(tmp_path / "b", loaded.model, loaded.mtp)
    before, after = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # decay and step size are kept in float32
        assert torch.equal(after[name].to(dtype), tensor), name
    assert ModelConfig.from_pretrained(tmp_path / "b") == loaded.config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_transformers_checkpoints_load_and_ours_load_there(
    config: ModelConfig, tmp_path: Path
) -> None:
    random_checkpoint(tmp_path / "a", config, seed=1, with_mtp=False)
    peer = transformers.Qwen3NextForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    peer.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    save_model(tmp_path / "c", load_model(tmp_path / "b").model)
    before, after = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_names_are_those_of_public_checkpoints(checkpoint: Path) -> None:
    names = tensors_of(checkpoint)
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.in_proj_qkvz.weight",
        "model.layers.0.linear_attn.in_proj_ba.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.self_attn.k_norm.weight",
        "mtp.layers.0.mlp.gate_proj.weight",
        "mtp.norm.weight",
        "lm_head.weight",
    ):
        assert name in names
    assert names["mtp.fc.weight"].shape == (32, 64)
    assert names["model.layers.0.linear_attn.conv1d.weight"].shape == (128, 1, 4)


def test_an_mtp_layer_is_loaded_where_it_is_and_wanted(checkpoint: Path, tmp_path: Path) -> None:
    assert load_model(checkpoint).mtp is not None
    assert load_model(checkpoint, with_mtp=False).mtp is None
    random_checkpoint(tmp_path / "bare", small_config(), with_mtp=False)
    assert load_model(tmp_path / "bare").mtp is None
    with pytest.raises(BadInput, match="no MTP layer; run it without speculation"):
        load_model(tmp_path / "bare", with_mtp=True)


def test_a_tied_checkpoint_may_hold_its_projection_twice(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, CONFIGS["tied"])
    tensors = tensors_of(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_checkpoint(tmp_path, CONFIGS["tied"], tensors)
    model = load_model(tmp_path).model
    assert model.lm_head is model.embed_tokens


def test_experts_are_refused_before_a_weight_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_experts": 4}))

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(weights, "safe_open", read)
    with pytest.raises(BadInput, match=r"all layers have experts \(num_experts=4"):
        load_model(checkpoint)
    # the control: a dense one opens its file
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError):
        load_model(checkpoint)


def test_missing_unexpected_and_wrong_tensors_are_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(checkpoint)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(33)
    save_file(tensors, str(checkpoint / "model.safetensors"))

    def load(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(WeightPart, "load", load)
    with pytest.raises(BadInput) as caught:
        load_model(checkpoint)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: model.layers.1.mlp.up_proj.weight",
        "  unexpected: mtp.layers.1.mlp.up_proj.weight",
        "  model.norm.weight is [33]; config.json says [32]",
    ]


@pytest.mark.parametrize(
    ("field", "size", "said"),
    [
        ("vocab_size", 10**12, r"lm_head.* config\.json says \[1000000000000, 32\]"),
        ("intermediate_size", 2**62, "impossible sizes"),
        ("num_hidden_layers", 2**31, "num_hidden_layers=2147483648; .* at most 10000"),
    ],
)
def test_sizes_of_another_config_are_refused_before_memory_is_taken(
    checkpoint: Path, field: str, size: int, said: str
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: size}))
    with pytest.raises(BadInput, match=said):
        load_model(checkpoint)


def test_the_rotary_table_is_computed_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, build = [], RotaryTable.build

    def noted(**sizes: Any) -> RotaryTable:
        positions.append(sizes["max_positions"])
        return build(**sizes)

    monkeypatch.setattr(RotaryTable, "build", noted)
    load_model(checkpoint, max_positions=77)
    # the first is the outline's
    assert positions == [1, 77]


def test_weights_that_the_device_has_no_room_for_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(weights.Qwen3NextForCausalLM):
        def __init__(self, config: ModelConfig, *, device: torch.device | str, **more: Any) -> None:
            if device != "meta":
                raise torch.OutOfMemoryError("no room")
            super().__init__(config, device=device, **more)

    size = sum(tensor.nbytes for tensor in tensors_of(checkpoint).values())
    monkeypatch.setattr(weights, "Qwen3NextForCausalLM", Full)
    with pytest.raises(BadInput, match=f"the weights take {size:,} bytes, more than cpu has free"):
        load_model(checkpoint)


def test_many_faults_are_cut_short(checkpoint: Path) -> None:
    save_file({"a": torch.zeros(1)}, str(checkpoint / "model.safetensors"))
    with pytest.raises(BadInput, match=r"missing: .* more") as caught:
        load_model(checkpoint)
    assert len(str(caught.value)) < 400


def test_damaged_and_missing_files_are_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(BadInput, match="damaged checkpoint"):
        load_model(checkpoint)
    file.unlink()
    with pytest.raises(BadInput, match=r"no file model\.safetensors"):
        load_model(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    for text in ("{", "{}", json.dumps({"weight_map": 3})):
        index.write_text(text)
        with pytest.raises(BadInput, match="damaged checkpoint"):
            load_model(checkpoint)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(BadInput, match=r"no file gone\.safetensors"):
        load_model(checkpoint)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_checkpoint(tmp_path / name, small_config(), seed)
    a, b, c = (tensors_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)
