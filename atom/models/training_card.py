"""What a training leaves: a model folder with its card."""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from atom.errors import BadInput
from atom.models.json_file import write_json
from atom.models.presets import count_parameters
from atom.models.training import Trainer
from atom.models.weights import write_checkpoint

CURVE = "loss_curve.csv"
CARD = "README.md"
FACTS = "training.json"
#: most bytes of a weights file
_SHARD_BYTES = 14_000_000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export(trainer: Trainer, data: Path, folder: Path) -> Path:
    """Write weights, tokenizer, loss curve, facts and card.

    Args:
        trainer: what was trained.
        data: folder of the data, with ``tokenizer`` and ``data.json``.
        folder: made if need be.

    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = trainer.model.tensors(torch.bfloat16)
    write_checkpoint(folder, trainer.config, tensors, shard_bytes=_SHARD_BYTES)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(data / "tokenizer" / name, folder / name)
    curve = trainer.state.curve
    with (folder / CURVE).open("w", newline="", encoding="utf-8") as file:
        if curve:
            writer = csv.DictWriter(file, list(curve[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: f"{v:.6g}" for k, v in point.items()} for point in curve)
    _write_facts(folder, training_facts(trainer, data))
    return folder


def _write_facts(folder: Path, facts: dict[str, object]) -> None:
    write_json(folder / FACTS, facts)
    (folder / CARD).write_text(card(facts), encoding="utf-8")


def training_facts(trainer: Trainer, data: Path) -> dict[str, object]:
    """Settings, data, machine and how far the training went."""
    state, path = trainer.state, data / "data.json"
    cuda = trainer.device.type == "cuda"
    return {
        "settings": trainer.settings.model_dump(),
        "data": json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        "parameters": count_parameters(trainer.config, with_mtp=True),
        "steps": state.step,
        "tokens": state.tokens,
        "training_seconds": round(state.seconds, 1),
        "last": state.curve[-1] if state.curve else {},
        "machine": torch.cuda.get_device_name() if cuda else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("ATOM_COMMIT", ""),
    }


def record_evaluation(folder: str | Path, evaluation: Mapping[str, object]) -> None:
    """Write what an evaluation found into a model's facts and card.

    Args:
        folder: a folder of :func:`export`.
        evaluation: value by name.

    Raises:
        BadInput: if it is none.
    """
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}; expected a model of atom.models.train") from None
    facts["evaluation"] = dict(evaluation)
    _write_facts(Path(folder), facts)


def card(facts: dict[str, object]) -> str:
    """The card of a model, in Markdown."""

    def table(values: object) -> str:
        assert isinstance(values, dict)
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        return f"| | |\n|---|---|\n{rows}\n"

    plain = {name: value for name, value in facts.items() if not isinstance(value, dict)}
    evaluation = ""
    if "evaluation" in facts:
        evaluation = f"## Evaluation (measured)\n\n{table(facts['evaluation'])}\n"
    return f"""# A small Qwen3-Next model that solves word problems

A dense model of the Qwen3-Next architecture (gated delta nets, and full attention in every fourth
layer) with its multi-token-prediction layer, trained from scratch by `python -m atom.models.train`
on generated grade-school word problems. It knows nothing else. It serves to measure what a fault
in an engine does to answers.

* Data: `python -m atom.benchmarks.word_problem_tokens`, from a seed; no text of anybody's is in it.
  Problems of the test split are never trained on, not even in other words.
* `loss_curve.csv` has the loss over training; `training.json` what stands here, for programs.
* Loads in this workbook's engine, and in transformers as `Qwen3NextForCausalLM` (which leaves the
  `mtp.*` weights aside).

{evaluation}## Training

{table(plain)}
Settings:

{table(facts["settings"])}
Data:

{table(facts["data"])}
Last point of the loss curve (on training data, before the step):

{table(facts["last"])}"""
