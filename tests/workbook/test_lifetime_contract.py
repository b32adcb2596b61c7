"""The contract as instrumented runs show it, each with something that must break it."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.lifetime_check import find_mutation, try_mutation
from atom.benchmarks.lifetime_mutations import changed
from atom.benchmarks.lifetime_paths import DraftIds, EllSlot, Logprobs, SpecStatus
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.transfer.payload import PayloadKind
from atom.workbook import lifetime_claims
from atom.workbook import source_contract as contract
from atom.workbook.claims import Verdict, judge, load_claims

HOLD = CopyProtocol.HOLD
MUTATIONS = (
    "ell held through the pending list, evicted",
    "ell held through the pending list, map set",
    "drain without its wait (queue)",
    "clean() without its wait",
)


def without(name: str) -> Any:
    return changed(find_mutation(name).changes)


def test_hold_keeps_each_source_until_its_event_was_seen() -> None:
    facts = contract.source_facts(HOLD)
    assert {fact.kind for fact in facts} == set(PayloadKind) - {PayloadKind.OTHER}
    for fact in facts:
        assert fact.alive_after_send, fact.path
        assert fact.after_event, fact.path
        assert fact.lives_in is not None, fact.path
        assert (fact.events_recorded, fact.told, fact.left) == (1, 0, 0)
    by_path = {fact.path: fact for fact in facts}
    assert by_path["spec_status"].released_in[-1] == "D2HQueue._release_oldest"
    assert by_path["ell_slot"].released_in[-1] == "EllRing._ell_stage"
    assert by_path["logprobs"].lives_in == "TokenIDProcessor.cpu_tensor_handle[0].source[1]"
    assert by_path["sampled_ids"].released_in == ("TokenIDProcessor.recv_async_output",)


@pytest.mark.parametrize("protocol", [CopyProtocol.UNPATCHED, CopyProtocol.RECORD_STREAM])
def test_nothing_is_kept_where_nothing_is_held(protocol: CopyProtocol) -> None:
    fact = contract.trace_source(SpecStatus, protocol)
    assert fact.lives_in is None
    assert not fact.alive_after_send
    assert fact.told == (1 if protocol is CopyProtocol.RECORD_STREAM else 0)


def test_an_early_release_is_seen() -> None:
    with without("release before the wait (queue)"):
        fact = contract.trace_source(DraftIds, HOLD)
    assert not fact.after_event


def test_a_source_that_stays_is_seen() -> None:
    with without("ell kept after the drain"):
        assert contract.trace_source(EllSlot, HOLD).left == 1


def test_two_events_would_be_counted() -> None:
    assert contract.shared_entry() == contract.SharedEntry(1, 1, 2, True, True)
    assert contract.trace_source(Logprobs, HOLD).copies == 2


def test_drain_and_clean_wait_first() -> None:
    assert contract.drain_waits_first()
    assert contract.clean_rebuilds_last()
    with without("drain without its wait (queue)"):
        assert not contract.drain_waits_first()
    with without("clean() without its wait"):
        assert not contract.clean_rebuilds_last()


def test_a_verdict_is_new_each_step_and_dies_with_it() -> None:
    before = contract.verdict_lives(CopyProtocol.UNPATCHED, 4)
    after = contract.verdict_lives(HOLD, 4)
    assert (before.fresh, before.lent, before.alive) == (4, 4, 0)
    assert (after.fresh, after.lent, after.alive) == (4, 4, 4)


def test_a_later_user_of_the_queue_is_served() -> None:
    found = {protocol: contract.later_user(protocol) for protocol in CopyProtocol}
    assert found.pop(CopyProtocol.UNPATCHED) == 2
    assert set(found.values()) == {1}


@pytest.mark.parametrize("forget", [False, True])
def test_ell_outlives_its_pending_entry(forget: bool) -> None:
    assert contract.evicted_ell_stays(forget) == (True, True)
    with without("ell held through the pending list, evicted"):
        assert contract.evicted_ell_stays(forget) == (True, False)


def test_the_first_version_leaves_one_source_open() -> None:
    assert lifetime_claims.open_sources() == ["ell"]
    assert lifetime_claims.helpers_left() == []


def test_without_parking_no_control_races() -> None:
    stale = lifetime_claims.unparked_controls(4)
    assert len(stale) == 7
    claim = load_claims()["life-07"]
    arguments = lifetime_claims.unparked_arguments(stale, 4)
    assert judge(claim, Evidence.SIMULATED, **arguments).verdict == "reproduced in simulation"
    racing = lifetime_claims.unparked_arguments({**stale, "clean": 4}, 4)
    assert judge(claim, Evidence.SIMULATED, **racing).verdict is Verdict.DIFFERS


def test_every_claim_of_the_contract_is_settled() -> None:
    facts = contract.source_facts(HOLD)
    mutations = [try_mutation(find_mutation(name)) for name in MUTATIONS]
    found = lifetime_claims.contract_arguments(facts, mutations, [])
    numbers = [number for number in range(1, 15) if number != 11]
    assert set(found) == {f"contract-{number:02d}" for number in numbers} | {"mech-10", "mech-17"}
    for claim, arguments in found.items():
        settled = judge(load_claims()[claim], Evidence.SIMULATED, **arguments)
        assert settled.verdict is Verdict.REPRODUCED_IN_SIMULATION, claim
    shallow = lifetime_claims.contract_arguments(facts, mutations[1:], [], mutation_depth=1)
    assert "tried up to 1" in shallow["contract-07"]["reason"]
    # a mutation that slips through takes its claim with it
    found = lifetime_claims.contract_arguments(facts, mutations[1:], [])
    settled = judge(load_claims()["contract-07"], Evidence.SIMULATED, **found["contract-07"])
    assert settled.verdict is Verdict.DIFFERS


def test_published_sources_are_all_found() -> None:
    table = contract.beside_published(contract.source_facts(HOLD))
    assert len(table) == 5
    assert table["found: reference in"].str.len().min() > 0
    (ell,) = table["found: reference in"][table["source"] == "DSpark ell"]
    assert str(ell).count("EllRing") == 2
