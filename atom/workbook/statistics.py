"""Intervals and tests for counts and ratios. Every interval is two-sided."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

_Interval = tuple[float, float]


def exact_interval(k: float, n: float, confidence: float = 0.95) -> _Interval:
    """Clopper-Pearson interval of a rate: covers the true rate at least ``confidence`` often.

    Args:
        k: events, 0 to ``n``; may be fractional (an effective count).
        n: trials, above 0.
        confidence: between 0 and 1.
    """
    _check_count(k, n, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if k == 0 else float(stats.beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k == n else float(stats.beta.ppf(1 - tail, k + 1, n - k))
    return low, high


def wilson_interval(k: int, n: int, confidence: float = 0.95) -> _Interval:
    """Wilson score interval of a rate: near its nominal coverage also for rates close to 0 or 1."""
    _check_count(k, n, confidence)
    z = float(stats.norm.ppf((1 + confidence) / 2))
    rate = k / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if k == 0 else max(0.0, centre - half)
    high = 1.0 if k == n else min(1.0, centre + half)
    return low, high


def poisson_interval(events: int, exposure: float, confidence: float = 0.95) -> _Interval:
    """Exact interval of a rate of events per unit of exposure (Garwood).

    Args:
        events: counted, 0 or more.
        exposure: watched, above 0, e.g. hours; the ends are events per unit of it.
        confidence: between 0 and 1.

    Source: Garwood, Biometrika 28 (1936) 437-442.
    """
    _check_exposure(events, exposure)
    _check_count(0, 1, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if events == 0 else float(stats.chi2.ppf(tail, 2 * events)) / 2
    return low / exposure, float(stats.chi2.ppf(1 - tail, 2 * events + 2)) / 2 / exposure


def poisson_ratio_interval(
    events_a: int, exposure_a: float, events_b: int, exposure_b: float, confidence: float = 0.95
) -> tuple[float, float, float]:
    """Two rates of events compared: how many times the first is the second.

    Given their sum, the first count is binomial with a share that the rates and exposures fix, so
    an exact interval of that share is one of the ratio.

    Returns:
        Low end, high end (infinity without an event in ``b``), two-sided p-value of equal rates.
    """
    _check_exposure(events_a, exposure_a)
    _check_exposure(events_b, exposure_b)
    events = events_a + events_b
    if events == 0:
        return 0.0, math.inf, 1.0
    low, high = exact_interval(events_a, events, confidence)
    odds = exposure_b / exposure_a
    p = float(stats.binomtest(events_a, events, exposure_a / (exposure_a + exposure_b)).pvalue)
    return low / (1 - low) * odds, math.inf if high == 1 else high / (1 - high) * odds, p


def clustered_interval(
    stale_per_process: Sequence[int], trials_per_process: Sequence[int], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Korn-Graubard interval of a rate whose trials come in processes.

    Trials of one process share one draw of the stream-to-queue mapping, so they say less than as
    many independent trials. The trial count is divided by the design effect (between-process
    variance over binomial variance, at least 1) and corrected for the few processes; then the exact
    interval is taken. Where all trials agree no variance can be estimated and the full count is
    used: read :func:`process_interval` beside it.

    Args:
        stale_per_process: stale trials of each process.
        trials_per_process: trials of each process.
        confidence: between 0 and 1.

    Returns:
        Low end, high end, design effect (NaN for a single process, which shows no spread).

    Source: Korn and Graubard, Survey Methodology 24 (1998) 193-201.
    """
    stale, trials = _check_processes(stale_per_process, trials_per_process)
    k, n, groups = float(stale.sum()), float(trials.sum()), len(stale)
    if groups == 1:
        return (*exact_interval(k, n, confidence), math.nan)
    if k in (0.0, n):
        return (*exact_interval(k, n, confidence), 1.0)
    rate = k / n
    between = groups / (groups - 1) * float(((stale - rate * trials) ** 2).sum()) / n**2
    effect = max(1.0, between / (rate * (1 - rate) / n))
    level = (1 + confidence) / 2
    few = float(stats.t.ppf(level, n - 1) / stats.t.ppf(level, groups - 1)) ** 2
    effective = n / effect * min(1.0, few)
    return (*exact_interval(rate * effective, effective, confidence), effect)


def process_interval(
    stale_per_process: Sequence[int], trials_per_process: Sequence[int], confidence: float = 0.95
) -> tuple[int, int, float, float]:
    """Exact interval of the share of processes that show the fault at all.

    Returns:
        Processes with a stale trial, processes, low end, high end.
    """
    stale, _ = _check_processes(stale_per_process, trials_per_process)
    hit, groups = int((stale > 0).sum()), len(stale)
    return (hit, groups, *exact_interval(hit, groups, confidence))


def smallest_visible_rate(trials: int, confidence: float = 0.95) -> float:
    """The rate that shows itself at least once in ``trials`` with probability ``confidence``."""
    _check_count(0, trials, confidence)
    return -math.expm1(math.log1p(-confidence) / trials)


def smallest_detectable_difference(
    n: int, p: float, power: float = 0.8, confidence: float = 0.95
) -> float:
    """How far a second rate must lie below ``p`` for two samples of ``n`` to tell them apart.

    Two-sided test of two independent proportions, pooled variance under equality, normal
    approximation.

    Args:
        n: trials in each sample.
        p: the higher rate.
        power: probability of finding the difference.
        confidence: 1 - level of the test.

    Returns:
        The difference, 0 to ``p``; infinity if even a second rate of 0 could be missed.
    """
    _check_count(p, 1, confidence)
    if not 0 < power < 1:
        raise ValueError(f"power must lie between 0 and 1, got {power}")

    def missing(difference: float) -> float:
        other = p - difference
        mean = (p + other) / 2
        null = z_level * math.sqrt(max(0.0, 2 * mean * (1 - mean) / n))
        found = z_power * math.sqrt(max(0.0, (p * (1 - p) + other * (1 - other)) / n))
        return difference - null - found

    z_level = float(stats.norm.ppf((1 + confidence) / 2))
    z_power = float(stats.norm.ppf(power))
    if p == 0 or missing(p) < 0:
        return math.inf
    return float(optimize.brentq(missing, 0.0, p))


def difference_interval(
    rate_a: float, interval_a: _Interval, rate_b: float, interval_b: _Interval
) -> _Interval:
    """Interval of ``rate_b - rate_a`` from the interval of each: Newcombe's square-and-add.

    With Wilson intervals this is Newcombe's method 10. It takes any interval that is right for its
    rate, so also an exact one and one clustered by process.

    Args:
        rate_a, rate_b: the two independent rates.
        interval_a, interval_b: their intervals, both of the wanted confidence.

    Source: Newcombe, Statistics in Medicine 17 (1998) 873-890; Zou and Donner, 27 (2008) 1693-1702.
    """
    for rate, (low, high) in ((rate_a, interval_a), (rate_b, interval_b)):
        if not 0 <= low <= rate <= high <= 1:
            raise ValueError(f"rate {rate} needs an interval around it, got [{low}, {high}]")
    difference = rate_b - rate_a
    down = math.hypot(rate_b - interval_b[0], interval_a[1] - rate_a)
    up = math.hypot(interval_b[1] - rate_b, rate_a - interval_a[0])
    return max(-1.0, difference - down), min(1.0, difference + up)


def fisher_exact(k_a: int, n_a: int, k_b: int, n_b: int) -> float:
    """Two-sided p-value of Fisher's test that ``k_a`` of ``n_a`` and ``k_b`` of ``n_b`` differ."""
    _check_count(k_a, n_a, 0.95)
    _check_count(k_b, n_b, 0.95)
    return float(stats.fisher_exact([[k_a, n_a - k_a], [k_b, n_b - k_b]])[1])


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test on pairs: as many lost as gained?

    Args:
        lost: pairs in which the first is right alone.
        gained: pairs in which the second is.

    Source: McNemar, Psychometrika 12 (1947) 153-157, with the binomial in place of its limit.
    """
    if lost < 0 or gained < 0:
        raise ValueError(f"counts of pairs are 0 or more, got {lost} and {gained}")
    if not lost + gained:
        return 1.0
    return float(stats.binomtest(lost, lost + gained, 0.5).pvalue)


def smallest_significant_pairs(confidence: float = 0.95) -> int:
    """Fewest pairs, all on one side, that McNemar's exact test takes for a difference."""
    _check_count(0, 1, confidence)
    return next(n for n in range(1, 100_000) if mcnemar_exact(n, 0) < 1 - confidence)


def bootstrap_ratio(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    seed: int,
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
    of: Callable[..., np.ndarray] = np.median,
) -> tuple[float, float, float]:
    """Ratio of two samples' medians with a percentile bootstrap interval.

    Args:
        a: sample of the numerator, independent of ``b``.
        b: sample of the denominator; positive values.
        seed: of the resampling.
        confidence: between 0 and 1.
        resamples: bootstrap draws.
        of: statistic that takes ``axis=``, the median by default.

    Returns:
        Ratio, low end, high end.
    """
    top, bottom = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if not len(top) or not len(bottom):
        raise ValueError("both samples need at least one value")
    if not np.isfinite(top).all() or not np.isfinite(bottom).all() or (bottom <= 0).any():
        raise ValueError("values must be finite, and positive in the denominator")
    random = np.random.default_rng(seed)
    draws_a = of(random.choice(top, (resamples, len(top))), axis=1)
    draws_b = of(random.choice(bottom, (resamples, len(bottom))), axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws_a / draws_b, [tail, 1 - tail])
    return float(of(top, axis=0) / of(bottom, axis=0)), float(low), float(high)


def _check_exposure(events: int, exposure: float) -> None:
    if events < 0 or not 0 < exposure < math.inf:
        raise ValueError(f"need 0 or more events in an exposure above 0, got {events}, {exposure}")


def _check_count(k: float, n: float, confidence: float) -> None:
    if not n > 0:
        raise ValueError(f"at least one trial is needed, got {n}")
    if not 0 <= k <= n:
        raise ValueError(f"events must lie in 0..{n}, got {k}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def _check_processes(stale: Sequence[int], trials: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    counts, totals = np.asarray(stale, dtype=float), np.asarray(trials, dtype=float)
    if counts.shape != totals.shape or counts.ndim != 1 or not len(counts):
        raise ValueError("stale and trials need one entry a process, and at least one process")
    if (totals <= 0).any() or (counts < 0).any() or (counts > totals).any():
        raise ValueError("each process needs trials, and 0 to that many stale ones")
    return counts, totals
