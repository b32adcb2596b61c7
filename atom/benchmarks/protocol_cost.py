"""The protocol-cost experiment: what each way of protecting a host-bound copy costs.

Method. In the bare loop (:mod:`atom.benchmarks.transfer_loop`) and in the engine's decode loop
(:mod:`atom.benchmarks.engine_cost`) all arms of a point take turns in one process, in an order
drawn from the seed for every repeat; ``unpatched`` runs twice, so that the difference of two equal
arms is known. A repeat of an arm is a window of timed steps, then a few steps whose memory is
watched, and in the first repeat some in which events are counted. The garbage collector runs
between windows and not in them.

Limits: what no transfer can do without, each by itself, many times. Memory story: a loop whose host
is far ahead, step by step, with a copy stream that is held up for a while, in front of a step's
copy or behind it: ``record_stream`` waits for all that was queued when the payload was dropped,
``hold`` for the copy.

On a virtual device the same code runs and the times are those of its clock: labelled simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from atom.benchmarks.engine_cost import EngineCostBench
from atom.benchmarks.engine_speed_rows import Clock
from atom.benchmarks.protocol_cost_rows import (
    BARE_ARMS,
    PROTOCOLS,
    CostArm,
    CostRow,
    HeldRow,
    LimitRow,
    Loop,
)
from atom.benchmarks.protocol_cost_settings import (
    CostPoint,
    PointKind,
    ProtocolSweepSettings,
    build_points,
)
from atom.benchmarks.transfer_loop import (
    WRITE_STATUS,
    CopyStreamWork,
    TransferLoop,
    kept_seconds,
    memory_columns,
    microseconds,
    quiet_collector,
)
from atom.config import CopyProtocol
from atom.device import DeviceKind
from atom.device.interface import Device, Kernel, Stream
from atom.device.plain_copy import counted_events, plain_host_copy
from atom.errors import DeviceError


def _nothing(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    pass


#: a launch of it on another stream is what a change of streams costs
NOTHING = Kernel("nothing", _nothing)
Tables = dict[str, list[BaseModel]]
#: bytes of the copy whose latency is a limit
LIMIT_BYTES = 256
#: a loop is warm once every slot has gone round
_MEMORY_WARM_UP = 2
_MEMORY_ARMS = (
    CostArm.UNPATCHED,
    CostArm.RECORD_STREAM,
    CostArm.HOLD,
    CostArm.BLOCKING,
    CostArm.ZERO_COPY,
)


def clock_of(device: Device) -> Clock:
    """Whose times a device gives."""
    virtual = device.properties.kind is DeviceKind.VIRTUAL
    return Clock.SIMULATION if virtual else Clock.ACCELERATOR


def work_of(settings: ProtocolSweepSettings, point: CostPoint) -> CopyStreamWork:
    """What else the copy stream has to do at a point."""
    return CopyStreamWork(
        point.pressure, settings.store_bytes, settings.stuck_seconds, settings.stuck_every
    )


def run_points(
    settings: ProtocolSweepSettings, device: Device, done: Sequence[str] = ()
) -> Iterator[tuple[CostPoint, Tables]]:
    """Run the points that are not done yet, one after the other.

    Args:
        settings: of the experiment.
        device: where it runs.
        done: identities of points to leave out.

    Raises:
        DeviceError: a protocol that protects its copies delivered another step's bytes, or does
            not work on this device.
        BadInput: an engine does not fit into memory.
    """
    stream = device.new_stream()
    # buffers and the spin's calibration: not inside a window
    device.traffic(settings.store_bytes, "d2h", stream=stream)
    device.spin(1e-6, stream=stream)
    device.synchronize()
    bench: EngineCostBench | None = None
    tables: Tables
    with ExitStack() as stack:
        for number, point in enumerate(build_points(settings)):
            if point.point_id in done:
                continue
            if point.kind is PointKind.ENGINE and bench is None:
                bench = stack.enter_context(EngineCostBench(settings, device))
            with quiet_collector() as collect:
                if point.kind is PointKind.LIMITS:
                    tables = {"limits": [*_limits(settings, device, stream, collect)]}
                elif point.kind is PointKind.BARE:
                    tables = {"samples": [*_bare(settings, device, stream, point, number, collect)]}
                elif point.kind is PointKind.MEMORY:
                    tables = {"held": [*_memory(settings, device, stream, point, collect)]}
                else:
                    assert bench is not None
                    work = work_of(settings, point)
                    tables = {"samples": [*bench.run(point, work, number, collect)]}
            yield point, tables


def turns(
    arms: Sequence[CostArm], seed: int, number: int, repeats: int
) -> Iterator[tuple[int, list[CostArm]]]:
    """Repeats, each with all arms in an order drawn for it."""
    random = np.random.default_rng([seed, 3, number])
    for repeat in range(repeats):
        yield repeat, [arms[index] for index in random.permutation(len(arms))]


def _refuse_stale(arm: CostArm, stale: int, where: str) -> None:
    protected = arm in PROTOCOLS and PROTOCOLS[arm] is not CopyProtocol.UNPATCHED
    if stale and protected:
        raise DeviceError(
            f"{where}: {stale} payloads of another step arrived under {arm}, which protects them; "
            "nothing that it costs is worth knowing"
        )


def _bare(
    settings: ProtocolSweepSettings,
    device: Device,
    stream: Stream,
    point: CostPoint,
    number: int,
    collect: Callable[[], None],
) -> Iterator[CostRow]:
    work = work_of(settings, point)
    loops = {
        arm: TransferLoop(device, stream, arm, point.batch, point.lead, work)
        for arm in BARE_ARMS
        if settings.wants(arm)
    }
    same: dict[str, Any] = {
        "point_id": point.point_id,
        "clock": clock_of(device),
        "loop": Loop.BARE,
        "batch": point.batch,
        "lead": point.lead,
        "pressure": point.pressure,
        "steps": settings.steps,
    }
    for repeat, order in turns(list(loops), settings.seed, number, settings.repeats):
        for position, arm in enumerate(order):
            loop = loops[arm]
            collect()
            loop.window(settings.warmup_steps)
            times = loop.window(settings.steps)
            base = loop.base()
            watched = loop.window(settings.watched_steps, watch=True)
            columns: dict[str, Any] = {}
            if repeat == 0:
                with counted_events(device) as made:
                    loop.window(settings.counted_steps)
                columns = {"events_created": made[0], "counted_steps": settings.counted_steps}
            _refuse_stale(arm, times.stale, point.point_id)
            samples = [sample for _, sample in watched.sent]
            yield CostRow(
                **same,
                arm=arm,
                repeat=repeat,
                position=position,
                **microseconds(times.step, "step"),
                **microseconds(times.make, "make", quantile=False),
                **microseconds(times.send, "send"),
                **microseconds(times.receive, "receive"),
                wait_us=float(np.mean(times.wait)) * 1e6,
                stale=times.stale,
                **memory_columns(samples, base),
                kept_us=kept_seconds(watched, base) * 1e6,
                **columns,
            )


def _memory(
    settings: ProtocolSweepSettings,
    device: Device,
    stream: Stream,
    point: CostPoint,
    collect: Callable[[], None],
) -> Iterator[HeldRow]:
    steps = settings.memory_steps
    # once in a window, in its middle
    work = CopyStreamWork(point.pressure, settings.store_bytes, settings.stuck_seconds, steps)
    for arm in _MEMORY_ARMS:
        if not settings.wants(arm):
            continue
        loop = TransferLoop(device, stream, arm, point.batch, point.lead, work, behind=point.behind)
        loop.window(_MEMORY_WARM_UP * (point.lead + 1))
        collect()
        base = loop.base()
        times = loop.window(steps, watch=True)
        _refuse_stale(arm, times.stale, point.point_id)
        first = times.sent[0][0]
        for step, (at, sample) in enumerate(times.sent):
            yield HeldRow(
                point_id=point.point_id,
                clock=clock_of(device),
                arm=arm,
                lead=point.lead,
                step=step,
                at_us=(at - first) * 1e6,
                stuck=times.stuck[step],
                held_bytes=sample.active_bytes - base.active_bytes,
                reserved_bytes=sample.reserved_bytes,
                segments=sample.segments,
            )


def _limits(
    settings: ProtocolSweepSettings, device: Device, stream: Stream, collect: Callable[[], None]
) -> Iterator[LimitRow]:
    limits = limit_calls(device, stream, settings.store_bytes)
    for repeat in range(settings.repeats):
        for name, limit in limits.items():
            collect()
            seconds = timed_calls(device, limit, settings.limit_calls)
            values = np.asarray(seconds) * 1e6
            yield LimitRow(
                point_id="limits",
                clock=clock_of(device),
                limit=name,
                repeat=repeat,
                calls=len(seconds),
                median_us=float(np.median(values)),
                p99_us=float(np.quantile(values, 0.99)),
            )
            device.synchronize()


class LimitCall(NamedTuple):
    """What is timed by itself.

    Attributes:
        call: what.
        settle: how many of it may be queued before the device catches up.
        before: called in front of each, not timed.
    """

    call: Callable[[], object]
    settle: int
    before: Callable[[], None] | None = None


def timed_calls(device: Device, limit: LimitCall, calls: int) -> list[float]:
    """Host seconds of each of ``calls`` calls."""
    call, settle, before = limit
    now = device.host_seconds
    seconds = []
    for number in range(calls):
        if number % settle == 0:
            device.synchronize()
        if before is not None:
            before()
        began = now()
        call()
        seconds.append(now() - began)
    return seconds


def limit_calls(device: Device, stream: Stream, store_bytes: int) -> dict[str, LimitCall]:
    """What is timed by itself, by name.

    What ends with a wait is a latency: what the host sees of one kernel, or of one copy. The
    kernel that writes host memory runs alone, and while a store has the link.
    """
    event, other = device.new_event(), device.new_event()
    status = device.empty((LIMIT_BYTES,), torch.uint8)
    host = device.pinned((LIMIT_BYTES,), torch.uint8)
    default = device.default_stream

    def kernel() -> None:
        device.launch(WRITE_STATUS, (), (status,), scalars=(0,))

    def wait() -> None:
        stream.wait_event(other)

    def copy() -> None:
        device.copy(host, status, stream=stream)

    def kernel_latency() -> None:
        kernel()
        event.record(default)
        event.synchronize()

    def copy_latency() -> None:
        copy()
        event.record(stream)
        event.synchronize()

    def switch() -> None:
        device.launch(NOTHING, (), (), stream=stream)

    def query() -> None:
        event.query()

    def block() -> None:
        device.empty((LIMIT_BYTES,), torch.uint8)

    def send() -> None:
        other.record(default)
        stream.wait_event(other)
        device.copy(host, status, stream=stream)
        event.record(stream)

    mapped = device.mapped(host)

    def host_write() -> None:
        device.launch(WRITE_STATUS, (), (mapped,), scalars=(0,))
        event.record(default)
        event.synchronize()

    def store() -> None:
        device.traffic(store_bytes, "d2h", stream=stream)
        # as long as it takes to begin
        kernel_latency()
        kernel_latency()

    kernel()
    other.record(default)
    return {
        "clock read": LimitCall(lambda: None, 1_000_000),
        "event record": LimitCall(lambda: event.record(stream), 64),
        "event wait": LimitCall(wait, 64),
        "event query": LimitCall(query, 64),
        "wait for a completed event": LimitCall(event.synchronize, 1_000_000),
        "stream there and back": LimitCall(switch, 64),
        "new event": LimitCall(device.new_event, 1_000_000),
        "block from the allocator": LimitCall(block, 1_000_000),
        "kernel launch": LimitCall(kernel, 64),
        "copy call, 256 bytes": LimitCall(copy, 64),
        "record, wait, copy, record": LimitCall(send, 64),
        "plain send": LimitCall(lambda: plain_host_copy(device, status, stream), 64),
        "kernel and wait": LimitCall(kernel_latency, 1),
        "copy of 256 bytes and wait": LimitCall(copy_latency, 1),
        "kernel and wait, beside a store": LimitCall(kernel_latency, 1, store),
        "host-writing kernel and wait": LimitCall(host_write, 1),
        "host-writing kernel and wait, beside a store": LimitCall(host_write, 1, store),
    }
