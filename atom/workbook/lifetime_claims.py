"""What lifetime rows and instrumented runs say of notebook 03's claims: arguments of a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from atom.benchmarks.lifetime_check import MUTATION_DEPTH, find_mutation
from atom.benchmarks.lifetime_mutations import changed
from atom.benchmarks.lifetime_paths import LifetimePath, own_queue_stream
from atom.benchmarks.lifetime_programs import LifetimeProgram
from atom.benchmarks.source_lifetime import CONTROL, PROTECTED, Point, run_point
from atom.benchmarks.source_lifetime_rows import ExplorationRow, MutationRow
from atom.config import CopyProtocol
from atom.device import open_device
from atom.evidence import Evidence
from atom.lifetime.explore import ViolationKind, explore
from atom.transfer import d2h_queue
from atom.workbook import source_contract
from atom.workbook.claim_model import Claim
from atom.workbook.lifetime_analysis import caught, proved, seven_paths, words
from atom.workbook.records import Run
from atom.workbook.source_contract import SourceFact

Arguments = dict[str, dict[str, Any]]

#: virtual profile of the machine that the published counts came from
PUBLISHED_PROFILE = "MI355X"
_EVICTED = "ell held through the pending list, evicted"
#: long enough for nothing: the copy stream is not parked at all
UNPARKED_SECONDS = 1e-9


def count_arguments(run: Run, exploration: Sequence[ExplorationRow] = ()) -> Arguments:
    """Arguments for the claims that a lifetime run's counts settle.

    The seven paths are judged by the worst of them: a count over all paths would let one that is
    wrong drown in six that are right. All of a run's trials come from one process.

    Args:
        run: a lifetime run.
        exploration: told beside a simulated count, which only bounds the rate.
    """
    provenance = run.provenance
    simulated = provenance.evidence is Evidence.SIMULATED
    rows = seven_paths(run.tables["trials"])
    found: Arguments = {
        "life-01": _worst(rows, CopyProtocol.HOLD, PROTECTED),
        "life-02": _worst(rows, CopyProtocol.HOLD, CONTROL),
        "life-03": _worst(rows, CopyProtocol.UNPATCHED, CONTROL),
        "mech-03": _worst(rows, CopyProtocol.HOLD, PROTECTED),
    }
    if simulated and provenance.device != PUBLISHED_PROFILE:
        reason = f"simulated on profile {provenance.device}; the counts are of {PUBLISHED_PROFILE}"
        return {claim: {"reason": reason} for claim in found}
    if exploration and "stale" in found["mech-03"]:
        schedules = sum(r.schedules for r in exploration if r.protocol is CopyProtocol.HOLD)
        depth = max(row.depth for row in exploration)
        word = "holds" if proved(exploration, CopyProtocol.HOLD) else "does NOT hold"
        found["mech-03"]["detail"] += (
            f"; under every schedule of the seven paths it {word} ({schedules} schedules, up to "
            f"{depth} steps in flight)"
        )
    if not simulated:
        found["contract-10"] = clean_arguments(rows)
    common = {
        "machine": provenance.device if simulated else provenance.machine,
        "run_ids": (provenance.run_id,),
    }
    return {
        claim: arguments if "reason" in arguments else {**arguments, **common}
        for claim, arguments in found.items()
    }


def _worst(rows: pd.DataFrame, protocol: CopyProtocol, arm: str) -> dict[str, Any]:
    cells = rows[(rows["protocol"] == str(protocol)) & (rows["arm"] == arm)]
    missing = [path.value for path in LifetimePath if path.value not in set(cells["path"])]
    if missing:
        return {"reason": f"this run leaves out {', '.join(missing)}"}
    rates = cells["stale"] / cells["trials"]
    # furthest from what is claimed; of equals the one with fewest trials bounds it least
    distance = rates if arm == PROTECTED else 1 - rates
    order = pd.DataFrame({"distance": -distance, "trials": cells["trials"]})
    worst = cells.loc[order.sort_values(["distance", "trials"]).index[0]]
    counts = ", ".join(f"{words(row.path)} {row.stale}/{row.trials}" for row in cells.itertuples())
    return {
        "stale": int(worst["stale"]),
        "trials": int(worst["trials"]),
        "processes": 1,
        "detail": f"the worst of seven paths; all: {counts}",
    }


def clean_arguments(rows: pd.DataFrame) -> dict[str, Any]:
    """``clean()`` under hold: no stale trial as it is, every one stale without its wait."""
    cells = rows[(rows["path"] == "clean") & (rows["protocol"] == str(CopyProtocol.HOLD))]
    counts = {
        str(arm): (int(stale), int(count))
        for arm, stale, count in zip(cells["arm"], cells["stale"], cells["trials"], strict=True)
    }
    if set(counts) != {PROTECTED, CONTROL}:
        return {"reason": "this run leaves out clean()"}
    (stale, trials), (raced, control) = counts[PROTECTED], counts[CONTROL]
    return {
        "holds": stale == 0 and raced == control,
        "value": f"{stale}/{trials} stale with its wait, {raced}/{control} without",
    }


def contract_arguments(
    facts: Sequence[SourceFact],
    mutations: Sequence[MutationRow],
    exploration: Sequence[ExplorationRow],
    mutation_depth: int = MUTATION_DEPTH,
) -> Arguments:
    """Arguments for the claims about the contract, all simulated.

    Args:
        facts: of ``source_facts`` under ``hold``.
        mutations: the mutation table.
        exploration: rows of the exploration, with ``clean()`` under ``hold``.
        mutation_depth: steps in flight up to which the mutations were tried.
    """
    by_path = {fact.path: fact for fact in facts}
    kinds = {fact.kind for fact in facts if fact.copies}
    shared = source_contract.shared_entry()
    lives = {
        p: source_contract.verdict_lives(p) for p in (CopyProtocol.UNPATCHED, CopyProtocol.HOLD)
    }
    before, after = lives[CopyProtocol.UNPATCHED], lives[CopyProtocol.HOLD]
    evicted, cleared = (source_contract.evicted_ell_stays(forget) for forget in (False, True))
    users = {protocol: source_contract.later_user(protocol) for protocol in CopyProtocol}
    protecting = (CopyProtocol.RECORD_STREAM, CopyProtocol.HOLD)
    clean_rows = [
        row for row in exploration if row.path == "clean" and row.protocol is CopyProtocol.HOLD
    ]
    first = open_sources()
    found: Arguments = {
        "mech-10": {
            "holds": before.fresh == before.steps == before.lent
            and before.alive == 0
            and after.alive == after.steps,
            "value": f"{before.fresh} new blocks in {before.steps} steps; alive at the step's end: "
            f"{before.alive} unpatched, {after.alive} with hold",
            "detail": "the copy reads the first rows of a larger block",
        },
        "mech-17": {
            "value": by_path["spec_status"].copies,
            "detail": f"{by_path['spec_status'].copied_bytes} of the verdict's "
            f"{by_path['spec_status'].block_bytes} bytes travel: its first rows and their tags",
        },
        "contract-01": {
            "value": len(kinds),
            "detail": ", ".join(sorted(kind.label for kind in kinds)),
        },
        "contract-02": {
            "value": shared.events,
            "detail": f"{shared.entries} entry, {shared.copies} copies; both sources let go at "
            f"{'one place' if shared.deaths_together else 'different places'}",
        },
        "contract-07": _pending(evicted, caught(mutations, _EVICTED)),
        "contract-08": _pending(
            cleared, caught(mutations, "ell held through the pending list, map set")
        ),
        "contract-09": _with_mutation(
            source_contract.drain_waits_first(),
            "every copy was seen to end before the first source was let go",
            caught(mutations, "drain without its wait (queue)"),
        ),
        "contract-10": _with_mutation(
            source_contract.clean_rebuilds_last() and all(not row.violations for row in clean_rows),
            "waits, then drains, then rebuilds",
            caught(mutations, "clean() without its wait"),
        ),
        "contract-12": {
            "value": sum(fact.told for fact in facts) + len(helpers_left()),
            "detail": "calls seen under hold, and helpers of that name in the transfer code",
        },
        "contract-13": {
            "value": len(first),
            "detail": f"open in the first version, without the ell copy: {', '.join(first)}",
        },
        "contract-14": {
            "holds": users[CopyProtocol.UNPATCHED] != 1 and all(users[p] == 1 for p in protecting),
            "value": ", ".join(f"{p}: {users[p]}" for p in (CopyProtocol.UNPATCHED, *protecting)),
            "detail": "what the host gets of step 1 from a queue that no engine part uses",
        },
    }
    for claim, path in (
        ("contract-03", "spec_status"),
        ("contract-04", "draft_ids"),
        ("contract-05", "ell_slot"),
        ("contract-06", "ell_one_off"),
    ):
        found[claim] = _released(by_path[path])
    if mutation_depth < MUTATION_DEPTH and caught(mutations, _EVICTED) is None:
        reason = f"mutations were tried up to {mutation_depth} steps in flight; its own needs 3"
        return {**_on_profile(found), "contract-07": {"reason": reason}}
    return _on_profile(found)


def _on_profile(found: Arguments) -> Arguments:
    return {
        claim: {**arguments, "machine": PUBLISHED_PROFILE} for claim, arguments in found.items()
    }


def _released(fact: SourceFact) -> dict[str, Any]:
    return {
        "holds": fact.alive_after_send and fact.after_event and fact.left == 0,
        "value": f"let go in {' > '.join(fact.released_in[-2:])}",
        "detail": f"kept in {fact.lives_in}; the copy's end was seen before, in {fact.known_by}",
    }


def _pending(seen: tuple[bool, bool], mutation: MutationRow | None) -> dict[str, Any]:
    gone, alive = seen
    caught_text = "not caught" if mutation is None else f"{mutation.killed_by} at {mutation.depth}"
    return {
        "holds": gone and alive and mutation is not None,
        "value": f"entry gone: {_yes(gone)}; source still held: {_yes(alive)}",
        "detail": f"holding through that list instead: {caught_text} steps in flight",
    }


def _with_mutation(holds: bool, value: str, mutation: MutationRow | None) -> dict[str, Any]:
    caught_text = "not caught" if mutation is None else f"{mutation.killed_by}"
    return {
        "holds": holds and mutation is not None,
        "value": value if holds else f"not so: {value}",
        "detail": f"without the wait: {caught_text}",
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def helpers_left() -> list[str]:
    """Names in the transfer code's classes that speak of the first version's helper."""
    from atom.model_engine import output_transfer
    from atom.spec_decode import dspark_verify

    found = []
    for owner in (
        output_transfer.TokenIDProcessor,
        d2h_queue.D2HQueue,
        d2h_queue.SpecStatusQueue,
        dspark_verify.EllRing,
    ):
        found += [f"{owner.__name__}.{name}" for name in vars(owner) if "hold_for" in name]
    return found


def open_sources() -> list[str]:
    """Sources of which the host gets foreign bytes under the fix's first version as reviewed.

    Every source's program is explored under ``record_stream`` with ``ell`` left out.
    """
    found = []
    with changed(find_mutation("record_stream without ell").changes):
        for path in LifetimePath:
            if path is LifetimePath.CLEAN:
                continue
            program = LifetimeProgram(path, CopyProtocol.RECORD_STREAM, 1)
            result = explore(program, stop_at=frozenset({ViolationKind.FOREIGN_BYTES}))
            if ViolationKind.FOREIGN_BYTES in result.counterexamples:
                # a ring slot and a one-off buffer are two targets of one source
                found.append("ell" if path.value.startswith("ell") else words(path.value))
    return list(dict.fromkeys(found))


def unparked_controls(trials: int, profile: str = PUBLISHED_PROFILE) -> dict[str, int]:
    """Stale trials of every path's control with the parking broken: the test must then fail.

    Args:
        trials: of each path.
        profile: of the virtual device.
    """
    device = open_device("virtual", profile=profile)
    stream = own_queue_stream(device)
    return {
        path.value: run_point(
            device,
            stream,
            Point(path.value, CopyProtocol.HOLD, CONTROL),
            trials,
            UNPARKED_SECONDS,
        ).stale
        for path in LifetimePath
    }


def unparked_arguments(stale: dict[str, int], trials: int) -> dict[str, Any]:
    """Arguments of life-07: without parking no control races, so the demand on it fails."""
    return {
        "holds": all(count < trials for count in stale.values()),
        "value": ", ".join(f"{words(path)} {count}/{trials}" for path, count in stale.items()),
        "detail": "stale controls with the parking broken; the test asks for every one",
        "machine": PUBLISHED_PROFILE,
    }


#: what a claim waits for that these rows and runs cannot give
_NEEDS = {
    "life-04": "the test file's own runs, five on one GPU and one on another",
    "life-06": "trials parked by a large copy beside those parked by a spin kernel",
    "life-08": "nothing here: the earlier revision's test is not available",
}


#: what a measurement of the engine's claims waits for, until there is one
_NEEDS_ENGINE = "a recorded run of sweep engine-fault on hardware"
_ENGINE_CLAIMS = ("mech-09", "mech-11", "mech-15", "mech-16", "limit-02")


def open_claims(
    claims: Mapping[str, Claim], notebook: str, *, engine_measured: bool = True
) -> pd.DataFrame:
    """Claims of a notebook that need something which does not exist yet, and what.

    Args:
        claims: all claims by id.
        notebook: its number.
        engine_measured: whether a run of the engine on hardware is there.
    """
    needs = dict(_NEEDS)
    if not engine_measured:
        needs |= dict.fromkeys(_ENGINE_CLAIMS, _NEEDS_ENGINE)
    return pd.DataFrame(
        {"claim": name, "what it says": claims[name].claim, "needs": need}
        for name, need in needs.items()
        if claims[name].notebook == notebook
    )
