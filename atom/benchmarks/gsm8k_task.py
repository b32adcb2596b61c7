"""GSM8K's task as lm-eval has it: prompts, what is read from an answer, and the task's files.

Items are word problems of :mod:`atom.benchmarks.word_problems`, or the real files of GSM8K. Prompts
and scores are those of lm-eval 0.4.13's task ``gsm8k``, version 3, without lm-eval: a machine that
cannot install it asks and reads the same. Where it is installed, tests hold the two side by side.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from atom.benchmarks.word_problems import TEST_ITEMS, Split, word_problems
from atom.config import Settings
from atom.errors import BadInput

#: where lm-eval's generation ends, beside the model's own end of a turn
STOPS = ("Question:", "</s>", "<|im_end|>")
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
#: what its exact match leaves aside
_IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")
_INVALID = "[invalid]"
_HASH_DIGITS = 16
TASK = "atom_gsm8k"


class Sampling(StrEnum):
    """How lm-eval chooses the solved examples of a prompt."""

    DEFAULT = "default"  #: drawn for each item
    FIRST_N = "first_n"  #: the first ones, the same in all prompts


class TaskSettings(Settings):
    """What is asked."""

    items: int = Field(TEST_ITEMS, ge=1, le=10**6)
    """Items of the test split: the first ones."""

    shots: int = Field(5, ge=0, le=32)
    """Solved examples before each."""

    examples: int = Field(16, ge=1, le=10**5)
    """Word problems that the examples are chosen from; GSM8K's are its whole train split."""

    sampling: Sampling = Sampling.DEFAULT
    """default draws examples for each item; first_n takes the first ones for all."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Of problems and examples (lm-eval's --seed)."""

    max_tokens: int = Field(12288, ge=1, le=2**20)
    """Longest answer."""

    gsm8k: str | None = Field(None, min_length=1, exclude=True)
    """Folder with GSM8K's train.jsonl and test.jsonl; empty asks word problems. Not recorded."""

    @model_validator(mode="after")
    def _enough_examples(self) -> TaskSettings:
        if self.gsm8k is None and self.examples < self.shots:
            raise ValueError(f"examples {self.examples} are fewer than the {self.shots} shots")
        return self


@dataclass(frozen=True, slots=True)
class TaskItem:
    """A question with its worked solution.

    Attributes:
        question: the text.
        answer: ends with ``#### result``.
        steps: computed steps of a word problem; ``None`` for GSM8K's.
    """

    question: str
    answer: str
    steps: int | None = None

    @property
    def turn(self) -> str:
        """A user's turn."""
        return f"Question: {self.question}\nAnswer:"


def load_items(settings: TaskSettings) -> tuple[list[TaskItem], list[TaskItem]]:
    """The asked items, and those that examples are chosen from.

    Raises:
        BadInput: a folder without GSM8K's files, or with fewer items than are asked.
    """
    if settings.gsm8k is None:
        sides = ((Split.TEST, settings.items), (Split.TRAIN, settings.examples))
        test, train = (
            [
                TaskItem(p.question, p.answer, len(p.steps))
                for p in word_problems(settings.seed, count, split)
            ]
            for split, count in sides
        )
        return test, train
    test, train = (_read(Path(settings.gsm8k) / f"{name}.jsonl") for name in ("test", "train"))
    if len(test) < settings.items or len(train) < settings.shots:
        raise BadInput(
            f"gsm8k: the folder has {len(test)} test and {len(train)} train items; "
            f"{settings.items} are to be asked with {settings.shots} examples"
        )
    return test[: settings.items], train


def _read(path: Path) -> list[TaskItem]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return [TaskItem(str(row["question"]), str(row["answer"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"gsm8k: {path.name} cannot be read ({type(error).__name__}); expected a folder with "
            "GSM8K's train.jsonl and test.jsonl, a JSON object with question and answer a line"
        ) from None


def build_chats(
    settings: TaskSettings, test: Sequence[TaskItem], train: Sequence[TaskItem]
) -> list[list[dict[str, str]]]:
    """The chat of each item, as lm-eval builds it: solved examples as turns, then the question."""
    generator = random.Random(settings.seed)
    chats = []
    for item in test:
        if settings.sampling is Sampling.DEFAULT:
            shown: Sequence[TaskItem] = generator.sample(list(train), settings.shots)
        else:
            shown = train[: settings.shots]
        chat = []
        for example in shown:
            chat.append({"role": "user", "content": example.turn})
            chat.append({"role": "assistant", "content": example.answer})
        chats.append([*chat, {"role": "user", "content": item.turn}])
    return chats


def prompts_of_test(
    settings: TaskSettings,
) -> tuple[list[TaskItem], list[list[dict[str, str]]]]:
    """The asked items and their chats.

    Raises:
        BadInput: see :func:`load_items`.
    """
    test, train = load_items(settings)
    return test, build_chats(settings, test, train)


def cut_at_stops(text: str) -> str:
    """An answer up to the first of lm-eval's stop strings."""
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def strict_match(answer: str) -> str:
    """What lm-eval's strict-match finds in an answer."""
    found = _STRICT.search(answer)
    return found[1].strip() if found else _INVALID


def flexible_extract(answer: str) -> str:
    """What its flexible-extract finds: the last number."""
    found = _FLEXIBLE.findall(answer)
    return next((part.strip() for part in found[-1] if part), _INVALID) if found else _INVALID


def is_right(found: str, solution: str) -> bool:
    """Whether its exact match takes what was found for a solution's."""

    def bare(text: str) -> str:
        for ignored in _IGNORED:
            text = re.sub(ignored, "", text)
        return text.lower()

    return bare(found) == bare(solution)


def hash_of(value: str | Sequence[Any]) -> str:
    """The first 64 bits of SHA-256 of a text, of tokens or of a chat, in hexadecimal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_DIGITS]


def write_task(
    folder: str | Path,
    settings: TaskSettings,
    test: Sequence[TaskItem],
    train: Sequence[TaskItem],
) -> str:
    """Write lm-eval's task file and its data, to be named by ``--include_path``.

    Returns:
        The task's name.
    """
    import yaml

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, items in (("test", test), ("train", train)):
        target = path / f"{name}.jsonl"
        rows = [{"question": item.question, "answer": item.answer} for item in items]
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        files[name] = str(target.resolve())
    (path / f"{TASK}.yaml").write_text(yaml.safe_dump(_task(settings, files)), encoding="utf-8")
    return TASK


def _task(settings: TaskSettings, files: dict[str, str]) -> dict[str, Any]:
    first = {"function": "take_first"}
    return {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "fewshot_config": {"sampler": settings.sampling.value},
        "num_fewshot": settings.shots,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": list(_IGNORED),
            }
        ],
        "generation_kwargs": {
            "until": list(STOPS),
            "do_sample": False,
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
        },
        "repeats": 1,
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [{"function": "regex", "regex_pattern": _STRICT.pattern}, first],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {
                        "function": "regex",
                        "group_select": -1,
                        "regex_pattern": _FLEXIBLE.pattern,
                    },
                    first,
                ],
            },
        ],
        "metadata": {"version": 3.0},
    }
