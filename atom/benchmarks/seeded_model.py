"""Which model the accuracy experiment asks: the one that is shipped, or a seeded stand-in.

The stand-in has the layers and the kind of tokenizer of the trained one, and random weights. Its
answers are noise: whether two engines give the same ones can be seen with it, how many are right
can not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atom.benchmarks.word_problems import Split, question_text, word_problems
from atom.models.presets import random_checkpoint
from atom.models.tokenizer_training import train_tokenizer
from atom.models.training_sizes import SIZES, for_tokenizer

_SIZE = "words1"
SEEDED = f"seeded {_SIZE}"
#: with it about one draft in eight is right, and prompts have answers of their own
_EMBEDDING_SCALE = 50.0
_TOKENIZER_PROBLEMS = 400


def shipped_model() -> Path | None:
    """Folder of the trained model of this checkout; ``None`` until there is one."""
    folder = Path(__file__).resolve().parents[2] / "data" / "models" / "words8"
    return folder if (folder / "config.json").is_file() else None


def make_seeded_model(folder: str | Path, seed: int) -> Path:
    """Write the stand-in with its tokenizer, in a second. The same seed writes the same files.

    Args:
        folder: made if need be; its files are overwritten.
        seed: of the weights.
    """
    path = Path(folder)
    shown = word_problems(1, _TOKENIZER_PROBLEMS, Split.TRAIN, distinct=False)
    texts = (
        text
        for problem in shown
        for text in (f"user\n{question_text(problem)}", f"assistant\n{problem.answer}")
    )
    train_tokenizer(path, texts, SIZES[_SIZE].vocab_size)
    # with tied embeddings random layers repeat their last token
    config = replace(
        for_tokenizer(SIZES[_SIZE], path), tie_word_embeddings=False, initializer_range=0.1
    )
    random_checkpoint(path, config, seed, embedding_scale=_EMBEDDING_SCALE)
    return path
