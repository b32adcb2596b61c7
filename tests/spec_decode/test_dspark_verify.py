"""The ell ring: who owns a source, until when, and what the map shows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.interface import Kernel, Stream
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError, StalePayload
from atom.spec_decode.dspark_verify import MAX_ELL_INFLIGHT, EllMismatch, EllRing
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload, WrongPayload

PARK_SECONDS = 0.02
SLOTS = 2
REQUESTS = 8


def fill_body(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    writes[0].fill_(value)


FILL = Kernel("fill", fill_body)


class Bench:
    """A virtual device, a copy stream with its own queue, and a ring of two slots."""

    def __init__(
        self, protocol: CopyProtocol = CopyProtocol.HOLD, ring_class: type[EllRing] = EllRing
    ) -> None:
        self.device = VirtualDevice("MI355X")
        self.stream = self._own_queue_stream()
        self.ring = ring_class(
            self.device, self.stream, protocol, slots=SLOTS, slot_requests=REQUESTS
        )

    def _own_queue_stream(self) -> Stream:
        for _ in range(32):
            stream = self.device.new_stream()
            self.device.spin(PARK_SECONDS, stream=stream)
            marker = self.device.new_event()
            marker.record(self.device.default_stream)
            marker.synchronize()
            apart = not stream.query()
            self.device.synchronize()
            if apart:
                return stream
        raise AssertionError("no stream with a queue of its own")

    def park(self) -> None:
        self.device.spin(PARK_SECONDS, stream=self.stream)

    def fresh(self, step: int, requests: int = REQUESTS) -> Payload:
        ell = self.ring.new_ell(step, requests)
        self.device.launch(FILL, (), (ell.data,), scalars=(step,))
        ell.stamp(self.device)
        return ell

    def step(self, step: int, requests: int = REQUESTS, first: int = 0) -> weakref.ref[Any]:
        """Record a step's ell for requests ``first..``, drop it, and watch its block."""
        ell = self.fresh(step, requests)
        block = weakref.ref(ell.raw)
        self.ring.record_ell(range(first, first + requests), ell)
        del ell
        gc.collect()
        return block


def test_landed_values_appear_by_request() -> None:
    bench = Bench()
    bench.step(1)
    bench.step(2, requests=3)
    bench.device.synchronize()
    assert bench.ring.ell_by_req == {0: 2, 1: 2, 2: 2} | dict.fromkeys(range(3, 8), 1)


def test_the_host_does_not_wait_for_what_has_not_landed() -> None:
    bench = Bench()
    bench.park()
    bench.step(1)
    assert bench.ring.ell_by_req == {}
    assert not bench.stream.query()
    bench.device.synchronize()
    assert bench.ring.ell_by_req == dict.fromkeys(range(REQUESTS), 1)


def test_a_step_without_ell_changes_nothing() -> None:
    bench = Bench()
    bench.step(1)
    bench.device.synchronize()
    before = dict(bench.ring.ell_by_req)
    bench.ring.record_ell([5, 6], None)
    bench.ring.record_ell([], None)
    assert bench.ring.ell_by_req == before
    assert bench.ring._ell_pending == []


def test_a_mismatched_batch_is_refused() -> None:
    bench = Bench()
    with pytest.raises(EllMismatch, match="for 3 requests"):
        bench.ring.record_ell([1, 2, 3], bench.fresh(1))


def test_a_source_outlives_its_pending_entry() -> None:
    bench = Bench()
    bench.park()
    blocks = [bench.step(step) for step in range(MAX_ELL_INFLIGHT + 4)]
    assert len(bench.ring._ell_pending) == MAX_ELL_INFLIGHT
    assert all(block() is not None for block in blocks)
    assert len(bench.ring._ell_oneoff_inflight) == len(blocks) - SLOTS


def test_a_source_outlives_the_setter() -> None:
    bench = Bench()
    bench.park()
    blocks = [bench.step(step) for step in range(4)]
    bench.ring.ell_by_req = {}
    assert bench.ring._ell_pending == []
    assert all(block() is not None for block in blocks)
    bench.device.synchronize()
    assert bench.ring.ell_by_req == {}


class HeldThroughPending(EllRing):
    """The mutation: a source lives with its pending entry, not with its slot."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.kept: list[tuple[Payload, object]] = []

    def record_ell(self, req_ids: Sequence[int], ell: Payload | None) -> None:
        super().record_ell(req_ids, ell)
        assert ell is not None
        self.kept.append((ell, self._ell_pending[-1]))
        self._ell_slot_source = [None] * len(self._ell_slot_source)
        self._ell_oneoff_inflight = [
            entry._replace(source=None) for entry in self._ell_oneoff_inflight
        ]
        self.forget()

    def forget(self) -> None:
        """What owning a source through the pending list comes to."""
        self.kept = [
            held for held in self.kept if any(held[1] is entry for entry in self._ell_pending)
        ]


@pytest.mark.parametrize("how", ["evicted", "cleared"])
@pytest.mark.parametrize("ring_class", [EllRing, HeldThroughPending])
def test_holding_through_the_pending_list_would_race(how: str, ring_class: type[EllRing]) -> None:
    """The control of the two tests above: that mutation loses sources under running copies."""
    bench = Bench(ring_class=ring_class)
    bench.park()
    first = bench.step(0)
    target = bench.ring._ell_slot_buffer[0]
    layout = bench.ring._ell_pending[0].layout
    if how == "evicted":
        for step in range(1, MAX_ELL_INFLIGHT + 2):
            bench.step(step)
    else:
        bench.ring.ell_by_req = {}
        if isinstance(bench.ring, HeldThroughPending):
            bench.ring.forget()
    assert (first() is not None) == (ring_class is EllRing)
    following = bench.fresh(99)
    bench.device.synchronize()
    landed = target.data(layout).unique().tolist()
    assert following.data.shape == (REQUESTS,)
    assert (landed == [0]) == (ring_class is EllRing)


def test_a_slot_is_reused_only_after_its_event_and_that_frees_its_source() -> None:
    bench = Bench()
    bench.park()
    first, second = bench.step(1), bench.step(2)
    third = bench.step(3)
    assert bench.ring._ell_pending[-1].slot.index == -1
    assert first() is not None
    assert second() is not None
    bench.device.synchronize()
    # landed, yet held until the slot is staged again
    assert first() is not None
    fourth = bench.step(4)
    assert bench.ring._ell_pending[-1].slot.index == 0
    assert first() is None
    assert second() is not None
    assert third() is None, "the one-off entry is pruned once its own event is done"
    assert fourth() is not None


def test_a_reused_slot_does_not_lose_a_landed_value() -> None:
    bench = Bench()
    for step in range(6):
        bench.step(step, requests=1, first=step)
        bench.device.synchronize()
    assert bench.ring.ell_by_req == {step: step for step in range(6)}


def test_a_large_ell_takes_a_buffer_of_its_own() -> None:
    bench = Bench()
    bench.park()
    block = bench.step(1, requests=100)
    assert block() is not None
    (entry,) = bench.ring._ell_oneoff_inflight
    assert entry.source is not None
    assert bench.ring._ell_slot_source == [None] * SLOTS
    del entry
    bench.device.synchronize()
    assert bench.ring.ell_by_req == dict.fromkeys(range(100), 1)
    bench.step(2)
    assert block() is None
    assert bench.ring._ell_oneoff_inflight == []


@pytest.mark.parametrize("protocol", CopyProtocol)
def test_many_steps_under_every_protocol(protocol: CopyProtocol) -> None:
    bench = Bench(protocol)
    seen: dict[int, int] = {}
    kept = []
    for step in range(1, 25):
        if step % 5 == 0:
            bench.park()
        # kept here, so that unpatched cannot race: this is about the ring, not the sources
        ell = bench.fresh(step, 1 + step % (2 * REQUESTS))
        bench.ring.record_ell(range(ell.data.numel()), ell)
        kept.append(ell)
        if protocol is CopyProtocol.ZERO_COPY:
            kept.clear()
        bench.ring.ell_by_req  # noqa: B018
        seen.update(dict.fromkeys(range(1 + step % (2 * REQUESTS)), step))
        bench.device.synchronize()
    assert bench.ring.ell_by_req == seen
    bench.ring.drain()
    assert bench.ring.live_sources() == 0
    assert bench.ring._ell_oneoff_inflight == []
    assert bench.ring._ell_oneoff_reserved == []


def test_a_drain_leaves_no_source_and_keeps_what_landed() -> None:
    bench = Bench()
    bench.park()
    blocks = [bench.step(step) for step in range(4)]
    assert bench.ring.live_sources() == 4
    bench.ring.drain()
    assert bench.ring.live_sources() == 0
    assert [block() for block in blocks] == [None] * 4
    assert bench.ring.ell_by_req == dict.fromkeys(range(REQUESTS), 3)


def test_a_stale_ell_is_named_once_and_left_out() -> None:
    bench = Bench(CopyProtocol.UNPATCHED)
    bench.step(1, requests=2)
    bench.device.synchronize()
    bench.park()
    bench.step(2)
    following = bench.fresh(3)
    bench.device.synchronize()
    with pytest.raises(StalePayload, match="ell carries step 3 where step 2 was expected"):
        bench.ring.ell_by_req  # noqa: B018
    assert bench.ring.ell_by_req == {0: 1, 1: 1}
    assert following.step == 3


def test_a_dropped_zero_copy_ell_gives_its_buffer_back_after_its_kernel() -> None:
    bench = Bench(CopyProtocol.ZERO_COPY)
    for requests in (REQUESTS, 100):
        bench.device.spin(PARK_SECONDS)
        bench.fresh(1, requests)
        gc.collect()
        bench.step(2, requests)
        bench.device.synchronize()
        assert bench.ring.ell_by_req == dict.fromkeys(range(requests), 2)
    bench.step(3)
    bench.step(4)
    assert bench.ring._ell_oneoff_reserved == []


def test_zero_copy_payloads_of_one_moment_have_slots_of_their_own() -> None:
    bench = Bench(CopyProtocol.ZERO_COPY)
    payloads = [bench.fresh(step) for step in range(SLOTS + 1)]
    assert len({payload.slot for payload in payloads}) == SLOTS + 1
    for step, payload in enumerate(payloads):
        bench.ring.record_ell([step], bench.fresh(step, 1))
        del payload
    bench.device.synchronize()
    assert bench.ring.ell_by_req == {0: 0, 1: 1, 2: 2}


def test_an_abandoned_slot_waits_for_the_kernel_that_writes_it() -> None:
    bench = Bench(CopyProtocol.ZERO_COPY)
    bench.device.spin(PARK_SECONDS)
    dropped = bench.fresh(1)
    slot = dropped.slot
    del dropped
    gc.collect()
    assert bench.fresh(2).slot is not slot
    bench.device.synchronize()
    assert bench.fresh(3).slot is slot


def test_element_type_and_sizes_are_checked() -> None:
    bench = Bench()
    assert bench.ring.new_ell(1, 4).data.dtype == torch.int32
    with pytest.raises(ValueError, match="at least 1"):
        EllRing(bench.device, bench.stream, slots=0)


@pytest.mark.parametrize("values", [None, [1, 2], {"a": 1}, {1: 2.0}, {1: None}, {1: True}])
def test_what_is_no_map_of_integers_is_refused_and_changes_nothing(values: Any) -> None:
    ring = Bench().ring
    ring.ell_by_req = {3: 4}
    with pytest.raises(BadInput, match="ell_by_req"):
        ring.ell_by_req = values
    assert ring.ell_by_req == {3: 4}


def test_a_payload_of_another_kind_is_no_ell() -> None:
    bench = Bench()
    other = D2HQueue(bench.device, bench.stream).new_payload(1, (2,), torch.int32)
    with pytest.raises(WrongPayload, match="ell"):
        bench.ring.record_ell([1, 2], other)


def test_a_one_off_buffer_of_a_failed_send_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    ell = bench.ring.new_ell(1, REQUESTS * 40)

    def failing_copy(*_: Any, **__: Any) -> None:
        raise DeviceError("no copy")

    monkeypatch.setattr(bench.device, "copy", failing_copy)
    with pytest.raises(DeviceError, match="no copy"):
        bench.ring.record_ell(range(REQUESTS * 40), ell)
    assert bench.ring._ell_oneoff_reserved == []
    assert bench.ring.live_sources() == 0
