"""Examples as flat arrays of tokens, and rows for training composed of them.

A row is one conversation: examples in random order, one behind the other, cut at the row's length.
So from its second example on a row is what a few-shot prompt is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from atom.errors import BadInput

_NAMES = ("tokens", "lengths", "prompt_lengths")


@dataclass(frozen=True, slots=True)
class TokenPool:
    """Examples, each a prompt and an answer.

    Attributes:
        tokens: integer ``[N]``, all examples one behind the other.
        lengths: integer ``[E]``, tokens of each.
        prompt_lengths: integer ``[E]``, how many of them are given. The others are to be written,
            except the last, which stands between two examples.
        starts: int64 ``[E]``, where each begins.
        shortest: tokens of the shortest.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    starts: Tensor
    shortest: int

    @classmethod
    def of(cls, tokens: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray) -> Self:
        """A pool of arrays.

        Raises:
            BadInput: if they do not fit each other.
        """
        if (
            len(lengths) == 0
            or len(lengths) != len(prompt_lengths)
            or int(lengths.sum()) != len(tokens)
            or not (prompt_lengths + 2 <= lengths).all()
        ):
            raise BadInput(
                f"training data: {len(tokens)} tokens, {len(lengths)} lengths that sum to "
                f"{int(lengths.sum())} and {len(prompt_lengths)} prompt lengths do not fit; every "
                f"example needs an answer"
            )
        wide = torch.from_numpy(lengths.astype(np.int64))
        return cls(
            torch.from_numpy(tokens.astype(np.int16)),
            wide,
            torch.from_numpy(prompt_lengths.astype(np.int64)),
            wide.cumsum(0) - wide,
            int(lengths.min()),
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of :meth:`save_arrays`.

        Raises:
            BadInput: naming the file, if it cannot be read.
        """
        try:
            with np.load(path) as file:
                return cls.of(*(file[name] for name in _NAMES))
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"{path}: {error}; expected arrays {', '.join(_NAMES)}") from None

    def to(self, device: torch.device | str) -> TokenPool:
        """The pool on another device."""
        arrays = (self.tokens, self.lengths, self.prompt_lengths, self.starts)
        tokens, lengths, prompts, starts = (x.to(device) for x in arrays)
        return TokenPool(tokens, lengths, prompts, starts, self.shortest)

    def rows(self, seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Conversations of examples drawn at random: the same for the same seed and device.

        Args:
            seed: of this batch.
            rows: how many, ``B``.
            length: tokens of each, ``L``.

        Returns:
            int64 ``[B, L]``, ids; bool ``[B, L]``, which of them are to be written.
        """
        device = self.tokens.device
        generator = torch.Generator(device).manual_seed(seed)
        most = length // self.shortest + 1
        drawn = torch.randint(len(self.lengths), (rows, most), generator=generator, device=device)
        ends = self.lengths[drawn].cumsum(1)
        place = torch.arange(length, device=device).expand(rows, length).contiguous()
        number = torch.searchsorted(ends, place, right=True)
        example = drawn.gather(1, number)
        size = self.lengths[example]
        inside = place - ends.gather(1, number) + size
        ids = self.tokens[self.starts[example] + inside].long()
        written = (inside >= self.prompt_lengths[example]) & (inside < size - 1)
        return ids, written


def save_arrays(
    path: str | Path, tokens: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray
) -> None:
    """Write a pool's arrays into one ``.npz`` file, whole or not at all."""
    target = Path(path)
    part = target.with_name(f".{target.name}.part.npz")
    np.savez(part, tokens=tokens, lengths=lengths, prompt_lengths=prompt_lengths)
    part.replace(target)
