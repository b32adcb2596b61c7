"""Holds the capacity model against points that the real engine ran: same sessions, same sizes.

Step times come from the points themselves, so what is tested is what follows from them: which
prefixes are found, which states are gone, and how many tokens that serves. A prefill step of the
recorded points takes about as long whatever its tokens, so each point's own mean is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atom.benchmarks.capacity import CapacityLoad, simulate
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.capacity_rows import CapacityRow
from atom.benchmarks.session_model import Session
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points, engine_settings
from atom.errors import BadInput

#: largest relative difference that counts as agreement
AGREES = 0.10
#: the steps' times over the measured ones, at which each point is simulated
FACTORS = (1.0, 0.9, 1.1)


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

    def agrees(self, what: str) -> bool | None:
        """Whether ``hits``, ``failed`` or ``throughput`` differ by less than a tenth."""
        measured, simulated = getattr(self, what)
        if measured is None or simulated is None:
            return None
        return abs(simulated - measured) <= AGREES * max(abs(measured), 1e-9)


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


def like_id(point_id: str, factor: float) -> str:
    """Name of a simulated row: of the measured point, and the factor of its steps."""
    return f"{point_id}/steps x{factor:g}"


def simulate_like(
    settings: ThroughputSettings, row: ThroughputRow, sessions: Sequence[Session], factor: float
) -> CapacityRow:
    """Simulate a usable point of a throughput run.

    Args:
        settings: of that run.
        row: the point.
        sessions: those of the run.
        factor: of its step times.

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
    if engine.num_kv_blocks is None:
        block = (row.kv_bytes_per_token or 1) * engine.block_size
        engine = engine.model_copy(update={"num_kv_blocks": (row.hbm_kv_bytes or 0) // block})
    load = CapacityLoad(
        concurrency=row.concurrency,
        duration_seconds=settings.duration_seconds,
        warmup_requests_per_lane=settings.warmup_requests,
        seed=settings.seed,
        think_cap_seconds=settings.think_cap_seconds,
    )
    made = simulate(sessions, load, engine, machine_of(row, factor))
    return made.model_copy(
        update={
            "point_id": like_id(row.point_id, factor),
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
        model = simulated.get(like_id(row.point_id, 1.0))
        if model is None:
            continue
        others = [simulated.get(like_id(row.point_id, factor)) for factor in FACTORS]
        reach = [
            share for one in others if one and (share := _share(one.hit_tokens, one.lookup_tokens))
        ]
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
            )
        )
    return found


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
