"""One point of a load in the terms that published, measured and simulated points share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import stats

from atom.evidence import Evidence
from atom.workbook.published_derived import agentx_derived
from atom.workbook.published_tables import load_published

#: a ratio with its low and its high end
Ratio = tuple[float, float, float]
#: fewest degrees of freedom with which a spread gives an interval, and not just a range
_FEWEST = 3


def pool_text(pool_gib: float | None) -> str:
    """A CPU pool in words: ``160 GiB`` or ``no offload``."""
    return "no offload" if pool_gib is None else f"{pool_gib:g} GiB"


def setting_text(concurrency: int, pool_gib: float | None) -> str:
    """``32 sessions, 160 GiB`` or ``32 sessions, no offload``."""
    return f"{concurrency} sessions, {pool_text(pool_gib)}"


@dataclass(frozen=True)
class LoadPoint:
    """One setting of a load; means over its repeats. ``None`` where it is not known.

    Attributes:
        name: short name.
        evidence: kind of its numbers.
        concurrency: live sessions.
        pool_gib: host pool in GiB; ``None`` without offload.
        runs: repeats that ended well.
        throughput: prompt and output tokens a second and GPU, cached prompt tokens included.
        rates: the same, one value a repeat.
        requests_per_hour: finished requests, scaled to an hour.
        ttft_s: mean time to the first token.
        itl_p90_ms: 90th percentile of the inter-token latency.
        cached_share: share of prompt tokens that came from a cache.
        failed_loads: share of state loads that failed; the middle of ``failed_range``, if any.
        failed_range: its ends, where a range is printed.
        ratio: throughput over that without offload at as many sessions, with its range.
        sitting: what it was run together with; ratios are formed within.
    """

    name: str
    evidence: Evidence
    concurrency: int
    pool_gib: float | None
    runs: int
    throughput: float
    rates: tuple[float, ...]
    requests_per_hour: float | None = None
    ttft_s: float | None = None
    itl_p90_ms: float | None = None
    cached_share: float | None = None
    failed_loads: float | None = None
    failed_range: tuple[float, float] | None = None
    ratio: Ratio | None = None
    sitting: str = ""

    @property
    def setting(self) -> str:
        """``32 sessions, 160 GiB`` or ``32 sessions, no offload``."""
        return setting_text(self.concurrency, self.pool_gib)


@dataclass(frozen=True)
class Spread:
    """How much repeats of one setting differ.

    Attributes:
        sd: standard deviation of the logarithm of one run's throughput.
        freedom: degrees of freedom behind it: repeats beyond the first, over all settings.
        basis: where it comes from, in words.
    """

    sd: float
    freedom: int
    basis: str

    @property
    def is_interval(self) -> bool:
        """Whether there are repeats enough for a 95% interval."""
        return self.freedom >= _FEWEST

    @property
    def kind(self) -> str:
        """What the ends of a ratio are."""
        if self.is_interval:
            return f"95% interval from {self.basis}"
        return f"not an interval, but the spread of {self.basis}, which enters on both sides"

    def of(self, top: Sequence[float], bottom: Sequence[float]) -> Ratio:
        """Ratio of two settings' geometric means with its ends.

        With at least three degrees of freedom the ends are those of a t interval. Else they are a
        range: the difference of one pair of repeats in quadrature for the two sides.
        """
        middle = float(np.mean(np.log(top)) - np.mean(np.log(bottom)))
        if self.is_interval:
            sides = math.sqrt(1 / len(top) + 1 / len(bottom))
            half = float(stats.t.ppf(0.975, self.freedom)) * self.sd * sides
        else:
            # two runs of one setting differ by sqrt(2) standard deviations of one run
            half = math.sqrt(2) * math.sqrt(2) * self.sd
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)

    def certain_factor(self) -> float:
        """Factor either way of a 95% interval of a ratio of two single runs."""
        if self.freedom == 0:
            return math.inf
        return math.exp(float(stats.t.ppf(0.975, self.freedom)) * self.sd * math.sqrt(2))


def pooled_spread(groups: Iterable[Sequence[float]], basis: str) -> Spread | None:
    """Spread of repeats about their own setting's mean, over all settings; ``None`` without any."""
    squares, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1:
            logs = np.log(values)
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += len(values) - 1
    return Spread(math.sqrt(squares / freedom), freedom, basis) if freedom else None


def with_ratios(points: Iterable[LoadPoint], spread: Spread) -> list[LoadPoint]:
    """Points with their ratio to the one without offload at as many sessions, if there is one."""
    known = list(points)
    bases = {(one.sitting, one.concurrency): one.rates for one in known if one.pool_gib is None}
    return [
        one
        if one.pool_gib is None or (one.sitting, one.concurrency) not in bases
        else replace(one, ratio=spread.of(one.rates, bases[one.sitting, one.concurrency]))
        for one in known
    ]


# -- the published points


def published_spread() -> Spread:
    """Of the one published setting that was run twice."""
    table = load_published("agentx").set_index("point")["throughput_tok_s_per_gpu"]
    pair = [float(table["c64-288"]), float(table["c64-288-repeat"])]
    spread = pooled_spread([pair], f"one published pair ({max(pair) / min(pair) - 1:.1%} apart)")
    assert spread is not None
    return spread


def published_points() -> list[LoadPoint]:
    """The nine published hours, each a point of its own; state loads by their setting."""
    failed = {
        (row["concurrency_sessions"], row["cpu_pool_gib"]): (
            row["failed_percent_low"] / 100,
            row["failed_percent_high"] / 100,
        )
        for row in load_published("state_load_failures").to_dict("records")
    }
    points = []
    for row in agentx_derived().to_dict("records"):
        pool = row["cpu_pool_gib"] if row["offload"] else None
        rate = float(row["throughput_tok_s_per_gpu"])
        ends = failed.get((row["concurrency_sessions"], pool))
        points.append(
            LoadPoint(
                name=str(row["point"]),
                evidence=Evidence.PUBLISHED,
                concurrency=int(row["concurrency_sessions"]),
                pool_gib=pool,
                runs=1,
                throughput=rate,
                rates=(rate,),
                requests_per_hour=row["requests"] * 3600 / row["duration_s"],
                ttft_s=_known(row["ttft_mean_s"]),
                itl_p90_ms=_known(row["itl_p90_ms"]),
                failed_loads=sum(ends) / 2 if ends else None,
                failed_range=ends,
            )
        )
    return with_ratios(points, published_spread())


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def points_table(points: Sequence[LoadPoint]) -> pd.DataFrame:
    """A row a point: what :func:`figures_throughput.load_figure` draws, as numbers."""
    return pd.DataFrame(
        {
            "sessions": one.concurrency,
            "pool": pool_text(one.pool_gib),
            "runs": one.runs,
            "tok/s": f"{one.throughput:,.0f}",
            "over no offload": ratio_text(one.ratio),
            "requests an hour": number_text(one.requests_per_hour, ",.0f"),
            "TTFT mean, s": number_text(one.ttft_s, ".3g"),
            "ITL p90, ms": number_text(one.itl_p90_ms, ".3g"),
            "from a cache": number_text(one.cached_share, ".0%"),
            "state loads failed": number_text(one.failed_loads, ".1%"),
        }
        for one in points
    )


def ratio_text(ratio: Ratio | None) -> str:
    """``1.87 [1.69, 2.10]``, or a dash."""
    return "–" if ratio is None else f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"


def number_text(value: float | None, form: str) -> str:
    """A value in a format such as ``,.0f``, or a dash."""
    return "–" if value is None else format(value, form)
