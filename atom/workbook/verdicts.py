"""Verdicts: what the evidence says of a claim, by the claim's predicate and nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.claim_model import Claim, Predicate
from atom.workbook.statistics import (
    clustered_interval,
    exact_interval,
    process_interval,
    smallest_visible_rate,
)

_CONFIDENCE = 0.95


class Verdict(StrEnum):
    """What was found."""

    REPRODUCED = "reproduced"
    REPRODUCED_IN_SIMULATION = "reproduced in simulation"
    DIFFERS = "differs"
    INCONCLUSIVE = "inconclusive"
    SOURCE_INCONSISTENT = "source inconsistent"
    NOT_TESTABLE_HERE = "not testable here"
    NOT_RUN = "not run"


class Settled(BaseModel):
    """A claim with its verdict from one kind of evidence."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    claim: str
    evidence: Evidence
    verdict: Verdict
    value: str
    """What was found, with its unit."""
    detail: str
    """Intervals, allowances and reasons."""
    machine: str | None
    """Slug of the hardware, or the virtual profile."""
    same_hardware: bool | None
    """Whether a measurement ran on the published value's kind of machine; ``None`` elsewhere."""
    run_ids: tuple[str, ...] = ()
    cell: str = ""
    """Anchor of the cell that settled it."""

    @property
    def key(self) -> str:
        """``<claim>/<evidence>``: there is at most one verdict a key."""
        return f"{self.claim}/{self.evidence}"


class _Finding(BaseModel):
    """``True`` supports the claim, ``False`` contradicts it, ``None`` decides nothing."""

    supports: bool | None
    value: str
    detail: str = ""


def judge(
    claim: Claim,
    evidence: Evidence | str,
    *,
    value: float | Sequence[float] | str | None = None,
    interval: tuple[float, float] | None = None,
    stale: int | Sequence[int] | None = None,
    trials: int | Sequence[int] | None = None,
    processes: int | None = None,
    holds: bool | None = None,
    testable: bool = True,
    undecided: str = "",
    reason: str = "",
    detail: str = "",
    machine: str | None = None,
    same_hardware: bool | None = None,
    run_ids: Sequence[str] = (),
    cell: str = "",
) -> Settled:
    """Judge ``claim`` from one kind of evidence.

    What is passed depends on the predicate. ``equals``, ``within``, ``ratio_within``: ``value``
    (and the ``interval`` of a measurement). ``always``, ``never``, ``sometimes``: ``stale`` and
    ``trials``, best one entry a process. ``order``: ``value`` as a sequence that should strictly
    increase, or ``holds``. ``holds``, ``inconsistent``: ``holds``, the finding itself (for
    ``inconsistent``: whether the source's step holds after all); ``value`` may carry its text.
    Any arithmetic part may be given as ``holds``. With none of these and a ``reason`` the verdict
    is ``not run``; with ``testable=False`` it is ``not testable here``.

    Args:
        claim: from ``load_claims``.
        evidence: a kind that the claim lists.
        value: what was found.
        interval: interval of ``value``; a verdict needs all of it on one side.
        stale: stale trials, in all or per process.
        trials: trials, in all or per process.
        processes: how many processes the totals came from, where only totals are known.
        holds: yes-or-no finding.
        testable: false where nothing here can test the claim.
        undecided: why this evidence decides nothing either way; the verdict is ``inconclusive``.
        reason: why it was not run or is not testable.
        detail: further words for the reader.
        machine: slug of the hardware (measured) or name of the profile (simulated).
        same_hardware: overrides the comparison of ``machine`` with the claim's.
        run_ids: recorded runs behind it.
        cell: anchor.

    Raises:
        BadInput: evidence that the claim does not list, or arguments that do not fit its predicate.
    """
    kind = Evidence(evidence)
    if kind not in claim.evidence:
        raise BadInput(
            f"claim {claim.id} is settled by {', '.join(claim.evidence)} evidence, not by {kind}"
        )
    if kind in (Evidence.MEASURED, Evidence.SIMULATED) and not machine:
        nothing = value is None and stale is None and holds is None
        if not nothing:
            raise BadInput(f"claim {claim.id}: {kind} evidence names its machine or profile")
    given = any(argument is not None for argument in (value, stale, trials, holds))
    if claim.predicate is Predicate.RECORDED or not testable:
        verdict = Verdict.NOT_TESTABLE_HERE
        finding = _Finding(supports=None, value="", detail=reason or claim.note or "")
    elif undecided:
        verdict = Verdict.INCONCLUSIVE
        finding = _Finding(supports=None, value=_shown(value), detail=undecided)
    elif not given:
        verdict, finding = Verdict.NOT_RUN, _Finding(supports=None, value="", detail=reason)
    else:
        finding = _find(claim, kind, value, interval, stale, trials, processes, holds)
        verdict = _verdict(claim, kind, finding)
    if verdict in (Verdict.NOT_TESTABLE_HERE, Verdict.NOT_RUN) and not finding.detail:
        raise BadInput(f"claim {claim.id}: '{verdict}' needs a reason")
    if kind is Evidence.MEASURED and machine and claim.machine and same_hardware is None:
        same_hardware = machine == claim.machine
    return Settled(
        claim=claim.id,
        evidence=kind,
        verdict=verdict,
        value=finding.value,
        detail="; ".join(part for part in (finding.detail, detail, given and reason) if part),
        machine=machine,
        same_hardware=same_hardware if kind is Evidence.MEASURED else None,
        run_ids=tuple(run_ids),
        cell=cell,
    )


def _verdict(claim: Claim, kind: Evidence, finding: _Finding) -> Verdict:
    if finding.supports is None:
        return Verdict.INCONCLUSIVE
    if finding.supports:
        simulated = kind is Evidence.SIMULATED
        return Verdict.REPRODUCED_IN_SIMULATION if simulated else Verdict.REPRODUCED
    # arithmetic over the source's own figures that fails is the source against itself
    return Verdict.SOURCE_INCONSISTENT if kind is Evidence.ARITHMETIC else Verdict.DIFFERS


def _find(
    claim: Claim,
    kind: Evidence,
    value: float | Sequence[float] | str | None,
    interval: tuple[float, float] | None,
    stale: int | Sequence[int] | None,
    trials: int | Sequence[int] | None,
    processes: int | None,
    holds: bool | None,
) -> _Finding:
    predicate = claim.predicate
    if holds is not None and stale is None:
        # each predicate but holds and inconsistent wants its numbers, save for a part by arithmetic
        free = (Predicate.HOLDS, Predicate.INCONSISTENT, Predicate.ORDER)
        if predicate in free or kind is Evidence.ARITHMETIC:
            return _Finding(supports=bool(holds), value=_shown(value) or _yes_or_no(holds))
    if predicate in (Predicate.ALWAYS, Predicate.NEVER, Predicate.SOMETIMES):
        if stale is None or trials is None or holds is not None or value is not None:
            raise BadInput(f"claim {claim.id} ({predicate}) is judged from stale and trials alone")
        return _rate_finding(claim, stale, trials, processes)
    if stale is not None or trials is not None or processes is not None:
        raise BadInput(f"claim {claim.id} ({predicate}) takes no stale counts")
    if predicate is Predicate.ORDER and isinstance(value, Sequence) and not isinstance(value, str):
        rising = all(a < b for a, b in itertools.pairwise(value))
        if len(value) < 2:
            raise BadInput(f"claim {claim.id}: an order needs at least two values")
        return _Finding(supports=rising, value=_shown(value))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if claim.expected is None or not number or holds is not None:
        wanted = "a number as value" if claim.expected is not None else "holds"
        raise BadInput(f"claim {claim.id} ({predicate}) is judged from {wanted}")
    assert isinstance(value, int | float)
    return _number_finding(claim, claim.expected, float(value), interval)


def _number_finding(
    claim: Claim, expected: float, value: float, interval: tuple[float, float] | None
) -> _Finding:
    low, high = interval or (value, value)
    if not all(math.isfinite(end) for end in (low, value, high)) or not low <= value <= high:
        raise BadInput(f"claim {claim.id}: {value} with interval [{low}, {high}] is not usable")
    tolerance = claim.tolerance or 0.0
    if claim.predicate is Predicate.RATIO_WITHIN:
        if expected == 0:
            raise BadInput(f"claim {claim.id}: a ratio to an expected 0 means nothing")
        tolerance *= abs(expected)
    # a whole number is exact; the slack is for binary fractions such as 0.1 + 0.2
    tolerance += 1e-9 * max(1.0, abs(expected))
    if expected - tolerance <= low and high <= expected + tolerance:
        supports: bool | None = True
    elif high < expected - tolerance or low > expected + tolerance:
        supports = False
    else:
        supports = None
    allowed = ""
    if claim.tolerance is not None:
        percent = claim.predicate is Predicate.RATIO_WITHIN
        allowance = f"{claim.tolerance:.3g}" if not percent else f"{claim.tolerance:.1%}"
        allowed = f" within {allowance} ({claim.tolerance_reason})"
    spread = f" in [{low:.5g}, {high:.5g}]" if interval else ""
    return _Finding(
        supports=supports,
        value=f"{_shown(value)}{spread} {claim.unit}",
        detail=f"expected {_shown(expected)}{allowed}",
    )


def _rate_finding(
    claim: Claim,
    stale: int | Sequence[int],
    trials: int | Sequence[int],
    processes: int | None,
) -> _Finding:
    per_process = not isinstance(stale, int)
    stale_counts = [stale] if isinstance(stale, int) else [int(count) for count in stale]
    trial_counts = [trials] if isinstance(trials, int) else [int(count) for count in trials]
    try:
        k, n = sum(stale_counts), sum(trial_counts)
        if per_process:
            low, high, effect = clustered_interval(stale_counts, trial_counts, _CONFIDENCE)
            hit, groups, group_low, group_high = process_interval(
                stale_counts, trial_counts, _CONFIDENCE
            )
            level = f"{hit} of {groups} processes show it [{group_low:.1%}, {group_high:.1%}]" + (
                f", design effect {effect:.3g}" if not math.isnan(effect) else ""
            )
        else:
            low, high = exact_interval(k, n, _CONFIDENCE)
            level = f"totals of {_processes(processes)}, not clustered"
    except ValueError as error:
        raise BadInput(f"claim {claim.id}: {error}") from None
    assert claim.tolerance is not None
    tolerance = claim.tolerance
    visible = smallest_visible_rate(n, _CONFIDENCE)
    blind = f"a rate of {visible:.2%} or more would have shown itself in {n} trials (95%)"
    supports: bool | None
    if claim.predicate is Predicate.NEVER:
        supports = False if k else (True if high <= tolerance else None)
    elif claim.predicate is Predicate.ALWAYS:
        supports = True if low >= 1 - tolerance else (False if high < 1 - tolerance else None)
    elif 0 < k < n:
        supports = True
    else:
        # all or none: a rate within the tolerance of the end would have been easy to miss
        settled = high <= tolerance if k == 0 else low >= 1 - tolerance
        supports = False if settled else None
    parts = [f"95% interval [{low:.2%}, {high:.2%}]", level]
    if supports is None or k == 0:
        parts.append(blind)
    parts.append(f"allowance {tolerance:.3g}: {claim.tolerance_reason}")
    return _Finding(supports=supports, value=f"{k}/{n} stale", detail="; ".join(parts))


def _processes(number: int | None) -> str:
    if number == 1:
        return "one process"
    return f"{number or 'an unknown number of'} processes"


def unsettled(
    claims: Iterable[Claim], settled: Iterable[Settled], notebooks: Collection[str]
) -> list[Settled]:
    """A ``not run`` or ``not testable here`` verdict for each (claim, evidence) without one.

    Args:
        claims: all claims.
        settled: verdicts of this profile, from all notebooks.
        notebooks: numbers of the notebooks that this version has, e.g. ``{"00", "01", "02"}``.
    """
    known = {one.key for one in settled}
    rest = []
    for claim in claims:
        for kind in claim.evidence:
            if f"{claim.id}/{kind}" in known:
                continue
            number = claim.notebook_for(kind)
            if claim.predicate is Predicate.RECORDED:
                rest.append(judge(claim, kind, testable=False, reason=claim.note or ""))
            elif number not in notebooks:
                why = f"needs notebook {number}, which this version does not have"
                rest.append(judge(claim, kind, reason=why))
            elif kind is Evidence.MEASURED:
                rest.append(judge(claim, kind, reason="no recorded hardware run settles it yet"))
            else:
                rest.append(judge(claim, kind, reason=f"notebook {number} did not settle it"))
    return rest


def _shown(value: float | Sequence[float] | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Sequence):
        return ", ".join(_shown(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _yes_or_no(holds: bool | None) -> str:
    return "holds" if holds else "does not hold"
