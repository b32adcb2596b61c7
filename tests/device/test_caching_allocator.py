"""The caching allocator against a plain model of PyTorch's rules, and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.device.caching_allocator import Block, CachingAllocator, round_size, segment_size
from atom.device.virtual import VirtualDevice
from atom.errors import DeviceError, DeviceOutOfMemory

KIBIBYTE, MEBIBYTE = 2**10, 2**20
CAPACITY = 64 * MEBIBYTE
STREAMS = 3


class CountedWork:
    """Streams as counters: work queued, and work done."""

    def __init__(self) -> None:
        self.queued = [0] * STREAMS
        self.done = [0] * STREAMS

    def mark(self, stream_id: int) -> tuple[int, int]:
        return stream_id, self.queued[stream_id]

    def passed(self, mark: tuple[int, int]) -> bool:
        return self.done[mark[0]] >= mark[1]

    def wait(self, mark: tuple[int, int]) -> None:
        self.done[mark[0]] = max(self.done[mark[0]], mark[1])

    def wait_all(self) -> None:
        self.done = list(self.queued)

    def segment_cost(self) -> None:
        pass


@dataclass(eq=False)
class Piece:
    offset: int
    size: int
    state: str = "free"
    users: set[int] = field(default_factory=set)
    marks: int = 0


@dataclass(eq=False)
class Segment:
    start: int
    size: int
    stream: int
    small: bool
    pieces: list[Piece]


class PlainModel:
    """The same rules, written to be read: every look-up scans every piece of every segment."""

    def __init__(self, work: CountedWork) -> None:
        self.work = work
        self.segments: list[Segment] = []
        self.waiting: list[list[tuple[Any, Segment, Piece]]] = [[] for _ in range(STREAMS)]

    def allocate(self, nbytes: int, stream: int) -> tuple[Segment, Piece] | None:
        self.look_at_events()
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MEBIBYTE
        found = self.find(size, stream, small) or self.grow(size, stream, small)
        if found is None:
            self.give_back()
            found = self.grow(size, stream, small)
        if found is None:
            return None
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small else rest > MEBIBYTE:
            place = segment.pieces.index(piece)
            segment.pieces.insert(place + 1, Piece(piece.offset + size, rest))
            piece.size = size
        piece.state = "used"
        return found

    def find(self, size: int, stream: int, small: bool) -> tuple[Segment, Piece] | None:
        fitting = [
            (piece.size, piece.offset, segment, piece)
            for segment in self.segments
            if segment.stream == stream and segment.small == small
            for piece in segment.pieces
            if piece.state == "free" and piece.size >= size
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda entry: entry[:2])
        return best[2], best[3]

    def grow(self, size: int, stream: int, small: bool) -> tuple[Segment, Piece] | None:
        if small:
            nbytes = 2 * MEBIBYTE
        elif size < 10 * MEBIBYTE:
            nbytes = 20 * MEBIBYTE
        else:
            nbytes = (size + 2 * MEBIBYTE - 1) // (2 * MEBIBYTE) * (2 * MEBIBYTE)
        taken = {
            page
            for segment in self.segments
            for page in range(segment.start, segment.start + segment.size, 2 * MEBIBYTE)
        }
        for start in range(0, CAPACITY - nbytes + 1, 2 * MEBIBYTE):
            if not taken & set(range(start, start + nbytes, 2 * MEBIBYTE)):
                piece = Piece(start, nbytes)
                segment = Segment(start, nbytes, stream, small, [piece])
                self.segments.append(segment)
                return segment, piece
        return None

    def free(self, segment: Segment, piece: Piece) -> None:
        users = sorted(piece.users)
        piece.users = set()
        if not users:
            self.put_back(segment, piece)
            return
        piece.state = "waiting"
        piece.marks = len(users)
        for user in users:
            self.waiting[user].append((self.work.mark(user), segment, piece))

    def look_at_events(self) -> None:
        for waiting in self.waiting:
            while waiting and self.work.passed(waiting[0][0]):
                _, segment, piece = waiting.pop(0)
                piece.marks -= 1
                if piece.marks == 0:
                    self.put_back(segment, piece)

    def put_back(self, segment: Segment, piece: Piece) -> None:
        piece.state = "free"
        merged: list[Piece] = []
        for each in segment.pieces:
            if merged and each.state == merged[-1].state == "free":
                merged[-1].size += each.size
            else:
                merged.append(each)
        segment.pieces = merged

    def give_back(self) -> None:
        self.work.wait_all()
        self.look_at_events()
        self.segments = [
            segment
            for segment in self.segments
            if len(segment.pieces) > 1 or segment.pieces[0].state != "free"
        ]

    def total(self, *states: str) -> int:
        return sum(
            piece.size
            for segment in self.segments
            for piece in segment.pieces
            if piece.state in states
        )


SIZES = st.one_of(
    st.sampled_from(
        [
            *(1, 511, 512, 513, MEBIBYTE - 1, MEBIBYTE, MEBIBYTE + 1, 2 * MEBIBYTE, 3 * MEBIBYTE),
            *(9 * MEBIBYTE, 10 * MEBIBYTE - 512, 10 * MEBIBYTE, 11 * MEBIBYTE, 21 * MEBIBYTE),
        ]
    ),
    st.integers(1, 8 * KIBIBYTE),
    st.integers(1, 24 * MEBIBYTE),
)
STREAM = st.integers(0, STREAMS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, STREAM),
        st.tuples(st.just("free"), st.integers(0, 99), STREAM),
        st.tuples(st.just("record"), st.integers(0, 99), STREAM),
        st.tuples(st.just("queue"), st.just(0), STREAM),
        st.tuples(st.just("run"), st.just(0), STREAM),
        st.tuples(st.just("empty"), st.just(0), STREAM),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_allocator_agrees_with_the_plain_model(steps: list[tuple[str, int, int]]) -> None:
    work, plain_work = CountedWork(), CountedWork()
    allocator, plain = CachingAllocator(CAPACITY, work), PlainModel(plain_work)
    held: list[tuple[Block, Segment, Piece]] = []
    for action, number, stream in steps:
        if action == "allocate":
            expected = plain.allocate(number, stream)
            if expected is None:
                with pytest.raises(DeviceOutOfMemory):
                    allocator.allocate(number, stream)
            else:
                block = allocator.allocate(number, stream)
                assert (block.offset, block.size) == (expected[1].offset, expected[1].size)
                held.append((block, *expected))
        elif action == "free" and held:
            block, segment, piece = held.pop(number % len(held))
            allocator.free(block)
            plain.free(segment, piece)
        elif action == "record" and held:
            block, segment, piece = held[number % len(held)]
            allocator.record_stream(block, stream)
            if stream != segment.stream:
                piece.users.add(stream)
        elif action == "queue":
            work.queued[stream] += 1
            plain_work.queued[stream] += 1
        elif action == "run":
            work.done[stream] = work.queued[stream]
            plain_work.done[stream] = plain_work.queued[stream]
        elif action == "empty":
            allocator.empty_cache()
            plain.give_back()
        figures = allocator.statistics()
        assert figures["allocated_bytes.all.current"] == plain.total("used")
        assert figures["active_bytes.all.current"] == plain.total("used", "waiting")
        assert figures["reserved_bytes.all.current"] == sum(s.size for s in plain.segments)
        assert figures["segment.all.current"] == len(plain.segments)
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes"):
            small, large = (figures[f"{name}.{p}.current"] for p in ("small_pool", "large_pool"))
            assert small + large == figures[f"{name}.all.current"]
            assert figures[f"{name}.all.peak"] >= figures[f"{name}.all.current"]


@given(st.integers(1, 2**34))
def test_sizes(nbytes: int) -> None:
    block = round_size(nbytes)
    assert block % 512 == 0
    assert 0 <= block - nbytes < 512
    assert segment_size(block) >= block
    assert segment_size(block) % (2 * MEBIBYTE) == 0


def test_retry_returns_cached_segments_before_it_fails() -> None:
    allocator = CachingAllocator(CAPACITY, CountedWork())
    allocator.free(allocator.allocate(40 * MEBIBYTE, 0))
    block = allocator.allocate(50 * MEBIBYTE, 1)
    assert block.size == 50 * MEBIBYTE
    figures = allocator.statistics()
    assert (figures["num_alloc_retries"], figures["num_ooms"]) == (1, 0)
    assert figures["reserved_bytes.all.current"] == 50 * MEBIBYTE


def test_retry_waits_for_recorded_streams() -> None:
    work = CountedWork()
    allocator = CachingAllocator(CAPACITY, work)
    block = allocator.allocate(40 * MEBIBYTE, 0)
    allocator.record_stream(block, 1)
    work.queued[1] = 5
    allocator.free(block)
    allocator.allocate(40 * MEBIBYTE, 0)
    assert work.done[1] == 5


def test_out_of_memory_names_the_sizes_and_the_holders() -> None:
    device = VirtualDevice(memory_bytes=64 * MEBIBYTE)
    state = device.label(device.empty((30 * MEBIBYTE,), torch.uint8), "conv state")
    other = device.empty((12 * MEBIBYTE,), torch.uint8)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.empty((40 * MEBIBYTE,), torch.uint8)
    message = str(caught.value)
    assert f"{40 * MEBIBYTE} bytes requested" in message
    assert f"reserved {42 * MEBIBYTE}, allocated {42 * MEBIBYTE}" in message
    assert f"{30 * MEBIBYTE} bytes, stream 0, conv state, test_caching_allocator.py:" in message
    assert message.index("conv state") < message.index(f"{12 * MEBIBYTE} bytes, stream 0")
    assert "test_caching_allocator.py" in message.splitlines()[0]
    assert device.memory_stats()["num_ooms"] == 1
    # a failed allocation leaves the device usable
    del state
    assert device.empty((25 * MEBIBYTE,), torch.uint8).numel() == 25 * MEBIBYTE
    assert other.numel() == 12 * MEBIBYTE


def test_a_private_pool_stays_while_its_graph_lives() -> None:
    allocator = CachingAllocator(CAPACITY, CountedWork())
    pool = allocator.begin_capture()
    inside = allocator.allocate(512, 0)
    allocator.free(inside)
    with pytest.raises(DeviceError, match="capture"):
        allocator.empty_cache()
    allocator.end_capture()
    outside = allocator.allocate(512, 0)
    assert outside.offset != inside.offset
    allocator.empty_cache()
    assert allocator.statistics()["segment.all.current"] == 2
    allocator.release_pool(pool)
    allocator.empty_cache()
    assert allocator.statistics()["segment.all.current"] == 1


def test_a_free_inside_a_capture_waits_for_recorded_streams_after_it() -> None:
    work = CountedWork()
    allocator = CachingAllocator(CAPACITY, work)
    allocator.begin_capture()
    block = allocator.allocate(512, 0)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert allocator.allocate(512, 0).offset != block.offset
    # queued after the free, but before the first look after the capture: it counts
    work.queued[1] = 1
    allocator.end_capture()
    allocator.allocate(512, 0)
    assert allocator.statistics()["active.all.current"] == 3
    work.done[1] = 1
    allocator.allocate(512, 0)
    assert allocator.statistics()["active.all.current"] == 3
