"""The stand-in of the trained model."""

from __future__ import annotations

from pathlib import Path

from atom.benchmarks.seeded_model import make_seeded_model, shipped_model
from atom.entrypoints.tokenizer import open_tokenizer
from atom.models.model_config import ModelConfig
from atom.models.training_sizes import SIZES


def test_the_same_seed_makes_the_same_files(tmp_path: Path) -> None:
    first, again, other = (
        make_seeded_model(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for path in first.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_its_layers_are_those_of_the_trained_one(tmp_path: Path) -> None:
    folder = make_seeded_model(tmp_path, 0)
    config = ModelConfig.from_pretrained(folder)
    assert config.num_hidden_layers == SIZES["words1"].num_hidden_layers
    tokenizer = open_tokenizer(str(folder), config.vocab_size)
    text = "Question: Ada has 3 apples."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert config.eos_token_ids


def test_the_shipped_model_is_found_where_it_is_there() -> None:
    folder = shipped_model()
    assert folder is None or folder.name == "words8"
