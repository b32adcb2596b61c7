"""Finds use of memory that no order protects, in any PyTorch program and on the virtual device.

    with sanitizer() as report:
        step()
    report.raise_if_found()

It needs no unlucky timing and no reuse: a block that dies while another stream's use of it is
neither seen complete by the host, nor joined into the owner's stream, nor recorded with the
allocator is a finding, at the line of the free. See :mod:`atom.lifetime.findings` for what a
finding says, and ``Report.cannot_see`` for what a run was blind to.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atom.device import virtual
from atom.errors import DeviceError
from atom.lifetime.findings import Report, Suppression
from atom.lifetime.happens_before import StreamKey
from atom.lifetime.host_watch import put_back, replace
from atom.lifetime.monitor import Monitor
from atom.lifetime.torch_front import TorchFront
from atom.lifetime.torch_layer import CudaLayer, NoDevice, TorchLayer
from atom.lifetime.torch_patches import TorchPatches
from atom.lifetime.triton_launches import TritonLaunches
from atom.lifetime.virtual_observer import (
    STREAMS_A_DEVICE,
    VirtualObserver,
    virtual_stream_name,
)
from atom.lifetime.watch_mode import WatchMode

_BLIND = (
    "extensions and libraries that launch kernels past torch's dispatcher (Triton is watched)",
    "code compiled by torch.compile: its generated launches",
    "record_stream called by C++ code (the autograd engine, some collectives)",
    "reads of pinned memory by pickle, DLPack and ctypes, on the host",
    "kernels that reach pinned memory through a device alias, and when a pinned tensor dies",
    "torch.Event.query and torch.Stream.query of the generic classes, and bound methods of events "
    "that were taken before the start",
    "threads of the host among themselves: they count as one",
)


class Sanitizer:
    """The watch behind :func:`sanitizer`: start and stop it by hand where no block will do.

    Args:
        suppressions: findings that do not count, each with its reason.
        layer: torch's device layer; ``None`` takes ``torch.cuda`` if this torch drives a device.
    """

    def __init__(
        self, suppressions: Iterable[Suppression] = (), layer: TorchLayer | None = None
    ) -> None:
        self.report = Report(suppressions=tuple(suppressions))
        if layer is None:
            built = torch.version.cuda is not None or torch.version.hip is not None
            layer = CudaLayer() if built else NoDevice()
        self._layer = layer
        self._names: dict[StreamKey, str] = {}
        self.monitor = Monitor(self.report, self._stream_name)
        self.front = TorchFront(self.monitor, layer)
        self._patches = TorchPatches(self.front)
        self._triton = TritonLaunches(self.front)
        self._observers: list[VirtualObserver] = []
        self._replaced: list[tuple[type, str, Any]] = []
        self._mode: WatchMode | None = None

    def _stream_name(self, key: StreamKey) -> str:
        if key <= 0:
            return "the default stream" + (f" of device {-key}" if key else "")
        if STREAMS_A_DEVICE <= key < STREAMS_A_DEVICE * (len(self._observers) + 1):
            return virtual_stream_name(key)
        return self._names.setdefault(key, f"stream {len(self._names) + 1} ({key:#x})")

    def start(self) -> None:
        """Start to watch.

        Raises:
            DeviceError: torch lacks what the watch leans on, or its allocator hides itself.
        """
        refusal = self._layer.refusal()
        if refusal is not None:
            raise DeviceError(f"the lifetime sanitizer cannot watch this process: {refusal}")
        # what is garbage already does not die inside
        gc.collect()
        self.front.start()
        self._patches.apply()
        self._triton.apply()
        self.front.host.patch()
        for device in list(virtual._devices):
            self._observe(device)
        make = virtual.VirtualDevice.__init__
        watch = self

        def watched_make(self: virtual.VirtualDevice, *arguments: Any, **options: Any) -> None:
            make(self, *arguments, **options)
            watch._observe(self)

        replace(self._replaced, virtual.VirtualDevice, "__init__", watched_make)
        if not isinstance(self._layer, NoDevice):
            for text in _BLIND:
                self.report.note(text)
        self._mode = self.front.mode()
        self._mode.__enter__()

    def _observe(self, device: virtual.VirtualDevice) -> None:
        if device.observer is None:
            index = len(self._observers) + 1
            self._observers.append(VirtualObserver(device, self.monitor, index))

    def use(self, report: Report) -> None:
        """Send findings to another report from now on."""
        self.report = self.monitor.report = report

    def stop(self) -> None:
        """Stop, and put everything back as it was."""
        if self._mode is None:
            return
        self._mode.__exit__(None, None, None)
        self._mode = None
        put_back(self._replaced)
        for observer in self._observers:
            observer.detach()
        self.front.host.restore()
        self._triton.restore()
        self._patches.restore()
        self.front.stop()


@contextmanager
def sanitizer(
    suppressions: Iterable[Suppression] = (), *, layer: TorchLayer | None = None
) -> Iterator[Report]:
    """Watch the block; the report is complete when it ends. Off, nothing of it remains.

    Args:
        suppressions: findings that do not count, each with its reason.
        layer: torch's device layer, for tests.

    Raises:
        DeviceError: this torch or its allocator cannot be watched.
    """
    watch = Sanitizer(suppressions, layer)
    watch.start()
    try:
        yield watch.report
    finally:
        watch.stop()
