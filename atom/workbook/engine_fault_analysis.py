"""What the rows of the engine-fault experiment say: tables, and arguments of verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from atom.benchmarks.engine_fault import EXPERIMENT
from atom.benchmarks.engine_fault_arms import (
    CHECK_ALONE,
    GUARD_ALONE,
    NO_DRAFTS,
    NO_MIDDLE_CHUNK,
    NO_NET,
    NO_STORE,
    NULL,
    REFERENCE,
    TAG_ALONE,
    EngineFaultSettings,
    quick,
)
from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook.engine_fault_runs import record_engine_fault
from atom.workbook.records import Run, existing, load_runs
from atom.workbook.run_choice import newest_whole
from atom.workbook.sweep_progress import SweepProgress

NOTHING = "–"
#: what a report has to name for an error to say what happened
_NAMED = (r"request \S+", r"state slot \d+", r"num_accepted_tokens -?\d+")
_NETS = {
    TAG_ALONE: "epoch tag",
    CHECK_ALONE: "host check of the status",
    GUARD_ALONE: "bounds guard in the kernels",
    NO_NET: "none",
}


@dataclass(frozen=True)
class FaultRuns:
    """What there is to analyse.

    Attributes:
        simulated: a run on the virtual device.
        measured: the newest finished run on hardware, ``None`` if there is none; one of those that
            were asked for goes first, and one with all of its arms.
        problems: runs that could not be used, and why.
        others: every other finished run on hardware, newest first.
    """

    simulated: Run
    measured: Run | None
    problems: tuple[str, ...]
    others: tuple[Run, ...] = ()


def gather_runs(
    records: Sequence[str],
    measured: Sequence[str],
    device_profile: str,
    seed: int,
    root: str | Path,
    progress: SweepProgress | None = None,
) -> FaultRuns:
    """Recorded runs, and a small simulated one made now where ``records`` holds none.

    Args:
        records: folders of runs that were asked for.
        measured: folders whose hardware runs stand beside it.
        device_profile, seed: of the run that is made now.
        root: its folder of runs.
        progress: told what it does.
    """
    asked, problems = _finished(records)
    beside, more = _finished([folder for folder in measured if folder not in records])
    hardware = _of_kind(asked, Evidence.MEASURED) or _of_kind(beside, Evidence.MEASURED)
    known = _of_kind(asked, Evidence.SIMULATED)
    if known:
        simulated = known[-1]
    else:
        wanted = EngineFaultSettings(device_profile=device_profile, seed=seed)
        simulated = record_engine_fault(quick(wanted), root, progress)
    newest = newest_whole(hardware) if hardware else None
    others = {run.provenance.run_id: run for run in _of_kind([*asked, *beside], Evidence.MEASURED)}
    if newest is not None:
        del others[newest.provenance.run_id]
    return FaultRuns(
        simulated,
        newest,
        tuple(dict.fromkeys(problems + more)),
        tuple(others[name] for name in sorted(others, reverse=True)),
    )


def _finished(folders: Sequence[str]) -> tuple[list[Run], list[str]]:
    runs, problems = load_runs(existing(folders), EXPERIMENT)
    kept = []
    for run in runs:
        state = run.provenance.exit_state
        if state == "finished":
            kept.append(run)
        else:
            problems.append(f"{run.provenance.run_id} is {state}")
    return kept, problems


def _of_kind(runs: Sequence[Run], kind: Evidence) -> list[Run]:
    return [run for run in runs if run.provenance.evidence is kind]


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Rows with plain values: enum members as text, blanks as ``None``."""
    enums = ("protocol", "guard", "status_check")
    return [
        {
            str(name): str(value) if name in enums else None if pd.isna(value) else value
            for name, value in row.items()
        }
        for row in run.tables["arms"].to_dict("records")
    ]


def is_simulated(run: Run) -> bool:
    """Whether it ran on the virtual device."""
    return run.provenance.evidence is Evidence.SIMULATED


def settings_of(run: Run) -> EngineFaultSettings:
    """The settings that it ran with."""
    return EngineFaultSettings.parse(run.provenance.settings, where=run.provenance.run_id)


def protected(row: dict[str, Any]) -> bool:
    """Whether the arm's protocol orders copy and reuse."""
    return str(row["protocol"]) != CopyProtocol.UNPATCHED


def arms_table(run: Run) -> pd.DataFrame:
    """One row an arm and budget: what stood against the fault, and what was seen."""
    return pd.DataFrame(
        {
            "arm": row["arm"],
            "token budget": int(row["token_budget"]),
            "middle chunks": int(row["middle_chunks"]),
            "stale of statuses": f"{int(row['stale_statuses'])}/{int(row['statuses'])}",
            "largest num_bonus": _number(row["largest_bonus"], least=0),
            "tag refused": int(row["stale_payloads"]),
            "guard found": _number(row["guard_value"]),
            "failed": int(row["failed_requests"]),
            "other tokens": f"{int(row['changed_requests'])}/{int(row['compared_requests'])}",
            "end": end_of(row),
        }
        for row in rows_of(run)
    )


def _number(value: Any, least: int | None = None) -> str:
    if value is None or (least is not None and value < least):
        return NOTHING
    return str(int(value))


def end_of(row: dict[str, Any]) -> str:
    """How the arm's engine ended, in words."""
    if not row["crashed"]:
        return "served all"
    code = row["exit_code"]
    return "died" if code is None else f"died, exit code {int(code)}"


def nets_table(run: Run, budget: int) -> pd.DataFrame:
    """One row a net, each alone under the unpatched protocol."""
    table = []
    for row in rows_of(run):
        if row["token_budget"] != budget or row["arm"] not in _NETS:
            continue
        table.append(
            {
                "net": _NETS[row["arm"]],
                "stale statuses": int(row["stale_statuses"]),
                "stopped before a kernel read the count": "yes"
                if row["arm"] in (TAG_ALONE, CHECK_ALONE)
                else "no",
                "requests told": int(row["failed_requests"]),
                "others that changed in silence": f"{int(row['changed_requests'])} of "
                f"{int(row['compared_requests'])} that ended well",
                "end": end_of(row),
                "what it said": row["error"] or "nothing",
            }
        )
    return pd.DataFrame(table)


@dataclass(frozen=True)
class LawPoint:
    """What one arm read at one token budget.

    Attributes:
        arm: which.
        budget: the token budget.
        largest: largest ``num_bonus`` of the first stale status; of all, where none was stale.
        seen: statuses that carried the budget itself.
        unpatched: whether the arm has the fault.
    """

    arm: str
    budget: int
    largest: int
    seen: int
    unpatched: bool


def law_points(run: Run) -> list[LawPoint]:
    """The held control and the guarded unpatched arm at every budget, by budget."""
    points = [
        LawPoint(
            str(row["arm"]),
            int(row["token_budget"]),
            _first_wrong_value(row),
            int(row["budget_statuses"]),
            not protected(row),
        )
        for row in rows_of(run)
        if row["arm"] in (REFERENCE, GUARD_ALONE)
    ]
    return sorted(points, key=lambda point: point.budget)


def _first_wrong_value(row: dict[str, Any]) -> int:
    shown = re.findall(r"-?\d+", str(row["first_wrong_status"] or ""))
    return max(map(int, shown), default=int(row["largest_bonus"]))


def silent_changes(run: Run) -> list[dict[str, Any]]:
    """Rows of the arm with the guard alone, in which a wrong status was seen."""
    return [
        row
        for row in rows_of(run)
        if row["arm"] == GUARD_ALONE and row["first_wrong_status"] is not None
    ]


def null_changes(run: Run) -> int:
    """Requests with other tokens when ``hold`` simply runs twice."""
    return sum(int(row["changed_requests"]) for row in rows_of(run) if row["arm"] == NULL)


def claim_arguments(run: Run) -> dict[str, dict[str, Any]]:
    """Arguments for the claims that a run settles; those of other kinds of evidence are left out.

    A claim whose arm was not run gets a reason, and one whose fault never showed is undecided.
    """
    provenance = run.provenance
    rows = rows_of(run)
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(str(row["arm"]), []).append(row)
    simulated = is_simulated(run)
    found = {
        "mech-09": _no_drafts(by_arm),
        "mech-11": _budget_is_read(run),
        "mech-15": _unbounded(by_arm),
        "limit-02": _clear_error(by_arm),
    }
    if simulated:
        found["mech-12"] = _conditions(by_arm)
        found["arith-08"] = _legal_counts(rows)
    else:
        found["mech-16"] = _illegal_access(by_arm)
    common = {
        "machine": provenance.device if simulated else provenance.machine,
        "run_ids": (provenance.run_id,),
    }
    return {
        claim: arguments if set(arguments) == {"reason"} else {**arguments, **common}
        for claim, arguments in found.items()
    }


def _lacks(by_arm: dict[str, list[dict[str, Any]]], *arms: str) -> dict[str, Any] | None:
    missing = [arm for arm in arms if arm not in by_arm]
    return {"reason": f"this run leaves out {', '.join(missing)}"} if missing else None


def _no_drafts(by_arm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    lacking = _lacks(by_arm, NO_DRAFTS)
    if lacking:
        return lacking
    rows = by_arm[NO_DRAFTS]
    statuses = sum(int(row["statuses"]) for row in rows)
    errors = sum(int(row["guard_errors"]) for row in rows)
    dead = sum(bool(row["crashed"]) for row in rows)
    stale = sum(int(row["stale_payloads"]) for row in rows)
    return {
        "holds": statuses == errors == dead == 0,
        "value": f"{statuses} statuses sent, {errors} bad counts, {dead} of {len(rows)} engines "
        "died",
        "detail": f"sampled ids are read late all the same: {stale} stale transfers by their tags",
    }


def _budget_is_read(run: Run) -> dict[str, Any]:
    points = law_points(run)
    faulty = [point for point in points if point.unpatched]
    held = [point for point in points if not point.unpatched]
    if not faulty or not held:
        return {"reason": "this run leaves out the guarded unpatched arm"}
    text = ", ".join(f"{p.budget} gives {p.largest if p.seen else 'none'}" for p in faulty)
    if len(faulty) < 2:
        return {"undecided": "one token budget alone predicts nothing", "value": text}
    if all(point.largest <= _DRAFTS for point in faulty):
        return {"undecided": "no impossible count arrived in this run", "value": text}
    return {
        "holds": all(p.seen for p in faulty) and not any(p.seen for p in held),
        "value": f"by token budget: {text}",
        "detail": f"held, the largest is {max(p.largest for p in held)} at each of "
        f"{len(held)} budgets",
    }


_DRAFTS = 3


def _conditions(by_arm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    lacking = _lacks(by_arm, GUARD_ALONE, NO_STORE, NO_MIDDLE_CHUNK)
    if lacking:
        return lacking
    arms = (GUARD_ALONE, NO_STORE, NO_MIDDLE_CHUNK)
    both, no_store, no_chunk = (
        sum(int(row["budget_statuses"]) for row in by_arm[arm]) for arm in arms
    )
    without = [sum(int(row["stale_statuses"]) for row in by_arm[arm]) for arm in arms[1:]]
    return {
        "holds": both > 0 and no_store == no_chunk == 0,
        "value": f"statuses that carry the token budget: {both} with store and middle chunk, "
        f"{no_store} without the store, {no_chunk} without the chunk",
        "detail": f"other impossible statuses: {without[0]} without the store; without the middle "
        f"chunk {without[1]}, whose values are not a prefill's: the block may also go to a later "
        "tensor of the same step",
    }


def _unbounded(by_arm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    lacking = _lacks(by_arm, GUARD_ALONE, NO_NET)
    if lacking:
        return lacking
    bad = [row for row in by_arm[NO_NET] if row["out_of_bounds_lines"]]
    recorded = [row for row in by_arm[GUARD_ALONE] if row["guard_value"] is not None]
    if not bad or not recorded:
        return {"undecided": "no count out of range reached a kernel in this run"}
    reached = [row for row in bad if row["crashed"] or row["changed_requests"]]
    values = ", ".join(str(int(row["guard_value"])) for row in recorded)
    ends = ", ".join(
        end_of(row)
        if row["crashed"]
        else f"{int(row['changed_requests'])} requests with other tokens, no error"
        for row in bad
    )
    return {
        "holds": len(reached) == len(bad),
        "value": f"unguarded: {ends}; the guard recorded num_accepted_tokens {values}",
    }


def _illegal_access(by_arm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    lacking = _lacks(by_arm, NO_NET)
    if lacking:
        return lacking
    bad = [row for row in by_arm[NO_NET] if row["out_of_bounds_lines"]]
    if not bad:
        return {"undecided": "no count out of range reached an unguarded kernel in this run"}
    dead = [row for row in bad if row["crashed"]]
    if not dead:
        changed = sum(int(row["changed_requests"]) for row in bad)
        return {
            "undecided": f"every bad row lay in mapped memory: {changed} requests got other tokens "
            "and nothing faulted"
        }
    illegal = [row for row in dead if re.search("illegal", str(row["error"]), re.IGNORECASE)]
    text = "; ".join(str(row["error"]) for row in dead)
    return {
        "holds": len(illegal) == len(dead),
        "value": f"{len(dead)} of {len(bad)} engines died: {text}",
    }


def _legal_counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kept = [row for row in rows if protected(row)]
    if not kept:
        return {"reason": "this run has no protected arm"}
    largest = max(int(row["largest_bonus"]) for row in kept)
    return {
        "holds": not any(row["stale_statuses"] for row in kept) and largest == _DRAFTS,
        "value": f"1 to {largest + 1}",
        "detail": f"bonus plus one, in {sum(int(row['statuses']) for row in kept)} statuses of "
        "engines whose sources are protected",
    }


def _clear_error(by_arm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    lacking = _lacks(by_arm, GUARD_ALONE)
    if lacking:
        return lacking
    caught = [row for row in by_arm[GUARD_ALONE] if row["guard_errors"]]
    if not caught:
        return {"undecided": "no count out of range reached the guard in this run"}
    named = [row for row in caught if all(re.search(part, str(row["error"])) for part in _NAMED)]
    silent = sum(int(row["changed_requests"]) for row in caught)
    others = sum(int(row["compared_requests"]) for row in caught)
    wrong = [row for row in caught if row["first_wrong_rows"] is not None]
    rows = sum(int(row["first_wrong_rows"]) for row in wrong)
    legal = sum(int(row["first_wrong_rows_in_range"]) for row in wrong)
    return {
        "holds": len(named) == len(caught) and not any(row["crashed"] for row in caught),
        "value": str(caught[0]["error"]).split(";")[0],
        "detail": f"the engine went on, but {silent} of {others} other requests got other tokens "
        f"in silence; of the {rows} wrong counts in the first wrong statuses {legal} were legal "
        "ones, which no bounds check sees",
    }
