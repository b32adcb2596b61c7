"""Streams and events of ``torch.cuda`` behind the interface."""

from __future__ import annotations

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

    __slots__ = ("query", "raw", "synchronize")

    def __init__(self, timing: bool) -> None:
        self.raw = torch.cuda.Event(enable_timing=timing)
        # bound once: a status copy queries and waits on its event every step
        self.query = self.raw.query
        self.synchronize = self.raw.synchronize

    def record(self, stream: interface.Stream | None = None) -> None:
        """Mark the present end of ``stream`` (``None``: the home stream)."""
        self.raw.record(None if stream is None else raw_of(stream))

    def wait(self, stream: interface.Stream | None = None) -> None:
        """Make ``stream`` wait for the latest record."""
        self.raw.wait(None if stream is None else raw_of(stream))

    def elapsed_time(self, end: interface.Event) -> float:
        """Milliseconds to ``end``."""
        return float(self.raw.elapsed_time(raw_of(end)))


class AcceleratorStream:
    """A ``torch.cuda.Stream``."""

    __slots__ = ("query", "raw", "stream_id", "synchronize")

    def __init__(self, raw: torch.cuda.Stream, default: bool) -> None:
        self.raw = raw
        self.stream_id = 0 if default else int(raw.stream_id)
        self.query = raw.query
        self.synchronize = raw.synchronize

    def wait_event(self, event: interface.Event) -> None:
        """Wait for the latest record of ``event``."""
        self.raw.wait_event(raw_of(event))

    def wait_stream(self, stream: interface.Stream) -> None:
        """Wait for everything queued on ``stream`` so far."""
        self.raw.wait_stream(raw_of(stream))

    def record_event(self, event: interface.Event | None = None) -> interface.Event:
        """Record ``event`` (a new one if ``None``) here and return it."""
        marker = AcceleratorEvent(timing=False) if event is None else event
        raw_of(marker).record(self.raw)
        return marker
