"""Holds the capacity model against points that the real engine ran: same sessions, same sizes.

Step times come from the points themselves, so what is tested is what follows from them: which
prefixes are found, which states are gone, and how many tokens that serves. A prefill step of the
recorded points takes about as long whatever its tokens, so each point's own mean is taken.

Each point is also simulated with one thing changed: step times, the size of the caches, or the
order of the sessions. That shows where hits hang on what a model cannot know so closely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from atom.benchmarks.capacity import CapacityLoad, simulate
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.capacity_rows import CapacityRow
from atom.benchmarks.session_model import Session
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points, engine_settings
from atom.errors import BadInput

#: largest relative difference that counts as agreement
AGREES = 0.10


@dataclass(frozen=True)
class Change:
    """What a simulation of a point changes about it, one thing or nothing.

    Attributes:
        steps: step times over the measured ones.
        caches: KV blocks of the device and bytes of the pool, over the recorded ones.
        order: added to the seed of the order of the sessions.
    """

    steps: float = 1.0
    caches: float = 1.0
    order: int = 0

    @property
    def name(self) -> str:
        """As in a row's ``point_id``."""
        if self.order:
            return f"order +{self.order}"
        return f"caches x{self.caches:g}" if self.caches != 1 else f"steps x{self.steps:g}"


AS_IT_IS = Change()
#: how each point is simulated
CHANGES = (
    AS_IT_IS,
    *(Change(steps=factor) for factor in (0.9, 1.1)),
    *(Change(caches=factor) for factor in (0.9, 0.95, 1.05, 1.1)),
    *(Change(order=number) for number in (1, 2, 3)),
)


@dataclass(frozen=True)
class Checked:
    """A point of the real engine beside the same simulated; shares are ``None`` where not counted.

    Attributes:
        point_id: of the throughput run.
        hits: share of the looked-up tokens that were found: measured, simulated.
        failed: share of the state images asked of the pool that it had evicted, likewise.
        throughput: tokens a second, likewise.
        requests: of the profiling window, likewise.
        reach: least and largest share of hits with steps a tenth shorter or longer.
        by_caches: share of hits by the factor of the caches, the smallest first; 1 is one of them.
        by_order: share of hits with each other order of the sessions.
        apart: the hits' difference in requests of mean length.
        asked: state images asked of the pool: measured, simulated; ``None`` without one.
    """

    point_id: str
    hits: tuple[float | None, float | None]
    failed: tuple[float | None, float | None]
    throughput: tuple[float, float]
    requests: tuple[int, int] = (0, 0)
    reach: tuple[float, float] | None = None
    apart: float | None = None
    asked: tuple[int, int] | None = None
    by_caches: tuple[tuple[float, float], ...] = ()
    by_order: tuple[float, ...] = ()

    def agrees(self, what: str) -> bool | None:
        """Whether ``hits``, ``failed`` or ``throughput`` differ by less than a tenth."""
        measured, simulated = getattr(self, what)
        if measured is None or simulated is None:
            return None
        return abs(simulated - measured) <= AGREES * max(abs(measured), 1e-9)

    @property
    def like_caches(self) -> float | None:
        """Size of the caches, over the recorded ones, at which the model finds what was measured.

        On lines between the sizes simulated; ``None`` where that is at none of them.
        """
        measured = self.hits[0]
        if measured is None:
            return None
        for (size, share), (larger, more) in pairwise(self.by_caches):
            if min(share, more) <= measured <= max(share, more) and share != more:
                return size + (larger - size) * (measured - share) / (more - share)
        return None

    @property
    def closeness(self) -> float | None:
        """Relative error of the caches' size that moves the hits by a tenth of what was measured.

        By the steepest line between two sizes simulated; ``None`` where none is.
        """
        measured = self.hits[0]
        slopes = [
            (more - share) / (larger - size)
            for (size, share), (larger, more) in pairwise(self.by_caches)
        ]
        if not measured or max(slopes, default=0.0) <= 0:
            return None
        return AGREES * measured / max(slopes)


def usable(settings: ThroughputSettings, row: ThroughputRow) -> bool:
    """Whether a point can be simulated: it ended well, its times and sizes were recorded."""
    timed = row.prefill_seconds and row.prefill_steps and row.decode_seconds and row.decode_steps
    sized = row.kv_bytes_per_token and (settings.num_kv_blocks or row.hbm_kv_bytes)
    own = row.protocol == settings.protocol[0]
    return bool(own and row.outcome is Outcome.OK and timed and sized)


def machine_of(row: ThroughputRow, factor: float = 1.0) -> Machine:
    """Costs and sizes of a usable point: its own mean step times, times ``factor``.

    The link to the host takes its share of 54.9 GB/s whatever the factor.
    """
    prefill = (row.prefill_seconds or 0.0) / (row.prefill_steps or 1)
    decode = (row.decode_seconds or 0.0) / (row.decode_steps or 1)
    return Machine(
        decode_base_seconds=factor * decode,
        decode_row_seconds=0.0,
        decode_context_seconds=0.0,
        prefill_base_seconds=factor * prefill,
        prefill_token_seconds=0.0,
        prefill_pair_seconds=0.0,
        host_seconds=0.0,
        kv_bytes_per_token=row.kv_bytes_per_token or 1,
        state_image_bytes=row.state_image_bytes or 1,
    )


def like_id(point_id: str, change: Change) -> str:
    """Name of a simulated row: of the measured point, and what was changed."""
    return f"{point_id}/{change.name}"


def simulate_like(
    settings: ThroughputSettings, sessions: Sequence[Session], row: ThroughputRow, change: Change
) -> CapacityRow:
    """Simulate a usable point of a throughput run.

    Args:
        settings: of that run.
        sessions: those of the run.
        row: the point.
        change: one thing that is not as recorded, or nothing.

    Raises:
        BadInput: the run's settings have no such point.
    """
    point = next((one for one in build_points(settings) if one.point_id == row.point_id), None)
    if point is None:
        raise BadInput(f"{row.point_id}: no point of the run's settings")
    most = settings.output_tokens
    if most is not None:
        sessions = [
            replace(
                one,
                turns=tuple(
                    replace(turn, output_tokens=min(turn.output_tokens, most)) for turn in one.turns
                ),
            )
            for one in sessions
        ]
    engine = engine_settings(settings, point.arm, row.concurrency, row.pool_gib)
    block = (row.kv_bytes_per_token or 1) * engine.block_size
    blocks = engine.num_kv_blocks or (row.hbm_kv_bytes or 0) // block
    sizes = {"num_kv_blocks": round(change.caches * blocks)}
    if engine.cpu_pool_bytes is not None:
        sizes["cpu_pool_bytes"] = round(change.caches * engine.cpu_pool_bytes)
    engine = engine.model_copy(update=sizes)
    load = CapacityLoad(
        concurrency=row.concurrency,
        duration_seconds=settings.duration_seconds,
        warmup_requests_per_lane=settings.warmup_requests,
        seed=settings.seed + change.order,
        think_cap_seconds=settings.think_cap_seconds,
    )
    made = simulate(sessions, load, engine, machine_of(row, change.steps))
    return made.model_copy(
        update={
            "point_id": like_id(row.point_id, change),
            "arm": point.arm.name,
            "repeat": row.repeat,
            "pool_gib": row.pool_gib,
        }
    )


def compare(
    rows: Sequence[ThroughputRow],
    simulated: Mapping[str, CapacityRow],
    evicted_states: Mapping[str, int],
) -> list[Checked]:
    """Measured points beside simulated ones.

    Args:
        rows: measured; those that were not simulated are left out.
        simulated: rows by name, see :func:`like_id`.
        evicted_states: state loads of a point that failed since the state had been evicted, from
            the run's table of causes; points that are not named have none.
    """
    found = []
    for row in rows:
        model = simulated.get(like_id(row.point_id, AS_IT_IS))
        if model is None:
            continue
        found_with = {
            change: share
            for change in CHANGES
            if (one := simulated.get(like_id(row.point_id, change)))
            and (share := _share(one.hit_tokens, one.lookup_tokens)) is not None
        }
        reach = [s for change, s in found_with.items() if change.caches == 1 and not change.order]
        sizes = {c.caches: s for c, s in found_with.items() if c.steps == 1 and not c.order}
        offload, lost = row.pool_gib is not None, evicted_states.get(row.point_id, 0)
        hits = _share(row.hit_tokens, row.lookup_tokens)
        expected = _share(model.hit_tokens, model.lookup_tokens)
        apart = None
        if hits is not None and expected is not None and row.tokens_per_request:
            apart = abs(hits - expected) * (row.lookup_tokens or 0) / row.tokens_per_request
        asked = model.state_load_failures + model.state_loads
        found.append(
            Checked(
                row.point_id,
                (hits, expected),
                (
                    _share(lost, lost + (row.states_loaded or 0)) if offload else None,
                    _share(model.state_load_failures, asked) if offload else None,
                ),
                (row.effective_total_throughput or 0.0, model.effective_total_throughput),
                (row.requests or 0, model.requests),
                (min(reach), max(reach)) if reach else None,
                apart,
                (lost + (row.states_loaded or 0), asked) if offload else None,
                tuple(sorted(sizes.items())),
                tuple(share for change, share in found_with.items() if change.order),
            )
        )
    return found


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
