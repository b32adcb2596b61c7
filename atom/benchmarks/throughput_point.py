"""One point of the throughput experiment: an engine under a load of agentic sessions.

Method. An engine is built with a KV pool of bounded size, with a CPU pool below it or without.
``concurrency`` lanes hold one live session each: a request, its answer, a pause, the next request
with the conversation so far. Each lane sends its warm-up requests, then the profiling window
begins. Prefixes that the device had to give up come back from the CPU pool or are computed again.
The engine starts cold, in a process of its own, which tells its counters as it goes.

``python -m atom.benchmarks.throughput_point`` reads its job, one JSON line, from standard input and
ends itself when that closes. Exit codes: 0 fine, else see ``throughput_process``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.agentic_sessions import (
    Session,
    Traces,
    generate_sessions,
    load_traces,
    working_set_tokens,
)
from atom.benchmarks.load_client import EngineClient, LoadResult, LoadSettings, run_load
from atom.benchmarks.load_metrics import RequestRow
from atom.benchmarks.throughput_engine import (
    TimedEngine,
    TimedRunner,
    cause_rows,
    counters,
    sizes,
    timings,
)
from atom.benchmarks.throughput_process import (
    DIED,
    GUARD_ERROR,
    LOAD_FAILED,
    OUT_OF_MEMORY,
    START_FAILED,
    Tell,
    pass_gate,
    read_job,
    run_and_leave,
)
from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_settings import (
    ThroughputPoint,
    ThroughputSettings,
    build_points,
    engine_settings,
)
from atom.config import DeviceChoice
from atom.device import Device, open_device
from atom.entrypoints.async_engine import AsyncEngine
from atom.errors import DeviceOutOfMemory
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.llm_engine import LLMEngine
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning

_LOGGER = logging.getLogger(__name__)
_TELL_SECONDS = 0.5
_STOP_SECONDS = 30.0
EXIT_CODES = {
    Outcome.OK: 0,
    Outcome.CRASH: DIED,
    Outcome.HANG: DIED,
    Outcome.OUT_OF_MEMORY: OUT_OF_MEMORY,
    Outcome.START_FAILED: START_FAILED,
    Outcome.LOAD_FAILED: LOAD_FAILED,
    Outcome.GUARD_ERROR: GUARD_ERROR,
}


def read_sessions(settings: ThroughputSettings) -> Traces:
    """The sessions of a sweep, the same in each of its points.

    Raises:
        BadInput: there are no such traces, or none fits ``max_context_tokens``.
    """
    if settings.traces is not None:
        return load_traces(
            settings.traces,
            max_context_tokens=settings.max_context_tokens,
            block_tokens=settings.block_tokens,
        )
    named = {} if settings.block_tokens is None else {"block_tokens": settings.block_tokens}
    return generate_sessions(
        settings.sessions, settings.seed, max_context_tokens=settings.max_context_tokens, **named
    )


def load_settings(settings: ThroughputSettings, point: ThroughputPoint) -> LoadSettings:
    """The load of a point. All points draw the sessions in one order."""
    return LoadSettings(
        concurrency=point.concurrency,
        duration_seconds=settings.duration_seconds,
        warmup_requests_per_lane=settings.warmup_requests,
        seed=settings.seed,
        think_cap_seconds=settings.think_cap_seconds,
        output_tokens=settings.output_tokens,
    )


def run_point(
    settings: ThroughputSettings,
    point: ThroughputPoint,
    tell: Tell,
    *,
    began: float | None = None,
    model: LoadedModel | None = None,
    traces: Traces | None = None,
    device: Device | None = None,
    gate: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run one point in this process, and tell all that becomes known of it.

    Args:
        settings: of the sweep.
        point: which.
        tell: called with fields of the point's row as they are known, and at last with
            ``outcome``; also ``requests`` and ``causes``, rows of those tables without identity.
        began: when the point began, by ``time.time``; now by default.
        model: already loaded weights.
        traces: already read sessions.
        device: already open.
        gate: called when the engine is ready; the load begins when it returns.

    Returns:
        How it ended. Whatever fails is an outcome, not an exception.
    """
    began = time.time() if began is None else began
    threads = torch.get_num_threads()
    outcome, detail = Outcome.START_FAILED, None
    try:
        _LOGGER.info("%s: %.1f s until imported", point.point_id, time.time() - began)
        traces = traces or read_sessions(settings)
        _LOGGER.info("%d sessions read", len(traces.sessions))
        device = device or open_device(
            settings.device, profile=settings.device_profile, seed=settings.seed
        )
        if settings.device is DeviceChoice.VIRTUAL:
            # matrices of a tiny model: more threads would wait for each other
            torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            engine = start_engine(settings, point, device, model)
        outcome, detail = asyncio.run(_serve(settings, point, engine, traces, tell, began, gate))
    except Exception as error:
        _LOGGER.exception("the point failed")
        detail = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            outcome = Outcome.OUT_OF_MEMORY
    finally:
        torch.set_num_threads(threads)
    tell(
        {
            "device_peak_bytes": _device_peak(device),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "outcome": outcome.value,
            "outcome_detail": None if detail is None else first_line(detail),
        }
    )
    return outcome


def start_engine(
    settings: ThroughputSettings,
    point: ThroughputPoint,
    device: Device,
    loaded: LoadedModel | None = None,
) -> LLMEngine:
    """The engine of a point.

    Raises:
        BadInput: it does not fit, or there is no such model.
        DeviceOutOfMemory: the device or the host has not as much.
    """
    engine = engine_settings(settings, point.arm, point.concurrency, point.pool_gib)
    if loaded is None:
        loaded = load_model(
            settings.model,
            device,
            with_mtp=engine.draft_tokens > 0,
            seed=settings.seed,
            max_positions=engine.max_model_len + 4 * engine.query_tokens,
        )
    _LOGGER.info("the model is loaded")
    return build_engine(loaded.model, loaded.mtp, engine, device, runner_class=TimedRunner)


async def _serve(
    settings: ThroughputSettings,
    point: ThroughputPoint,
    engine: LLMEngine,
    traces: Traces,
    tell: Tell,
    began: float,
    gate: Callable[[], None],
) -> tuple[Outcome, str | None]:
    timed = TimedEngine(engine)
    known = sizes(engine, timed.runner)
    server = AsyncEngine(timed)
    server.start()
    _LOGGER.info("the engine has started")
    gate()
    tell(
        {
            "setup_seconds": max(0.0, time.time() - began),
            "exposure_seconds": 0.0,
            "traces": len(traces.sessions),
            "traces_dropped": sum(traces.dropped.values()),
            "working_set_bytes": _working_set(traces.sessions, point) * known["kv_bytes_per_token"],
            **known,
        }
    )
    start = time.monotonic()
    timed.start_clock()
    client = EngineClient(server, vocab_size=engine.vocab_size or 2)
    load = asyncio.create_task(run_load(client, traces.sessions, load_settings(settings, point)))
    exposure = 0.0
    while not load.done():
        await asyncio.wait({load}, timeout=_TELL_SECONDS)
        if server.failure is None:
            exposure = time.monotonic() - start
            tell({"exposure_seconds": exposure, **counters(server.stats(), known)})
        elif not load.done():
            # nobody serves the rest of the load; what it has measured is its result
            load.cancel()
    result = load.result()
    _LOGGER.info("the load has ended: %s", result.ended)
    stopped = await server.stop(_STOP_SECONDS)
    # only a thread that has ended may be looked at
    stats = engine.stats() if stopped else server.stats()
    fault = engine.last_guard_fault
    tell(
        {
            "exposure_seconds": exposure,
            **load_fields(result),
            **counters(stats, known),
            **(timings(timed) if stopped else {}),
            "guard_value": None if fault is None else fault.value,
            "requests_table": request_rows(result.rows),
            "causes_table": cause_rows(stats),
        }
    )
    return _outcome(server.failure, stopped, stats, result)


def _outcome(
    failure: str | None, stopped: bool, stats: dict[str, float], result: LoadResult
) -> tuple[Outcome, str | None]:
    if failure is not None:
        full = Outcome.OUT_OF_MEMORY if is_out_of_memory(failure) else Outcome.CRASH
        return full, failure
    if not stopped:
        return Outcome.HANG, f"its engine did not stop within {_STOP_SECONDS:.0f} s"
    if stats.get("guard_errors", 0):
        return Outcome.GUARD_ERROR, first_error(result)
    return load_outcome(result)


def first_error(result: LoadResult) -> str | None:
    """What the first request that failed says; ``None`` when none did."""
    return next((row.error for row in result.rows if row.error), None)


def load_outcome(result: LoadResult) -> tuple[Outcome, str | None]:
    """How a load ended whose server or engine lives, and the first error."""
    said = first_error(result)
    if not result.summary.requests or result.ended != "complete":
        return Outcome.LOAD_FAILED, f"the load {result.ended}; first error: {said or 'none'}"
    return Outcome.OK, said


def _working_set(sessions: Sequence[Session], point: ThroughputPoint) -> int:
    """Tokens of the live sessions at their longest, in the mean of the sessions."""
    return round(working_set_tokens(sessions) / len(sessions) * point.concurrency)


def load_fields(result: LoadResult) -> dict[str, Any]:
    """Figures of a load as fields of a row."""
    figures = {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in asdict(result.summary).items()
    }
    return {**figures, "client_cpu_seconds": result.client_cpu_seconds}


def request_rows(rows: Sequence[RequestRow]) -> list[dict[str, Any]]:
    """Rows of table ``requests``, without the point's identity. Times to a tenth of a millisecond:
    the rows are many, and the clock of a stream of tokens is no finer."""
    first = min((row.started for row in rows), default=0.0)
    return [
        {
            "number": number,
            "session": row.session,
            "turn": row.turn,
            "phase": row.phase,
            "outcome": row.outcome,
            "prompt_tokens": row.prompt_tokens,
            "cached_tokens": row.cached_tokens,
            "output_tokens": row.output_tokens,
            "started_seconds": round(row.started - first, 4),
            "ttft_seconds": None
            if row.first_token is None
            else round(max(0.0, row.first_token - row.started), 4),
            "latency_seconds": round(max(0.0, row.ended - row.started), 4),
        }
        for number, row in enumerate(rows)
    ]


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error says that memory of the device or the host is full."""
    if isinstance(error, DeviceOutOfMemory | torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    # pinning too much is a plain runtime error, and a failure's text has lost its type
    return any(word in text for word in ("out of memory", "outofmemory", "memoryerror"))


def first_line(text: str) -> str:
    """The first line that says something, of bounded length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def _device_peak(device: Device | None) -> int | None:
    if device is None:
        return None
    try:
        return device.memory_stats().get("allocated_bytes.all.peak")
    except Exception:
        # a dead device says nothing; the outcome tells of what it died
        _LOGGER.debug("no memory statistics", exc_info=True)
        return None


def describe(settings: ThroughputSettings) -> dict[str, Any]:
    """The device that this process would use, and the software that drives it."""
    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    return {
        "properties": asdict(device.properties),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# -- a process of its own
def main() -> int:
    """Run the job that standard input describes. Returns the exit code."""
    job, tell = read_job()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = ThroughputSettings.parse(job["settings"], where="sweep throughput")
    if job.get("describe"):
        tell(describe(settings))
        return 0
    point = next(p for p in build_points(settings) if p.point_id == job["point_id"])
    if settings.serves:
        from atom.benchmarks.throughput_server import run_server_point

        log = None if job.get("log") is None else Path(job["log"]).with_suffix(".server.log")
        outcome = run_server_point(settings, point, tell, began=job["began"], log=log)
    else:
        outcome = run_point(settings, point, tell, began=job["began"], gate=partial(pass_gate, job))
    return EXIT_CODES[outcome]


if __name__ == "__main__":
    run_and_leave(main)
