"""Order and lifetime inside the queues and the processor."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transfer_paths import BATCH, DraftIds, SpecStatus, SpyEvent, TokenIds, own_queue_stream

from atom.config import CopyProtocol
from atom.device.interface import Event, Stream
from atom.device.virtual import VirtualDevice
from atom.errors import DeviceError, StalePayload
from atom.model_engine.output_transfer import TokenIDProcessor, UnpatchedWarning
from atom.transfer.d2h_queue import D2HQueue, NothingQueued, SpecStatusQueue
from atom.transfer.payload import Payload, WrongPayload, epoch_tag
from atom.transfer.pinned_ring import PinnedRingFull


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice("MI355X")


def spy_on_oldest(queue: D2HQueue, seen: object, *, waits: bool = True) -> None:
    slot = queue._slots[0]
    slot.copy_done = cast(Event, SpyEvent(slot.copy_done, seen, waits=waits))


def test_receive_waits_before_it_releases(device: VirtualDevice) -> None:
    path = DraftIds(device, CopyProtocol.HOLD)
    path.park()
    payload = path.step(7)
    block = weakref.ref(payload.raw)
    path.send(payload)
    del payload
    alive: list[bool] = []
    spy_on_oldest(path.processor.draft_ids, lambda: alive.append(block() is not None))
    path.receive()
    assert alive == [True]
    assert block() is None


def test_drain_waits_for_all_before_it_releases_any(device: VirtualDevice) -> None:
    path = DraftIds(device, CopyProtocol.HOLD)
    path.park()
    blocks = []
    for step in range(3):
        payload = path.step(step)
        blocks.append(weakref.ref(payload.raw))
        path.send(payload)
        del payload
    alive: list[int] = []
    queue = path.processor.draft_ids
    for slot in queue._slots:
        count = lambda: alive.append(sum(block() is not None for block in blocks))  # noqa: E731
        slot.copy_done = cast(Event, SpyEvent(slot.copy_done, count))
    assert queue.drain() == 3
    assert alive == [3, 3, 3]
    assert [block() for block in blocks] == [None] * 3
    assert (len(queue), queue.ring.busy) == (0, 0)


def test_the_handle_owns_ids_and_logprobs_until_the_wait(device: VirtualDevice) -> None:
    path = TokenIds(device, CopyProtocol.HOLD)
    processor = path.processor
    path.park()
    ids, logprobs = processor.new_token_ids(7, (BATCH,)), processor.new_logprobs(7, (BATCH,))
    path.produce(ids, 7)
    path.produce(logprobs, 7)
    blocks = [weakref.ref(ids.raw), weakref.ref(logprobs.raw)]
    processor.send_to_cpu_async(ids, logprobs)
    del ids, logprobs
    assert len(processor.cpu_tensor_handle) == 1
    entry = processor.cpu_tensor_handle[0]
    assert entry.source is not None
    assert len(entry.source) == len(entry.cpu_tensors) == 2
    alive: list[bool] = []
    spy = SpyEvent(entry.copy_done, lambda: alive.append(all(b() is not None for b in blocks)))
    processor.cpu_tensor_handle[0] = entry._replace(copy_done=cast(Event, spy))
    del entry
    values, scores = processor.recv_async_output()
    assert scores is not None
    assert set(values.tolist()) == set(scores.tolist()) == {7}
    assert alive == [True]
    assert [block() for block in blocks] == [None, None]
    assert processor.ring.busy == 0


@pytest.mark.parametrize("protocol", CopyProtocol)
def test_without_edge_a_the_copy_reads_too_early(
    device: VirtualDevice, protocol: CopyProtocol
) -> None:
    """The producer is late. With the edge the value is right; without it the tag says so."""
    for with_edge in (True, False):
        path = DraftIds(device, protocol)
        if not with_edge:
            # the edge is then taken from a stream that has nothing queued
            path.processor.draft_ids._lane.producer_stream = device.new_stream()
        payload = path.new(7)
        device.spin(0.01)
        path.produce(payload, 7)
        path.send(payload)
        if with_edge:
            assert set(path.receive()) == {7}
        else:
            with pytest.raises(StalePayload, match="where step 7 was expected"):
                path.receive()
        device.synchronize()


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.ZERO_COPY])
def test_without_edge_b_the_host_reads_the_previous_step(
    device: VirtualDevice, protocol: CopyProtocol
) -> None:
    """The previous count is in range; only the tag can tell."""
    path = DraftIds(device, protocol)
    path.send(path.step(6))
    path.receive()
    path.park()
    device.spin(0.01)
    path.send(path.step(7))
    spy_on_oldest(path.processor.draft_ids, None, waits=False)
    with pytest.raises(StalePayload, match="carries step 6 where step 7 was expected"):
        path.receive()
    device.synchronize()


def test_a_stale_payload_counts_as_received(device: VirtualDevice) -> None:
    path = SpecStatus(device, CopyProtocol.HOLD)
    payload = path.new(7)
    path.produce(payload, 7)
    payload.step = 9
    path.send(payload)
    del payload
    with pytest.raises(StalePayload, match="carries step 7 where step 9 was expected"):
        path.receive()
    assert (path.live(), path.processor.ring.busy) == (0, 0)
    path.send(path.step(10))
    assert set(path.receive()) == {10}


def test_a_raw_receive_never_raises(device: VirtualDevice) -> None:
    path = SpecStatus(device, CopyProtocol.UNPATCHED)
    queue = path.processor.spec_status
    path.park()
    path.send(path.step(7))
    path.step(8)
    received = queue.receive_raw()
    assert received.step == 7
    assert received.tag_ok is False
    assert received.first_tag == received.last_tag == epoch_tag(8, queue.kind)
    assert received.data.unique().tolist() == [8]
    assert received.raw.numel() == queue.layout((2, BATCH), torch.int32, (2, BATCH)).host_bytes
    assert received.fault is not None
    path.send(path.step(9))
    assert queue.receive_raw().tag_ok is True
    untagged = D2HQueue(device, path.stream, epoch_tag=False)
    untagged.send(untagged.new_payload(1, (4,), torch.int32))
    assert untagged.receive_raw().tag_ok is None


def count_events(device: VirtualDevice, work: Callable[[], None], monkeypatch: Any) -> int:
    made: list[int] = []
    original = device.new_event

    def counted(timing: bool = False) -> Any:
        made.append(1)
        return original(timing)

    monkeypatch.setattr(device, "new_event", counted)
    work()
    monkeypatch.undo()
    return len(made)


def test_no_protocol_makes_more_events_than_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for protocol in CopyProtocol:
        device = VirtualDevice("MI355X")
        stream = own_queue_stream(device)

        def work(
            device: VirtualDevice = device,
            protocol: CopyProtocol = protocol,
            stream: Stream = stream,
        ) -> None:
            path = SpecStatus(device, protocol, stream=stream)
            ids = TokenIds(device, protocol, stream=stream)
            for step in range(50):
                path.send(path.step(step))
                ids.send(ids.step(step))
                path.receive()
                ids.receive()
            path.processor.clean()

        counts[protocol] = count_events(device, work, monkeypatch)
    assert set(counts.values()) == {counts[CopyProtocol.UNPATCHED]}
    assert counts[CopyProtocol.UNPATCHED] < 10


def everything_in_flight(processor: TokenIDProcessor, path: DraftIds) -> list[weakref.ref[Any]]:
    payloads = [
        processor.new_token_ids(7, (BATCH,)),
        processor.new_logprobs(7, (BATCH, 5)),
        processor.draft_ids.new_payload(7, (BATCH, 3), torch.int64),
        processor.spec_status.new_verdict(7, BATCH, rows=4),
    ]
    for payload in payloads:
        path.produce(payload, 7)
    processor.send_to_cpu_async(payloads[0], payloads[1])
    processor.draft_ids.send(payloads[2])
    processor.spec_status.send(payloads[3])
    return [weakref.ref(payload.raw) for payload in payloads]


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "control: no wait"])
def test_clean_with_everything_in_flight(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    path = DraftIds(device, CopyProtocol.HOLD)
    processor = path.processor
    path.park()
    blocks = everything_in_flight(processor, path)
    assert all(block() is not None for block in blocks)
    landed = [
        (slot, layout)
        for slot, (layout, _) in zip(
            processor.cpu_tensor_handle[0].cpu_tensors,
            processor.cpu_tensor_handle[0].expected,
            strict=True,
        )
    ]
    landed += [
        (queue._slots[0].target, queue._slots[0].layout)
        for queue in (processor.draft_ids, processor.spec_status)
    ]
    if not waits:
        monkeypatch.setattr(TokenIDProcessor, "_wait_for_copies", lambda self: None)
        monkeypatch.setattr(D2HQueue, "wait", lambda self: None)
    old_queues = processor.draft_ids, processor.spec_status
    processor.clean()
    assert [block() for block in blocks] == [None] * 4
    assert processor.draft_ids is not old_queues[0]
    assert processor.spec_status is not old_queues[1]
    assert (processor.copies_in_flight, processor.live_sources(), processor.ring.busy) == (0, 0, 0)
    following = [
        processor.new_token_ids(8, (BATCH,)),
        processor.new_logprobs(8, (BATCH, 5)),
        processor.draft_ids.new_payload(8, (BATCH, 3), torch.int64),
        processor.spec_status.new_verdict(8, BATCH, rows=4),
    ]
    for payload in following:
        path.produce(payload, 8)
    device.synchronize()
    values = [set(slot.data(layout).flatten().tolist()) for slot, layout in landed]
    if waits:
        assert values == [{7}] * 4
    else:
        # every source raced, which is what the wait is for
        assert all(found != {7} for found in values)


def test_clean_waits_on_the_handle_before_it_pops(device: VirtualDevice) -> None:
    path = TokenIds(device, CopyProtocol.HOLD)
    processor = path.processor
    path.park()
    payload = path.step(7)
    block = weakref.ref(payload.raw)
    path.send(payload)
    del payload
    alive: list[bool] = []
    entry = processor.cpu_tensor_handle.pop()
    spy = SpyEvent(entry.copy_done, lambda: alive.append(block() is not None))
    processor.cpu_tensor_handle.append(entry._replace(copy_done=cast(Event, spy)))
    del entry
    processor.clean()
    assert alive == [True]
    assert block() is None


def test_clean_on_nothing_is_fine(device: VirtualDevice) -> None:
    processor = TokenIDProcessor(device)
    processor.clean()
    assert processor.copies_in_flight == 0


def test_unpatched_says_so_and_others_do_not(device: VirtualDevice) -> None:
    with pytest.warns(UnpatchedWarning, match="experiments only"):
        TokenIDProcessor(device, CopyProtocol.UNPATCHED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for protocol in CopyProtocol:
            if protocol is not CopyProtocol.UNPATCHED:
                TokenIDProcessor(device, protocol)


def test_an_empty_receive_is_refused(device: VirtualDevice) -> None:
    processor = TokenIDProcessor(device)
    for receive in (
        processor.recv_async_output,
        processor.draft_ids.receive,
        processor.draft_ids.receive_raw,
        processor.spec_status.receive_status,
    ):
        with pytest.raises(NothingQueued):
            receive()


def test_sending_without_receiving_ends_in_a_clear_error(device: VirtualDevice) -> None:
    queue = SpecStatusQueue(device, device.new_stream(), max_slots=3)
    for step in range(3):
        queue.send(queue.new_verdict(step, 4))
    with pytest.raises(PinnedRingFull, match="max_slots"):
        queue.send(queue.new_verdict(3, 4))
    assert queue.drain() == 3


def test_a_zero_copy_payload_is_sent_once_and_comes_from_its_queue(device: VirtualDevice) -> None:
    queue = D2HQueue(device, device.new_stream(), CopyProtocol.ZERO_COPY)
    payload = queue.new_payload(1, (4,), torch.int32)
    payload.stamp(device)
    queue.send(payload)
    with pytest.raises(DeviceError, match="sent once"):
        queue.send(payload)
    layout = queue.layout((4,), torch.int32)
    block = device.empty((layout.total_bytes,), torch.uint8)
    with pytest.raises(DeviceError, match="new_payload"):
        queue.send(Payload(layout, 2, block))
    queue.drain()


def test_a_verdict_has_its_status_rows(device: VirtualDevice) -> None:
    queue = SpecStatusQueue(device, device.new_stream())
    verdict = queue.new_verdict(1, 8, rows=5)
    assert verdict.data.shape == (2, 8)
    assert verdict.rest is not None
    assert verdict.rest.shape == (3, 8)
    assert queue.new_verdict(1, 8).rest is None
    with pytest.raises(ValueError, match="at least 2 rows"):
        queue.new_verdict(1, 8, rows=1)


def test_a_received_tensor_does_not_change_when_its_slot_is_reused(device: VirtualDevice) -> None:
    path = DraftIds(device, CopyProtocol.HOLD)
    path.send(path.step(1))
    first = path.processor.draft_ids.receive()
    path.send(path.step(2))
    path.receive()
    assert path.processor.ring.grown == 1
    assert first.unique().tolist() == [1]


# -- a send that fails


def _ids_and_logprobs(processor: TokenIDProcessor, step: int) -> tuple[Payload, Payload]:
    payloads = processor.new_token_ids(step, (BATCH,)), processor.new_logprobs(step, (BATCH,))
    for payload in payloads:
        payload.stamp(processor.device)
    return payloads


def test_a_ring_that_is_full_at_the_second_payload_queues_and_keeps_nothing(
    device: VirtualDevice,
) -> None:
    processor = TokenIDProcessor(device, max_slots=3)
    processor.send_to_cpu_async(*_ids_and_logprobs(processor, 1))
    stream = processor.async_copy_stream
    stream.synchronize()
    for _ in range(3):
        payloads = _ids_and_logprobs(processor, 2)
        device.default_stream.synchronize()
        with pytest.raises(PinnedRingFull):
            processor.send_to_cpu_async(*payloads)
        # a queued copy would still read a source that nobody holds
        assert stream.query()
        assert (processor.ring.busy, processor.copies_in_flight) == (2, 1)
    processor.recv_async_output()
    payloads = _ids_and_logprobs(processor, 2)
    processor.send_to_cpu_async(*payloads)
    processor.clean()
    assert processor.ring.busy == 0


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.RECORD_STREAM])
def test_a_copy_that_fails_leaves_none_of_its_send_in_flight(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch, protocol: CopyProtocol
) -> None:
    processor = TokenIDProcessor(device, protocol)
    payloads = _ids_and_logprobs(processor, 1)
    copy, calls = device.copy, []

    def failing_copy(*arguments: Any, **more: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise DeviceError("no second copy")
        copy(*arguments, **more)

    monkeypatch.setattr(device, "copy", failing_copy)
    with pytest.raises(DeviceError, match="no second copy"):
        processor.send_to_cpu_async(*payloads)
    assert len(calls) == 2
    assert processor.async_copy_stream.query()
    assert (processor.ring.busy, processor.live_sources()) == (0, 0)


def test_a_zero_copy_payload_that_gets_no_device_memory_loses_no_slot(
    device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = TokenIDProcessor(device, CopyProtocol.ZERO_COPY)

    def no_memory(*_: Any, **__: Any) -> None:
        raise DeviceError("no memory")

    monkeypatch.setattr(device, "empty", no_memory)
    with pytest.raises(DeviceError, match="no memory"):
        processor.spec_status.new_verdict(1, BATCH, rows=4)
    assert processor.ring.busy == 0


def test_a_payload_of_another_kind_is_refused_before_anything_is_queued(
    device: VirtualDevice,
) -> None:
    processor = TokenIDProcessor(device)
    ids, logprobs = _ids_and_logprobs(processor, 5)
    for send in (
        lambda: processor.draft_ids.send(ids),
        lambda: processor.spec_status.send(ids),
        lambda: processor.send_to_cpu_async(logprobs),
        lambda: processor.send_to_cpu_async(ids, ids),
    ):
        with pytest.raises(WrongPayload, match="of step 5"):
            send()
    assert (processor.ring.busy, processor.copies_in_flight) == (0, 0)


def test_a_payload_without_its_stamp_is_named_as_a_possible_cause(device: VirtualDevice) -> None:
    processor = TokenIDProcessor(device)
    processor.send_to_cpu_async(processor.new_token_ids(1, (BATCH,)))
    with pytest.raises(StalePayload, match="never stamped"):
        processor.recv_async_output()
