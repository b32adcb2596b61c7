"""What throughput rows and the published tables settle, as arguments of ``judge``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.warm_start import WarmStart
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook.claim_model import Claim, Predicate
from atom.workbook.statistics import exact_interval, poisson_interval
from atom.workbook.throughput_analysis import LoadSet, Row, is_cut_short, shows_fault
from atom.workbook.throughput_crashes import published_watches
from atom.workbook.throughput_points import LoadPoint, published_points, published_spread

Arguments = dict[str, dict[str, Any]]

_UNPATCHED = CopyProtocol.UNPATCHED.value
_ENDED_ITSELF = (Outcome.START_FAILED, Outcome.OUT_OF_MEMORY)
#: the published points have as many sessions
_PUBLISHED_SESSIONS = (32, 64)
#: what a claim waits for that no row here settles
_NEEDS = {
    "thr-14": "a recorded run of sweep colocation on an accelerator, with neighbours that copy",
    "thr-18": "the warm start of this notebook",
}


def row_arguments(found: LoadSet) -> Arguments:
    """Arguments by claim for the rows of one machine or profile.

    Simulated rows settle the factorial alone: their times are those of a CPU.
    """
    rows = found.rows
    arguments = {"mech-19": only_with_offload(rows)}
    machine = found.source
    if found.kind is Evidence.MEASURED:
        machine = found.runs[-1].provenance.machine
        arguments |= {
            "thr-10": _gain(found),
            "thr-11": _flat_without_offload(found),
            "thr-12": _falls_with_sessions(found),
            "thr-17": _errors(rows),
            "crash-01": _unfixed_crash(rows),
            "crash-05": _fixed_survive(rows),
        }
    same = {"machine": machine, "run_ids": tuple(found.run_ids)}
    return {
        claim: given if set(given) == {"reason"} else {**given, **same}
        for claim, given in arguments.items()
    }


def _loaded(rows: Sequence[Row]) -> list[Row]:
    """Points that came under load, and did not end for want of memory."""
    return [row for row in rows if row["outcome"] not in _ENDED_ITSELF and row["protocol"]]


def factorial(rows: Sequence[Row]) -> dict[tuple[bool, bool], tuple[int, int]]:
    """Faulty points and points of ``unpatched``, by (offload, drafts)."""
    cells: dict[tuple[bool, bool], tuple[int, int]] = {}
    for row in _loaded(rows):
        if row["protocol"] == _UNPATCHED:
            key = (row["pool_gib"] is not None, bool(row["mtp"]))
            faults, points = cells.get(key, (0, 0))
            cells[key] = (faults + shows_fault(row), points + 1)
    return cells


def factorial_table(cells: Mapping[tuple[bool, bool], tuple[int, int]]) -> pd.DataFrame:
    """Faulty of all unpatched points: a row with and without offload, a column by drafts."""
    return pd.DataFrame(
        {
            "": "offload" if offload else "no offload",
            **{
                ("MTP" if drafts else "no MTP"): "not run"
                if (offload, drafts) not in cells
                else "{} of {}".format(*cells[offload, drafts])
                for drafts in (True, False)
            },
        }
        for offload in (True, False)
    )


def only_with_offload(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether ``unpatched`` shows the fault with offload, and never without."""
    cells = factorial(rows)
    if (True, True) not in cells or (False, True) not in cells:
        return {"reason": "no unpatched points with and without offload in these runs"}
    with_, without = (
        [sum(cells.get((offload, drafts), (0, 0))[place] for drafts in (True, False))
         for place in (0, 1)]
        for offload in (True, False)
    )  # fmt: skip
    _, high = exact_interval(*without)
    text = f"{with_[0]} of {with_[1]} points with offload, {without[0]} of {without[1]} without"
    cell_text = "; ".join(
        f"{'offload' if offload else 'no offload'}, {'MTP' if drafts else 'no MTP'}: "
        f"{faults} of {points}"
        for (offload, drafts), (faults, points) in sorted(cells.items(), reverse=True)
    )
    detail = (
        "faulty: died, hung, failed by the guard, or read a stale status; unpatched; "
        f"{cell_text}; without offload a point's risk may still be up to {high:.0%}"
    )
    if not with_[0] and not without[0]:
        return {"undecided": f"no unpatched point showed the fault; {detail}", "value": text}
    return {"holds": with_[0] > 0 and without[0] == 0, "value": text, "detail": detail}


def warm_arguments(cold: WarmStart, warm: WarmStart, profile: str) -> dict[str, Any]:
    """Whether a cache that a neighbour filled changes what a server has to do.

    Raises:
        ValueError: the two rounds asked for different numbers of tokens.
    """
    if cold.prompt_tokens != warm.prompt_tokens:
        raise ValueError(f"{cold.prompt_tokens} and {warm.prompt_tokens} prompt tokens")
    return {
        "holds": warm.found_share > cold.found_share,
        "value": f"{warm.computed_tokens:,} of {warm.prompt_tokens:,} prompt tokens computed where "
        f"a neighbour's cache answers, {cold.computed_tokens:,} where none does",
        "detail": f"found: {warm.found_share:.0%} against {cold.found_share:.0%}; a server that "
        "finds so much does less work for the same load",
        "machine": profile,
    }


# -- measured only


def _gain(own: LoadSet) -> dict[str, Any]:
    ratios = [one for one in own.points if one.ratio]
    if not ratios:
        return {"reason": "no setting of the main grid was run with and without offload"}
    known = [one.ratio[0] for one in published_points() if one.ratio]
    factor = math.exp(2 * published_spread().sd)
    least, most = min(known) / factor, max(known) * factor
    found = [one.ratio[0] for one in ratios if one.ratio]
    value = f"{min(found):.2f} to {max(found):.2f} in {len(found)} settings"
    detail = (
        f"published {min(known):.2f} to {max(known):.2f}, with its repeat's spread {least:.2f} to "
        f"{most:.2f}; another model, and pools of another size beside the working set"
    )
    highest = max(one.ratio[2] for one in ratios if one.ratio)
    if highest < least:
        return {"holds": False, "value": value, "detail": detail}
    if least <= min(found) and max(found) <= most:
        return {"holds": True, "value": value, "detail": detail}
    return {
        "undecided": f"the ratio depends on the pool, and reaches beyond the published range: "
        f"{detail}",
        "value": value,
    }


def _published_sessions(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """The points within the published numbers of sessions, if those are two numbers at least.

    Of the sitting that has most of them alone: another's host may be of another speed.
    """
    sizes = Counter(one.sitting for one in points)
    together = [one for one in points if sizes[one.sitting] == max(sizes.values())]
    together = [one for one in together if one.sitting == together[0].sitting]
    low, high = _PUBLISHED_SESSIONS
    inside = [one for one in together if low <= one.concurrency <= high]
    return inside if len({one.concurrency for one in inside}) > 1 else together


def _flat_without_offload(own: LoadSet) -> dict[str, Any]:
    points = _published_sessions([one for one in own.points if one.pool_gib is None])
    if len(points) < 2:
        return {"reason": "fewer than two numbers of sessions were run without offload"}
    ends = sorted(points, key=lambda one: one.throughput)
    allowed = math.exp(math.sqrt(2) * published_spread().sd)
    middle, low, high = own.spread.of(ends[-1].rates, ends[0].rates)
    counts = sorted(one.concurrency for one in points)
    value = f"spread {middle - 1:.1%} from {counts[0]} to {counts[-1]} sessions"
    detail = f"ratio of the ends [{low:.2f}, {high:.2f}]; the published repeat moved by as much as "
    detail += f"{allowed - 1:.1%}"
    if middle <= allowed:
        return {"holds": True, "value": value, "detail": detail}
    if low > 1:
        return {"holds": False, "value": value, "detail": detail}
    return {"undecided": f"more than the published spread, within that of repeats here; {detail}",
            "value": value}  # fmt: skip


def _falls_with_sessions(own: LoadSet) -> dict[str, Any]:
    points = _published_sessions([one for one in own.points if one.pool_gib is not None])
    by_pool = {
        pool: sorted(
            (one for one in points if one.pool_gib == pool), key=lambda one: -one.concurrency
        )
        for pool in sorted({one.pool_gib for one in points if one.pool_gib is not None})
    }
    by_pool = {pool: chain for pool, chain in by_pool.items() if len(chain) > 1}
    if not by_pool:
        return {"reason": "no pool size was run with two numbers of sessions"}
    largest = by_pool[max(by_pool)]
    texts = [
        f"{pool:g} GiB: " + ", ".join(f"{one.throughput:,.0f}" for one in chain)
        for pool, chain in by_pool.items()
    ]
    return {
        "value": [round(one.throughput, 1) for one in largest],
        "detail": f"the largest pool, from {largest[0].concurrency} sessions down to "
        f"{largest[-1].concurrency}; here the pool stays while sessions go up; {'; '.join(texts)}",
    }


def _errors(rows: Sequence[Row]) -> dict[str, Any]:
    own = [
        row for row in _loaded(rows) if row["protocol"] != _UNPATCHED and row["errors"] is not None
    ]
    if not own:
        return {"reason": "no protected point counted its errors"}
    return {
        "value": sum(row["errors"] for row in own),
        "detail": f"in {len(own)} points with {sum(row['requests'] for row in own):,} requests",
    }


def _died(row: Row) -> bool:
    return row["outcome"] in (Outcome.CRASH, Outcome.HANG) and not is_cut_short(row)


def _unfixed_crash(rows: Sequence[Row]) -> dict[str, Any]:
    own = [
        row
        for row in _loaded(rows)
        if row["protection"] == f"{_UNPATCHED}, no net" and row["pool_gib"] is not None
        and row["mtp"]
    ]  # fmt: skip
    hours = sum(row["exposure_seconds"] or 0.0 for row in own) / 3600
    if not own or hours == 0:
        return {"reason": "no unpatched point with offload, drafts and without a net"}
    died = sum(_died(row) for row in own)
    stale = sum(row["stale_statuses"] or 0 for row in own)
    published = published_watches()["unfixed"]
    low, high = (-math.expm1(-end) for end in poisson_interval(died, hours))
    expected = published.events / published.hours * hours
    value = f"{died} of {len(own)} points in {60 * hours:.1f} min under load"
    detail = (
        f"a risk of {_risk_text(low, high)} an hour at a steady rate (exact 95%); published "
        f"{published.events} of {published.runs} in [{published.risk[0]:.0%}, "
        f"{published.risk[1]:.0%}]; {stale:,} stale statuses"
    )
    if died == 0 and high >= published.risk[0]:
        return {
            "undecided": f"no crash, where the published rate would give {expected:.2f}; {detail}",
            "value": value,
        }
    return {"holds": died > 0, "value": value, "detail": detail}


def _risk_text(low: float, high: float) -> str:
    # no rate makes it certain
    ends = [f"{end:.1%}" if end < 0.9995 else "over 99.9%" for end in (low, high)]
    return " to ".join(dict.fromkeys(ends))


def _fixed_survive(rows: Sequence[Row]) -> dict[str, Any]:
    own = [
        row
        for row in _loaded(rows)
        if row["protocol"] != _UNPATCHED and row["pool_gib"] is not None
    ]
    hours = sum(row["exposure_seconds"] or 0.0 for row in own) / 3600
    if not own or hours == 0:
        return {"reason": "no protected point with offload"}
    ended = [row for row in own if shows_fault(row)]
    protocols = ", ".join(dict.fromkeys(str(row["protocol"]) for row in own))
    return {
        "holds": not ended,
        "value": f"{len(ended)} of {len(own)} points in {60 * hours:.1f} min under load",
        "detail": f"{protocols}; at most {poisson_interval(len(ended), hours)[1]:.2g} an hour "
        "(exact 95%)",
    }


# -- published, and what is open


def recorded_arguments(claims: Mapping[str, Claim], notebook: str) -> Arguments:
    """Claims of a notebook that stand for the record alone, with the reason in their note."""
    return {
        name: {"testable": False, "reason": claim.note}
        for name, claim in claims.items()
        if claim.notebook == notebook and claim.predicate is Predicate.RECORDED
    }


def open_claims(
    claims: Mapping[str, Claim],
    notebook: str,
    settled: Collection[str],
    needs: Mapping[str, str] = _NEEDS,
    otherwise: str = "a recorded run of sweep throughput on an accelerator",
) -> pd.DataFrame:
    """Claims of a notebook without a verdict by a kind of evidence that it settles.

    Args:
        claims: all claims by id.
        notebook: its number.
        settled: keys ``<claim>/<evidence>``.
        needs: what a claim waits for.
        otherwise: what all others wait for.
    """
    lines = []
    for name, claim in claims.items():
        missing = [
            str(kind)
            for kind in claim.evidence
            if claim.notebook_for(kind) == notebook and f"{name}/{kind}" not in settled
        ]
        if missing:
            lines.append(
                {
                    "claim": name,
                    "what it says": claim.claim,
                    "open": ", ".join(missing),
                    "needs": needs.get(name, otherwise),
                }
            )
    return pd.DataFrame(lines, columns=["claim", "what it says", "open", "needs"])
