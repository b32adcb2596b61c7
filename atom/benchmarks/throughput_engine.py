"""An engine that times its steps and its statuses, for the throughput experiment."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.interface import Event
from atom.kv_transfer.pool_entry import EntryKind
from atom.kv_transfer.tier_counts import Cause, count_name
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.output_transfer import SpecStatusQueue, TokenIDProcessor
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch
from atom.model_engine.sequence import SamplingParams
from atom.model_engine.tiered_blocks import TieredBlockManager
from atom.transfer.payload import Payload

_LOGGER = logging.getLogger(__name__)


class TimedStatusQueue(SpecStatusQueue):
    """A status queue that notes when a decode step's status was ready, and when it had landed.

    Both by events of the device's clock: one on the default stream behind the last kernel that
    writes the status, one behind the copy (under ``zero_copy``, which has none: behind that kernel
    again). They cost every protocol the same two records a step.
    """

    def __init__(self, processor: TokenIDProcessor) -> None:
        super().__init__(
            processor.device,
            processor.async_copy_stream,
            processor.protocol,
            ring=processor.ring,
            copy_path=processor.copy_path,
            epoch_tag=processor.epoch_tag,
        )
        copied = self.protocol is not CopyProtocol.ZERO_COPY
        self._landing_stream = self.stream if copied else self.device.default_stream
        self._pairs: deque[tuple[Event, Event] | None] = deque()
        self._spare: list[tuple[Event, Event]] = []
        #: whether the next status is a decode step's
        self.is_decode = False
        self.latencies_us: list[float] = []
        self.waits_us: list[float] = []

    def send(self, payload: Payload, produced: Event | None = None) -> Event:
        """See :meth:`D2HQueue.send`."""
        if not self.is_decode:
            self._pairs.append(None)
            return super().send(payload, produced)
        pair = self._spare.pop() if self._spare else self._new_pair()
        pair[0].record(self.device.default_stream)
        done = super().send(payload, produced)
        pair[1].record(self._landing_stream)
        self._pairs.append(pair)
        return done

    def _new_pair(self) -> tuple[Event, Event]:
        return self.device.new_event(timing=True), self.device.new_event(timing=True)

    def receive(self) -> Tensor:
        """See :meth:`D2HQueue.receive`."""
        pair = self._pairs.popleft() if self._pairs else None
        began = self.device.host_seconds()
        try:
            return super().receive()
        finally:
            if pair is not None:
                self.waits_us.append(1e6 * (self.device.host_seconds() - began))
                pair[1].synchronize()
                self.latencies_us.append(1e3 * pair[0].elapsed_time(pair[1]))
                self._spare.append(pair)


class TimedRunner(ModelRunner):
    """A runner that times steps from launch to launch."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.statuses = TimedStatusQueue(self.processor)
        self.processor.spec_status = self.statuses
        #: seconds of steps by kind
        self.step_seconds: dict[BatchKind, list[float]] = {kind: [] for kind in BatchKind}
        self.decode_rows = 0
        self._last: tuple[BatchKind, float] | None = None
        _LOGGER.info("kernels are warm and graphs captured")

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """See :meth:`ModelRunner.launch`."""
        self.end_step()
        self._last = (batch.kind, time.monotonic())
        self.statuses.is_decode = batch.kind is BatchKind.DECODE
        if self.statuses.is_decode:
            self.decode_rows += len(batch.rows)
        super().launch(batch, forced_bonus)

    def end_step(self) -> None:
        """The latest step ends here: another follows, or nothing is left to do."""
        if self._last is not None:
            kind, began = self._last
            self.step_seconds[kind].append(time.monotonic() - began)
            self._last = None


class TimedEngine:
    """What ``AsyncEngine`` needs of an engine, over one with a :class:`TimedRunner`."""

    def __init__(self, engine: LLMEngine) -> None:
        assert isinstance(engine.runner, TimedRunner)
        self.engine = engine
        self.runner = engine.runner
        self.idle_seconds = 0.0
        self._idle_since: float | None = None

    def start_clock(self) -> None:
        """The load begins: from here on, having nothing to do counts as idle."""
        self._idle_since = time.monotonic()

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """See :meth:`LLMEngine.add_request`."""
        return self.engine.add_request(prompt_token_ids, params, request_id=request_id)

    def abort_request(self, request_id: str) -> bool:
        """See :meth:`LLMEngine.abort_request`."""
        return self.engine.abort_request(request_id)

    def step(self) -> list[RequestOutput]:
        """See :meth:`LLMEngine.step`."""
        if self._idle_since is not None:
            self.idle_seconds += time.monotonic() - self._idle_since
            self._idle_since = None
        outputs = self.engine.step()
        if not self.engine.has_unfinished_requests():
            self.runner.end_step()
            self._idle_since = time.monotonic()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """See :meth:`LLMEngine.has_unfinished_requests`."""
        return self.engine.has_unfinished_requests()

    def stats(self) -> dict[str, float]:
        """See :meth:`LLMEngine.stats`."""
        return self.engine.stats()

    def close(self) -> None:
        """See :meth:`LLMEngine.close`."""
        if self._idle_since is not None:
            self.idle_seconds += time.monotonic() - self._idle_since
            self._idle_since = None
        self.engine.close()


def sizes(engine: LLMEngine, runner: TimedRunner) -> dict[str, int]:
    """Bytes that say at what scale an engine runs, by name of ``ThroughputRow``."""
    plan, buffers = runner.plan, runner.buffers
    manager = engine.scheduler.block_manager
    if isinstance(manager, TieredBlockManager):
        state = manager.offload.state_bytes
    else:
        conv, recurrent = buffers.checkpoints[0], buffers.checkpoints[1]
        state = sum(
            part.numel() * part.element_size() // part.shape[1] for part in (conv, recurrent)
        )
    return {
        "kv_bytes_per_token": plan.block_bytes // manager.block_size,
        "state_image_bytes": state,
        "hbm_kv_bytes": plan.kv_bytes,
        "hbm_checkpoint_bytes": plan.checkpoint_bytes,
    }


def counters(stats: dict[str, float], known: dict[str, int]) -> dict[str, int]:
    """An engine's counters by name of ``ThroughputRow``; those of a pool only if there is one.

    Args:
        stats: of :meth:`LLMEngine.stats`.
        known: of :func:`sizes`.
    """

    def count(name: str) -> int:
        return int(stats.get(name, 0))

    found = {
        "lookup_tokens": count("lookup_tokens"),
        "hit_tokens": count("hit_tokens"),
        "preemptions": count("preemptions"),
        "stale_statuses": count("stale_payloads") + count("impossible_statuses"),
        "guard_errors": count("guard_errors"),
        "failed_requests": count("failed"),
        "decode_steps": count("decode_steps"),
        "prefill_steps": count("prefill_steps"),
        "middle_chunks": count("middle_chunks"),
        "prompt_tokens_computed": count("prompt_tokens"),
        "generated_tokens": count("generated_tokens"),
        "drafted_tokens": count("drafted_tokens"),
        "accepted_tokens": count("accepted_tokens"),
    }
    if "pool_bytes" not in stats:
        return found
    states = count("offload_loaded_states")
    kv_bytes = max(0, count("offload_loaded_bytes") - states * known["state_image_bytes"])
    totals = {
        (what, kind): sum(number for _, number in _causes(stats, what, kind))
        for what in ("failed", "dropped")
        for kind in EntryKind
    }
    return found | {
        "pool_hit_tokens": kv_bytes // known["kv_bytes_per_token"],
        "kv_chunks_stored": count("offload_stored_chunks"),
        "kv_chunks_loaded": count("offload_loaded_chunks"),
        "states_stored": count("offload_stored_states"),
        "states_loaded": states,
        "pool_loads": count("offload_loads"),
        "stored_bytes": count("offload_stored_bytes"),
        "loaded_bytes": count("offload_loaded_bytes"),
        "pool_bytes_used": sum(count(f"pool_{kind}_bytes") for kind in EntryKind),
        "kv_evicted": count(f"pool_{EntryKind.KV}_evicted"),
        "states_evicted": count(f"pool_{EntryKind.STATE}_evicted"),
        "kv_load_failures": totals["failed", EntryKind.KV],
        "state_load_failures": totals["failed", EntryKind.STATE],
        "kv_stores_dropped": totals["dropped", EntryKind.KV],
        "state_stores_dropped": totals["dropped", EntryKind.STATE],
        "pin_waits": count("offload_pin_waits"),
    }


def cause_rows(stats: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of table ``causes``, without the point's identity."""
    return [
        {"what": what, "kind": kind.value, "cause": cause.value, "count": number}
        for what, word in (("load", "failed"), ("store", "dropped"))
        for kind in EntryKind
        for cause, number in _causes(stats, word, kind)
    ]


def _causes(stats: dict[str, float], word: str, kind: EntryKind) -> list[tuple[Cause, int]]:
    found = []
    for cause in Cause:
        number = int(stats.get(count_name(word, kind, cause), 0))
        if number:
            found.append((cause, number))
    return found


def timings(engine: TimedEngine) -> dict[str, float | int | None]:
    """Times of steps and statuses by name of ``ThroughputRow``."""
    runner, statuses = engine.runner, engine.runner.statuses
    decode = runner.step_seconds[BatchKind.DECODE]
    prefill = runner.step_seconds[BatchKind.PREFILL]
    latencies, waits = statuses.latencies_us, statuses.waits_us
    return {
        "statuses": len(latencies),
        "status_latency_p50_us": _percentile(latencies, 50),
        "status_latency_p99_us": _percentile(latencies, 99),
        "status_latency_max_us": _percentile(latencies, 100),
        "status_wait_p50_us": _percentile(waits, 50),
        "status_wait_p99_us": _percentile(waits, 99),
        "decode_batch_mean": runner.decode_rows / len(decode) if decode else None,
        "decode_step_p50_ms": _percentile(decode, 50, 1e3),
        "decode_step_p99_ms": _percentile(decode, 99, 1e3),
        "prefill_step_p50_ms": _percentile(prefill, 50, 1e3),
        "decode_seconds": sum(decode),
        "prefill_seconds": sum(prefill),
        "idle_seconds": engine.idle_seconds,
    }


def _percentile(values: Sequence[float], percent: float, scale: float = 1.0) -> float | None:
    return round(float(np.percentile(values, percent)) * scale, 6) if values else None
