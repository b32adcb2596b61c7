"""zero_copy: where it is refused, what holds its slots, and what hardware must show."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from atom.config import CopyProtocol
from atom.device.accelerator import Accelerator
from atom.device.host_visibility import COHERENT_VARIABLE, why_no_host_writes
from atom.device.interface import Device, DeviceKind, Kernel
from atom.device.virtual import VirtualDevice
from atom.errors import DeviceError
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload

ZERO = CopyProtocol.ZERO_COPY


def _write(reads: Sequence[Tensor], writes: Sequence[Tensor], value: int) -> None:
    writes[0].view(torch.int32).fill_(value)


WRITE = Kernel("write", _write)


class Unseen(VirtualDevice):
    """A device whose kernels' writes the host may not read."""

    def why_no_host_writes(self) -> str | None:
        """See :class:`Device`."""
        return why_no_host_writes(DeviceKind.HIP, {})


@pytest.mark.parametrize(
    ("kind", "environment", "reason"),
    [
        (DeviceKind.CUDA, {}, None),
        (DeviceKind.VIRTUAL, {}, None),
        (DeviceKind.HIP, {}, COHERENT_VARIABLE),
        (DeviceKind.HIP, {COHERENT_VARIABLE: "0"}, COHERENT_VARIABLE),
        (DeviceKind.HIP, {COHERENT_VARIABLE: "1"}, None),
        (
            DeviceKind.HIP,
            {
                COHERENT_VARIABLE: "1",
                "PYTORCH_HIP_ALLOC_CONF": "pinned_use_cuda_host_register: True",
            },
            "register",
        ),
    ],
)
def test_the_host_may_read_coherent_memory_alone(
    kind: DeviceKind, environment: Mapping[str, str], reason: str | None
) -> None:
    found = why_no_host_writes(kind, environment)
    assert (found is None) is (reason is None)
    assert reason is None or reason in (found or "")


def test_whatever_sends_refuses_such_a_device_before_it_makes_a_slot() -> None:
    device = Unseen("MI355X")
    stream = device.new_stream()
    for make in (
        lambda: D2HQueue(device, stream, ZERO),
        lambda: TokenIDProcessor(device, ZERO),
        lambda: EllRing(device, stream, ZERO),
    ):
        with pytest.raises(DeviceError, match=f"zero_copy does not work here.*{COHERENT_VARIABLE}"):
            make()
    # the others send copies
    TokenIDProcessor(device, CopyProtocol.HOLD)


def sends_of(device: Device) -> TokenIDProcessor:
    return TokenIDProcessor(device, ZERO, epoch_tag=False)


def test_no_payload_is_made_inside_a_capture() -> None:
    device = VirtualDevice("MI355X")
    processor = sends_of(device)
    with device.capture(), pytest.raises(DeviceError, match="outside the graph"):
        processor.spec_status.new_verdict(1, 4)
    assert len(processor.ring) == 0
    # control: a copied payload may be made there, for the arm of a static output
    hold = TokenIDProcessor(device, CopyProtocol.HOLD, epoch_tag=False)
    with device.capture():
        hold.spec_status.new_verdict(1, 4, opened=False)


def test_slots_live_as_long_as_what_sends() -> None:
    device = VirtualDevice("MI355X")
    processor = sends_of(device)
    seen: dict[int, weakref.ref[Tensor]] = {}
    for step in range(40):
        status = processor.spec_status.new_verdict(step, 4, opened=False)
        ids = processor.new_token_ids(step, (4, 4), opened=False)
        for payload in (status, ids):
            assert payload.slot is not None
            seen[payload.slot.index] = weakref.ref(payload.slot.tensor)
            device.launch(WRITE, (), (payload.raw,), scalars=(step,))
        del payload
        processor.spec_status.send(status)
        processor.send_to_cpu_async(ids)
        del status, ids
        if step >= 2:
            assert set(processor.spec_status.receive().flatten().tolist()) == {step - 2}
            processor.recv_async_output()
    assert processor.ring.grown == len(processor.ring) == len(seen)
    processor.clean()
    assert all(slot() is not None for slot in seen.values())
    assert processor.ring.busy == 0


@pytest.mark.parametrize("early", [False, True])
def test_a_slot_that_is_handed_out_before_it_was_read_holds_another_step(early: bool) -> None:
    """The protocol's own hazard; with ``early`` the control, which must show the next step."""
    device = VirtualDevice("MI355X")
    processor = sends_of(device)
    ring = processor.ring

    def step(number: int) -> Payload:
        payload = processor.spec_status.new_verdict(number, 4, opened=False)
        device.launch(WRITE, (), (payload.raw,), scalars=(number,))
        processor.spec_status.send(payload)
        return payload

    first = step(1)
    if early:
        # what release() refuses until the reader is done: the slot is free again
        assert first.slot is not None
        ring._busy.discard(first.slot)
        device.synchronize()
        ring._free[first.slot.capacity].append(first.slot)
    second = step(2)
    device.synchronize()
    assert (second.slot is first.slot) is early
    assert set(processor.spec_status.receive().flatten().tolist()) == ({2} if early else {1})


# -- hardware
@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator()


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize("asks", [False, True])
    def test_what_a_kernel_wrote_is_there_once_its_event_is(
        self, accelerator: Accelerator, asks: bool
    ) -> None:
        """Both ways to know of an event: a wait, and a query that says yes."""
        queue = D2HQueue(accelerator, accelerator.new_stream(), ZERO, epoch_tag=False)
        side = accelerator.new_stream()
        for step in range(1, 1500):
            if step % 50 == 0:
                # other traffic on the host link
                accelerator.traffic(2**22, "d2h", stream=side)
            payload = queue.new_payload(step, (512,), torch.int32)
            accelerator.launch(WRITE, (), (payload.raw,), scalars=(step,))
            done = queue.send(payload)
            del payload
            while asks and not done.query():
                pass
            assert set(queue.receive().tolist()) == {step}
        assert queue.ring.grown <= 2

    def test_nothing_waits_behind_a_store(self, accelerator: Accelerator) -> None:
        stream = accelerator.new_stream()
        for protocol, late in ((CopyProtocol.HOLD, True), (ZERO, False)):
            queue = D2HQueue(accelerator, stream, protocol, epoch_tag=False)
            accelerator.spin(0.05, stream=stream)
            payload = queue.new_payload(1, (64,), torch.int32)
            accelerator.launch(WRITE, (), (payload.raw,), scalars=(1,))
            queue.send(payload)
            del payload
            accelerator.default_stream.synchronize()
            assert stream.query() is False
            assert queue._slots[0].copy_done.query() is not late
            assert set(queue.receive().tolist()) == {1}
            accelerator.synchronize()

    def test_no_payload_inside_a_capture(self, accelerator: Accelerator) -> None:
        queue = D2HQueue(accelerator, accelerator.new_stream(), ZERO, epoch_tag=False)
        with accelerator.capture(), pytest.raises(DeviceError, match="outside the graph"):
            queue.new_payload(1, (64,), torch.int32)
        assert not accelerator.capturing
        accelerator.synchronize()
