"""Every source under every protocol: on time, and with the copy parked behind a spin kernel.

The same trial that shows a protocol safe must show ``unpatched`` racing: that is the control.
"""

from __future__ import annotations

import gc
import weakref

import pytest
from transfer_paths import BATCH, PATHS, SpecStatus, TransferPath

from atom.config import CopyProtocol
from atom.device.virtual import VirtualDevice
from atom.errors import StalePayload

SAFE = [protocol for protocol in CopyProtocol if protocol is not CopyProtocol.UNPATCHED]
each_path = pytest.mark.parametrize("path_class", PATHS, ids=lambda path: path.__name__)


def parked_trial(path: TransferPath) -> bool:
    """Step 7 sent behind a parked copy stream and dropped; step 8 written. Did it reuse the block?

    Returns:
        Whether step 8's payload has step 7's address.
    """
    path.park()
    payload = path.step(7)
    address = path.device.address(payload.raw)
    path.send(payload)
    del payload
    following = path.step(8)
    return path.device.address(following.raw) == address


@each_path
@pytest.mark.parametrize("protocol", CopyProtocol)
def test_a_copy_on_time_is_right(path_class: type[TransferPath], protocol: CopyProtocol) -> None:
    path = path_class(VirtualDevice("MI355X"), protocol)
    for step in range(1, 12):
        path.send(path.step(step))
        assert set(path.receive()) == {step}
    assert path.live() == 0


@each_path
def test_unpatched_reads_the_next_step(path_class: type[TransferPath]) -> None:
    path = path_class(VirtualDevice("MI355X"), CopyProtocol.UNPATCHED, epoch_tag=False)
    assert parked_trial(path)
    assert path.live() == 0
    assert set(path.receive()) == {8}


@each_path
def test_the_tag_catches_it(path_class: type[TransferPath]) -> None:
    path = path_class(VirtualDevice("MI355X"), CopyProtocol.UNPATCHED)
    assert parked_trial(path)
    with pytest.raises(StalePayload, match="carries step 8 where step 7 was expected"):
        path.receive()


@each_path
@pytest.mark.parametrize("protocol", SAFE)
@pytest.mark.parametrize("epoch_tag", [True, False])
def test_the_other_protocols_do_not_race(
    path_class: type[TransferPath], protocol: CopyProtocol, epoch_tag: bool
) -> None:
    path = path_class(VirtualDevice("MI355X"), protocol, epoch_tag=epoch_tag)
    reused = parked_trial(path)
    # blocking waited inside the send, so its block may be used again; nobody else's may
    assert reused is (protocol is CopyProtocol.BLOCKING)
    assert set(path.receive()) == {7}


@each_path
@pytest.mark.parametrize("protocol", CopyProtocol)
def test_one_queue_hides_the_race(path_class: type[TransferPath], protocol: CopyProtocol) -> None:
    """Why the trials pick a stream with a queue of its own."""
    device = VirtualDevice("MI355X", hardware_queues=1)
    path = path_class(device, protocol, stream=device.new_stream())
    parked_trial(path)
    assert set(path.receive()) == {7}


@each_path
def test_a_held_source_lives_until_it_is_received(path_class: type[TransferPath]) -> None:
    path = path_class(VirtualDevice("MI355X"), CopyProtocol.HOLD)
    path.park()
    payload = path.step(7)
    block = weakref.ref(payload.raw)
    path.send(payload)
    del payload
    gc.collect()
    assert block() is not None
    assert path.live() == path.sources
    path.receive()
    gc.collect()
    assert block() is None
    assert path.live() == 0


@each_path
@pytest.mark.parametrize(
    "protocol", [CopyProtocol.UNPATCHED, CopyProtocol.RECORD_STREAM, CopyProtocol.BLOCKING]
)
def test_the_others_keep_no_reference(
    path_class: type[TransferPath], protocol: CopyProtocol
) -> None:
    path = path_class(VirtualDevice("MI355X"), protocol)
    payload = path.step(7)
    block = weakref.ref(payload.raw)
    path.send(payload)
    del payload
    assert block() is None
    assert path.live() == 0
    assert set(path.receive()) == {7}


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.ZERO_COPY])
def test_a_long_window_keeps_every_step_apart(protocol: CopyProtocol) -> None:
    path = SpecStatus(VirtualDevice("MI355X"), protocol)
    path.park()
    for step in range(20):
        path.send(path.step(step))
    assert path.live() == 20
    for step in range(20):
        assert path.receive() == [step] * (2 * BATCH)
    assert path.live() == 0


def test_a_view_of_the_verdict_keeps_its_whole_block() -> None:
    """The status is a view: whoever holds the other rows holds the block, protocol or not."""
    path = SpecStatus(VirtualDevice("MI355X"), CopyProtocol.UNPATCHED)
    path.park()
    payload = path.step(7)
    rest = payload.rest
    assert rest is not None
    address = path.device.address(payload.raw)
    path.send(payload)
    del payload
    assert path.device.address(path.step(8).raw) != address
    assert set(path.receive()) == {7}
