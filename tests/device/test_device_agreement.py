"""One file for both devices: operation by operation, does the next allocation reuse the block?

Every test says what PyTorch does. The virtual device must agree with it here, and hardware where
there is some (``pytest -m gpu``).
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import Tensor

from atom.device.interface import Device, Kernel, Stream
from atom.errors import FreedPinnedBuffer

MEBIBYTE = 2**20
PARKED_SECONDS = 0.03

pytestmark = pytest.mark.parametrize(
    "device", ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)], indirect=True
)


def _fill(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], value: int) -> None:
    for tensor in writes:
        tensor.fill_(value)


FILL = Kernel("fill", _fill)


def allocate(device: Device, nbytes: int, stream: Stream | None = None) -> Tensor:
    return device.empty((nbytes,), torch.uint8, stream=stream)


def addresses(device: Device, tensors: list[Tensor]) -> list[int]:
    return [device.address(tensor) for tensor in tensors]


def current(device: Device, name: str) -> int:
    return device.memory_stats()[f"{name}.all.current"]


def test_same_stream_reuses_at_once(device: Device) -> None:
    stream = device.new_stream()
    device.spin(PARKED_SECONDS, stream=stream)
    block = allocate(device, 256, stream)
    address = device.address(block)
    del block
    assert device.address(allocate(device, 256, stream)) == address


def test_a_live_view_keeps_the_block(device: Device) -> None:
    stream = device.new_stream()
    block = allocate(device, 256, stream)
    address = device.address(block)
    view = block[8:16].view(torch.int32)
    del block
    other = allocate(device, 256, stream)
    assert device.address(other) != address
    assert device.address(view) == address + 8
    del view
    assert device.address(allocate(device, 256, stream)) == address


def test_another_stream_does_not_reuse(device: Device) -> None:
    first, second = device.new_stream(), device.new_stream()
    block = allocate(device, 256, first)
    address = device.address(block)
    del block
    device.synchronize()
    assert device.address(allocate(device, 256, second)) != address
    assert device.address(allocate(device, 256, first)) == address


def test_record_stream_defers_reuse_until_the_stream_has_passed(device: Device) -> None:
    owner, user = device.new_stream(), device.new_stream()
    block = allocate(device, 256, owner)
    address = device.address(block)
    device.record_stream(block, user)
    device.spin(PARKED_SECONDS, stream=user)
    del block
    while_pending = allocate(device, 256, owner)
    assert device.address(while_pending) != address
    device.synchronize()
    assert device.address(allocate(device, 256, owner)) == address


def test_record_stream_marks_the_stream_at_the_free(device: Device) -> None:
    owner, user = device.new_stream(), device.new_stream()
    block = allocate(device, 256, owner)
    address = device.address(block)
    device.record_stream(block, user)
    # queued after record_stream, before the free: it counts
    device.spin(PARKED_SECONDS, stream=user)
    user_done = user.record_event()
    del block
    # queued after the free was noticed: it does not count
    other = allocate(device, 256, owner)
    user_done.synchronize()
    device.spin(PARKED_SECONDS, stream=user)
    again = allocate(device, 256, owner)
    assert device.address(other) != address
    assert device.address(again) == address
    assert not user.query()


def test_record_stream_of_the_owner_changes_nothing(device: Device) -> None:
    stream = device.new_stream()
    device.spin(PARKED_SECONDS, stream=stream)
    block = allocate(device, 256, stream)
    address = device.address(block)
    device.record_stream(block, stream)
    del block
    assert device.address(allocate(device, 256, stream)) == address


@pytest.mark.parametrize(
    ("freed", "asked", "reused"),
    [(1, 512, True), (100, 400, True), (512, 1, True), (512, 513, False), (1024, 1000, True)],
)
def test_sizes_round_to_512(device: Device, freed: int, asked: int, reused: bool) -> None:
    stream = device.new_stream()
    block = allocate(device, freed, stream)
    fence = allocate(device, 512, stream)
    address = device.address(block)
    del block
    assert (device.address(allocate(device, asked, stream)) == address) is reused
    assert fence.numel() == 512


def test_neighbours_lie_one_behind_the_other(device: Device) -> None:
    stream = device.new_stream()
    blocks = [allocate(device, nbytes, stream) for nbytes in (1, 513, 512, 5000)]
    first = device.address(blocks[0])
    assert addresses(device, blocks) == [first, first + 512, first + 1536, first + 2048]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freed_neighbours_merge_in_any_order(device: Device, order: tuple[int, ...]) -> None:
    stream = device.new_stream()
    blocks: list[Tensor | None] = [allocate(device, 512, stream) for _ in range(3)]
    fence = allocate(device, 512, stream)
    assert blocks[0] is not None
    address = device.address(blocks[0])
    for index in order:
        blocks[index] = None
        # each free is noticed on its own
        device.memory_stats()
    assert device.address(allocate(device, 1536, stream)) == address
    assert device.address(fence) == address + 1536


def test_best_fit_is_by_size_then_address(device: Device) -> None:
    stream = device.new_stream()
    sizes = [2048, 512, 1024, 512, 1024, 512]
    blocks: list[Tensor | None] = [allocate(device, nbytes, stream) for nbytes in sizes]
    where = [device.address(block) for block in blocks if block is not None]
    for index in (4, 2, 0):
        blocks[index] = None
    first, second = allocate(device, 1024, stream), allocate(device, 1024, stream)
    third = allocate(device, 1024, stream)
    assert addresses(device, [first, second, third]) == [where[2], where[4], where[0]]


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1, 2 * MEBIBYTE),
        (MEBIBYTE, 2 * MEBIBYTE),
        (MEBIBYTE + 1, 20 * MEBIBYTE),
        (10 * MEBIBYTE - 512, 20 * MEBIBYTE),
        (10 * MEBIBYTE - 1, 10 * MEBIBYTE),
        (10 * MEBIBYTE, 10 * MEBIBYTE),
        (11 * MEBIBYTE + 1, 12 * MEBIBYTE),
    ],
)
def test_segments(device: Device, nbytes: int, reserved: int) -> None:
    stream = device.new_stream()
    before = current(device, "reserved_bytes")
    block = allocate(device, nbytes, stream)
    assert current(device, "reserved_bytes") - before == reserved
    assert block.numel() == nbytes


def test_small_and_large_requests_use_pools_of_their_own(device: Device) -> None:
    stream = device.new_stream()
    small, large = allocate(device, MEBIBYTE, stream), allocate(device, MEBIBYTE + 1, stream)
    where_small, where_large = addresses(device, [small, large])
    del small, large
    # 1 MiB would fit the freed large block, and 1.5 MiB the merged small segment
    again_large = allocate(device, 3 * MEBIBYTE // 2, stream)
    again_small = allocate(device, MEBIBYTE, stream)
    assert addresses(device, [again_small, again_large]) == [where_small, where_large]


@pytest.mark.parametrize(
    ("asked", "given"),
    [(2 * MEBIBYTE, 3 * MEBIBYTE), (2 * MEBIBYTE - 512, 2 * MEBIBYTE - 512)],
)
def test_a_large_block_splits_when_more_than_1_mib_is_left(
    device: Device, asked: int, given: int
) -> None:
    stream = device.new_stream()
    block, fence = allocate(device, 3 * MEBIBYTE, stream), allocate(device, 3 * MEBIBYTE, stream)
    address = device.address(block)
    del block
    before = current(device, "allocated_bytes")
    again = allocate(device, asked, stream)
    assert device.address(again) == address
    assert current(device, "allocated_bytes") - before == given
    assert fence.numel() == 3 * MEBIBYTE


def test_empty_cache_returns_only_whole_segments(device: Device) -> None:
    stream = device.new_stream()
    before = current(device, "reserved_bytes")
    kept, dropped = allocate(device, 512, stream), allocate(device, 12 * MEBIBYTE, stream)
    del dropped
    device.empty_cache()
    assert current(device, "reserved_bytes") - before == 2 * MEBIBYTE
    del kept
    device.empty_cache()
    assert current(device, "reserved_bytes") == before


def test_statistics_follow_the_free_and_the_return(device: Device) -> None:
    owner, user = device.new_stream(), device.new_stream()
    allocated, active = current(device, "allocated_bytes"), current(device, "active_bytes")
    block = allocate(device, 700, owner)
    assert current(device, "allocated_bytes") - allocated == 1024
    device.record_stream(block, user)
    device.spin(PARKED_SECONDS, stream=user)
    del block
    assert current(device, "allocated_bytes") == allocated
    assert current(device, "active_bytes") - active == 1024
    device.synchronize()
    other = allocate(device, 700, owner)
    assert current(device, "active_bytes") - active == 1024
    assert other.numel() == 700


def test_empty_tensors(device: Device) -> None:
    before = current(device, "allocated_bytes")
    tensor = device.empty((0, 4), torch.float32)
    device.launch(FILL, [], [tensor], scalars=(1,))
    device.synchronize()
    assert tensor.shape == (0, 4)
    assert current(device, "allocated_bytes") == before


def test_a_graph_allocates_from_a_pool_of_its_own(device: Device) -> None:
    # the fence keeps the segment, so that the freed block stays in the device's own pool
    freed, fence = device.empty((128,), torch.int32), device.empty((128,), torch.int32)
    address = device.address(freed)
    del freed
    with device.capture() as graph:
        scratch = device.empty((128,), torch.int32)
        inside = device.address(scratch)
        device.launch(FILL, [], [scratch], scalars=(1,))
        del scratch
        output = device.empty((128,), torch.int32)
        device.launch(FILL, [], [output], scalars=(2,))
    # inside the capture a freed block is reused, outside neither pool reaches into the other
    assert device.address(output) == inside
    assert inside != address
    del output
    outside = [device.empty((128,), torch.int32) for _ in range(8)]
    assert address in addresses(device, outside)
    assert inside not in addresses(device, outside)
    graph.replay()
    device.synchronize()
    assert fence.numel() == 128


def test_a_graph_runs_at_replay_only_and_on_the_same_addresses(device: Device) -> None:
    host = device.pinned((128,), torch.int32)
    host.fill_(-1)
    kept = device.empty((128,), torch.int32)
    with device.capture() as graph:
        device.launch(FILL, [], [kept], scalars=(7,))
    device.launch(FILL, [], [kept], scalars=(1,))
    device.copy(host, kept)
    device.synchronize()
    assert host.tolist() == [1] * 128
    for _ in range(2):
        device.launch(FILL, [], [kept], scalars=(1,))
        graph.replay()
        device.copy(host, kept)
        device.synchronize()
        assert host.tolist() == [7] * 128


def test_pinned_buffers_come_back_last_in_first_out(device: Device) -> None:
    first, second = (device.pinned((3000,), torch.uint8) for _ in range(2))
    where_first, where_second = addresses(device, [first, second])
    del first
    device.memory_stats()
    del second
    again = [device.pinned((2500,), torch.uint8), device.pinned((4096,), torch.uint8)]
    assert addresses(device, again) == [where_second, where_first]
    assert device.address(device.pinned((2048,), torch.uint8)) not in (where_first, where_second)


def test_a_pending_copy_guards_a_freed_pinned_buffer(device: Device) -> None:
    stream = device.new_stream()
    source = device.empty((3000,), torch.uint8)
    host = device.pinned((3000,), torch.uint8)
    address = device.address(host)
    device.spin(PARKED_SECONDS, stream=stream)
    device.copy(host, source, stream=stream)
    del host
    pending = device.pinned((3000,), torch.uint8)
    assert device.address(pending) != address
    device.synchronize()
    assert device.address(device.pinned((3000,), torch.uint8)) == address


def test_a_pending_kernel_does_not_guard_a_freed_pinned_buffer(device: Device) -> None:
    stream = device.new_stream()
    host = device.pinned((3000,), torch.uint8)
    address = device.address(host)
    device.spin(PARKED_SECONDS, stream=stream)
    device.launch(FILL, [], [device.mapped(host)], scalars=(1,), stream=stream)
    del host
    assert device.address(device.pinned((3000,), torch.uint8)) == address
    # the virtual device says what hardware keeps to itself
    with contextlib.suppress(FreedPinnedBuffer):
        device.synchronize()


def test_a_mapped_alias_keeps_the_buffer(device: Device) -> None:
    host = device.pinned((64,), torch.int32)
    alias = device.mapped(host)
    device.launch(FILL, [], [alias], scalars=(3,))
    device.synchronize()
    assert host.tolist() == [3] * 64
    address = device.address(host)
    del host
    assert device.address(device.pinned((64,), torch.int32)) != address
    del alias


def test_an_event_that_was_never_recorded(device: Device) -> None:
    event = device.new_event()
    assert event.query()
    event.synchronize()
    stream = device.new_stream()
    event.wait(stream)
    assert stream.query()


def test_a_wait_takes_the_latest_record_at_call_time(device: Device) -> None:
    producer, consumer = device.new_stream(), device.new_stream()
    event = device.new_event()
    device.spin(PARKED_SECONDS, stream=producer)
    event.record(producer)
    event.wait(consumer)
    device.spin(5 * PARKED_SECONDS, stream=producer)
    event.record(producer)
    consumer.synchronize()
    assert not event.query()
    assert not producer.query()
    event.synchronize()
    assert producer.query()


def test_elapsed_time_spans_the_work_between(device: Device) -> None:
    start, end = device.new_event(timing=True), device.new_event(timing=True)
    device.spin(PARKED_SECONDS)
    start.record()
    device.spin(PARKED_SECONDS)
    end.record()
    end.synchronize()
    assert 0.5 * PARKED_SECONDS < start.elapsed_time(end) / 1e3 < 2 * PARKED_SECONDS


def test_the_thirty_third_stream_is_the_first(device: Device) -> None:
    streams = [device.new_stream().stream_id for _ in range(33)]
    assert len(set(streams)) == 32
    assert streams[32] == streams[0]
    assert device.default_stream.stream_id == 0
    assert 0 not in streams


@pytest.mark.parametrize("protocol", ["unpatched", "hold", "record_stream"])
def test_the_fault_and_its_two_fixes(device: Device, protocol: str) -> None:
    copies = device.new_stream()
    verdict = device.empty((2, 32), torch.int32)
    host = device.pinned((2, 32), torch.int32)
    device.launch(FILL, [], [verdict], scalars=(1,))
    copies.wait_stream(device.default_stream)
    device.spin(PARKED_SECONDS, stream=copies)
    device.copy(host, verdict, stream=copies)
    done = copies.record_event()
    address = device.address(verdict)
    held = verdict if protocol == "hold" else None
    if protocol == "record_stream":
        device.record_stream(verdict, copies)
    del verdict
    following = device.empty((64,), torch.int32)
    device.launch(FILL, [], [following], scalars=(16384,))
    done.synchronize()
    assert (device.address(following) == address) is (protocol == "unpatched")
    assert host.flatten().tolist() == [16384 if protocol == "unpatched" else 1] * 64
    del held


@pytest.mark.parametrize("waits", [False, True])
def test_holding_does_not_help_a_static_output(device: Device, waits: bool) -> None:
    copies = device.new_stream()
    with device.capture() as graph:
        output = device.empty((64,), torch.int32)
        device.launch(FILL, [], [output], scalars=(2,))
    host = device.pinned((64,), torch.int32)
    device.launch(FILL, [], [output], scalars=(1,))
    copies.wait_stream(device.default_stream)
    device.spin(PARKED_SECONDS, stream=copies)
    device.copy(host, output, stream=copies)
    done = copies.record_event()
    if waits:
        done.wait(device.default_stream)
    graph.replay()
    done.synchronize()
    assert host.tolist() == [1 if waits else 2] * 64
