"""The training loop: it learns, goes on where it ended, saves on a signal, leaves a model."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_requests import small_config

from atom.errors import BadInput
from atom.models import train, training_card
from atom.models.model_config import FULL, LINEAR
from atom.models.tokenizer_training import train_tokenizer
from atom.models.training import CHECKPOINT, Trainer, TrainingSettings
from atom.models.training_card import export, record_evaluation
from atom.models.training_data import TokenPool, save_arrays
from atom.models.training_optimizer import orthogonalize
from atom.models.training_sizes import SIZES, for_tokenizer
from atom.models.weights import load_model, write_checkpoint

#: one layer of each kind
CONFIG = small_config(num_hidden_layers=2, layer_types=(LINEAR, FULL))


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Examples whose answers follow from their prompts: the same ids again, each one higher."""
    random = np.random.default_rng(0)
    prompts = random.integers(10, 40, (200, 4))
    examples = np.concatenate([prompts, prompts + 40, np.full((200, 1), 3)], axis=1)
    return examples.reshape(-1), np.full(200, 9), np.full(200, 4)


def settings(**changes: object) -> TrainingSettings:
    values = {"rows": 4, "length": 64, "steps": 8, "warmup_steps": 2, "draft_places": 8}
    return TrainingSettings.parse({**values, **changes})


def quiet(text: str) -> None:
    """No progress."""


def trainer(folder: Path, **changes: object) -> Trainer:
    return Trainer(CONFIG, settings(**changes), TokenPool.of(*arrays()), folder)


@pytest.mark.parametrize("muon", [True, False])
def test_it_learns(tmp_path: Path, muon: bool) -> None:
    run = trainer(tmp_path, rows=2, learning_rate=0.02, muon=muon)
    losses = [run.step(0.0) for _ in range(16)]
    assert losses[-1].model < 0.9 * losses[0].model
    assert (losses[-1].drafts < losses[0].drafts).all()
    assert run.state.tokens == 16 * 2 * 64


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run(tell=quiet)
    part = trainer(tmp_path / "parts")
    for _ in range(3):
        part.step(part.state.step / 8)
    part.save()
    rest = trainer(tmp_path / "parts")
    assert rest.state.step == 3
    assert rest.run(tell=quiet)
    assert rest.state.step == 8
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, rest.model.state_dict()[name]), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves(tmp_path: Path, number: signal.Signals) -> None:
    run = trainer(tmp_path, steps=1000)

    def tell(text: str) -> None:
        if text.startswith("first step"):
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    assert not run.run(tell=tell)
    assert signal.getsignal(number) is before
    assert 1 <= run.state.step < 10
    assert trainer(tmp_path, steps=1000).state.step == run.state.step


def test_a_time_limit_ends_it_and_the_rate_falls_by_time(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=0)
    # four seconds are kept for saving
    assert run.run(seconds=4.6, tell=quiet)
    assert run.state.step >= 1
    assert run.learning_rate(1.0) == 0.0
    again = trainer(tmp_path / "other", steps=0)
    assert not again.run(seconds=4.3, budget_seconds=1000, tell=quiet)
    with pytest.raises(BadInput, match="no end"):
        trainer(tmp_path / "none", steps=0).run(tell=quiet)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).save()
    with pytest.raises(BadInput, match="seed=0, asked for 1"):
        trainer(tmp_path, seed=1)
    (tmp_path / CHECKPOINT).write_bytes(b"no checkpoint")
    with pytest.raises(BadInput, match="damaged"):
        trainer(tmp_path)


def test_orthogonalize_evens_out_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert values.min() > 0.4
        assert values.max() < 1.6


def test_the_command_leaves_a_model_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    train_tokenizer(data / "tokenizer", ["1 and 2 are 3"] * 3, 300)
    save_arrays(data / "problems.npz", *arrays())
    common = ["--data", str(data), "--out", str(out), "--size", "words1", "--device", "cpu"]
    options = ["-p", "rows", "1", "-p", "length", "64", "-p", "steps", "2"]
    assert train.main([*common, *options]) == 0
    folder = out / "model"
    loaded = load_model(folder)
    assert loaded.mtp is not None
    assert loaded.model.dtype is torch.bfloat16
    rows = list(csv.DictReader((folder / "loss_curve.csv").open()))
    assert [row["step"] for row in rows] == ["2"]
    facts = json.loads((folder / "training.json").read_text())
    assert facts["settings"]["rows"] == 1
    assert "steps | 2" in (folder / "README.md").read_text()
    assert train.main([*common, "-p", "rows", "0"]) == 2
    assert train.main([*common, "-p", "row", "2"]) == 2
    assert train.main([*common, "--seconds", "-1"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean" in shown
    assert "rows" in shown


def test_shards_hold_all_weights_and_are_small(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    tensors = run.model.tensors(torch.float32)
    write_checkpoint(tmp_path / "model", CONFIG, tensors, shard_bytes=20_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 30_000 for file in files)
    parts = load_model(tmp_path / "model").model.parts()
    assert all(torch.equal(part.save(), tensors[name]) for name, part in parts.items())


def test_sizes_fit_the_repository() -> None:
    from atom.models.presets import count_parameters

    for name in ("words8", "words16"):
        assert 2 * count_parameters(SIZES[name], with_mtp=True) < 19_000_000
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        for_tokenizer(SIZES["words8"], "nowhere")


def test_export_without_a_curve(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer", ["a"], 300)
    folder = export(trainer(tmp_path / "run"), tmp_path, tmp_path / "model")
    assert "Evaluation" not in (folder / "README.md").read_text()
    record_evaluation(folder, {"strict_match": 0.5})
    assert "strict_match | 0.5" in (folder / "README.md").read_text()
    assert json.loads((folder / "training.json").read_text())["evaluation"] == {"strict_match": 0.5}
    with pytest.raises(BadInput, match=r"training\.json"):
        record_evaluation(tmp_path, {})


def test_a_renamed_model_gets_its_name_by_the_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(tmp_path / "tokenizer", ["a"], 300)
    folder = export(trainer(tmp_path / "run"), tmp_path, tmp_path / "model")
    assert training_card.main([str(folder), "--remark", "no evaluation"]) == 2
    record_evaluation(folder, {"model": "model", "strict_match": 0.5, "items": 7})
    folder = folder.rename(tmp_path / "words0")
    assert training_card.main([str(folder), "--remark", "One was a tie."]) == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# words0:")
    assert "model | model" not in text
    assert "One was a tie." in text
    assert "-p steps 0" not in text
    assert "--items 7" in text
    # the next evaluation has nothing of the last one's remark
    record_evaluation(folder, {"strict_match": 0.6})
    assert "tie" not in (folder / "README.md").read_text()
    (folder / "training.json").write_text("[]")
    assert training_card.main([str(folder)]) == 2
    assert "facts by name" in capsys.readouterr().err
