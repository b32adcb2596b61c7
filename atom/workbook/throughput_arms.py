"""Arms of one setting and one sitting side by side: what their pools held, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from atom.kv_transfer.host_pool import PoolPolicy
from atom.workbook.records import Run
from atom.workbook.throughput_analysis import (
    NOTHING,
    Row,
    agrees,
    hit_share,
    is_ok,
    main_factors,
    place_in_sitting,
    spread_of,
    value_text,
)
from atom.workbook.throughput_bounds import size_text
from atom.workbook.throughput_points import number_text, ratio_text

_RATE = "effective_total_throughput"


def not_run_sentences(runs: Sequence[Run]) -> list[str]:
    """Points that the runs planned and none of them came to, by reason."""
    done = {name for run in runs for name in run.tables["points"]["point_id"]}
    by_reason: dict[str, list[str]] = {}
    for run in runs:
        left = run.provenance.facts.get("stopped_early", {}).get("not_run", {})
        for name, reason in left.items():
            own = by_reason.setdefault(str(reason), [])
            if name not in done and name not in own:
                own.append(str(name))
    return [
        f"planned and not run ({reason}): {_names(names)}."
        for reason, names in by_reason.items()
        if names
    ]


def side_by_side_sentences(rows: Sequence[Row]) -> list[str]:
    """Sittings whose points shared their host: a GPU each, and a neighbour's load beside them."""
    workers: dict[str, set[Any]] = {}
    for row in rows:
        if row["worker"] is not None:
            workers.setdefault(row["sitting"], set()).add(row["worker"])
    shared = {name: len(own) for name, own in workers.items() if len(own) > 1}
    if not shared:
        return []
    counts = ", ".join(f"{name}: up to {count}" for name, count in sorted(shared.items()))
    return [
        f"points were run side by side, a GPU each ({counts} at a time). Which points had which "
        "neighbours was not recorded, and what neighbours cost is in none of the intervals but as "
        "the spread of repeats: see what neighbours cost, below."
    ]


def _names(names: Sequence[str]) -> str:
    """Names, repeats of one in one: ``hold/c16/6GiB/alone/any (6 repeats)``."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(name.rpartition("/")[0], []).append(name)
    return "; ".join(
        own[0] if len(own) == 1 else f"{stem} ({len(own)} repeats)" for stem, own in counts.items()
    )


def arm_groups(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Points with a pool that ended well, where several arms of one sitting have the setting.

    Returns:
        The point of the main grid's factors, and those that differ from it in one, by setting.
    """
    main = main_factors(rows)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_ok(row) and row["pool_gib"] is not None and row["lookup_tokens"]:
            groups.setdefault(place_in_sitting(row), []).append(row)
    found = []
    for _, own in sorted(groups.items(), key=lambda item: item[0]):
        base = [row for row in own if agrees(row, main)]
        others = [row for row in own if not agrees(row, main)]
        if base and others:
            found.append((base[0], [*base[1:], *others]))
    return found


def kv_held(row: Row) -> float | None:
    """Bytes of the pool that KV took at the end."""
    used, states = row["pool_bytes_used"], states_held(row)
    if used is None or states is None or row["state_image_bytes"] is None:
        return None
    return float(used - states * row["state_image_bytes"])


def states_held(row: Row) -> int | None:
    """State images that were in the pool at the end, if none was withdrawn."""
    stored, evicted = row["states_stored"], row["states_evicted"]
    return None if stored is None or evicted is None else int(stored - evicted)


def arms_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A row a point: its throughput over the main grid's arm, what it found, stored and held."""
    lines = []
    spread = spread_of(rows)
    for base, others in arm_groups(rows):
        own = [base, *others]
        first = arm_name(base)
        rates = [row[_RATE] for row in own if arm_name(row) == first]
        for row in own:
            arm = arm_name(row)
            over = NOTHING if arm == first else ratio_text(spread.of([row[_RATE]], rates))
            lines.append(
                {
                    "sessions": row["concurrency"],
                    "pool": value_text("pool_gib", row["pool_gib"]),
                    "sitting": row["sitting"],
                    "arm": arm,
                    "requests": f"{row['requests']:,}",
                    "tok/s": f"{row[_RATE]:,.0f}",
                    "over the first arm": over,
                    "from a cache": f"{hit_share(row):.0%}",
                    "states stored": number_text(row["states_stored"], ",d"),
                    "KV held at the end": size_text(kv_held(row)),
                    "states held": number_text(states_held(row), ",d"),
                    "KV loads failed": number_text(row["kv_load_failures"], ",d"),
                    "state loads failed": number_text(row["state_load_failures"], ",d"),
                }
            )
    return pd.DataFrame(lines)


def arm_name(row: Row) -> str:
    """``hold, shared_lru, chunk 256``."""
    name = f"{row['protection']}, {row['offload_policy']}, chunk {row['chunk_tokens']}"
    return name if row["mtp"] else f"{name}, no MTP"


def arms_sentences(rows: Sequence[Row]) -> list[str]:
    """What the arms of a setting found, and what the counts say about why."""
    found = []
    for base, others in arm_groups(rows):
        own = [base, *others]
        where = (
            f"{base['concurrency']} sessions, {value_text('pool_gib', base['pool_gib'])} "
            f"({base['sitting']})"
        )
        shares = {id(row): hit_share(row) or 0.0 for row in own}
        least = min(own, key=lambda row: shares[id(row)])
        most = max(own, key=lambda row: shares[id(row)])
        found.append(
            f"{where}: from a cache come {shares[id(base)]:.0%} under {arm_name(base)}; least "
            f"{shares[id(least)]:.0%} ({arm_name(least)}), most {shares[id(most)]:.0%} "
            f"({arm_name(most)}); {_runs_text(own)}."
        )
        held = {id(row): kv_held(row) for row in own}
        known = [row for row in own if held[id(row)] is not None]
        if len(known) > 2 and least is not most:
            ends = (
                min(known, key=lambda row: held[id(row)] or 0.0),
                max(known, key=lambda row: held[id(row)] or 0.0),
            )
            if ends[0] is least and ends[1] is most:
                found.append(
                    f"{where}: the arm that found least also held least KV at the end "
                    f"({size_text(held[id(least)])} and {states_held(least):,} states), the one "
                    f"that found most held most ({size_text(held[id(most)])} and "
                    f"{states_held(most):,} "
                    f"states; {arm_name(base)}: {size_text(held[id(base)])} and "
                    f"{states_held(base):,}). No arm changed the KV alone: the cause is "
                    "open. `sweep capacity -p like RUN` replays the counts of such a run."
                )
        found += [
            f"{where}: {text}" for row in own if row is not base and (text := _isolated(row, base))
        ]
    return found


def _runs_text(own: Sequence[Row]) -> str:
    names = [arm_name(row) for row in own]
    return "one run an arm" if len(set(names)) == len(names) else "some arms repeated"


def _isolated(row: Row, base: Row) -> str:
    """Why a pool with a share for each kind found nothing, by what failed."""
    if row["offload_policy"] != PoolPolicy.ISOLATED.value or row["hit_tokens"] is None:
        return ""
    kv, states = row["kv_load_failures"] or 0, row["state_load_failures"] or 0
    held, shared = kv_held(row), kv_held(base)
    if row["states_loaded"] is None or held is None or shared is None:
        return ""
    text = (
        f"isolated: states loaded: {row['states_loaded']:,}; loads that failed: {kv:,} for KV, "
        f"{states:,} for a state."
    )
    if kv > states and held < shared:
        text += (
            f" Its states have bytes for themselves and used them ({states_held(row):,} against "
            f"{states_held(base):,} images), so its KV, {size_text(held)} against "
            f"{size_text(shared)}, "
            "went before it was asked for again: a share too large for this load would do that."
        )
    return text
