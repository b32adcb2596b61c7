"""Intervals and tests against known values, and against the laws that define them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atom.workbook.statistics import (
    bootstrap_ratio,
    clustered_interval,
    exact_interval,
    fisher_exact,
    poisson_interval,
    poisson_ratio_interval,
    process_interval,
    smallest_detectable_difference,
    smallest_visible_rate,
    wilson_interval,
)

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 200, 0.0, 0.0183),
        (200, 200, 0.9817, 1.0),
        (99, 100, 0.9455, 0.9997),
        (0, 50, 0.0, 0.0711),
        (0, 100, 0.0, 0.0362),
        (4, 5, 0.2836, 0.9949),
        (0, 6, 0.0, 0.4593),
    ],
)
def test_exact_interval_of_known_counts(k: int, n: int, low: float, high: float) -> None:
    assert exact_interval(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_of_a_known_score() -> None:
    assert wilson_interval(1290, 1319) == pytest.approx((0.9686, 0.9846), abs=5e-5)


@given(COUNTS)
def test_each_end_of_the_exact_interval_leaves_one_tail(count: tuple[int, int]) -> None:
    k, n = count
    low, high = exact_interval(k, n)
    if k > 0:
        assert stats.binom.sf(k - 1, n, low) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert stats.binom.cdf(k, n, high) == pytest.approx(0.025, rel=1e-6)


@given(st.integers(1, 60), st.floats(0.001, 0.999))
def test_the_exact_interval_covers_at_least_as_often_as_it_says(n: int, rate: float) -> None:
    covered = sum(
        stats.binom.pmf(k, n, rate)
        for k in range(n + 1)
        if exact_interval(k, n)[0] <= rate <= exact_interval(k, n)[1]
    )
    assert covered >= 0.95 - 1e-9


@pytest.mark.parametrize("interval", [exact_interval, wilson_interval])
@given(count=COUNTS)
def test_intervals_hold_the_rate_are_symmetric_and_monotone(interval, count) -> None:  # type: ignore[no-untyped-def]
    k, n = count
    low, high = interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    mirrored = interval(n - k, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)
    if k < n:
        more_low, more_high = interval(k + 1, n)
        assert more_low > low - 1e-12
        assert more_high >= high
    wider_low, wider_high = interval(k, n, 0.99)
    assert wider_low <= low <= high <= wider_high


@given(st.lists(st.tuples(st.integers(0, 40), st.just(40)), min_size=2, max_size=12))
def test_clustering_never_narrows_and_ignores_the_order(pairs: list[tuple[int, int]]) -> None:
    stale, trials = zip(*pairs, strict=True)
    low, high, effect = clustered_interval(stale, trials)
    plain_low, plain_high = exact_interval(sum(stale), sum(trials))
    assert effect >= 1
    assert low <= plain_low + 1e-9
    assert high >= plain_high - 1e-9
    assert clustered_interval(stale[::-1], trials) == pytest.approx((low, high, effect))


def test_one_draw_a_process_is_worth_one_trial_a_process() -> None:
    # each process all or nothing: 200 trials say no more than 5 draws do
    low, high, effect = clustered_interval([40, 40, 40, 40, 0], [40] * 5)
    assert effect > 39
    assert high - low > 0.7
    plain_low, plain_high = exact_interval(160, 200)
    assert plain_high - plain_low < 0.15


def test_clustered_interval_covers_processes_that_differ() -> None:
    random = np.random.default_rng(7)
    covered = plain = 0
    for _ in range(400):
        stale = random.binomial(40, random.beta(2, 2, size=10)).tolist()
        low, high, _ = clustered_interval(stale, [40] * 10)
        covered += low <= 0.5 <= high
        plain_low, plain_high = exact_interval(sum(stale), 400)
        plain += plain_low <= 0.5 <= plain_high
    assert covered >= 0.93 * 400
    # the control: without clustering the same data mislead
    assert plain < 0.7 * 400


def test_unanimous_processes_and_single_ones_say_what_they_cannot_know() -> None:
    assert clustered_interval([0] * 5, [40] * 5) == (*exact_interval(0, 200), 1.0)
    assert process_interval([0] * 5, [40] * 5) == (0, 5, *exact_interval(0, 5))
    assert process_interval([40, 1, 0], [40] * 3)[:2] == (2, 3)
    assert math.isnan(clustered_interval([3], [40])[2])


@given(st.integers(1, 5000), st.floats(0.5, 0.999))
def test_the_smallest_visible_rate_is_seen_just_so_often(trials: int, confidence: float) -> None:
    rate = smallest_visible_rate(trials, confidence)
    assert 1 - (1 - rate) ** trials == pytest.approx(confidence, rel=1e-6)


@pytest.mark.parametrize(("n", "p"), [(1319, 0.9788), (200, 0.5), (400, 0.9)])
def test_the_detectable_difference_has_the_power_it_claims(n: int, p: float) -> None:
    other = p - smallest_detectable_difference(n, p)
    random = np.random.default_rng(3)
    a, b = random.binomial(n, p, 20000), random.binomial(n, other, 20000)
    mean = (a + b) / (2 * n)
    z = (a - b) / n / np.sqrt(2 * mean * (1 - mean) / n)
    assert np.mean(np.abs(z) > 1.96) == pytest.approx(0.8, abs=0.02)


@given(st.integers(50, 5000), st.floats(0.5, 0.99))
def test_more_trials_show_less(n: int, p: float) -> None:
    assert smallest_detectable_difference(2 * n, p) < smallest_detectable_difference(n, p)


def test_too_few_trials_show_nothing() -> None:
    assert smallest_detectable_difference(1, 0.5) == math.inf
    assert smallest_detectable_difference(100, 0.0) == math.inf


def test_fisher_of_the_crash_history() -> None:
    assert fisher_exact(4, 5, 0, 6) == pytest.approx(5 / 330)
    assert fisher_exact(0, 6, 4, 5) == pytest.approx(5 / 330)
    assert fisher_exact(3, 6, 3, 6) == pytest.approx(1.0)


@given(st.integers(0, 50), st.floats(0.1, 100))
def test_poisson_ends_are_where_the_count_becomes_unlikely(events: int, exposure: float) -> None:
    low, high = poisson_interval(events, exposure)
    assert stats.poisson.cdf(events, high * exposure) == pytest.approx(0.025)
    if events:
        assert stats.poisson.sf(events - 1, low * exposure) == pytest.approx(0.025)
    else:
        assert low == 0


def test_poisson_ratio_of_the_crash_history() -> None:
    low, high, p = poisson_ratio_interval(4, 2.5, 0, 6.0)
    # all four in the first, by its share of the exposure; the other tail is less likely
    assert p == pytest.approx((2.5 / 8.5) ** 4)
    share = exact_interval(4, 4)[0]
    assert low == pytest.approx(share / (1 - share) * 6.0 / 2.5)
    assert high == math.inf
    assert poisson_ratio_interval(0, 1.0, 0, 1.0) == (0.0, math.inf, 1.0)
    assert poisson_ratio_interval(7, 2.0, 7, 2.0)[2] == pytest.approx(1.0)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(1, 100), min_size=3, max_size=20),
    st.lists(st.floats(1, 100), min_size=3, max_size=20),
    st.floats(0.5, 10),
)
def test_bootstrap_ratio_scales_and_is_seeded(a: list[float], b: list[float], by: float) -> None:
    found = bootstrap_ratio(a, b, seed=1, resamples=200)
    assert found == bootstrap_ratio(a, b, seed=1, resamples=200)
    assert found[1] <= found[2]
    scaled = bootstrap_ratio([by * value for value in a], b, seed=1, resamples=200)
    assert scaled == pytest.approx(tuple(by * end for end in found))


def test_bootstrap_ratio_covers_the_truth() -> None:
    random = np.random.default_rng(11)
    covered = 0
    for number in range(200):
        a, b = random.lognormal(0.1, 0.3, 40), random.lognormal(0.0, 0.3, 40)
        _, low, high = bootstrap_ratio(a, b, seed=number, resamples=500)
        covered += low <= math.exp(0.1) <= high
    assert covered >= 0.9 * 200


@pytest.mark.parametrize(
    "call",
    [
        lambda: exact_interval(3, 2),
        lambda: exact_interval(0, 0),
        lambda: exact_interval(-1, 5),
        lambda: wilson_interval(1, 5, 1.0),
        lambda: clustered_interval([1], [1, 2]),
        lambda: clustered_interval([], []),
        lambda: clustered_interval([3], [2]),
        lambda: bootstrap_ratio([1], [0], seed=0),
        lambda: bootstrap_ratio([], [1], seed=0),
        lambda: smallest_detectable_difference(10, 0.5, power=1),
        lambda: poisson_interval(-1, 1.0),
        lambda: poisson_interval(1, 0.0),
        lambda: poisson_ratio_interval(1, 1.0, 1, math.inf),
    ],
)
def test_impossible_input_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"must|need|at least"):
        call()
