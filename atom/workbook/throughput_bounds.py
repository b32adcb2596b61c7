"""What a point is bound by: prefill, decode, or the copies between host and device; and its scale.

Each resource has the seconds that it was busy. If it were busy all the time, and nothing else
changed, the point would serve ``throughput / busy share``: its ceiling. The lowest ceiling is the
one that the point runs into first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from atom.benchmarks.throughput_settings import GIB
from atom.config import Front
from atom.device.profiles import find_profile
from atom.workbook.records import Run
from atom.workbook.statistics import bootstrap_ratio
from atom.workbook.throughput_analysis import NOTHING, Row, is_ok

PREFILL, DECODE, COPY, IDLE = "prefill", "decode", "host copy", "idle"
#: least share of the time that a resource is busy for a point to be called bound by it
BOUND_SHARE = 0.5


@dataclass(frozen=True)
class CopyRate:
    """Bytes a second of a copy between pinned host memory and the device, and where it is from."""

    bytes_per_s: float
    source: str


def measured_copy_rate(race: Run, seed: int = 42) -> CopyRate | None:
    """Rate of the bulk store of a race run, by the device's clock; ``None`` if it has none."""
    rows = race.tables["timeline"]
    arm = f"/{Front.STORE_ON_COPY_STREAM}/"
    stores = rows[
        rows["arm"].str.startswith("main/")
        & rows["arm"].str.contains(arm, regex=False)
        & (rows["lane"] == "copy")
        & (rows["label"] == "front")
    ]
    if stores.empty:
        return None
    nbytes = int(race.provenance.settings["store_bytes"])
    rate, _, _ = bootstrap_ratio(
        [nbytes * 1e6], stores["end_us"] - stores["start_us"], seed, resamples=10
    )
    tail = race.provenance.run_id.rsplit("-", 1)[-1]
    text = f"median of {len(stores)} stores of {nbytes / 2**20:g} MiB, run {tail}"
    return CopyRate(rate, text)


def profile_copy_rate(run: Run) -> CopyRate:
    """Rate of the copies to the host of a simulated run's device."""
    settings = run.provenance.settings
    rate = find_profile(settings["device_profile"]).d2h_bytes_per_second
    return CopyRate(
        rate / float(settings.get("link_slowdown", 1.0)),
        f"a parameter of profile {run.provenance.device}",
    )


@dataclass(frozen=True)
class PointBounds:
    """Where the time of one point went.

    Attributes:
        row: the point.
        shares: busy share of the time under load by resource; copies overlap with compute, so the
            shares may add up to more than 1.
        copied_bytes: stored and loaded.
        bound: the resource with the largest share, or ``idle`` where none is busy half of the time.
    """

    row: Row
    shares: dict[str, float]
    copied_bytes: int
    bound: str

    def ceiling(self, resource: str) -> float | None:
        """Throughput if that resource were always busy; ``None`` where it never was."""
        share = self.shares[resource]
        return float(self.row["effective_total_throughput"]) / share if share > 0 else None

    @property
    def bytes_per_token(self) -> float:
        """Bytes copied between host and device for each token served, warm-up included."""
        served = self.row["effective_total_throughput"] * self.row["exposure_seconds"]
        return self.copied_bytes / served


def bounds(rows: Sequence[Row], rate: CopyRate) -> list[PointBounds]:
    """Bounds of the points that ended well and timed their steps.

    Stores and loads go in opposite directions of the link and overlap: the busier direction counts.
    """
    found = []
    for row in rows:
        if not is_ok(row) or not row["exposure_seconds"] or row["decode_seconds"] is None:
            continue
        seconds = row["exposure_seconds"]
        stored, loaded = row["stored_bytes"] or 0, row["loaded_bytes"] or 0
        shares = {
            PREFILL: (row["prefill_seconds"] or 0.0) / seconds,
            DECODE: row["decode_seconds"] / seconds,
            COPY: max(stored, loaded) / rate.bytes_per_s / seconds,
        }
        largest = max(shares, key=lambda name: shares[name])
        bound = largest if shares[largest] >= BOUND_SHARE else IDLE
        found.append(PointBounds(row, shares, stored + loaded, bound))
    return found


def bounds_table(found: Sequence[PointBounds]) -> pd.DataFrame:
    """A row a point: shares, ceilings and what binds it."""
    return pd.DataFrame(
        {
            "sessions": one.row["concurrency"],
            "pool": NOTHING if one.row["pool_gib"] is None else f"{one.row['pool_gib']:g} GiB",
            "served, tok/s": f"{one.row['effective_total_throughput']:,.0f}",
            **{f"{name} busy": f"{share:.1%}" for name, share in one.shares.items()},
            "copied a token": f"{one.bytes_per_token:,.0f} B",
            "copy ceiling, tok/s": NOTHING
            if one.ceiling(COPY) is None
            else f"{one.ceiling(COPY):,.0f}",
            "bound by": one.bound,
        }
        for one in found
    )


@dataclass(frozen=True)
class Scale:
    """The sizes by which one machine's curve is held beside another's.

    Attributes:
        kv_bytes_per_token: of the model.
        state_image_bytes: of one recurrent state.
        hbm_kv_bytes: KV pool on the device.
        working_sets: bytes by sessions.
        pools_gib: sizes of the host pool.
    """

    kv_bytes_per_token: int
    state_image_bytes: int | None
    hbm_kv_bytes: int | None
    working_sets: dict[int, int]
    pools_gib: tuple[float, ...]

    def pool_over_working_set(self, pool_gib: float, concurrency: int) -> float:
        """How much of the working set the pool holds."""
        return pool_gib * GIB / self.working_sets[concurrency]


def scale_of(rows: Sequence[Row]) -> Scale | None:
    """Sizes of the points in ``rows``; ``None`` where they were not recorded."""
    known = [row for row in rows if row["kv_bytes_per_token"] and row["working_set_bytes"]]
    if not known:
        return None
    first = known[0]
    return Scale(
        first["kv_bytes_per_token"],
        first["state_image_bytes"],
        first["hbm_kv_bytes"],
        {row["concurrency"]: int(row["working_set_bytes"]) for row in sorted(known, key=_sessions)},
        tuple(sorted({row["pool_gib"] for row in known if row["pool_gib"] is not None})),
    )


def _sessions(row: Row) -> int:
    return int(row["concurrency"])


def scale_sentences(scale: Scale) -> list[str]:
    """The scaling in words: bytes of KV a token, working set, pool over working set."""
    sets = ", ".join(
        f"{sessions}: {size_text(nbytes)}" for sessions, nbytes in scale.working_sets.items()
    )
    text = f"A token has {size_text(scale.kv_bytes_per_token)} of KV"
    if scale.state_image_bytes is not None:
        text += f", a state image {size_text(scale.state_image_bytes)}"
    if scale.hbm_kv_bytes is not None:
        text += f"; the KV pool on the device is {size_text(scale.hbm_kv_bytes)}"
    found = [f"{text}. Working set by live sessions: {sets}."]
    ratios = [
        scale.pool_over_working_set(pool, sessions)
        for pool in scale.pools_gib
        for sessions in scale.working_sets
    ]
    if ratios:
        found.append(
            f"Pools of {', '.join(f'{pool:g}' for pool in scale.pools_gib)} GiB hold "
            f"{min(ratios):.2g} to {max(ratios):.2g} of it. The source prints neither bytes a "
            "token nor a working set, so its pools cannot be put on this scale."
        )
    return found


def scale_table(scale: Scale) -> pd.DataFrame:
    """Pool over working set: a row a number of sessions, a column a pool."""
    return pd.DataFrame(
        {
            "sessions": sessions,
            "working set": size_text(nbytes),
            **{
                f"{pool:g} GiB": f"{scale.pool_over_working_set(pool, sessions):.2f}"
                for pool in scale.pools_gib
            },
        }
        for sessions, nbytes in scale.working_sets.items()
    )


def size_text(nbytes: float | None) -> str:
    """``12.5 GiB``: with the unit that keeps the number readable; a dash for ``None``."""
    if nbytes is None:
        return NOTHING
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return (
                f"{nbytes / size:,.3g} {unit}"
                if nbytes < 1000 * size
                else f"{nbytes / size:,.0f} {unit}"
            )
    return f"{nbytes:,.0f} B"


def bound_counts(found: Sequence[PointBounds]) -> dict[str, int]:
    """Points by what binds them, most first."""
    return dict(Counter(one.bound for one in found).most_common())
