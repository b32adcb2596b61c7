"""One trial of the race, on any device, through the engine's own status queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom.benchmarks.race_outcome import Bytes, classify
from atom.benchmarks.race_plan import Arm, NextStep
from atom.benchmarks.race_rows import Outcome, ProducerEdge
from atom.benchmarks.race_trace import Span, Trace, span
from atom.config import CopyProtocol, Front, RaceSettings, Source
from atom.device import CopyPath, Device, Kernel
from atom.device.interface import Graph, Stream
from atom.model_engine.output_transfer import SpecStatusQueue
from atom.transfer.payload import Payload, PayloadKind, PayloadLayout, epoch_tag

DRAFT_TOKENS = 3
#: what the next step writes in every other trial: a prefill step's token budget, as in the log
PREFILL_VALUE = 16384
FEW_BYTES = 16
STORE_STREAMS = 2
#: streams that pack and then store, each its share of the bytes
PACK_STREAMS = 2
SPARE_STREAMS = 7
#: PyTorch's pool has 32 streams: 1 + 16 + 7 + 7 stay below
MOST_STREAMS_BEFORE = 8
#: an offload store is packed in chunks, by as many kernels
PACK_CHUNKS = 4
#: bytes of a packing kernel's buffers on the virtual device, which gets its duration told
VIRTUAL_PACK_BYTES = 2**12


def copy_words(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Kernel body: copy by an elementwise kernel, without a temporary that could take a block."""
    torch.bitwise_or(reads[0], 0, out=writes[0])


FILL = Kernel("fill", copy_words)
NEXT_WRITE = Kernel("next_write", copy_words)
GRAPH_STEP = Kernel("graph_step", copy_words)
PACK = Kernel("pack", copy_words, occupancy=0.25)


@dataclass(frozen=True)
class Trial:
    """What one trial showed.

    Attributes:
        outcome: told from the received bytes alone.
        address_reused: whether the next step's tensor began at the source's address.
        tag_caught: whether the epoch tags differ from this step's.
        in_range: whether every received count is legal (0 to the number of draft tokens).
        send_us: host time of the send.
        receive_us: host time of the receive, its wait included.
        spans: of a traced trial.
    """

    outcome: Outcome
    address_reused: bool
    tag_caught: bool
    in_range: bool
    send_us: float
    receive_us: float
    spans: tuple[Span, ...] = ()


class TrialBench:
    """Streams, buffers and graphs of one process, and the trials that use them.

    Args:
        device: freshly opened.
        settings: sizes of what goes in front.
        seed: of the payloads' contents.
        streams_before: streams that exist before the copy stream, as other libraries' do. It moves
            the copy stream over the hardware queues from process to process.
    """

    def __init__(
        self, device: Device, settings: RaceSettings, seed: int, streams_before: int = 0
    ) -> None:
        self.device = device
        self.settings = settings
        self._random = np.random.default_rng(seed)
        # Streams of other libraries, in use: a mapping by load counts streams that have worked.
        self._others = [device.new_stream() for _ in range(streams_before % MOST_STREAMS_BEFORE)]
        self.copy_stream = device.new_stream()
        for stream in (device.default_stream, *self._others, self.copy_stream):
            device.spin(1e-6, stream=stream)
        # As in the published benchmark: nothing between the copy stream and the matmul streams.
        self._matmul_streams = [device.new_stream() for _ in range(settings.matmul_streams)]
        # Of some more streams it is drawn which ones store and pack: else the packing stream, say,
        # would keep its distance to the copy stream, and never share its hardware queue.
        spare = [device.new_stream() for _ in range(SPARE_STREAMS)]
        drawn = [spare[place] for place in self._random.permutation(SPARE_STREAMS)]
        self._store_streams = drawn[:STORE_STREAMS]
        self._pack_streams = drawn[STORE_STREAMS : STORE_STREAMS + PACK_STREAMS]
        self._pack: tuple[Tensor, Tensor] | None = None
        self._queues: dict[tuple[CopyProtocol, CopyPath, bool], SpecStatusQueue] = {}
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, tuple[Graph, Tensor, Tensor]] = {}
        self._half_copy_seconds: dict[int, float] = {}
        self._produced = device.new_event()
        self._step = 0

    @property
    def shares_default_queue(self) -> bool | None:
        """Whether the copy stream has the default stream's hardware queue; ``None``: unknown."""
        own = getattr(self.copy_stream, "hardware_queue", None)
        default = getattr(self.device.default_stream, "hardware_queue", None)
        return None if own is None or default is None else bool(own == default)

    def _copy_stream(self, arm: Arm) -> Stream:
        return self._matmul_streams[0] if arm.aliased else self.copy_stream

    def sizes(self, arm: Arm) -> tuple[int, int]:
        """Bytes of an arm's source, tags included, and of its next step's tensor."""
        layout = self._queue(arm).layout((2, arm.batch_size), torch.int32)
        return layout.host_bytes, _next_bytes(arm, layout)

    def warm_up(self, arm: Arm) -> None:
        """One trial that nobody counts: it compiles, pins, captures and calibrates."""
        if arm.next_step is NextStep.MID_COPY:
            self._calibrate(arm)
        self.run(arm)

    def run(self, arm: Arm, *, traced: bool = False) -> Trial:
        """Run one trial. All work of earlier trials has ended, all of this one's ends in here.

        Args:
            arm: what to run.
            traced: also record when things ran. The events for that are queued too, so traced
                trials are not counted.

        Raises:
            DeviceError: bytes of neither step arrived.
        """
        device = self.device
        self._step += 1
        queue = self._queue(arm)
        layout = queue.layout((2, arm.batch_size), torch.int32)
        this, following = self._write_contents(layout, self._step)
        following = following[: _next_bytes(arm, layout)]
        this_on_device, next_on_device = self._upload(this, following)
        trace = Trace(device) if traced else None
        if arm.source is Source.ALLOCATOR:
            trial = self._allocator_trial(arm, queue, layout, this_on_device, next_on_device, trace)
        else:
            trial = self._graph_trial(arm, queue, layout, this_on_device, next_on_device, trace)
        address_reused, offset, send_us, receive_us, raw, tag_ok = trial
        outcome = classify(raw, this, following, offset)
        counts = layout.data(torch.from_numpy(raw))
        in_range = bool(((counts >= 0) & (counts <= DRAFT_TOKENS)).all())
        device.synchronize()
        spans = () if trace is None else trace.spans()
        return Trial(outcome, address_reused, not tag_ok, in_range, send_us, receive_us, spans)

    def close(self) -> None:
        """Wait for everything and drop what the bench holds."""
        self.device.synchronize()
        self._graphs.clear()
        self._queues.clear()
        self._contents.clear()
        self._pack = None

    # -- the two kinds of source

    def _allocator_trial(
        self,
        arm: Arm,
        queue: SpecStatusQueue,
        layout: PayloadLayout,
        this: Tensor,
        following: Tensor,
        trace: Trace | None,
    ) -> tuple[bool, int, float, float, Bytes, bool]:
        device = self.device
        copy_stream = self._copy_stream(arm)
        payload = queue.new_verdict(self._step, arm.batch_size)
        source_address = device.address(payload.raw)
        on_device = payload.slot is None
        with span(trace, "default", "fill", device.default_stream):
            device.launch(FILL, (self._data(this, layout),), (payload.data,))
            payload.stamp(device)
        produced = None
        if arm.producer_edge is not ProducerEdge.AT_SEND:
            produced = self._produced
            produced.record(device.default_stream)
            if arm.producer_edge is ProducerEdge.WAITED_FIRST:
                copy_stream.wait_event(produced)
        self._queue_front(arm, trace)
        front_done = copy_stream.record_event()
        with span(trace, "copy", "copy", copy_stream):
            began = device.host_seconds()
            queue.send(payload, produced)
            send_us = (device.host_seconds() - began) * 1e6
        # The last reference of this function: what lives on is the protocol's business.
        del payload
        tensor = device.empty((following.numel(),), torch.uint8)
        offset = device.address(tensor) - source_address
        if arm.next_step is NextStep.MID_COPY:
            device.default_stream.wait_event(front_done)
            device.spin(self._half_copy_seconds[arm.batch_size])
        self._write_next(tensor, following, trace)
        began = device.host_seconds()
        received = queue.receive_raw()
        receive_us = (device.host_seconds() - began) * 1e6
        if not on_device:
            # The source was a host slot: no device tensor can lie on it.
            offset = layout.total_bytes
        reused = on_device and offset == 0
        return reused, offset, send_us, receive_us, received.raw.numpy(), bool(received.tag_ok)

    def _graph_trial(
        self,
        arm: Arm,
        queue: SpecStatusQueue,
        layout: PayloadLayout,
        this: Tensor,
        following: Tensor,
        trace: Trace | None,
    ) -> tuple[bool, int, float, float, Bytes, bool]:
        device = self.device
        graph, inputs, static = self._graph(layout)
        payload = Payload(layout, self._step, static)
        device.launch(FILL, (this,), (inputs,))
        with span(trace, "default", "fill", device.default_stream):
            graph.replay()
        self._queue_front(arm, trace)
        with span(trace, "copy", "copy", self.copy_stream):
            began = device.host_seconds()
            copy_done = queue.send(payload)
            send_us = (device.host_seconds() - began) * 1e6
        del payload
        device.launch(FILL, (following,), (inputs,))
        if arm.source is Source.GRAPH_OUTPUT_WAIT:
            device.default_stream.wait_event(copy_done)
        with span(trace, "default", "next write", device.default_stream):
            graph.replay()
        began = device.host_seconds()
        received = queue.receive_raw()
        receive_us = (device.host_seconds() - began) * 1e6
        return True, 0, send_us, receive_us, received.raw.numpy(), bool(received.tag_ok)

    def _write_next(self, tensor: Tensor, following: Tensor, trace: Trace | None) -> None:
        with span(trace, "default", "next write", self.device.default_stream):
            self.device.launch(NEXT_WRITE, (following,), (tensor,))

    # -- what goes in front

    def _queue_front(self, arm: Arm, trace: Trace | None) -> None:
        device, settings = self.device, self.settings
        lanes: list[tuple[str, Stream]] = []
        match arm.front:
            case Front.NOTHING:
                return
            case Front.STORE_ON_COPY_STREAM | Front.SPIN:
                lanes = [("copy", self.copy_stream)]
            case Front.STORE_ON_OTHER_STREAMS:
                lanes = [(f"front {n}", s) for n, s in enumerate(self._store_streams)]
            case Front.MATMUL:
                lanes = [(f"front {n}", s) for n, s in enumerate(self._matmul_streams)]
            case Front.PACK_AND_STORE:
                lanes = [(f"front {n}", s) for n, s in enumerate(self._pack_streams)]
        if trace is not None:
            for lane, stream in lanes:
                trace.mark(lane, "front", stream)
        for _, stream in lanes:
            if arm.front is Front.SPIN:
                device.spin(settings.spin_seconds, stream=stream)
            elif arm.front is Front.MATMUL:
                for _ in range(settings.matmuls_per_stream):
                    device.matmul(settings.matmul_size, stream=stream)
            else:
                store_bytes = settings.store_bytes
                if arm.front is Front.PACK_AND_STORE:
                    self._queue_packing(stream)
                    store_bytes //= PACK_STREAMS
                device.traffic(store_bytes, "d2h", stream=stream)
        if trace is not None:
            for lane, stream in lanes:
                trace.mark(lane, "", stream)

    def _queue_packing(self, stream: Stream) -> None:
        """Gather a stream's share of the store with one kernel a chunk."""
        device = self.device
        chunk_bytes = max(8, self.settings.store_bytes // PACK_STREAMS // PACK_CHUNKS // 8 * 8)
        profile = getattr(device, "profile", None)
        flops = 0.0
        if profile is not None:
            seconds = 2 * chunk_bytes / profile.device_bytes_per_second
            flops = seconds * profile.matmul_flops_per_second
            chunk_bytes = VIRTUAL_PACK_BYTES
        if self._pack is None:
            shape = (chunk_bytes // 8,)
            self._pack = device.empty(shape, torch.int64), device.empty(shape, torch.int64)
        gathered, rows = self._pack
        for _ in range(PACK_CHUNKS):
            device.launch(PACK, (rows,), (gathered,), stream=stream, flops=flops)

    # -- contents

    def _write_contents(self, layout: PayloadLayout, step: int) -> tuple[Bytes, Bytes]:
        """This step's bytes, and the next step's: alternately a prefill step's or a verdict's.

        A stale prefill value is out of range; a stale verdict is in range, and only a tag tells.
        """
        this = np.zeros(layout.host_bytes, np.uint8)
        following = np.zeros(layout.host_bytes, np.uint8)
        batch = layout.shape[1]
        bonus = self._random.integers(0, DRAFT_TOKENS + 1, batch, dtype=np.int32)
        _fill_status(this, layout, step, bonus)
        if step % 2:
            following[:] = np.frombuffer(
                np.full(layout.host_bytes // 4, PREFILL_VALUE, np.int32).tobytes(), np.uint8
            )
        else:
            _fill_status(following, layout, step + 1, (bonus + 1) % (DRAFT_TOKENS + 1))
        return this, following

    def _upload(self, this: Bytes, following: Bytes) -> tuple[Tensor, Tensor]:
        size = this.size
        held = self._contents.get(size)
        if held is None:
            held = (
                self.device.pinned((2, size), torch.uint8),
                self.device.empty((2, size), torch.uint8),
            )
            self._contents[size] = held
        on_host, on_device = held
        on_host[0].numpy()[:] = this
        on_host[1].numpy()[: following.size] = following
        self.device.copy(on_device, on_host)
        self.device.synchronize()
        return on_device[0], on_device[1][: following.size]

    def _data(self, raw: Tensor, layout: PayloadLayout) -> Tensor:
        return layout.data(raw)

    def _queue(self, arm: Arm) -> SpecStatusQueue:
        key = (arm.protocol, arm.copy_path, arm.aliased)
        queue = self._queues.get(key)
        if queue is None:
            queue = SpecStatusQueue(
                self.device, self._copy_stream(arm), arm.protocol, copy_path=arm.copy_path
            )
            self._queues[key] = queue
        return queue

    def _graph(self, layout: PayloadLayout) -> tuple[Graph, Tensor, Tensor]:
        held = self._graphs.get(layout.host_bytes)
        if held is None:
            device = self.device
            inputs = device.empty((layout.host_bytes,), torch.uint8)
            # Run the kernel once before capture: a first run may load code, which capture refuses.
            static = device.empty((layout.host_bytes,), torch.uint8)
            device.launch(GRAPH_STEP, (inputs,), (static,))
            device.synchronize()
            with device.capture() as graph:
                static = device.empty((layout.host_bytes,), torch.uint8)
                device.launch(GRAPH_STEP, (inputs,), (static,))
            held = graph, inputs, static
            self._graphs[layout.host_bytes] = held
        return held

    def _calibrate(self, arm: Arm) -> None:
        """Time the arm's copy once, so that a write can be put into its middle."""
        device = self.device
        size, _ = self.sizes(arm)
        source, target = device.empty((size,), torch.uint8), device.pinned((size,), torch.uint8)
        for _ in range(2):
            # Parked, so that marks and copy are queued before the first of them is reached.
            device.spin(1e-3, stream=self.copy_stream)
            start, end = device.new_event(timing=True), device.new_event(timing=True)
            start.record(self.copy_stream)
            device.copy(target, source, stream=self.copy_stream, path=arm.copy_path)
            end.record(self.copy_stream)
            device.synchronize()
            self._half_copy_seconds[arm.batch_size] = start.elapsed_time(end) / 2e3


def _next_bytes(arm: Arm, layout: PayloadLayout) -> int:
    match arm.next_step:
        case NextStep.HALF:
            return max(8, layout.total_bytes // 2)
        case NextStep.FEW:
            return FEW_BYTES
        case _:
            return layout.total_bytes


def _fill_status(raw: Bytes, layout: PayloadLayout, step: int, bonus: NDArray[np.int32]) -> None:
    view = torch.from_numpy(raw)
    data = layout.data(view).numpy()
    data[0] = DRAFT_TOKENS - bonus
    data[1] = bonus
    layout.tags(view).fill_(epoch_tag(step, PayloadKind.SPEC_STATUS))
