"""The generator: its published vectors, its uniformity, and what a draw depends on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from atom.spec_decode.random_numbers import (
    LANES,
    Purpose,
    exponential,
    gumbel,
    philox,
    uniform,
    unit_interval,
    word_of_entry,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def words(seed: int, index: int, position: int, purpose: int) -> list[int]:
    key, count, place = (torch.tensor([value]) for value in (seed, index, position))
    return [int(word) for word in philox(key, count, place, purpose)]


@pytest.mark.parametrize(
    ("seed", "index", "position", "purpose", "expected"),
    [
        (0, 0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, 0xFFFFFFFF, -1, 0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0A4093822,
            0x243F6A88,
            0x0370734485A308D3,
            0x13198A2E,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(
    seed: int, index: int, position: int, purpose: int, expected: list[int]
) -> None:
    """The vectors that the generator's authors publish for ten rounds of four words."""
    assert words(seed, index, position, purpose) == expected


@given(INT64, st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.sampled_from(Purpose))
def test_words_are_those_of_python_integers(
    seed: int, index: int, position: int, purpose: Purpose
) -> None:
    mask = 2**32 - 1
    a, b, c, d = index, position & mask, int(purpose), position >> 32
    key_a, key_b = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        one, other = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (other >> 32) ^ b ^ key_a, other & mask, (one >> 32) ^ d ^ key_b, one & mask
        key_a, key_b = (key_a + 0x9E3779B9) & mask, (key_b + 0xBB67AE85) & mask
    assert words(seed, index, position, purpose) == [a, b, c, d]


@pytest.mark.parametrize("varied", ["position", "seed", "purpose"])
def test_numbers_are_uniform_along_every_argument(varied: str) -> None:
    count = 20_000
    still, turning = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    if varied == "position":
        found = uniform(still + 5, turning, Purpose.ACCEPT)
    elif varied == "seed":
        found = uniform(turning, still + 5, Purpose.ACCEPT)
    else:
        found = torch.cat([uniform(still[:1], still[:1], purpose) for purpose in range(500)])
    assert stats.kstest(found.numpy().astype(np.float64), "uniform").pvalue > 1e-3
    # neighbours do not tell of each other
    after = np.corrcoef(found[:-1].numpy(), found[1:].numpy())[0, 1]
    assert abs(after) < 4 / math.sqrt(len(found))


def test_the_test_of_uniformity_can_fail() -> None:
    found = uniform(torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000), 1) ** 1.1
    assert stats.kstest(found.numpy().astype(np.float64), "uniform").pvalue < 1e-3


def test_numbers_stay_inside_the_open_interval() -> None:
    ends = unit_interval(torch.tensor([0, 1, 2**31, 2**32 - 1]))
    assert ends[0] == 2.0**-33
    assert ends[-1] < 1
    assert bool((exponential(ends) > 0).all())
    assert bool(torch.isfinite(-torch.log(exponential(ends))).all())


@given(st.floats(2.0**-33, 1 - 2.0**-24, width=32))
def test_exponentials_keep_their_precision(number: float) -> None:
    found = float(exponential(torch.tensor([number])))
    assert found == pytest.approx(-math.log1p(-number), rel=3e-5)


@pytest.mark.parametrize("vocabulary", [3, LANES, LANES + 1, 4 * LANES, 9 * LANES + 5])
def test_the_noise_of_an_entry_is_its_own(vocabulary: int) -> None:
    seed, position = torch.tensor([3, -8]), torch.tensor([0, 2**33 + 1])
    found = gumbel(seed, position, Purpose.TARGET, vocabulary)
    assert found.shape == (2, vocabulary)
    for entry in {0, vocabulary // 2, vocabulary - 1}:
        index, word = word_of_entry(entry)
        for row in range(2):
            bits = words(int(seed[row]), index, int(position[row]), Purpose.TARGET)[word]
            number = min((bits + 0.5) / 2**32, 1 - 2**-24)
            assert float(found[row, entry]) == pytest.approx(
                -math.log(-math.log1p(-number)), rel=1e-4, abs=1e-4
            )


def test_the_noise_is_gumbel() -> None:
    found = gumbel(torch.arange(4), torch.arange(4), Purpose.TARGET, 5 * LANES).reshape(-1)
    assert stats.kstest(found.numpy().astype(np.float64), "gumbel_r").pvalue > 1e-3


def test_purposes_positions_and_seeds_give_other_noise() -> None:
    seed, position = torch.tensor([1]), torch.tensor([2])
    base = gumbel(seed, position, Purpose.TARGET, 2000)[0]
    others = [
        gumbel(seed, position, Purpose.DRAFT, 2000)[0],
        gumbel(seed + 1, position, Purpose.TARGET, 2000)[0],
        gumbel(seed, position + 1, Purpose.TARGET, 2000)[0],
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.1
