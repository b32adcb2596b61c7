"""The pinned host allocator against a plain model of PyTorch's rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_caching_allocator import STREAMS, CountedWork

from atom.device.pinned_allocator import PinnedAllocator, PinnedBuffer
from atom.errors import DeviceOutOfMemory

MEBIBYTE = 2**20


class PlainPinned:
    """The same rules over lists of buffer numbers."""

    def __init__(self, work: CountedWork) -> None:
        self.work = work
        self.sizes: list[int] = []
        self.free_by_size: dict[int, list[int]] = {}
        self.users: dict[int, set[int]] = {}
        self.waiting: list[tuple[tuple[int, int], int]] = []

    def allocate(self, nbytes: int) -> int:
        while self.waiting and self.work.passed(self.waiting[0][0]):
            number = self.waiting.pop(0)[1]
            if number not in [waits for _, waits in self.waiting]:
                self.free_by_size.setdefault(self.sizes[number], []).append(number)
        size = 1
        while size < nbytes:
            size *= 2
        if self.free_by_size.get(size):
            number = self.free_by_size[size].pop()
        else:
            number = len(self.sizes)
            self.sizes.append(size)
        self.users[number] = set()
        return number

    def free(self, number: int) -> None:
        if not self.users[number]:
            self.free_by_size.setdefault(self.sizes[number], []).append(number)
        for stream in sorted(self.users[number]):
            self.waiting.append((self.work.mark(stream), number))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from([1, 2, 3, 600, 700, 1024, 1025])),
        st.tuples(st.just("copy"), st.integers(0, 99)),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("copy"), st.integers(0, 99)),
        st.tuples(st.just("run"), st.integers(0, 99)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_the_allocator_agrees_with_the_plain_model(steps: list[tuple[str, int]]) -> None:
    work, plain_work = CountedWork(), CountedWork()
    allocator, plain = PinnedAllocator(64 * MEBIBYTE, work), PlainPinned(plain_work)
    numbers: dict[int, int] = {}
    held: list[tuple[PinnedBuffer, int]] = []
    for action, number in steps:
        stream = number % STREAMS
        if action == "allocate":
            buffer, expected = allocator.allocate(number), plain.allocate(number)
            assert numbers.setdefault(buffer.offset, expected) == expected
            assert buffer.size == plain.sizes[expected]
            assert buffer not in [owned for owned, _ in held]
            held.append((buffer, expected))
        elif action == "free" and held:
            buffer, known = held.pop(number % len(held))
            allocator.free(buffer)
            plain.free(known)
        elif action == "copy" and held:
            buffer, known = held[number % len(held)]
            allocator.record_copy(buffer, stream)
            plain.users[known].add(stream)
            work.queued[stream] += 1
            plain_work.queued[stream] += 1
        elif action == "run":
            work.done[stream] = work.queued[stream]
            plain_work.done[stream] = plain_work.queued[stream]


def test_live_buffers_never_overlap_and_are_found_by_any_byte() -> None:
    allocator = PinnedAllocator(64 * MEBIBYTE, CountedWork())
    buffers = [allocator.allocate(nbytes) for nbytes in (1, 100, 512, 513, 5000, 3 * MEBIBYTE, 1)]
    spans = sorted((buffer.offset, buffer.offset + buffer.size) for buffer in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for buffer in buffers:
        assert allocator.find(buffer.offset) is buffer
        assert allocator.find(buffer.offset + buffer.size - 1) is buffer
    assert allocator.find(60 * MEBIBYTE) is None


def test_the_generation_tells_owned_from_dropped() -> None:
    allocator = PinnedAllocator(MEBIBYTE * 4, CountedWork())
    buffer = allocator.allocate(100)
    first = buffer.generation
    allocator.free(buffer)
    assert buffer.generation != first
    assert allocator.allocate(100) is buffer
    assert buffer.generation not in (first, first + 1)


def test_out_of_pinned_memory_names_the_sizes() -> None:
    allocator = PinnedAllocator(4 * MEBIBYTE, CountedWork())
    held = allocator.allocate(3 * MEBIBYTE)
    with pytest.raises(DeviceOutOfMemory, match=rf"owned {4 * MEBIBYTE}.*pinned_bytes"):
        allocator.allocate(MEBIBYTE)
    assert held.size == 4 * MEBIBYTE
