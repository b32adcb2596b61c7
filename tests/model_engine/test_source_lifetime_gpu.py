"""The lifetime trials on hardware: certain to race without a protocol, and not with one.

``python -m pytest -m gpu tests/model_engine``
"""

from __future__ import annotations

import pytest
from transfer_paths import PATHS, TransferPath

from atom.config import CopyProtocol
from atom.device.accelerator import Accelerator, why_no_accelerator
from atom.errors import StalePayload

TRIALS = 5
REASON = why_no_accelerator()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"no accelerator: {REASON}"),
]


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator()


def warm(path: TransferPath) -> None:
    """Fill the caches of both allocators: a first allocation may synchronise the device."""
    for _ in range(3):
        for step in (1, 2):
            path.send(path.step(step))
        path.device.synchronize()
        for _ in (1, 2):
            path.receive()


def parked_trial(path: TransferPath) -> tuple[bool, bool]:
    """Whether step 8 has step 7's address, and whether the copy was still parked by then."""
    path.park()
    payload = path.step(7)
    address = path.device.address(payload.raw)
    path.send(payload)
    del payload
    following = path.step(8)
    parked = not path.stream.query()
    reused = path.device.address(following.raw) == address
    marker = path.device.new_event()
    marker.record(path.device.default_stream)
    marker.synchronize()
    return reused, parked


@pytest.mark.parametrize("path_class", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("protocol", CopyProtocol)
def test_hardware_agrees(
    accelerator: Accelerator, path_class: type[TransferPath], protocol: CopyProtocol
) -> None:
    path = path_class(accelerator, protocol)
    warm(path)
    for _ in range(TRIALS):
        reused, parked = parked_trial(path)
        # blocking waits inside the send and so leaves nothing parked
        assert parked is (protocol is not CopyProtocol.BLOCKING)
        if protocol is CopyProtocol.UNPATCHED:
            assert reused
            with pytest.raises(StalePayload, match="carries step 8 where step 7 was expected"):
                path.receive()
        else:
            # zero_copy parks nothing: its slot may land, be read out and serve the next step
            if protocol not in (CopyProtocol.BLOCKING, CopyProtocol.ZERO_COPY):
                assert not reused
            assert set(path.receive()) == {7}
        accelerator.synchronize()
