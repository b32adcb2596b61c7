"""The whole check: protocols hold under every interleaving, mutations do not survive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atom.benchmarks import lifetime_check
from atom.benchmarks.lifetime_check import (
    check_mutations_apply,
    explore_program,
    find_mutation,
    mutation_counterexample,
    replay_recorded,
    try_mutation,
)
from atom.benchmarks.lifetime_mutants import MUTATIONS
from atom.benchmarks.lifetime_mutations import Change, Mutation, changed
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import Following, LifetimeProgram, programs
from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.lifetime.counterexample import Recorded
from atom.lifetime.explore import Method, ViolationKind, explore
from atom.spec_decode import dspark_verify
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.copy_protocol import Hold
from atom.transfer.d2h_queue import D2HQueue


def name(program: LifetimeProgram) -> str:
    return f"{program.path}-{program.protocol}-{program.depth}"


@pytest.mark.parametrize("program", programs(depths=(1, 2)), ids=name)
def test_correct_protocols_hold_and_the_unpatched_one_does_not(program: LifetimeProgram) -> None:
    row, found = explore_program(program)
    if program.protocol is not CopyProtocol.UNPATCHED:
        assert row.complete
        assert found.holds
        assert row.outcomes == 1
        return
    assert ViolationKind.EARLY_FREE in found.counterexamples
    # clean() waits, so a lone step's sources are dropped and yet not written again
    lone_clean = program.path is LifetimePath.CLEAN and program.depth == 1
    assert (ViolationKind.FOREIGN_BYTES in found.counterexamples) is not lone_clean


@pytest.mark.parametrize("program", programs(depths=(1,)), ids=name)
def test_the_reduction_keeps_every_outcome(program: LifetimeProgram) -> None:
    short = replace(program, again=False)
    reduced, states = explore(short), explore(short, method=Method.STATES)
    assert reduced.complete
    assert states.complete
    assert reduced.outcomes == states.outcomes


TWO_STEPS = [
    (path, protocol)
    for path in (LifetimePath.SPEC_STATUS, LifetimePath.ELL_SLOT)
    for protocol in CopyProtocol
    # 2,700 states: python -m atom lifetime explore --full
    if (path, protocol) != (LifetimePath.ELL_SLOT, CopyProtocol.UNPATCHED)
]


@pytest.mark.parametrize(("path", "protocol"), TWO_STEPS)
def test_the_reduction_keeps_every_outcome_of_two_steps(
    path: LifetimePath, protocol: CopyProtocol
) -> None:
    # with tags the unpatched one alone takes a minute: python -m atom lifetime explore --full
    tagged = protocol not in (CopyProtocol.UNPATCHED, CopyProtocol.RECORD_STREAM)
    short = LifetimeProgram(path, protocol, 2, again=False, epoch_tag=tagged)
    reduced, states = explore(short), explore(short, method=Method.STATES)
    assert states.complete
    assert reduced.outcomes == states.outcomes


@pytest.mark.parametrize(
    ("path", "protocol"),
    [
        (LifetimePath.SAMPLED_IDS, CopyProtocol.UNPATCHED),
        (LifetimePath.SPEC_STATUS, CopyProtocol.RECORD_STREAM),
        (LifetimePath.ELL_SLOT, CopyProtocol.UNPATCHED),
    ],
)
def test_so_does_the_search_by_states(path: LifetimePath, protocol: CopyProtocol) -> None:
    short = LifetimeProgram(path, protocol, again=False, epoch_tag=False)
    results = {method: explore(short, method=method) for method in Method}
    assert results[Method.FULL].complete
    assert results[Method.FULL].schedules > 100
    assert len({frozenset(found.outcomes) for found in results.values()}) == 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_is_caught_or_equivalent(mutation: Mutation) -> None:
    row = try_mutation(mutation)
    assert row.caught is not row.equivalent
    assert row.equivalent is bool(row.argument)
    if not row.equivalent:
        written = mutation_counterexample(mutation.name)
        assert written is not None
        about, example = written[0].about["program"], written[0].example
        assert (about["path"], about["protocol"], about["depth"]) == (
            row.path,
            row.protocol,
            row.depth,
        )
        assert (example.kind, len(example.steps)) == (row.killed_by, row.steps)
        replayed = replay_recorded(Recorded.from_text(written[0].to_text()))
        assert row.killed_by in {violation.kind for violation in replayed.violations}
    if row.killed_by == ViolationKind.FOREIGN_BYTES:
        assert row.foreign_reads > 0


def test_a_ring_of_two_needs_three_steps() -> None:
    for mutation in ("ell slot reused early", "pinned slot reused early"):
        assert try_mutation(find_mutation(mutation)).depth == 3
    # under zero copy the following step's payload is the third
    assert try_mutation(find_mutation("pinned slot reused early (zero_copy)")).depth == 2


def test_neither_net_alone_would_have_caught_a_dropped_source() -> None:
    """Tags that are not opened first miss a copy before the stamp; the guard, legal values."""
    row = try_mutation(find_mutation("hold keeps nothing"))
    assert (row.tag_alone, row.guard_alone) == ("every", "some")
    behind = try_mutation(find_mutation("hold keeps nothing, tags behind the data alone"))
    assert behind.tag_alone == behind.guard_alone == "some"
    program = LifetimeProgram(LifetimePath.SPEC_STATUS, CopyProtocol.UNPATCHED)
    seen: list[tuple[bool, bool]] = []
    explore(
        lambda device: program.observe(
            device,
            lambda watch: seen.extend(
                (one.tag_caught, one.guard_caught)
                for one in watch.observations.values()
                if one.foreign
            ),
        )
    )
    assert set(seen) == {(True, False)}


def test_only_the_order_shows_a_release_just_before_the_wait() -> None:
    """No allocation comes between the two, so no byte is lost: the free itself is the fault."""
    row = try_mutation(find_mutation("release before the wait (queue)"))
    assert (row.killed_by, row.foreign_depth) == (ViolationKind.EARLY_FREE, None)


def test_a_mutation_of_text_that_is_gone_fails() -> None:
    gone = Change(Hold, "protect", "return everything", "return None")
    with pytest.raises(BadInput, match=r"'return everything' stands 0 times"), changed((gone,)):
        pass


def test_mutations_that_no_longer_apply_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutations_apply()
    gone = Change(Hold, "protect", "return everything", "return None")
    broken = replace(MUTATIONS[-1], name="gone", changes=(gone,))
    monkeypatch.setattr(lifetime_check, "MUTATIONS", (*MUTATIONS[:-1], broken))
    with pytest.raises(BadInput, match=r"mutation 'gone'.*'return everything' stands 0 times"):
        check_mutations_apply()


def test_mutations_are_taken_back() -> None:
    before = (
        Hold.protect,
        D2HQueue._wait_oldest,
        EllRing.__dict__["ell_by_req"],
        dspark_verify.MAX_ELL_INFLIGHT,
    )
    for mutation in MUTATIONS:
        with changed(mutation.changes):
            pass
    after = (
        Hold.protect,
        D2HQueue._wait_oldest,
        EllRing.__dict__["ell_by_req"],
        dspark_verify.MAX_ELL_INFLIGHT,
    )
    assert before == after


def test_a_program_says_what_it_is() -> None:
    program = LifetimeProgram(
        LifetimePath.ELL_SLOT, CopyProtocol.HOLD, 3, Following.PREFILL, forget=True
    )
    assert LifetimeProgram.from_json(program.to_json()) == program
    with pytest.raises(BadInput, match="depth=0"):
        LifetimeProgram(LifetimePath.CLEAN, CopyProtocol.HOLD, 0)
    with pytest.raises(BadInput, match="not a program"):
        LifetimeProgram.from_json({**program.to_json(), "moon": 1})
