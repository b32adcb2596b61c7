"""Streams and events of ``torch.cuda`` behind the interface."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from atom.device import interface
from atom.errors import WrongDevice


def raw_of(wrapper: object) -> torch.cuda.Stream | torch.cuda.Event:
    """The torch object behind a stream or an event of an accelerator.

    Raises:
        WrongDevice: it belongs to another device.
    """
    raw = getattr(wrapper, "raw", None)
    if not isinstance(raw, (torch.cuda.Stream, torch.cuda.Event)):
        raise WrongDevice(f"{type(wrapper).__name__} does not belong to an accelerator")
    return raw


class AcceleratorEvent:
    """A ``torch.cuda.Event``."""

    __slots__ = ("_record", "_wait", "query", "raw", "synchronize")

    def __init__(self, timing: bool) -> None:
        self.raw = torch.cuda.Event(enable_timing=timing)
        # bound once: a status copy uses its event every step
        self.query = self.raw.query
        # the class's own methods only fill in the current stream, which is never asked for here
        base: Any = super(torch.cuda.Event, self.raw)
        self.synchronize = base.synchronize
        self._record, self._wait = base.record, base.wait

    def record(self, stream: interface.Stream | None = None) -> None:
        """Mark the present end of ``stream`` (``None``: the home stream)."""
        if stream is None:
            self.raw.record()
        else:
            self._record(raw_of(stream))

    def wait(self, stream: interface.Stream | None = None) -> None:
        """Make ``stream`` wait for the latest record."""
        if stream is None:
            self.raw.wait()
        else:
            self._wait(raw_of(stream))

    def elapsed_time(self, end: interface.Event) -> float:
        """Milliseconds to ``end``."""
        return float(self.raw.elapsed_time(raw_of(end)))


class AcceleratorStream:
    """A ``torch.cuda.Stream``."""

    __slots__ = ("make_current", "query", "raw", "stream_id", "synchronize")

    def __init__(self, raw: torch.cuda.Stream, default: bool) -> None:
        self.raw = raw
        #: ``torch.cuda.set_stream`` of this stream, with what it looks up
        self.make_current = partial(
            torch._C._cuda_setStream,
            stream_id=raw.stream_id,
            device_index=raw.device_index,
            device_type=raw.device_type,
        )
        self.stream_id = 0 if default else int(raw.stream_id)
        self.query = raw.query
        self.synchronize = raw.synchronize

    def wait_event(self, event: interface.Event) -> None:
        """Wait for the latest record of ``event``."""
        if isinstance(event, AcceleratorEvent):
            event._wait(self.raw)
        else:
            self.raw.wait_event(raw_of(event))

    def wait_stream(self, stream: interface.Stream) -> None:
        """Wait for everything queued on ``stream`` so far."""
        self.raw.wait_stream(raw_of(stream))

    def record_event(self, event: interface.Event | None = None) -> interface.Event:
        """Record ``event`` (a new one if ``None``) here and return it."""
        marker = AcceleratorEvent(timing=False) if event is None else event
        raw_of(marker).record(self.raw)
        return marker


def make_current(stream: object) -> None:
    """Make ``stream`` PyTorch's current stream.

    Raises:
        WrongDevice: it belongs to another device.
    """
    if not isinstance(stream, AcceleratorStream):
        raw_of(stream)
        raise WrongDevice(f"{type(stream).__name__} is no stream of an accelerator")
    stream.make_current()
