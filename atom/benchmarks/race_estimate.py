"""How long a race sweep takes: from the bytes it moves, the operations it queues, its processes."""

from __future__ import annotations

from collections.abc import Iterable

from atom.benchmarks.race_plan import Arm, Job, NextStep
from atom.config import DeviceChoice, Front, RaceSettings

#: bandwidth of a bulk device-to-host copy and dense bfloat16 rate: estimates of time only
STORE_BYTES_PER_SECOND = 55e9
MATMUL_FLOPS = 7.0e14
TRIAL_OVERHEAD_SECONDS = 0.5e-3
#: a pre-warmed worker: context, first matmul, pinned buffers; then its arms' warm-up
WORKER_START_SECONDS = 2.5
#: host cost on the virtual device: a trial, and one queued matmul
VIRTUAL_TRIAL_SECONDS = 0.5e-3
VIRTUAL_MATMUL_SECONDS = 8e-6
#: host cost of making and comparing the large payload of the arm that is cut in mid-copy
CUT_TRIAL_SECONDS = 20e-3


def trial_seconds(arm: Arm, settings: RaceSettings) -> float:
    """Expected seconds of one trial, from the bytes and operations that it queues."""
    matmuls = settings.matmul_streams * settings.matmuls_per_stream
    if arm.next_step is NextStep.MID_COPY:
        return CUT_TRIAL_SECONDS + settings.spin_seconds
    if settings.device is DeviceChoice.VIRTUAL:
        return VIRTUAL_TRIAL_SECONDS + VIRTUAL_MATMUL_SECONDS * matmuls * (
            arm.front is Front.MATMUL
        )
    store = settings.store_bytes / STORE_BYTES_PER_SECOND
    front = {
        Front.NOTHING: 0.0,
        Front.STORE_ON_COPY_STREAM: store,
        Front.STORE_ON_OTHER_STREAMS: 2 * store,
        Front.MATMUL: matmuls * 2 * settings.matmul_size**3 / MATMUL_FLOPS,
        Front.PACK_AND_STORE: 1.1 * store,
        Front.SPIN: settings.spin_seconds,
    }[arm.front]
    return TRIAL_OVERHEAD_SECONDS + front


def estimate_seconds(jobs: Iterable[Job], settings: RaceSettings) -> float:
    """Expected seconds of a sweep: what the trials move, plus the start of each worker."""
    start = WORKER_START_SECONDS if settings.device is DeviceChoice.ACCELERATOR else 0.02
    total = 0.0
    for job in jobs:
        total += start
        for point in job.points:
            # One untimed warm-up trial a point.
            trials = point.arm.trials + point.arm.traced + 1
            total += trials * trial_seconds(point.arm, settings)
    return total
