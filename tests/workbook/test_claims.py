"""Claims, verdicts and what counts as worse: honest at the edges, silent about nothing."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import accepted as accepted_module
from atom.workbook.accepted import Accepted
from atom.workbook.claims import (
    CLAIMS_FILE,
    Claim,
    Predicate,
    Settled,
    Verdict,
    accept,
    compare,
    judge,
    load_accepted,
    load_claims,
    unsettled,
)
from atom.workbook.tables import csv_text, parse_rows

MEASURED, SIMULATED, ARITHMETIC = Evidence.MEASURED, Evidence.SIMULATED, Evidence.ARITHMETIC


def claim(predicate: str, **more: Any) -> Claim:
    numeric = predicate in ("equals", "within", "ratio_within")
    tolerant = predicate in ("within", "ratio_within", "always", "never", "sometimes")
    kinds: Any = (MEASURED, SIMULATED, ARITHMETIC)
    if predicate == "recorded":
        kinds = (Evidence.PUBLISHED,)
    values: dict[str, Any] = {
        "id": "toy-01",
        "group": "toy",
        "claim": "something is so",
        "unit": "units",
        "subject_version": "hold",
        "machine": "mi355x",
        "source_place": "somewhere",
        "evidence": kinds,
        "predicate": predicate,
        "expected": 10 if numeric else None,
        "tolerance": 0.02 if tolerant else None,
        "tolerance_reason": "because" if tolerant else None,
        "notebook": "02",
        "note": "no engine here" if predicate == "recorded" else None,
    }
    return Claim(**(values | more))


def verdict(one: Claim, evidence: Evidence = MEASURED, **found: Any) -> Verdict:
    return judge(one, evidence, machine="h200", **found).verdict


# -- the table of claims


def test_the_claims_file_is_whole() -> None:
    claims = load_claims()
    assert len(claims) >= 120
    assert all(name == one.id for name, one in claims.items())
    # the file is what the model writes: no hand-made quoting, no lost cell
    text = CLAIMS_FILE.read_text()
    assert csv_text(claims.values(), Claim) == text
    assert {one.notebook for one in claims.values()} <= {f"0{number}" for number in range(8)}


def test_ids_of_a_group_have_no_hole() -> None:
    numbers: dict[str, list[int]] = {}
    for name in load_claims():
        group, number = name.split("-")
        numbers.setdefault(group, []).append(int(number))
    for group, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), group


def test_no_claim_repeats_another() -> None:
    texts = [one.claim for one in load_claims().values()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"predicate": "within", "tolerance": ""}, "tolerance is given for"),
        ({"expected": ""}, "expected is given for"),
        ({"tolerance": "0.1"}, "tolerance is given for"),
        ({"evidence": "measured|measured"}, "one kind twice"),
        ({"evidence": "measured|guessed"}, "evidence"),
        ({"evidence": "published"}, "published evidence alone"),
        ({"predicate": "recorded", "expected": ""}, "published evidence alone"),
        ({"notebook": "08"}, "notebook"),
        ({"id": "toy-1"}, "id"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(changes: dict[str, str], said: str) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text([claim("equals")], Claim))))
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerow(rows[0] | changes)
    with pytest.raises(BadInput, match=rf"c\.csv:2:.*{said}"):
        parse_rows(out.getvalue(), Claim, "c.csv")


# -- judging


@pytest.mark.parametrize(
    ("predicate", "found", "expected"),
    [
        ("equals", {"value": 10}, Verdict.REPRODUCED),
        ("equals", {"value": 10.5}, Verdict.DIFFERS),
        ("within", {"value": 10.02}, Verdict.REPRODUCED),
        ("within", {"value": 10.03}, Verdict.DIFFERS),
        ("within", {"value": 10.0, "interval": (9.99, 10.01)}, Verdict.REPRODUCED),
        ("within", {"value": 10.0, "interval": (9.9, 10.1)}, Verdict.INCONCLUSIVE),
        ("within", {"value": 11.0, "interval": (10.5, 11.5)}, Verdict.DIFFERS),
        ("ratio_within", {"value": 10.2}, Verdict.REPRODUCED),
        ("ratio_within", {"value": 9.7}, Verdict.DIFFERS),
        ("never", {"stale": 0, "trials": 200}, Verdict.REPRODUCED),
        ("never", {"stale": 0, "trials": 100}, Verdict.INCONCLUSIVE),
        ("never", {"stale": 1, "trials": 100000}, Verdict.DIFFERS),
        ("never", {"stale": [0] * 5, "trials": [40] * 5}, Verdict.REPRODUCED),
        ("always", {"stale": 200, "trials": 200}, Verdict.REPRODUCED),
        ("always", {"stale": 20, "trials": 20}, Verdict.INCONCLUSIVE),
        ("always", {"stale": 0, "trials": 100}, Verdict.DIFFERS),
        ("always", {"stale": 150, "trials": 200}, Verdict.DIFFERS),
        ("sometimes", {"stale": 1, "trials": 3}, Verdict.REPRODUCED),
        ("sometimes", {"stale": 0, "trials": 3}, Verdict.INCONCLUSIVE),
        ("sometimes", {"stale": 0, "trials": 200}, Verdict.DIFFERS),
        ("sometimes", {"stale": 200, "trials": 200}, Verdict.DIFFERS),
        ("holds", {"holds": True}, Verdict.REPRODUCED),
        ("holds", {"holds": False}, Verdict.DIFFERS),
        ("holds", {"undecided": "one log only"}, Verdict.INCONCLUSIVE),
        ("order", {"value": [1, 2, 3]}, Verdict.REPRODUCED),
        ("order", {"value": [1, 3, 3]}, Verdict.DIFFERS),
        ("holds", {"reason": "no device today"}, Verdict.NOT_RUN),
        ("never", {"testable": False, "reason": "needs its card"}, Verdict.NOT_TESTABLE_HERE),
    ],
)
def test_each_predicate(predicate: str, found: dict[str, Any], expected: Verdict) -> None:
    assert verdict(claim(predicate), **found) is expected


def test_a_process_that_differs_makes_the_rate_uncertain() -> None:
    # as many stale trials, once spread evenly and once in a few processes
    even: dict[str, Any] = {"stale": [36] * 5, "trials": [40] * 5}
    lumped: dict[str, Any] = {"stale": [40, 40, 40, 40, 20], "trials": [40] * 5}
    loose = claim("always", tolerance=0.2)
    assert verdict(loose, **even) is Verdict.REPRODUCED
    assert verdict(loose, **lumped) is Verdict.INCONCLUSIVE


def test_an_inconclusive_zero_says_what_could_have_been_seen() -> None:
    settled = judge(claim("never"), MEASURED, machine="h200", stale=[0] * 5, trials=[4] * 5)
    assert settled.verdict is Verdict.INCONCLUSIVE
    # 1 - 0.05 ** (1 / 20)
    assert "13.91% or more would have shown itself in 20 trials" in settled.detail
    assert "0 of 5 processes show it [0.0%, 52.2%]" in settled.detail


def test_success_in_simulation_is_called_that() -> None:
    assert verdict(claim("holds"), SIMULATED, holds=True) is Verdict.REPRODUCED_IN_SIMULATION
    assert verdict(claim("holds"), SIMULATED, holds=False) is Verdict.DIFFERS


def test_arithmetic_against_the_source_has_a_verdict_of_its_own() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("inconsistent", {"holds": False}),
        ("equals", {"value": 9}),
        ("never", {"holds": False}),
    ]
    for predicate, found in cases:
        settled = judge(claim(predicate), ARITHMETIC, **found)
        assert settled.verdict is Verdict.SOURCE_INCONSISTENT
    assert judge(claim("inconsistent"), ARITHMETIC, holds=True).verdict is Verdict.REPRODUCED


def test_other_hardware_is_marked() -> None:
    def same(here: str, published: str | None, evidence: Evidence = MEASURED) -> bool | None:
        one = claim("holds", machine=published)
        return judge(one, evidence, holds=True, machine=here).same_hardware

    assert same("h200", "mi355x") is False
    assert same("mi355x", "mi355x") is True
    assert same("h200", None) is None
    assert same("MI355X", "mi355x", SIMULATED) is None


@pytest.mark.parametrize(
    ("predicate", "evidence", "found", "said"),
    [
        ("holds", Evidence.PUBLISHED, {"holds": True}, "settled by"),
        ("never", MEASURED, {"holds": True, "machine": "h200"}, "stale and trials alone"),
        ("never", MEASURED, {"stale": 3, "trials": 2, "machine": "h200"}, "events must lie"),
        ("never", MEASURED, {"stale": 3, "machine": "h200"}, "stale and trials alone"),
        ("equals", MEASURED, {"holds": True, "machine": "h200"}, "a number as value"),
        ("equals", MEASURED, {"value": True, "machine": "h200"}, "a number as value"),
        ("equals", MEASURED, {"value": float("nan"), "machine": "h200"}, "not usable"),
        ("holds", MEASURED, {"value": 3, "machine": "h200"}, "from holds"),
        ("holds", MEASURED, {"holds": True}, "names its machine"),
        ("holds", MEASURED, {}, "needs a reason"),
        ("order", MEASURED, {"value": [1], "machine": "h200"}, "at least two"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    predicate: str, evidence: Evidence, found: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        judge(claim(predicate), evidence, **found)


@given(st.integers(0, 400), st.integers(1, 400))
def test_never_is_never_reproduced_from_a_stale_trial(stale: int, more: int) -> None:
    found = verdict(claim("never"), stale=stale, trials=stale + more)
    if stale:
        assert found is Verdict.DIFFERS
    else:
        assert found in (Verdict.REPRODUCED, Verdict.INCONCLUSIVE)


def test_what_nobody_settled_says_why() -> None:
    claims = list(load_claims().values())
    done = judge(load_claims()["mech-01"], SIMULATED, holds=True, machine="MI355X")
    rest = {one.key: one for one in unsettled(claims, [done], {"00", "01", "02"})}
    assert done.key not in rest
    assert len(rest) == sum(len(one.evidence) for one in claims) - 1
    assert rest["mech-01/measured"].verdict is Verdict.NOT_RUN
    assert rest["mech-01/measured"].detail == "no recorded hardware run settles it yet"
    assert rest["life-01/simulated"].detail == "needs notebook 03, which this version does not have"
    assert rest["count-01/published"].verdict is Verdict.NOT_TESTABLE_HERE
    recorded = [one for one in claims if one.predicate is Predicate.RECORDED]
    assert all(rest[f"{one.id}/published"].detail == one.note for one in recorded)


# -- accepted verdicts


def settled(name: str, kind: Evidence, found: Verdict) -> Settled:
    return Settled(
        claim=name, evidence=kind, verdict=found, value="v", detail="d", machine=None,
        same_hardware=None,
    )  # fmt: skip


def fell(now: Verdict, before: Verdict | None, kind: Evidence = MEASURED) -> bool:
    one = settled("mech-01" if kind is not ARITHMETIC else "thr-13", kind, now)
    known = {one.key: Accepted(verdict=before, reason="r", date="2030-01-01")} if before else {}
    return bool(compare([one], known, "02"))


R, UNSURE, N, D = Verdict.REPRODUCED, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.DIFFERS
INCONSISTENT = Verdict.SOURCE_INCONSISTENT


@pytest.mark.parametrize(
    ("now", "before", "falls"),
    [
        (R, R, False),
        (R, UNSURE, False),
        (R, D, False),
        (UNSURE, R, True),
        (N, R, True),
        (D, R, True),
        (D, UNSURE, True),
        (D, D, False),
        (UNSURE, D, True),
        (N, D, True),
        (D, None, True),
        (R, None, False),
        (UNSURE, None, False),
        (N, None, False),
    ],
)
def test_which_change_is_a_fall(now: Verdict, before: Verdict | None, falls: bool) -> None:
    assert fell(now, before) is falls


def test_any_change_of_arithmetic_is_a_fall() -> None:
    for before in (R, INCONSISTENT, UNSURE):
        for now in (R, INCONSISTENT, UNSURE):
            assert fell(now, before, ARITHMETIC) is (now is not before)
    assert fell(INCONSISTENT, None, ARITHMETIC)


def test_an_accepted_claim_that_is_settled_no_more_falls() -> None:
    known = {
        "mech-01/measured": Accepted(verdict=R, reason="r", date="2030-01-01"),
        "thr-13/arithmetic": Accepted(verdict=R, reason="r", date="2030-01-01"),
        "mech-02/measured": Accepted(verdict=N, reason="r", date="2030-01-01"),
        "gone-01/measured": Accepted(verdict=R, reason="r", date="2030-01-01"),
    }
    said = compare([], known, "02")
    assert [line.split(":")[0] for line in said] == ["mech-01/measured", "gone-01/measured"]
    assert "no longer settled" in said[0]
    assert "no such claim" in said[1]
    # arithmetic of a claim whose room comes later belongs to the notebook of its arithmetic
    assert any("thr-13" in line for line in compare([], known, "00"))


def test_accepting_writes_the_file_that_compare_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_module, "VERDICTS", tmp_path / "verdicts")
    found = [settled("mech-01", MEASURED, D), settled("mech-02", MEASURED, R)]
    assert load_accepted("ci") == {}
    assert len(compare(found, load_accepted("ci"), "02")) == 1
    assert accept("ci", "mech-01", " other copy path ", found) == ["mech-01/measured"]
    assert compare(found, load_accepted("ci"), "02") == []
    assert load_accepted("ci")["mech-01/measured"].reason == "other copy path"
    assert accept("ci", "mech-*", "all", found) == ["mech-01/measured", "mech-02/measured"]
    assert accept("ci", "mech-02/measured", "dropped", found[:1]) == ["mech-02/measured"]
    assert list(load_accepted("ci")) == ["mech-01/measured"]
    with pytest.raises(BadInput, match="needs a reason"):
        accept("ci", "mech-01", " ", found)
    with pytest.raises(BadInput, match=r"did you mean .*mech-02/measured"):
        accept("ci", "mech-02/mesured", "typo", found)
    with pytest.raises(BadInput, match="lower-case"):
        accept("../x", "mech-01", "escape", found)


def test_a_bare_claim_accepts_only_what_needs_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_module, "VERDICTS", tmp_path)
    simulated = settled("micro-05", Evidence.SIMULATED, Verdict.REPRODUCED_IN_SIMULATION)
    measured = settled("micro-05", MEASURED, UNSURE)
    assert accept("ci", "micro-05", "too few trials", [simulated, measured]) == [measured.key]
    assert list(load_accepted("ci")) == [measured.key]
    # what is accepted as it is keeps its reason
    with pytest.raises(BadInput, match=r"no verdict of micro-05 needs acceptance.*/\*"):
        accept("ci", "micro-05", "again", [simulated, measured])
    assert load_accepted("ci")[measured.key].reason == "too few trials"
    # a full key and a pattern take what they match
    assert accept("ci", simulated.key, "seen", [simulated, measured]) == [simulated.key]
    assert accept("ci", "micro-05/*", "all", [simulated, measured]) == [
        simulated.key,
        measured.key,
    ]
    # worse than what is accepted, though neither against the source nor inconclusive
    worse = settled("micro-05", Evidence.SIMULATED, N)
    assert accept("ci", "micro-05", "left out", [worse, measured]) == [worse.key]


def test_a_damaged_file_of_accepted_verdicts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_module, "VERDICTS", tmp_path)
    (tmp_path / "ci.json").write_text(json.dumps({"mech-01/measured": {"verdict": "fine"}}))
    with pytest.raises(BadInput, match=r"ci\.json:mech-01/measured\.verdict"):
        load_accepted("ci")
