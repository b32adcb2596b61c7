"""Word problems as training data: a tokenizer and arrays of tokens, made by several processes.

Writes ``tokenizer/``, ``problems.npz`` (:class:`atom.models.training_data.TokenPool`) and
``data.json`` with what they were made from. The same options give the same files, whatever the
number of processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from atom.benchmarks.word_problems import Split, WordProblem, question_text, word_problems
from atom.config import Settings
from atom.errors import AtomError
from atom.models.tokenizer_training import TURN_END, TURN_START, train_tokenizer

TOKENIZER = "tokenizer"
PROBLEMS = "problems.npz"
SETTINGS = "data.json"
#: problems of one task of a process
_TASK = 2000
_EPILOG = """\
example
  python -m atom.benchmarks.word_problem_tokens --out word_data --problems 200000

makes 200,000 problems of the train split (about 30 million tokens) in a minute on two cores. Then

  python -m atom.models.train --data word_data --out my_model --seconds 480
"""


class DataSettings(Settings):
    """What the data is made from."""

    problems: int = Field(1_000_000, ge=100, le=10**8)
    """How many, all of the train split."""

    seed: int = Field(1, ge=0, le=2**31 - 1)
    """Of the problems."""

    vocab_size: int = Field(1408, ge=300, le=2**15 - 1)
    """Most tokens of the tokenizer."""

    tokenizer_problems: int = Field(6000, ge=100, le=10**6)
    """Problems that the tokenizer is learned from."""


def prompt_of(problem: WordProblem) -> str:
    """The text before an answer: what the chat template makes of the question."""
    question = question_text(problem)
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def answer_of(problem: WordProblem) -> str:
    """What the model writes, and the line break before the next turn."""
    return f"{problem.answer}{TURN_END}\n"


def make(settings: DataSettings, out: str | Path, workers: int | None = None) -> Path:
    """Make the tokenizer and the arrays.

    Args:
        settings: what of.
        out: folder; made if need be, its files are overwritten.
        workers: processes; as many as the machine has cores by default.

    Returns:
        The folder.
    """
    folder = Path(out)
    started = time.monotonic()
    shown = word_problems(settings.seed, settings.tokenizer_problems, Split.TRAIN, distinct=False)
    texts = (
        text for p in shown for text in (f"user\n{question_text(p)}", f"assistant\n{p.answer}")
    )
    tokens = train_tokenizer(folder / TOKENIZER, texts, settings.vocab_size)
    _tell(f"tokenizer: {tokens} tokens, {time.monotonic() - started:.1f} s")
    parts = []
    tasks = [
        (first, min(_TASK, settings.problems - first))
        for first in range(0, settings.problems, _TASK)
    ]
    task = partial(_encode, str(folder / TOKENIZER / "tokenizer.json"), settings.seed)
    told = time.monotonic()
    with _mapper(workers or os.cpu_count() or 1) as each:
        for number, part in enumerate(each(task, tasks), 1):
            parts.append(part)
            if time.monotonic() - told > 5 or number == len(tasks):
                told = time.monotonic()
                done = min(number * _TASK, settings.problems)
                _tell(f"{done:,} of {settings.problems:,} problems")
    _write(folder, settings, tokens, parts)
    _tell(f"{folder / PROBLEMS}: {time.monotonic() - started:.1f} s")
    return folder


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` over so many processes; one worker is this process."""
    if workers == 1:
        yield map
        return
    # a spawned process has no threads that were running when it began
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield pool.map


def _write(
    folder: Path,
    settings: DataSettings,
    vocab: int,
    parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> None:
    from atom.models.json_file import write_json
    from atom.models.training_data import save_arrays

    arrays = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    save_arrays(folder / PROBLEMS, *arrays)
    facts = {**settings.model_dump(), "tokens": len(arrays[0]), "tokenizer_tokens": vocab}
    write_json(folder / SETTINGS, facts)


def _encode(
    tokenizer_path: str, seed: int, task: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of some problems: flat tokens, lengths, lengths of the prompts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_path)
    first, count = task
    problems = list(word_problems(seed, count, Split.TRAIN, first=first, distinct=False))
    prompts = _batch(tokenizer, map(prompt_of, problems))
    answers = _batch(tokenizer, map(answer_of, problems))
    flat = [token for pair in zip(prompts, answers, strict=True) for ids in pair for token in ids]
    prompt_lengths = np.fromiter(map(len, prompts), np.int32, count)
    answer_lengths = np.fromiter(map(len, answers), np.int32, count)
    return np.array(flat, np.uint16), prompt_lengths + answer_lengths, prompt_lengths


def _batch(tokenizer: object, texts: Iterable[str]) -> list[list[int]]:
    encode = tokenizer.encode_batch_fast  # type: ignore[attr-defined]
    return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the data; returns an exit code."""
    default = DataSettings()
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.word_problem_tokens",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for tokenizer and arrays")
    add(
        "--problems", type=int, default=default.problems, metavar="N", help="how many (%(default)s)"
    )
    add("--seed", type=int, default=default.seed, metavar="N", help="of the problems (%(default)s)")
    add(
        "--vocab-size",
        type=int,
        default=default.vocab_size,
        metavar="N",
        help="most tokens of the tokenizer (%(default)s)",
    )
    add("--workers", type=int, metavar="N", help="processes (as many as cores)")
    chosen = parser.parse_args(arguments)
    try:
        values = {n: getattr(chosen, n) for n in ("problems", "seed", "vocab_size")}
        settings = DataSettings.parse(values, where="word_problem_tokens")
        make(settings, chosen.out, chosen.workers)
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
