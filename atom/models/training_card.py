"""What a training leaves: a model folder with its card."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atom.errors import AtomError, BadInput
from atom.models.json_file import write_json
from atom.models.model_config import ModelConfig
from atom.models.presets import count_parameters
from atom.models.training import Trainer, TrainingSettings
from atom.models.training_sizes import SIZES, for_tokenizer
from atom.models.weights import write_checkpoint

CURVE = "loss_curve.csv"
CARD = "README.md"
FACTS = "training.json"
#: acceptance as of models in use, which a training aims at
_AIM = (0.65, 0.85)
#: characters of a card's line
_WIDTH = 100
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


def _write_facts(folder: Path, facts: dict[str, Any]) -> None:
    facts["name"] = folder.resolve().name
    write_json(folder / FACTS, facts)
    (folder / CARD).write_text(card(facts), encoding="utf-8")


def training_facts(trainer: Trainer, data: Path) -> dict[str, Any]:
    """Settings, data, machine and how far the training went."""
    state, path = trainer.state, data / "data.json"
    cuda = trainer.device.type == "cuda"
    return {
        "settings": trainer.settings.model_dump(),
        "data": json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        "size": _size_of(trainer.config, data / "tokenizer"),
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
        evaluation: value by name; ``remark`` is a sentence beside them.

    Raises:
        BadInput: if it is none.
    """
    facts = _read_facts(folder)
    facts["evaluation"] = {name: value for name, value in evaluation.items() if name != "model"}
    _write_facts(Path(folder), facts)


def rewrite_card(folder: str | Path, remark: str | None = None) -> None:
    """Write a model's card anew, under the name that its folder has now.

    Args:
        folder: a folder of :func:`export`, perhaps renamed.
        remark: a sentence about its evaluation, kept with it until the next evaluation.

    Raises:
        BadInput: if it is none, or has no evaluation to remark on.
    """
    facts = _read_facts(folder)
    evaluation = facts.get("evaluation", {})
    if remark is not None and not evaluation:
        raise BadInput(f"{folder}: there is no evaluation to remark on")
    evaluation.pop("model", None)
    if remark is not None:
        evaluation["remark"] = remark
    if "parameters" in facts and "size" not in facts:
        facts["size"] = _size_of(ModelConfig.from_pretrained(folder), Path(folder))
    _write_facts(Path(folder), facts)


def _read_facts(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}; expected a model of atom.models.train") from None
    if not isinstance(facts, dict):
        raise BadInput(f"{path}: expected facts by name, found a {type(facts).__name__}")
    return facts


def _size_of(config: ModelConfig, tokenizer: Path) -> str:
    """Name of the config among those that are trained here; empty for another."""
    same = (name for name, size in SIZES.items() if for_tokenizer(size, tokenizer) == config)
    return next(same, "")


def _table(values: Mapping[str, object]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in sorted(values.items()))
    return f"| | |\n|---|---|\n{rows}\n"


def _evaluation(facts: Mapping[str, Any]) -> str:
    found = dict(facts.get("evaluation", {}))
    if not found:
        return ""
    remark = found.pop("remark", None)
    said = [] if remark is None else [str(remark)]
    acceptance, last = found.get("acceptance"), facts.get("last", {})
    if acceptance is not None:
        drafts = [last[name] for n in range(1, 9) if (name := f"draft_{n}_right") in last]
        each = ", ".join(f"{share:.1%}" for share in drafts)
        learned = facts.get("settings", {}).get("draft_passes", len(drafts))
        low, high = _AIM
        apart = (
            "" if low <= acceptance <= high else f", where {low:.0%} to {high:.0%} were aimed at"
        )
        said.append(
            f"Of the drafts {acceptance:.1%} are accepted{apart}: the sentences of these solutions "
            "follow a few patterns, so most of their tokens can be guessed."
            + (
                f" On training data, by place of the draft, {each} are right; the MTP layer "
                f"learned {learned} of its passes."
                if each
                else ""
            )
        )
    text = "".join(textwrap.fill(one, _WIDTH) + "\n\n" for one in said)
    return f"## Evaluation (measured)\n\n{_table(found)}\n{text}"


def _commands(facts: Mapping[str, Any]) -> str:
    """How to make the model again: data, training, evaluation."""
    data, evaluation = facts["data"], facts.get("evaluation", {})
    names = {"problems": "--problems", "seed": "--seed", "vocab_size": "--vocab-size"}
    make = [f"{option} {data[name]}" for name, option in names.items() if name in data]
    usual = TrainingSettings().model_dump()
    settings = {**facts["settings"], "steps": facts["steps"]}
    train = [f"--size {facts['size']}"] if facts.get("size") else []
    train += [
        f"-p {name} {json.dumps(value)}" for name, value in settings.items() if value != usual[name]
    ]
    names = {
        "items": "--items",
        "shots": "--shots",
        "seed": "--seed",
        "draft_tokens": "--draft-tokens",
    }
    ask = [f"{option} {evaluation[name]}" for name, option in names.items() if name in evaluation]
    lines = (
        ["python -m atom.benchmarks.word_problem_tokens --out word_data", *make],
        ["python -m atom.models.train --data word_data --out my_model", *train],
        ["python -m atom.workbook.word_problem_accuracy my_model/model --card", *ask],
    )
    return "\n".join(
        " \\\n".join(
            # an option stays with its value
            part.replace("\0", " ")
            for part in textwrap.wrap(
                " ".join(option.replace(" ", "\0") for option in line),
                _WIDTH - 6,
                subsequent_indent="  ",
                break_on_hyphens=False,
            )
        )
        for line in lines
    )


def card(facts: Mapping[str, Any]) -> str:
    """The card of a model, in Markdown."""
    plain = {name: value for name, value in facts.items() if not isinstance(value, dict)}
    return f"""# {facts.get("name", "model")}: a small Qwen3-Next model that solves word problems

A dense model of the Qwen3-Next architecture (gated delta nets, and full attention in every fourth
layer) with its multi-token-prediction layer, trained from scratch by `python -m atom.models.train`
on generated grade-school word problems.

**For:** measuring what a fault in an engine does to answers. Its answers can be right or wrong for
a reason, and its drafts are accepted or not by verification alone.

**Not for:** anything else. It knows the sentences of one generator, in English, with 2 to 8 steps
of arithmetic in whole numbers; what it answers to any other text means nothing. It was trained on
conversations of {facts["settings"]["length"]:,} tokens; what it does with longer ones is not known.
Its scores say nothing of another model, nor of other problems.

**Licence:** that of the repository. The data is made by a program; no text of anybody's is in it.

* Problems of the test split are never trained on, not even in other words.
* `{CURVE}` has the loss over training, a row every few steps.
* `{FACTS}` has what stands here, for programs.
* Loads in this workbook's engine, and in transformers as `Qwen3NextForCausalLM` (which leaves the
  `mtp.*` weights aside).

## Make it again

```
{_commands(facts)}
```

The same options make the same data. They need not make the same weights, not even on the same
machine: a GPU adds in an order of its own, and the rounding of a step is where the next one starts.
On a GPU, `--cuda-graph` makes the training faster; with `--seconds S` in place of a number of steps
the learning rate falls by time.

{_evaluation(facts)}## Training

{_table(plain)}
Settings:

{_table(facts["settings"])}
Data:

{_table(facts["data"])}
Last point of the loss curve (on training data, before the step):

{_table(facts["last"])}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a card anew; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atom.models.training_card",
        description="Write a model's card anew from its facts, under its folder's name.",
        epilog="example\n  python -m atom.models.training_card data/models/words8\n\n"
        "exit codes: 0 written, 2 bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="MODEL", help=f"folder with {FACTS}")
    parser.add_argument("--remark", metavar="TEXT", help="a sentence about its evaluation")
    chosen = parser.parse_args(arguments)
    try:
        rewrite_card(chosen.folder, chosen.remark)
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
