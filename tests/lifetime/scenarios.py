"""Programs that lose an order, and near twins that keep it, for any device.

Each is a plain function of a device, so that it runs on the virtual device, on a GPU, and under any
other detector as a process of its own::

    python tests/lifetime/scenarios.py status_dropped --device accelerator

A faulty program and its twin differ in one thing. ``where`` names public reports of the same kind.
A report that was taken back because two factors had changed at once (vllm-project/vllm#48475) is
the reason for the twins; it has no program of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device import open_device
from atom.device.interface import Device, Kernel, Stream
from atom.errors import FreedPinnedBuffer
from atom.lifetime.findings import Kind
from atom.transfer.copy_protocol import UnpatchedWarning
from atom.transfer.d2h_queue import D2HQueue

PARKED_SECONDS = 0.004
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Scenario:
    """A program and the kinds of finding that it must give (none for a correct one)."""

    name: str
    program: Callable[[Device], None]
    expected: frozenset[Kind]
    where: str
    virtual_only: bool

    @property
    def faulty(self) -> bool:
        """Whether an order is missing."""
        return bool(self.expected)


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *expected: Kind, where: str = "", virtual_only: bool = False
) -> Callable[[Callable[[Device], None]], Callable[[Device], None]]:
    """Register a program."""

    def register(program: Callable[[Device], None]) -> Callable[[Device], None]:
        name = program.__name__
        SCENARIOS[name] = Scenario(name, program, frozenset(expected), where, virtual_only)
        return program

    return register


# -- small pieces


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    for tensor in writes:
        tensor.fill_(value)


def read_body(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    writes[0].copy_(reads[0])


FILL = Kernel("fill", fill_body)
READ = Kernel("read", read_body)


def fill(device: Device, tensor: Tensor, value: int, stream: Stream | None = None) -> None:
    device.launch(FILL, (), (tensor,), scalars=(value,), stream=stream)


def filled(device: Device, count: int, value: int, stream: Stream | None = None) -> Tensor:
    tensor = device.empty((count,), torch.int32, stream=stream)
    fill(device, tensor, value, stream)
    return tensor


def queue_copy(device: Device, side: Stream, host: Tensor, source: Tensor) -> None:
    """Edge (a), a parked copy stream, the copy."""
    side.wait_stream(device.default_stream)
    device.spin(PARKED_SECONDS, stream=side)
    device.copy(host, source, stream=side)


def at_address(device: Device, address: int, count: int) -> Tensor:
    """A fresh tensor on the bytes that were freed last: GPUs may have other cached blocks."""
    others: list[Tensor] = []
    while len(others) < 256:
        tensor = device.empty((count,), torch.int32)
        if device.address(tensor) == address:
            break
        others.append(tensor)
    return tensor


# -- a source that is freed under its copy


@scenario(Kind.FREED_IN_USE, where="ROCm/ATOM, the fault of this workbook")
def status_dropped(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    done = side.record_event()
    address = device.address(verdict)
    del verdict
    following = at_address(device, address, 64)
    fill(device, following, 16384)
    done.synchronize()
    host.tolist()


@scenario()
def status_held(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    done = side.record_event()
    filled(device, 64, 16384)
    done.synchronize()
    del verdict
    assert host.tolist() == [1] * 64


@scenario(Kind.FREED_IN_USE)
def freed_and_never_reused(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    del verdict
    device.synchronize()


@scenario()
def freed_after_query(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    done = side.record_event()
    while not done.query():
        device.memory_stats()
    del verdict
    filled(device, 64, 2)
    assert host.tolist() == [1] * 64


@scenario()
def recorded_on_the_copy_stream(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    done = side.record_event()
    device.record_stream(verdict, side)
    del verdict
    filled(device, 64, 2)
    done.synchronize()
    assert host.tolist() == [1] * 64


@scenario(Kind.FREED_IN_USE)
def recorded_on_another_stream(device: Device) -> None:
    side, other = device.new_stream(), device.new_stream()
    host = device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    device.record_stream(verdict, other)
    del verdict
    filled(device, 64, 2)
    device.synchronize()


@scenario(Kind.FREED_IN_USE, Kind.HOST_READ_TOO_EARLY)
def event_recorded_too_early(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    side.wait_stream(device.default_stream)
    done = side.record_event()
    device.spin(PARKED_SECONDS, stream=side)
    device.copy(host, verdict, stream=side)
    done.synchronize()
    host.tolist()
    del verdict
    device.synchronize()


@scenario(Kind.FREED_IN_USE, where="sgl-project/sglang#34076, NVIDIA/TensorRT-LLM#15265")
def freed_indices(device: Device) -> None:
    side = device.new_stream()
    for count in (40, 128, 300, 3000):
        indices = filled(device, count, 1)
        gathered = device.empty((count,), torch.int32, stream=side)
        side.wait_stream(device.default_stream)
        device.spin(PARKED_SECONDS, stream=side)
        device.launch(READ, (indices,), (gathered,), stream=side)
        del indices
        # best fit takes the victim's block for a size near its own
        filled(device, max(1, count - 17), 2)
        side.synchronize()


@scenario()
def joined_indices(device: Device) -> None:
    side = device.new_stream()
    for count in (40, 128, 300, 3000):
        indices = filled(device, count, 1)
        gathered = device.empty((count,), torch.int32, stream=side)
        side.wait_stream(device.default_stream)
        device.launch(READ, (indices,), (gathered,), stream=side)
        device.default_stream.wait_stream(side)
        del indices
        filled(device, max(1, count - 17), 2)


@scenario()
def joined_by_an_event(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    verdict = filled(device, 64, 1)
    queue_copy(device, side, host, verdict)
    done = side.record_event()
    device.default_stream.wait_event(done)
    del verdict
    filled(device, 64, 2)
    done.synchronize()
    assert host.tolist() == [1] * 64


@scenario(Kind.FREED_IN_USE, where="meta-pytorch/torchrec#4373")
def bulk_store_before_the_status(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    device.traffic(64 * MEBIBYTE, "d2h", stream=side)
    device.synchronize()
    for step in range(3):
        verdict = filled(device, 64, step)
        side.wait_stream(device.default_stream)
        device.traffic(64 * MEBIBYTE, "d2h", stream=side)
        device.copy(host, verdict, stream=side)
        done = side.record_event()
        del verdict
        filled(device, 64, 16384)
        done.synchronize()


@scenario(Kind.FREED_IN_USE, where="NVIDIA/nvalchemi-toolkit#171")
def recycled_256_elements(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((256,), torch.int32)
    for step in range(4):
        source = filled(device, 256, step)
        queue_copy(device, side, host, source)
        del source
    device.synchronize()


@scenario(Kind.FREED_IN_USE)
def view_of_a_dropped_base(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    base = filled(device, 4096, 1)
    rows = base[512:576]
    del base
    queue_copy(device, side, host, rows)
    del rows
    device.synchronize()


@scenario()
def view_that_outlives_its_base(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    base = filled(device, 4096, 1)
    rows = base[512:576]
    queue_copy(device, side, host, rows)
    del base
    filled(device, 4096, 2)
    side.synchronize()
    del rows
    assert host.tolist() == [1] * 64


@scenario(Kind.FREED_IN_USE, where="vllm-project/vllm#53726, #50021")
def status_under_offload(device: Device) -> None:
    _async_spec_offload(device, hold=False)


@scenario(where="the same three factors, source held")
def status_held_under_offload(device: Device) -> None:
    _async_spec_offload(device, hold=True)


def _async_spec_offload(device: Device, *, hold: bool) -> None:
    copies, offload = device.new_stream(), device.new_stream()
    host = device.pinned((64,), torch.int32)
    cache = filled(device, 65536, 3)
    store = device.pinned((65536,), torch.int32)
    held: list[Tensor] = []
    for step in range(3):
        offload.wait_stream(device.default_stream)
        device.copy(store, cache, stream=offload)
        verdict = filled(device, 64, step)
        queue_copy(device, copies, host, verdict)
        done = copies.record_event()
        if hold:
            held.append(verdict)
        del verdict
        filled(device, 64, 16384)
        done.synchronize()
        held.clear()
    device.synchronize()


@scenario(where="vllm-project/vllm#54422: nothing stays held once the queue is drained")
def last_output_released(device: Device) -> None:
    queue = D2HQueue(device, device.new_stream())
    for step in range(3):
        payload = queue.new_payload(step, (32,), torch.int32)
        fill(device, payload.data, step)
        payload.stamp(device)
        queue.send(payload)
    del payload
    queue.drain()
    assert queue.live_sources() == 0


# -- the other edges


@scenario(Kind.HOST_READ_TOO_EARLY, where="vllm-project/vllm#36013")
def previous_count_is_read(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    counts = filled(device, 64, 1)
    queue_copy(device, side, host, counts)
    host.tolist()
    device.synchronize()


@scenario()
def count_is_read_after_its_event(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    counts = filled(device, 64, 1)
    queue_copy(device, side, host, counts)
    view = host.numpy()
    side.record_event().synchronize()
    assert host.tolist() == view.tolist() == [1] * 64
    del counts


@scenario(Kind.HOST_READ_TOO_EARLY)
def numpy_of_a_copy_in_flight(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    counts = filled(device, 64, 1)
    queue_copy(device, side, host, counts)
    host.numpy().sum()
    device.synchronize()


@scenario(Kind.READ_TOO_EARLY, where="sgl-project/sglang#20611, vllm-project/vllm#46278")
def copy_before_its_producer(device: Device) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    device.synchronize()
    counts = device.empty((64,), torch.int32)
    device.spin(PARKED_SECONDS)
    fill(device, counts, 1)
    device.copy(host, counts, stream=side)
    side.synchronize()
    host.tolist()
    device.synchronize()


@scenario(Kind.REUSE_RACE, where="ROCm/ATOM#1956")
def side_stream_writes_first(device: Device) -> None:
    side, kept = device.new_stream(), device.empty((64,), torch.int32)
    old = filled(device, 64, 1)
    device.synchronize()
    device.spin(PARKED_SECONDS)
    device.launch(READ, (old,), (kept,))
    address = device.address(old)
    del old
    fresh = at_address(device, address, 64)
    fill(device, fresh, 2, side)
    device.synchronize()


@scenario(where="the twin: the side stream waits after the allocation")
def side_stream_waits_first(device: Device) -> None:
    side, kept = device.new_stream(), device.empty((64,), torch.int32)
    old = filled(device, 64, 1)
    device.spin(PARKED_SECONDS)
    device.launch(READ, (old,), (kept,))
    address = device.address(old)
    del old
    fresh = at_address(device, address, 64)
    side.wait_stream(device.default_stream)
    fill(device, fresh, 2, side)
    device.default_stream.wait_stream(side)
    del fresh
    device.synchronize()


# -- live bytes that are written again


@scenario(Kind.LIVE_OVERWRITE)
def static_output_held(device: Device) -> None:
    _static_output(device, waits=False)


@scenario()
def static_output_waited_for(device: Device) -> None:
    _static_output(device, waits=True)


def _static_output(device: Device, *, waits: bool) -> None:
    side, host = device.new_stream(), device.pinned((64,), torch.int32)
    with device.capture() as graph:
        output = device.empty((64,), torch.int32)
        fill(device, output, 2)
    graph.replay()
    queue_copy(device, side, host, output)
    done = side.record_event()
    if waits:
        device.default_stream.wait_event(done)
    graph.replay()
    done.synchronize()
    host.tolist()
    device.synchronize()


@scenario(Kind.LIVE_OVERWRITE)
def ring_slot_reused_early(device: Device) -> None:
    _ring(device, waits=False)


@scenario()
def double_buffer(device: Device) -> None:
    _ring(device, waits=True)


def _ring(device: Device, *, waits: bool) -> None:
    side = device.new_stream()
    slots = [device.empty((64,), torch.int32) for _ in range(2)]
    hosts = [device.pinned((64,), torch.int32) for _ in range(2)]
    events = [device.new_event() for _ in range(2)]
    for step in range(5):
        index = step % 2
        if waits:
            events[index].wait(device.default_stream)
        fill(device, slots[index], step)
        if step >= 2:
            events[index].synchronize() if waits else None
        side.wait_stream(device.default_stream)
        device.copy(hosts[index], slots[index], stream=side)
        events[index].record(side)
    device.synchronize()


@scenario(Kind.UNORDERED_WRITES)
def two_writers(device: Device) -> None:
    side = device.new_stream()
    state = device.empty((64,), torch.int32)
    device.synchronize()
    device.spin(PARKED_SECONDS)
    fill(device, state, 1)
    fill(device, state, 2, side)
    device.synchronize()


@scenario()
def two_writers_of_interleaved_columns(device: Device) -> None:
    side = device.new_stream()
    state = device.empty((64, 4), torch.int32)
    device.synchronize()
    fill(device, state[:, 0], 1)
    fill(device, state[:, 1], 2, side)
    device.synchronize()


@scenario()
def two_readers_of_one_weight(device: Device) -> None:
    side = device.new_stream()
    weight = filled(device, 64, 1)
    outputs = [device.empty((64,), torch.int32) for _ in range(2)]
    device.synchronize()
    for _ in range(3):
        device.launch(READ, (weight,), (outputs[0],))
        device.launch(READ, (weight,), (outputs[1],), stream=side)
    device.synchronize()


# -- host to device


@scenario(Kind.HOST_WRITE_TOO_EARLY)
def staging_written_again(device: Device) -> None:
    side = device.new_stream()
    staging = device.pinned((64,), torch.int32)
    batch = device.empty((64,), torch.int32, stream=side)
    staging.fill_(1)
    device.spin(PARKED_SECONDS, stream=side)
    device.copy(batch, staging, stream=side)
    staging.fill_(2)
    device.synchronize()


@scenario()
def pinned_prefetch(device: Device) -> None:
    side = device.new_stream()
    ring = [device.pinned((64,), torch.int32) for _ in range(2)]
    events = [device.new_event() for _ in range(2)]
    total = device.empty((64,), torch.int32)
    for step in range(5):
        index = step % 2
        events[index].synchronize()
        ring[index].fill_(step)
        batch = device.empty((64,), torch.int32, stream=side)
        device.copy(batch, ring[index], stream=side)
        events[index].record(side)
        device.default_stream.wait_event(events[index])
        device.launch(READ, (batch,), (total,))
        device.record_stream(batch, device.default_stream)
    device.synchronize()


@scenario()
def pinned_batches_of_a_loader(device: Device) -> None:
    total = device.empty((64,), torch.int32)
    for step in range(5):
        # a loader makes a pinned batch each time; its allocator guards the copy
        batch = device.pinned((64,), torch.int32)
        batch.fill_(step)
        on_device = device.empty((64,), torch.int32)
        device.copy(on_device, batch)
        device.launch(READ, (on_device,), (total,))
    device.synchronize()


@scenario(Kind.FREED_IN_USE, virtual_only=True)
def mapped_slot_dropped(device: Device) -> None:
    host = device.pinned((64,), torch.int32)
    device.launch(FILL, (), (device.mapped(host),), scalars=(3,))
    del host
    with contextlib.suppress(FreedPinnedBuffer):
        device.synchronize()


@scenario()
def one_stream_alone(device: Device) -> None:
    kept = device.empty((64,), torch.int32)
    for step in range(4):
        fresh = filled(device, 64, step)
        device.launch(READ, (fresh,), (kept,))
        del fresh
    device.synchronize()


# -- this project's own transfers


def _protocol(protocol: CopyProtocol) -> Callable[[Device], None]:
    def program(device: Device) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnpatchedWarning)
            queue = D2HQueue(device, device.new_stream(), protocol, epoch_tag=False)
        for step in range(4):
            device.spin(PARKED_SECONDS, stream=queue.stream)
            payload = queue.new_payload(step, (32,), torch.int32)
            fill(device, payload.data, step)
            queue.send(payload)
            del payload
        for _ in range(4):
            queue.receive()

    program.__name__ = f"protocol_{protocol}"
    return program


for _each in CopyProtocol:
    _kinds = (Kind.FREED_IN_USE,) if _each is CopyProtocol.UNPATCHED else ()
    scenario(*_kinds, where="this project")(_protocol(_each))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program; the detector around it says what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(SCENARIOS))
    parser.add_argument("--device", default="virtual", choices=["virtual", "accelerator"])
    options = parser.parse_args(arguments)
    device = open_device(options.device)
    SCENARIOS[options.name].program(device)
    device.synchronize()
    print(f"{options.name}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
