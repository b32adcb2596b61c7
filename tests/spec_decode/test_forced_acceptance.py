"""The forced length: its mean, its variance, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.spec_decode.forced_acceptance import ForcedAcceptance

LENGTHS = st.integers(100, 400).map(lambda hundredths: hundredths / 100)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 20))
def test_a_request_keeps_its_mean_within_one_draft(length: float, steps: int, others: int) -> None:
    forced = ForcedAcceptance(length, 3)
    for other in range(others):
        forced.next_bonus(("other", other), 3)
    total, goal = 0, Fraction(str(length)) - 1
    for step in range(1, steps + 1):
        bonus = forced.next_bonus("a", 3)
        # a whole number next to the mean: the least variance there is
        assert bonus in (math.floor(goal), math.ceil(goal))
        total += bonus
        assert abs(total - step * goal) < 1


def test_the_published_length() -> None:
    forced = ForcedAcceptance(2.32, 3)
    found = [forced.next_bonus(7, 3) for _ in range(100)]
    assert found.count(1) == 68
    assert found.count(2) == 32
    assert forced.mean_bonus == pytest.approx(1.32)


@pytest.mark.parametrize("requests", [25, 64])
def test_a_batch_keeps_the_mean_in_every_step(requests: int) -> None:
    forced = ForcedAcceptance(2.32, 3)
    for _ in range(30):
        mean = sum(forced.next_bonus(request, 3) for request in range(requests)) / requests
        assert abs(mean - 1.32) < 0.1


def test_requests_are_not_in_step() -> None:
    forced = ForcedAcceptance(1.5, 1)
    rhythms = {tuple(forced.next_bonus(request, 1) for _ in range(6)) for request in range(8)}
    assert len(rhythms) == 2


@pytest.mark.parametrize(("length", "bonus"), [(1.0, 0), (3, 2), (4.0, 3)])
def test_whole_lengths_do_not_vary(length: float, bonus: int) -> None:
    forced = ForcedAcceptance(length, 3)
    assert {forced.next_bonus(request, 3) for request in range(5) for _ in range(5)} == {bonus}


def test_a_step_with_fewer_drafts_accepts_those() -> None:
    forced = ForcedAcceptance(4, 3)
    assert [forced.next_bonus(1, drafts) for drafts in (3, 1, 0, -1, 3)] == [3, 1, 0, 0, 3]


def test_a_forgotten_request_begins_again() -> None:
    forced = ForcedAcceptance(1.01, 3)
    first = [forced.next_bonus(1, 3) for _ in range(100)]
    assert sum(first) == 1
    forced.forget(1)
    forced.forget("unknown")
    assert sum(forced.next_bonus(1, 3) for _ in range(100)) == 1
    assert len(forced._steps) == 1


@pytest.mark.parametrize("length", [0.99, 4.01, -1, math.nan, math.inf])
def test_impossible_lengths_are_refused(length: float) -> None:
    with pytest.raises(BadInput, match="1 to 4 tokens"):
        ForcedAcceptance(length, 3)
    with pytest.raises(BadInput):
        ForcedAcceptance(1.5, 0)


@pytest.mark.parametrize("length", [1.0, 1.5, 2.32, 4.0])
def test_what_is_upcoming_is_what_the_calls_give(length: float) -> None:
    forced = ForcedAcceptance(length, 3)
    for request in ("a", "b"):
        forced.next_bonus(request, 3)
    told = forced.upcoming("b", 3, 40)
    assert told == forced.upcoming("b", 3, 40)
    assert told[:25] == [forced.next_bonus("b", 3) for _ in range(25)]
    forced.skip("b", 10)
    assert told[35:] == forced.upcoming("b", 3, 5)
