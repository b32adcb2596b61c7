"""Streams and events of an accelerator, over stand-ins for torch's classes: no call is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom.device import plain_copy
from atom.device.accelerator_streams import AcceleratorEvent, AcceleratorStream, make_current
from atom.device.plain_copy import counted_events
from atom.device.virtual import VirtualDevice
from atom.errors import WrongDevice


class _BaseEvent:
    calls: list[tuple[str, Any]]

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return object.__new__(cls)

    def record(self, stream: Any) -> None:
        self.calls.append(("record", stream))

    def wait(self, stream: Any) -> None:
        self.calls.append(("wait", stream))

    def synchronize(self) -> None:
        self.calls.append(("synchronize", None))

    def query(self) -> bool:
        return True


class _Event(_BaseEvent):
    """As ``torch.cuda.Event``: what it adds is looking up the current stream."""

    def __new__(cls, enable_timing: bool = False) -> Any:
        return super().__new__(cls, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record("current" if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait("current" if stream is None else stream)

    def query(self) -> bool:
        return super().query()


class _Stream:
    stream_id, device_index, device_type = 7, 0, 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    _BaseEvent.calls = found
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch._C, "_cuda_setStream", lambda **named: found.append(named), False)
    return found


def test_events_and_streams_reach_torch(calls: list[Any]) -> None:
    stream: Any = AcceleratorStream(_Stream(), default=False)
    event: Any = AcceleratorEvent(timing=False)
    event.record(stream)
    event.wait(stream)
    stream.wait_event(event)
    event.record()
    event.wait()
    event.synchronize()
    assert calls == [
        ("record", stream.raw),
        ("wait", stream.raw),
        ("wait", stream.raw),
        ("record", "current"),
        ("wait", "current"),
        ("synchronize", None),
    ]


def test_a_stream_is_made_current_as_torch_does(calls: list[Any]) -> None:
    stream: Any = AcceleratorStream(_Stream(), default=False)
    make_current(stream)
    assert calls == [{"stream_id": 7, "device_index": 0, "device_type": 1}]
    for wrong in (VirtualDevice("H200").default_stream, AcceleratorEvent(timing=False)):
        with pytest.raises(WrongDevice):
            make_current(wrong)


def test_every_event_of_torch_is_counted(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        pass

    monkeypatch.setattr(plain_copy, "Accelerator", Device)
    with counted_events(Device()) as made:  # type: ignore[arg-type]
        AcceleratorEvent(timing=False)
        _Event(enable_timing=True)
    assert made == [2]
    assert isinstance(AcceleratorEvent(timing=True).raw, _Event)
    assert made == [2]
