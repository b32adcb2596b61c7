"""The plain way to send a tensor to the host, as engines without a ring of their own do it.

It is here to be timed: a fresh pinned buffer and fresh events every time, a stream context manager,
and nothing that keeps the source (edge (c) is missing, as under ``unpatched``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from atom.device.accelerator import Accelerator
from atom.device.accelerator_streams import raw_of
from atom.device.interface import Device, Event, Stream
from atom.device.virtual_streams import VirtualEvent


def plain_host_copy(device: Device, source: Tensor, stream: Stream) -> tuple[Tensor, Event]:
    """Copy ``source`` to fresh host memory on ``stream``, behind the default stream's work.

    On an accelerator it is ``source.to("cpu", non_blocking=True)`` inside ``torch.cuda.stream``,
    after ``wait_stream``, with a fresh event behind it. The virtual device makes the same calls of
    the interface. ``source`` is not kept.

    Returns:
        The host tensor, and an event that completes when it has landed.
    """
    done = device.new_event()
    if isinstance(device, Accelerator):
        raw = raw_of(stream)
        with torch.cuda.stream(raw):
            raw.wait_stream(raw_of(device.default_stream))
            host = source.to("cpu", non_blocking=True)
            done.record(stream)
        return host, done
    stream.wait_stream(device.default_stream)
    host = device.pinned(source.shape, source.dtype)
    device.copy(host, source, stream=stream)
    done.record(stream)
    return host, done


@contextmanager
def counted_events(device: Device) -> Iterator[list[int]]:
    """Count the events that are made while the block runs; ``[count]``.

    On an accelerator every ``torch.cuda.Event`` counts, whoever makes it from Python; events inside
    PyTorch's allocators are made in C++ and do not.
    """
    count = [0]
    place, name = (
        (torch.cuda.Event, "__new__")
        if isinstance(device, Accelerator)
        else (VirtualEvent, "__init__")
    )
    original: Callable[..., Any] = getattr(place, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        return original(*arguments, **named)

    setattr(place, name, counting)
    try:
        yield count
    finally:
        setattr(place, name, original)
