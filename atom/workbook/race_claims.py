"""What a race run says of each claim that notebook 02 settles: the arguments of a verdict."""

from __future__ import annotations

from typing import Any

import pandas as pd

from atom.config import CopyPath, CopyProtocol, Front, Source
from atom.evidence import Evidence
from atom.workbook.race_analysis import per_process, select, with_stale
from atom.workbook.records import Run

#: virtual profile of the machine that the published counts came from
PUBLISHED_PROFILE = "MI355X"
_FOUR, _ONE = "4", "1"

#: claim -> protocol, front, queue setting; judged on copies by engine, as torch queues them
_COUNTED = {
    "mech-04": (CopyProtocol.RECORD_STREAM, Front.STORE_ON_COPY_STREAM, "default"),
    "micro-01": (CopyProtocol.UNPATCHED, Front.NOTHING, "default"),
    "micro-02": (CopyProtocol.RECORD_STREAM, Front.NOTHING, "default"),
    "micro-03": (CopyProtocol.UNPATCHED, Front.STORE_ON_COPY_STREAM, "default"),
    "micro-04": (CopyProtocol.RECORD_STREAM, Front.STORE_ON_COPY_STREAM, "default"),
    "micro-05": (CopyProtocol.UNPATCHED, Front.MATMUL, _FOUR),
    "micro-06": (CopyProtocol.RECORD_STREAM, Front.MATMUL, _FOUR),
    "micro-07": (CopyProtocol.UNPATCHED, Front.MATMUL, _ONE),
    "micro-08": (CopyProtocol.RECORD_STREAM, Front.MATMUL, _ONE),
}
#: clean rows, and the racing row of the same run that shows that they could have been stale
_CONTRAST = {
    "mech-04": "micro-03",
    "micro-04": "micro-03",
    "micro-06": "micro-05",
    "micro-07": "micro-05",
}
#: cells that the source leaves empty: there is nothing to compare with
_GAPS = ("micro-08",)
#: claims of a stale row: the published process did not share the default stream's queue
_RACING = ("micro-03", "micro-05")

#: draws of the mapping without a stale trial that contradict "work there makes the copy late"
_ENOUGH_PROCESSES = 5
_NO_ARM = "this run leaves out the arms that would settle it"


def claim_arguments(run: Run) -> dict[str, dict[str, Any]]:
    """Arguments of ``book.settle`` for every claim that ``run`` can speak to, by claim id.

    In a simulated run the two racing rows are judged on the processes whose copy stream has not
    the default stream's hardware queue, and the others are told beside it: where it has, the queue
    itself puts the copy before the next step's write.
    """
    provenance = run.provenance
    simulated = provenance.evidence is Evidence.SIMULATED
    machine = provenance.device if simulated else provenance.machine
    common = {"machine": machine, "run_ids": (provenance.run_id,)}
    rows = with_stale(run.tables["trials"])
    found = {}
    for claim, (protocol, front, queues) in _COUNTED.items():
        cell = select(
            rows,
            protocol=protocol,
            front=front,
            copy_path=CopyPath.ENGINE,
            queue_setting=queues,
        )
        found[claim] = _counted(cell, claim in _RACING and simulated)
    found = {claim: _with_contrast(claim, found) for claim in found}
    for claim, queues in (("micro-05", _FOUR), ("micro-07", _ONE)):
        if "detail" in found[claim]:
            parts = (found[claim]["detail"], _by_kernel(rows, queues))
            found[claim]["detail"] = "; ".join(part for part in parts if part)
    found |= _findings(rows, simulated)
    if simulated:
        shared = rows[
            (rows["protocol"] == str(CopyProtocol.UNPATCHED))
            & (rows["front"] == str(Front.SPIN))
            & rows["shares_default_queue"].fillna(False).astype(bool)
            & rows["grid"].isin(["main", "queue"])
        ]
        found["life-05"] = _counted(shared, False)
        if provenance.device != PUBLISHED_PROFILE:
            reason = (
                f"simulated on profile {provenance.device}; the published counts are of "
                f"{PUBLISHED_PROFILE}"
            )
            found |= {claim: {"reason": reason} for claim in (*_COUNTED, "life-05")}
    return {
        claim: arguments
        if "reason" in arguments and arguments.get("testable", True)
        else {**arguments, **common}
        for claim, arguments in found.items()
    }


def _with_contrast(claim: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The claim's arguments, or why its clean count decides nothing."""
    arguments = found[claim]
    if "stale" not in arguments:
        return arguments
    counts = _total(arguments)
    if claim in _GAPS:
        return {"testable": False, "reason": f"the source gives no value; found here: {counts}"}
    contrast = found.get(_CONTRAST.get(claim, ""), {})
    if "stale" not in contrast or sum(contrast["stale"]) or sum(arguments["stale"]):
        return arguments
    return {
        "value": counts,
        "undecided": f"its contrast {_CONTRAST[claim]} has {_total(contrast)} in the same run: "
        "nothing could have failed",
        "detail": arguments["detail"],
    }


def _total(arguments: dict[str, Any]) -> str:
    return f"{sum(arguments['stale'])}/{sum(arguments['trials'])} stale"


def _by_kernel(rows: pd.DataFrame, queues: str) -> str:
    cell = select(
        rows,
        protocol=CopyProtocol.UNPATCHED,
        front=Front.MATMUL,
        copy_path=CopyPath.KERNEL,
        queue_setting=queues,
    )
    if cell.empty:
        return ""
    stale, trials = int(cell["stale"].sum()), int(cell["trials"].sum())
    return f"judged on copies by engine; copies by kernel there: {stale}/{trials} stale"


def _counted(cell: pd.DataFrame, racing_in_simulation: bool) -> dict[str, Any]:
    detail = ""
    if racing_in_simulation:
        shares = cell["shares_default_queue"].fillna(False).astype(bool)
        shared, cell = cell[shares], cell[~shares]
        if not shared.empty:
            both, own = (
                len(set(shared["process"]) | set(cell["process"])),
                cell["process"].nunique(),
            )
            counts = [
                (int(part["stale"].sum()), int(part["trials"].sum())) for part in (shared, cell)
            ]
            detail = (
                f"conditional: {own} of {both} processes, whose copy stream has not the default "
                f"stream's queue; in the others {counts[0][0]}/{counts[0][1]} stale, all together "
                f"{counts[0][0] + counts[1][0]}/{counts[0][1] + counts[1][1]}"
            )
    if cell.empty:
        return {"reason": _NO_ARM}
    stale, trials = per_process(cell)
    return {"stale": stale, "trials": trials, "detail": detail}


def _findings(rows: pd.DataFrame, simulated: bool) -> dict[str, dict[str, Any]]:
    unpatched = rows[
        (rows["protocol"] == str(CopyProtocol.UNPATCHED))
        & (rows["source"] == str(Source.ALLOCATOR))
    ]

    def stale_in(part: pd.DataFrame) -> dict[str, Any]:
        if part.empty:
            return {"reason": _NO_ARM}
        text = ", ".join(
            f"{front} {int(group['stale'].sum())}/{int(group['trials'].sum())}"
            for front, group in part.groupby("front", sort=True)
        )
        any_stale = bool(part["stale"].sum() > 0)
        draws = min(len(per_process(group)[0]) for _, group in part.groupby("front"))
        if not any_stale and draws < _ENOUGH_PROCESSES:
            return {"reason": f"nothing stale in {draws} processes: too few draws to judge"}
        return {"holds": any_stale, "value": f"stale: {text}"}

    def fronts(*wanted: Front) -> pd.DataFrame:
        # the arms of the cut grid choose when the next step writes
        return plain[plain["front"].isin([str(front) for front in wanted])]

    plain = unpatched[unpatched["grid"] != "cut"]
    same = unpatched[unpatched["next_bytes"] == unpatched["source_bytes"]]
    reuse = ", ".join(
        f"{backend} {int(group['address_reused'].sum())}/{int(group['trials'].sum())}"
        for backend, group in same.groupby("allocator", sort=True)
    )
    outcomes = ", ".join(
        f"{int(unpatched[name].sum())} {name}"
        for name in ("clean", "overwritten", "partial", "torn")
    )
    default = plain[plain["queue_setting"] == "default"]
    other = fronts(Front.STORE_ON_OTHER_STREAMS, Front.PACK_AND_STORE)
    stores = fronts(Front.STORE_ON_COPY_STREAM, Front.STORE_ON_OTHER_STREAMS, Front.PACK_AND_STORE)
    matmul = fronts(Front.MATMUL)
    by_kernel = matmul[matmul["copy_path"] == str(CopyPath.KERNEL)]
    batch = unpatched[unpatched["grid"] == "batch"]
    found = {
        "mech-01": {
            "holds": bool(same["address_reused"].sum() == same["trials"].sum()),
            "value": f"address reused: {reuse}",
        }
        if len(same)
        else {"reason": _NO_ARM},
        "mech-02": {
            "holds": bool(unpatched["stale"].sum() > 0),
            "value": outcomes,
            "detail": "every byte was this step's or the next step's; anything else is an error",
        }
        if len(unpatched)
        else {"reason": _NO_ARM},
        "mech-05": stale_in(fronts(Front.STORE_ON_COPY_STREAM, Front.SPIN)),
        "mech-06": stale_in(default[default["front"] == str(Front.STORE_ON_COPY_STREAM)]),
        "mech-07": stale_in(matmul if simulated else by_kernel),
        "mech-08": stale_in(other),
        "mech-13": {**stale_in(stores), "detail": "no arm makes a load"},
        "micro-10": stale_in(batch[batch["batch_size"] == 32]),
    }
    if not simulated and "value" in found["mech-07"]:
        found["mech-07"]["detail"] = "copies by kernel; copies by engine need no compute queue"
    return found
