"""Holds the capacity model against points that the real engine ran: same sessions, same sizes.

Step times come from the points themselves, so what is tested is what follows from them: which
prefixes are found, which states are gone, and how many tokens that serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from atom.benchmarks.capacity import CapacityLoad, simulate
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.session_model import Session
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points, engine_settings
from atom.errors import BadInput

#: largest relative difference that counts as agreement
AGREES = 0.10


@dataclass(frozen=True)
class Checked:
    """A point of the real engine beside the same simulated; shares are ``None`` where not counted.

    Attributes:
        point_id: of the throughput run.
        hits: share of the looked-up tokens that were found: measured, simulated.
        failed: share of the state images asked of the pool that it had evicted, likewise.
        throughput: tokens a second, likewise.
    """

    point_id: str
    hits: tuple[float | None, float | None]
    failed: tuple[float | None, float | None]
    throughput: tuple[float, float]

    def agrees(self, what: str) -> bool | None:
        """Whether ``hits``, ``failed`` or ``throughput`` differ by less than a tenth."""
        measured, simulated = getattr(self, what)
        if measured is None or simulated is None:
            return None
        return abs(simulated - measured) <= AGREES * max(abs(measured), 1e-9)


def machine_from(
    rows: Sequence[ThroughputRow], *, copy_bytes_per_second: float = 54.9e9
) -> Machine:
    """Costs and sizes that the rows of one machine and model tell.

    The time of prefill is so much a step and so much a token, the time of a decode step a line in
    its requests: least squares over the points.

    Raises:
        BadInput: no row timed its steps and told its sizes.
    """
    timed = [
        row
        for row in rows
        if row.outcome is Outcome.OK
        and row.prefill_seconds
        and row.decode_seconds
        and row.prompt_tokens_computed
        and row.decode_steps
        and row.decode_batch_mean
        and row.kv_bytes_per_token
    ]
    if not timed:
        raise BadInput("no point timed its prefill and decode steps and told its sizes")
    prefills = np.array([row.prefill_steps or 0 for row in timed], dtype=np.float64)
    computed = np.array([row.prompt_tokens_computed or 0 for row in timed], dtype=np.float64)
    spent = np.array([row.prefill_seconds or 0 for row in timed])
    per_token, per_step = float(spent.sum() / computed.sum()), 0.0
    if np.linalg.matrix_rank(np.stack([prefills, computed])) == 2:
        found, _ = nnls(np.stack([prefills, computed], axis=1), spent)
        per_step, per_token = (float(value) for value in found)
    steps = np.array([(row.decode_seconds or 0) / (row.decode_steps or 1) for row in timed])
    batch = np.array([row.decode_batch_mean or 0 for row in timed])
    slope = 0.0
    if batch.max() > 1.1 * batch.min():
        slope = max(float(np.polyfit(batch, steps, 1)[0]), 0.0)
    base = max(float((steps - slope * batch).mean()), 0.0)
    return Machine(
        decode_base_seconds=base,
        decode_row_seconds=slope,
        decode_context_seconds=0.0,
        prefill_base_seconds=per_step,
        prefill_token_seconds=per_token,
        prefill_pair_seconds=0.0,
        host_seconds=0.0,
        store_bytes_per_second=copy_bytes_per_second,
        load_bytes_per_second=copy_bytes_per_second,
        kv_bytes_per_token=timed[0].kv_bytes_per_token or 1,
        state_image_bytes=timed[0].state_image_bytes or 1,
    )


def check(
    settings: ThroughputSettings,
    rows: Sequence[ThroughputRow],
    evicted_states: Mapping[str, int],
    sessions: Sequence[Session],
) -> list[Checked]:
    """Simulate each point that ended well, and hold it beside.

    Args:
        settings: of the throughput run.
        rows: its points.
        evicted_states: state loads of a point that failed since the state had been evicted, from
            its table of causes; points that are not named have none.
        sessions: those of the run.

    Raises:
        BadInput: see :func:`machine_from`; or the engine's sizes were not recorded.
    """
    machine = machine_from(rows)
    points = {point.point_id: point for point in build_points(settings)}
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
    found = []
    for row in rows:
        point = points.get(row.point_id)
        if row.outcome is not Outcome.OK or point is None:
            continue
        engine = engine_settings(settings, point.arm, row.concurrency, row.pool_gib)
        if engine.num_kv_blocks is None:
            block = (row.kv_bytes_per_token or 0) * engine.block_size
            if not block or not row.hbm_kv_bytes:
                raise BadInput(f"{row.point_id}: the KV pool's size was not recorded")
            engine = engine.model_copy(update={"num_kv_blocks": row.hbm_kv_bytes // block})
        load = CapacityLoad(
            concurrency=row.concurrency,
            duration_seconds=settings.duration_seconds,
            warmup_requests_per_lane=settings.warmup_requests,
            seed=settings.seed,
            think_cap_seconds=settings.think_cap_seconds,
        )
        model = simulate(sessions, load, engine, machine)
        lost = evicted_states.get(row.point_id, 0)
        offload = row.pool_gib is not None
        found.append(
            Checked(
                row.point_id,
                (_share(row.hit_tokens, row.lookup_tokens),
                 _share(model.hit_tokens, model.lookup_tokens)),
                (_share(lost, lost + (row.states_loaded or 0)) if offload else None,
                 _share(model.state_load_failures, model.state_load_failures + model.state_loads)
                 if offload else None),
                (row.effective_total_throughput or 0.0, model.effective_total_throughput),
            )
        )  # fmt: skip
    return found


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
