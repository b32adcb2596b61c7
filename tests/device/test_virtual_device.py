"""The virtual device: its honesty rules, errors, graphs, time and records."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atom.device.interface import CopyPath, DeviceKind, Kernel
from atom.device.operations import Part
from atom.device.profiles import PROFILES
from atom.device.virtual import VirtualDevice, profile_properties
from atom.errors import (
    AtomError,
    BadInput,
    DeviceError,
    DeviceOutOfMemory,
    FreedPinnedBuffer,
    TensorCaptured,
    WrongDevice,
)
from atom.evidence import Evidence

MEBIBYTE = 2**20


def _fill(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], value: float = 1) -> None:
    for tensor in writes:
        tensor.fill_(value)


def _double(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
    torch.mul(reads[0], 2, out=writes[0])


def _broken(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
    raise ValueError("the body fails")


FILL, DOUBLE, BROKEN = Kernel("fill", _fill), Kernel("double", _double), Kernel("broken", _broken)


def read(device: VirtualDevice, tensor: Tensor) -> list[Any]:
    host = device.pinned(tuple(tensor.shape), tensor.dtype)
    device.copy(host, tensor)
    device.synchronize()
    return host.flatten().tolist()


def race(device: VirtualDevice, front: Callable[[Any], None], *, hold: bool = False) -> list[int]:
    """One trial; the values that the host read (1: this step's, 2: the next step's)."""
    copies = device.new_stream()
    verdict = device.empty((2, 32), torch.int32)
    device.launch(FILL, [], [verdict], scalars=(1,))
    copies.wait_stream(device.default_stream)
    front(copies)
    host = device.pinned((2, 32), torch.int32)
    device.copy(host, verdict, stream=copies)
    done = copies.record_event()
    held = verdict if hold else None
    del verdict
    following = device.empty((2, 32), torch.int32)
    device.launch(FILL, [], [following], scalars=(2,))
    done.synchronize()
    values = sorted(set(host.flatten().tolist()))
    del held
    device.synchronize()
    return values


class TestHonesty:
    def test_queued_work_does_not_keep_a_block_alive(self) -> None:
        device = VirtualDevice()
        assert race(device, lambda copies: device.spin(1e-3, stream=copies)) == [2]
        assert race(device, lambda copies: device.spin(1e-3, stream=copies), hold=True) == [1]

    def test_a_captured_tensor_would_have_hidden_the_fault(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # the same trial with the refusal switched off: the capture keeps the block, nothing races
        monkeypatch.setattr(
            "atom.device.operation_factory.refuse_captured_tensors", lambda *_: None
        )
        device = VirtualDevice()
        copies = device.new_stream()
        verdict = device.empty((64,), torch.int32)
        address = device.address(verdict)
        host = device.pinned((64,), torch.int32)
        device.launch(FILL, [], [verdict], scalars=(1,))
        copies.wait_stream(device.default_stream)
        device.spin(1e-3, stream=copies)

        def copy_it(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], own: Tensor) -> None:
            writes[0].copy_(own)

        kernel = Kernel("copy", functools.partial(copy_it, own=verdict))
        device.launch(kernel, [], [device.mapped(host)], stream=copies)
        del verdict, kernel
        following = device.empty((64,), torch.int32)
        device.launch(FILL, [], [following], scalars=(2,))
        # the second net: the block dies with the work
        with pytest.raises(TensorCaptured, match=r"'copy' .*1 block.*test_virtual_device\.py"):
            device.synchronize()
        device.synchronize()
        assert device.address(following) != address
        assert host.tolist() == [1] * 64

    @pytest.mark.parametrize("own", [torch.zeros(2), np.zeros(2)])
    def test_captures_are_refused_by_name(self, own: Any) -> None:
        class Holder:
            def __init__(self) -> None:
                self.state = {"weights": [own]}

            def body(self, reads: Any, writes: Any) -> None: ...

        def make() -> Callable[..., None]:
            hidden = own

            def body(reads: Any, writes: Any) -> None:
                _ = hidden

            return body

        def with_default(reads: Any, writes: Any, extra: Any = own) -> None: ...

        def with_keyword(reads: Any, writes: Any, *, extra: Any = own) -> None: ...

        closure = make()

        def outer(reads: Any, writes: Any) -> None:
            closure(reads, writes)

        bodies: dict[str, Callable[..., None]] = {
            "closure variable 'hidden'": closure,
            "closure variable 'closure''s closure variable 'hidden'": outer,
            "default of argument 'extra'": with_default,
            "of argument 'extra' is": with_keyword,
            r"body.args\[0\]": functools.partial(_fill, own),
            r"body.keywords\['value'\]": functools.partial(_fill, value=own),
            r"body.__self__.state\['weights'\]\[0\]": Holder().body,
        }
        device = VirtualDevice()
        for message, body in bodies.items():
            with pytest.raises(TensorCaptured, match=rf"kernel 'bad' captures .*{message}"):
                device.launch(Kernel("bad", body), [], [])
        with pytest.raises(TensorCaptured, match=r"scalars\[1\]"):
            device.launch(FILL, [], [], scalars=(1, own))
        device.synchronize()

    def test_a_body_that_starts_to_capture_is_noticed_later(self) -> None:
        device = VirtualDevice()
        box: list[Any] = []

        def body(reads: Any, writes: Any) -> None:
            _ = box

        device.launch(Kernel("boxed", body), [], [])
        box.append(torch.zeros(2))
        with pytest.raises(TensorCaptured, match=r"'box'\[0\]"):
            device.launch(Kernel("boxed", body), [], [])

    def test_ordinary_tensors_are_refused(self) -> None:
        device = VirtualDevice()
        block = device.empty((4,), torch.int32)
        with pytest.raises(BadInput, match=r"writes\[0\] of kernel 'fill' .* ordinary host tensor"):
            device.launch(FILL, [], [torch.zeros(4)])
        with pytest.raises(BadInput, match=r"copy's target .* ordinary host tensor"):
            device.copy(torch.zeros(4, dtype=torch.int32), block)

    def test_a_kernel_takes_a_pinned_tensor_through_its_alias_only(self) -> None:
        device = VirtualDevice()
        host = device.pinned((4,), torch.int32)
        with pytest.raises(DeviceError, match=r"pass device\.mapped"):
            device.launch(FILL, [], [host])
        device.launch(FILL, [], [device.mapped(host)], scalars=(5,))
        device.synchronize()
        assert host.tolist() == [5] * 4
        with pytest.raises(DeviceError, match="pinned"):
            device.mapped(device.empty((4,), torch.int32))

    def test_a_queued_kernel_that_reaches_a_dropped_pinned_buffer(self) -> None:
        device = VirtualDevice()
        host = device.pinned((100,), torch.uint8)
        device.spin(1e-3)
        device.launch(FILL, [], [device.mapped(host)])
        del host
        device.launch(FILL, [], [device.empty((4,), torch.int32)])
        with pytest.raises(FreedPinnedBuffer, match=r"kernel 'fill'.*128 bytes.*test_virtual_devi"):
            device.synchronize()
        # said once; the rest of the work goes on
        device.synchronize()

    def test_a_kernel_that_ran_before_the_drop_is_fine(self) -> None:
        device = VirtualDevice()
        host = device.pinned((100,), torch.uint8)
        device.launch(FILL, [], [device.mapped(host)])
        device.host_work(1e-3)
        del host
        device.synchronize()

    def test_an_error_of_a_body_names_the_kernel(self) -> None:
        device = VirtualDevice()
        device.launch(BROKEN, [], [])
        with pytest.raises(ValueError, match="the body fails") as caught:
            device.synchronize()
        assert "kernel 'broken'" in caught.value.__notes__[0]
        device.synchronize()


class TestWrongDevice:
    def test_streams_events_and_tensors_of_another_device(self) -> None:
        mine, other = VirtualDevice(), VirtualDevice("H200")
        block, host = mine.empty((4,), torch.int32), mine.pinned((4,), torch.int32)
        foreign = other.empty((4,), torch.int32)
        calls: list[Callable[[], Any]] = [
            lambda: mine.launch(FILL, [], [block], stream=other.new_stream()),
            lambda: mine.launch(FILL, [], [foreign]),
            lambda: mine.copy(host, foreign),
            lambda: mine.empty((4,), torch.int32, stream=other.default_stream),
            lambda: mine.record_stream(block, other.default_stream),
            lambda: mine.record_stream(foreign, mine.new_stream()),
            lambda: mine.default_stream.wait_event(other.new_event()),
            lambda: mine.default_stream.wait_stream(other.default_stream),
            lambda: mine.new_event().record(other.default_stream),
            lambda: mine.new_event(True).elapsed_time(other.new_event(True)),
        ]
        for call in calls:
            with pytest.raises(WrongDevice):
                call()


class TestWork:
    def test_strided_views_are_read_and_written_where_they_lie(self) -> None:
        device = VirtualDevice()
        block = device.empty((4, 6), torch.int32)
        device.launch(FILL, [], [block], scalars=(1,))
        device.launch(FILL, [], [block[1::2, 2:4]], scalars=(3,))
        device.launch(DOUBLE, [block.t()], [block.t()])
        expected = torch.full((4, 6), 2)
        expected[1::2, 2:4] = 6
        assert read(device, block) == expected.flatten().tolist()

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.bool])
    @pytest.mark.parametrize("path", list(CopyPath))
    def test_copies_both_ways(self, dtype: torch.dtype, path: CopyPath) -> None:
        device = VirtualDevice()
        source, back = device.pinned((3, 5), dtype), device.pinned((3, 5), dtype)
        source.copy_(torch.arange(15).reshape(3, 5) % 7)
        first, second = device.empty((3, 5), dtype), device.empty((15,), dtype)
        device.copy(first, source, path=path)
        device.copy(second, first, path=path)
        device.copy(back, second, path=path)
        device.synchronize()
        assert torch.equal(back, source)

    def test_copies_that_cannot_be(self) -> None:
        device = VirtualDevice()
        block, host = device.empty((4, 4), torch.int32), device.pinned((4, 4), torch.int32)
        for target, source, message in [
            (host, block[:2], "number of elements"),
            (host.view(torch.float32), block, "one type"),
            (host[:, :2], block[:, :2], "contiguous"),
            (host, device.pinned((4, 4), torch.int32), "both ends are pinned"),
        ]:
            with pytest.raises(BadInput, match=message):
                device.copy(target, source)

    def test_bad_arguments(self) -> None:
        device = VirtualDevice()
        calls: list[Callable[[], Any]] = [
            lambda: device.traffic(0, "d2h"),
            lambda: device.traffic(1, "d2d"),
            lambda: device.matmul(0),
            lambda: device.spin(-1.0),
            lambda: device.spin(float("nan")),
            lambda: device.empty((-1,), torch.int32),
            lambda: VirtualDevice(mode="both"),
            lambda: VirtualDevice(memory_bytes=0),
            lambda: VirtualDevice("RTX"),
        ]
        for call in calls:
            with pytest.raises(BadInput):
                call()

    def test_a_copy_can_be_torn(self) -> None:
        device = VirtualDevice(mode="schedule")
        host, block = device.pinned((4,), torch.int32), device.empty((4,), torch.int32)
        copies = device.new_stream()
        device.launch(FILL, [], [block], scalars=(1,))
        device.step(device.ready()[0])
        device.copy(host, block, stream=copies)
        device.step(device.ready()[0])
        device.launch(FILL, [], [block], scalars=(2,))
        device.step(next(part for part in device.ready() if part.name == "fill"))
        device.synchronize()
        assert host.tolist() == [1, 1, 2, 2]

    def test_half_of_a_copy_is_there_after_half_of_its_time(self) -> None:
        device = VirtualDevice(replace(PROFILES["H200"], jitter=0.0))
        host, block = (
            device.pinned((4 * MEBIBYTE,), torch.uint8),
            device.empty((4 * MEBIBYTE,), torch.uint8),
        )
        host.zero_()
        device.launch(FILL, [], [block], scalars=(1,))
        device.synchronize()
        device.copy(host, block)
        quarter = MEBIBYTE / 54.9e9
        seen = []
        for _ in range(4):
            seen.append((int(host[0]), int(host[-1])))
            device.host_work(quarter + 2e-6)
        seen.append((int(host[0]), int(host[-1])))
        assert seen == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1)]

    def test_no_copy_tears_a_word(self) -> None:
        device = VirtualDevice(mode="schedule")
        host, block = device.pinned((1,), torch.int64), device.empty((1,), torch.int64)
        host.fill_(-1)
        device.launch(FILL, [], [block], scalars=(0,))
        device.copy(host, block)
        device.step(device.ready()[0])
        device.step(device.ready()[0])
        assert host.item() == -1
        device.synchronize()
        assert host.item() == 0

    def test_a_chooser_decides_which_of_two_writers_is_last(self) -> None:
        def run(chooser: Callable[[list[Part]], Part]) -> int:
            device = VirtualDevice(mode="schedule", chooser=chooser)
            block = device.empty((1,), torch.int32)
            side = device.new_stream()
            device.launch(FILL, [], [block], scalars=(1,))
            device.launch(FILL, [], [block], scalars=(2,), stream=side)
            device.synchronize()
            return int(read(device, block)[0])

        assert run(lambda ready: ready[0]) == 2
        assert run(lambda ready: ready[-1]) == 1

    def test_only_ready_parts_can_be_run(self) -> None:
        device = VirtualDevice(mode="schedule")
        device.spin(1.0)
        (part,) = device.ready()
        device.step(part)
        with pytest.raises(DeviceError, match="not ready"):
            device.step(part)


class TestTime:
    def test_the_clock_is_virtual_and_counts_host_calls_and_waits(self) -> None:
        device = VirtualDevice()
        assert device.host_seconds() == 0
        started = time.perf_counter()
        device.spin(100.0)
        assert device.host_seconds() < 1e-3
        device.host_work(1.0)
        assert not device.default_stream.query()
        device.synchronize()
        assert device.host_seconds() > 100
        assert time.perf_counter() - started < 5

    def test_jitter_comes_from_the_seed(self) -> None:
        def seconds(seed: int) -> float:
            device = VirtualDevice(seed=seed)
            device.launch(FILL, [], [device.empty((4,), torch.int32)])
            return device.host_seconds()

        assert seconds(1) == seconds(1)
        assert seconds(1) != seconds(2)

    def test_timing_needs_timing_events(self) -> None:
        device = VirtualDevice()
        start, end = device.new_event(timing=True), device.new_event(timing=True)
        with pytest.raises(DeviceError, match="never recorded"):
            start.elapsed_time(end)
        start.record()
        device.spin(1e-3)
        end.record()
        with pytest.raises(DeviceError, match="not completed"):
            start.elapsed_time(end)
        with pytest.raises(DeviceError, match="timing=True"):
            start.elapsed_time(device.new_event())
        end.synchronize()
        assert start.elapsed_time(end) == pytest.approx(1.0, rel=0.02)

    def test_a_trial_behind_160_matmuls_is_cheap_to_simulate(self) -> None:
        device = VirtualDevice()
        streams = [device.new_stream() for _ in range(16)]

        def front(_: Any) -> None:
            for stream in streams:
                for _ in range(10):
                    device.matmul(4096, stream=stream)

        race(device, front)
        gc.disable()
        try:
            seconds = []
            for _ in range(20):
                started = time.perf_counter()
                race(device, front)
                seconds.append(time.perf_counter() - started)
        finally:
            gc.enable()
        # about 2 ms where this was written; the bound leaves room for a busy machine
        assert min(seconds) < 0.02


class TestGraphs:
    def test_what_a_capture_refuses(self) -> None:
        device = VirtualDevice()
        side, event = device.new_stream(), device.new_event()
        block = device.empty((4,), torch.int32)
        calls: list[Callable[[], Any]] = [
            device.synchronize,
            device.default_stream.synchronize,
            side.query,
            event.synchronize,
            event.query,
            event.record,
            lambda: event.wait(),
            device.empty_cache,
            lambda: device.launch(FILL, [], [block], stream=side),
            lambda: device.empty((4,), torch.int32, stream=side),
            lambda: device.capture().__enter__(),
        ]
        with device.capture() as graph:
            for call in calls:
                with pytest.raises(DeviceError, match="captur"):
                    call()
            with pytest.raises(DeviceError, match="captur"):
                graph.replay()

    def test_a_capture_that_failed_cannot_be_replayed(self) -> None:
        device = VirtualDevice()
        with pytest.raises(ValueError, match="stop"), device.capture() as graph:
            raise ValueError("stop")
        with pytest.raises(DeviceError, match="nothing to replay"):
            graph.replay()
        device.synchronize()

    def test_a_replay_on_another_stream_holds_copies_and_order(self) -> None:
        device = VirtualDevice()
        source, host = device.pinned((4,), torch.int32), device.pinned((4,), torch.int32)
        with device.capture() as graph:
            block = device.empty((4,), torch.int32)
            device.copy(block, source)
            device.launch(DOUBLE, [block], [block])
            device.copy(host, block)
        side = device.new_stream()
        for value in (3, 5):
            source.fill_(value)
            graph.replay(side)
            side.synchronize()
            assert host.tolist() == [2 * value] * 4

    def test_a_replay_after_a_pinned_buffer_died(self) -> None:
        device = VirtualDevice()
        host, block = device.pinned((4,), torch.int32), device.empty((4,), torch.int32)
        with device.capture() as graph:
            device.copy(host, block)
        del host
        with pytest.raises(FreedPinnedBuffer, match="graph replay"):
            graph.replay()

    def test_the_private_pool_goes_back_with_the_graph(self) -> None:
        device = VirtualDevice()
        with device.capture() as graph:
            output = device.empty((4,), torch.int32)
        del output
        device.empty_cache()
        assert device.memory_stats()["reserved_bytes.all.current"] == 2 * MEBIBYTE
        del graph
        device.empty_cache()
        assert device.memory_stats()["reserved_bytes.all.current"] == 0


class TestMemory:
    def test_blocks_die_with_the_last_view_without_garbage_collection(self) -> None:
        device = VirtualDevice()
        gc.disable()
        try:
            tensor = device.empty((64,), torch.float32)
            views = [tensor[3:], tensor.view(8, 8).t()[2]]
            del tensor
            assert device.memory_stats()["allocated_bytes.all.current"] == 512
            views.clear()
            assert device.memory_stats()["allocated_bytes.all.current"] == 0
        finally:
            gc.enable()

    def test_tensors_outlive_their_device(self) -> None:
        device = VirtualDevice()
        host = device.pinned((4,), torch.int32)
        host.fill_(7)
        del device
        gc.collect()
        assert host.tolist() == [7] * 4

    def test_addresses_are_the_same_in_every_run(self) -> None:
        first, second = VirtualDevice(), VirtualDevice()
        tensors = [d.empty((4, 4), torch.int32)[1] for d in (first, second)]
        assert first.address(tensors[0]) == second.address(tensors[1])
        assert tensors[0].data_ptr() != tensors[1].data_ptr()

    def test_an_unmappable_size_is_refused_before_any_work(self) -> None:
        with pytest.raises(DeviceError, match="memory_bytes"):
            VirtualDevice(memory_bytes=2**60)

    def test_out_of_memory_is_an_error_with_an_exit_code(self) -> None:
        device = VirtualDevice(memory_bytes=4 * MEBIBYTE, pinned_bytes=2 * MEBIBYTE)
        with pytest.raises(DeviceOutOfMemory) as caught:
            device.empty((8 * MEBIBYTE,), torch.uint8)
        assert isinstance(caught.value, AtomError)
        assert caught.value.exit_code == 3
        with pytest.raises(DeviceOutOfMemory, match="pinned host memory"):
            device.pinned((8 * MEBIBYTE,), torch.uint8)


class TestRecords:
    def test_a_timeline_shows_the_race(self) -> None:
        device = VirtualDevice()
        device.trace()
        assert race(device, lambda copies: device.spin(1e-3, stream=copies)) == [2]
        timeline = device.timeline()
        fills = [record for record in timeline.work if record.name == "fill"]
        (copy,) = (record for record in timeline.work if record.kind.endswith("copy"))
        assert len(fills) == 2
        assert fills[1].writes == fills[0].writes == copy.reads
        assert copy.submitted_seconds < fills[1].start_seconds < copy.start_seconds
        assert copy.stream_id == 1
        first, second = timeline.blocks
        assert (first.offset, first.nbytes) == (second.offset, second.nbytes)
        assert first.freed_seconds is not None
        assert copy.submitted_seconds < first.freed_seconds < copy.start_seconds
        assert first.freed_seconds <= second.allocated_seconds
        assert "test_virtual_device.py" in first.owner

    def test_labels_and_living_blocks(self) -> None:
        device = VirtualDevice()
        device.trace()
        block = device.label(device.empty((4,), torch.int32), "verdict of step 1")
        (record,) = device.timeline().blocks
        assert (record.owner, record.freed_seconds) == ("verdict of step 1", None)
        assert record.address == device.address(block)

    def test_tracing_can_be_off(self) -> None:
        device = VirtualDevice()
        with pytest.raises(DeviceError, match="trace"):
            device.timeline()
        device.trace()
        device.spin(1e-6)
        device.synchronize()
        device.trace()
        assert device.timeline().work == ()
        device.trace(False)
        with pytest.raises(DeviceError, match="trace"):
            device.timeline()

    def test_properties_carry_the_label_of_simulation(self) -> None:
        device = VirtualDevice("h200", hardware_queues=2, memory_bytes=64 * MEBIBYTE)
        found = device.properties
        assert (found.name, found.machine) == ("H200", "virtual-h200")
        assert (found.kind, found.evidence) == (DeviceKind.VIRTUAL, Evidence.SIMULATED)
        assert (found.hardware_queues, found.memory_bytes) == (2, 64 * MEBIBYTE)
        assert profile_properties("H200").memory_bytes == PROFILES["H200"].memory_bytes
