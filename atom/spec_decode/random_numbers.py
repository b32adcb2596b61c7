"""Counter-based random numbers: the same on every device, in any batch, in any order.

The generator is Philox-4x32 with 10 rounds (Salmon et al., *Parallel random numbers: as easy as
1, 2, 3*, 2011). A draw is a pure function of what it is for::

    key     = low and high 32 bits of the request's seed
    counter = (index, low 32 bits of the position, purpose, high 32 bits of the position)

so nothing is carried from one draw to the next: a request that is moved to another row, preempted,
or served beside others draws the same numbers. The four words of one call serve four entries of the
vocabulary that lie :data:`LANES` apart, see :func:`word_of_entry`.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

#: entries of the vocabulary that one word of each call serves, side by side
LANES = 1024
_MASK = 0xFFFFFFFF
_ROUND_A = 0xD2511F53
_ROUND_B = 0xCD9E8D57
_KEY_A = 0x9E3779B9
_KEY_B = 0xBB67AE85


class Purpose(IntEnum):
    """What a number is drawn for; draws of different purposes are independent."""

    TARGET = 0  #: the target's own token at a position
    ACCEPT = 1  #: whether a draft that was drawn from a distribution is accepted
    RESIDUAL = 2  #: the token in place of a draft that was not
    DRAFT = 3  #: the draft itself, where drafts are drawn and not the likeliest


def _high_product(constant: int, word: Tensor) -> Tensor:
    """Upper 32 bits of the 64-bit product of two unsigned 32-bit numbers, in int64."""
    # the whole product does not fit into int64
    return (constant * (word >> 16) + ((constant * (word & 0xFFFF)) >> 16)) >> 16


def philox(seed: Tensor, index: Tensor, position: Tensor, purpose: int) -> tuple[Tensor, ...]:
    """Four independent 32-bit words for each counter; all arguments broadcast.

    Args:
        seed: int64, any value.
        index: int64, 0 to 2**32 - 1.
        position: int64, at least 0.
        purpose: see :class:`Purpose`.

    Returns:
        Four int64 tensors with values 0 to 2**32 - 1.
    """
    shape = torch.broadcast_shapes(seed.shape, index.shape, position.shape)
    key_a, key_b = seed & _MASK, (seed >> 32) & _MASK
    first, second = index.expand(shape), (position & _MASK).expand(shape)
    third, fourth = torch.full_like(second, purpose), ((position >> 32) & _MASK).expand(shape)
    for _ in range(10):
        old_first, old_third = first, third
        first = _high_product(_ROUND_B, old_third) ^ second ^ key_a
        third = _high_product(_ROUND_A, old_first) ^ fourth ^ key_b
        second = (_ROUND_B * old_third) & _MASK
        fourth = (_ROUND_A * old_first) & _MASK
        key_a, key_b = (key_a + _KEY_A) & _MASK, (key_b + _KEY_B) & _MASK
    return first, second, third, fourth


def unit_interval(words: Tensor) -> Tensor:
    """Words as float32 in (0, 1): ``(word + 0.5) / 2**32``, at most the largest float below 1.

    Numbers near 0 keep float32's relative precision, down to 2**-33.
    """
    return torch.clamp_max((words.to(torch.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


def uniform(seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """One float32 in (0, 1) for each seed and position."""
    return unit_interval(philox(seed, torch.zeros_like(position), position, purpose)[0])


def word_of_entry(entry: int) -> tuple[int, int]:
    """The counter index and the word of the call that serve an entry of the vocabulary."""
    group, inside = divmod(entry, 4 * LANES)
    word, lane = divmod(inside, LANES)
    return group * LANES + lane, word


def gumbel(seed: Tensor, position: Tensor, purpose: int, vocabulary: int) -> Tensor:
    """Standard Gumbel noise for every entry of the vocabulary.

    The entry with the highest sum of log weight and noise is a draw from the weights.

    Args:
        seed: int64 ``[rows]``.
        position: int64 ``[rows]``.
        purpose: see :class:`Purpose`.
        vocabulary: entries.

    Returns:
        float32 ``[rows, vocabulary]``, between about -3 and 23.
    """
    groups = -(-vocabulary // (4 * LANES))
    lanes = min(LANES, vocabulary) if groups == 1 else LANES
    index = torch.arange(groups, device=seed.device)[:, None] * LANES
    index = (index + torch.arange(lanes, device=seed.device)).view(1, -1)
    words = philox(seed[:, None], index, position[:, None], purpose)
    stacked = torch.stack([word.view(-1, groups, lanes) for word in words], 2)
    # with fewer lanes than a whole group has, the words beyond the first serve nothing
    flat = stacked.reshape(len(seed), -1)[:, :vocabulary]
    return -torch.log(exponential(unit_interval(flat)))


def exponential(number: Tensor) -> Tensor:
    """``-log(1 - number)``, also for a small number, as the kernel computes it."""
    # 1 - number would round a small number away, and an entry of no weight could win
    series = number * (1.0 + number * (0.5 + number * (1.0 / 3.0)))
    return torch.where(number < 2.0**-8, series, -torch.log(1.0 - number))
