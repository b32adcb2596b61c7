"""Which copies the epoch tags see through: every interleaving of one writer and one reader.

Words stand for a payload: first tag, two words of data, last tag. The writer is the next step, in
the same block; the reader is a copy of this step's payload that runs too late. Words are read and
written one by one, in any order that the launches allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import pytest

FIRST, LAST = 0, 3
DATA = (1, 2)
MINE, OPEN, NEXT = "mine", "open", "next"
OPENING = [(FIRST, OPEN), (LAST, OPEN)]
WRITING = [(word, NEXT) for word in DATA]
CLOSING = [(FIRST, NEXT), (LAST, NEXT)]


def orders(*launches: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Every order of the writes; a launch ends before the following one begins."""
    if not launches:
        yield []
        return
    for first in permutations(launches[0]):
        for rest in orders(*launches[1:]):
            yield [*first, *rest]


def passes_unseen(writes: list[tuple[int, str]], reads: tuple[int, ...]) -> bool:
    """Whether some interleaving brings foreign data between two right tags."""
    for places in combinations(range(len(writes) + len(reads)), len(reads)):
        words = [MINE] * 4
        found = dict.fromkeys(reads, MINE)
        left, taken = iter(writes), iter(reads)
        for place in range(len(writes) + len(reads)):
            if place in places:
                word = next(taken)
                found[word] = words[word]
            else:
                word, value = next(left)
                words[word] = value
        right = found[FIRST] == found[LAST] == MINE
        if right and NEXT in (found[word] for word in DATA):
            return True
    return False


ALL_READS = list(permutations(range(4)))
TAG_LAST = [reads for reads in ALL_READS if reads[-1] in (FIRST, LAST)]
ENDS_FIRST = [reads for reads in ALL_READS if reads[-1] in DATA]


@pytest.mark.parametrize("reads", TAG_LAST)
def test_a_copy_that_reads_a_tag_after_the_data_is_seen_through(reads: tuple[int, ...]) -> None:
    assert not any(passes_unseen(w, reads) for w in orders(OPENING, WRITING, CLOSING))


@pytest.mark.parametrize("reads", ALL_READS)
def test_tags_behind_the_data_alone_leave_a_window_for_every_copy(reads: tuple[int, ...]) -> None:
    assert any(passes_unseen(w, reads) for w in orders(WRITING, CLOSING))


@pytest.mark.parametrize("reads", ENDS_FIRST)
def test_what_remains_a_copy_that_reads_data_after_both_tags(reads: tuple[int, ...]) -> None:
    assert any(passes_unseen(w, reads) for w in orders(OPENING, WRITING, CLOSING))


@pytest.mark.parametrize("reads", TAG_LAST)
def test_one_kernel_for_data_and_tags_is_fine_behind_an_opening(reads: tuple[int, ...]) -> None:
    assert not any(passes_unseen(w, reads) for w in orders(OPENING, [*WRITING, *CLOSING]))


@pytest.mark.parametrize("reads", ALL_READS)
def test_what_remains_one_kernel_for_data_and_tags_without_an_opening(
    reads: tuple[int, ...],
) -> None:
    assert any(passes_unseen(w, reads) for w in orders([*WRITING, *CLOSING]))
