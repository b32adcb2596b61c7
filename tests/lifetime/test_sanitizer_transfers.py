"""The project's own transfers under the sanitizer: seven paths, five protocols, both devices."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from atom.config import CopyProtocol
from atom.device import open_device
from atom.errors import StalePayload
from atom.lifetime.findings import Kind, Report
from atom.lifetime.sanitizer import sanitizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model_engine"))
from transfer_paths import PATHS, TokenIds, TransferPath

DEVICES = ["virtual", pytest.param("accelerator", marks=pytest.mark.gpu)]
UNPATCHED = CopyProtocol.UNPATCHED


def steps(path: TransferPath) -> None:
    """Four steps with two in flight, as an engine does them."""
    path.park()
    path.send(path.step(1))
    for step in (2, 3, 4):
        path.park()
        payload = path.step(step)
        path.send(payload)
        del payload
        # what the host gets is another test's business
        with contextlib.suppress(StalePayload):
            path.receive()


@pytest.mark.parametrize("choice", DEVICES)
@pytest.mark.parametrize("path_class", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("protocol", CopyProtocol)
def test_unpatched_alone_is_found(
    choice: str, path_class: type[TransferPath], protocol: CopyProtocol
) -> None:
    with sanitizer() as report:
        device = open_device(choice)
        path = path_class(device, protocol)
        steps(path)
        path.processor.clean()
        device.synchronize()
    kinds = {finding.kind for finding in report.findings}
    assert kinds == ({Kind.FREED_IN_USE} if protocol is UNPATCHED else set()), report.text()


@pytest.mark.parametrize("choice", DEVICES)
@pytest.mark.parametrize("waits", [True, False])
def test_clean_without_its_wait_is_found(
    choice: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Report:
        with sanitizer() as report:
            device = open_device(choice)
            path = TokenIds(device, CopyProtocol.HOLD)
            path.park()
            for step in (1, 2):
                path.send(path.step(step))
            if not waits:
                monkeypatch.setattr(path.processor, "_wait_for_copies", lambda: None)
            path.processor.clean()
            device.synchronize()
        return report

    kinds = {finding.kind for finding in run().findings}
    assert kinds == (set() if waits else {Kind.FREED_IN_USE})
