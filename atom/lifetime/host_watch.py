"""Host reads and writes of pinned memory that a queued copy or kernel still touches.

Operations on CPU tensors come from a dispatch mode; ``numpy`` and ``tolist`` read past it and are
patched while the sanitizer is on. Taking a NumPy view reads nothing yet, and reads through the view
cannot be seen. So a view that was taken too early counts as a read if it dies before the host has
seen the copy complete (``tensor.numpy().sum()``), and is named as a blind spot otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atom.lifetime.monitor import Monitor
from atom.lifetime.shadow import Access, View
from atom.lifetime.sites import CALLERS, RawSite, as_site, called_from, here

_DEVICE_AT_WORK = "atom/device/queue_model.py"
_MISSING = object()


def reach(tensor: Tensor) -> tuple[int, View]:
    """Bytes from a view's first to past its last element, and the view."""
    size = tensor.itemsize
    shape = tensor.shape
    if tensor.is_contiguous():
        return tensor.nbytes, View(tensor.dtype, shape, size)
    if tensor.numel() == 0:
        return 0, View(tensor.dtype, shape, size)
    strides = tensor.stride()
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    return (last + 1) * size, View(
        tensor.dtype, shape, size, tuple(stride * size for stride in strides)
    )


class HostWatch:
    """See the module's text.

    Args:
        monitor: the core; pinned blocks are those that it knows.
        find: the pinned block of a CPU tensor, or ``None``.
    """

    def __init__(self, monitor: Monitor, find: Callable[[Tensor], Any] | None = None) -> None:
        self._monitor = monitor
        self._find = find or self._known
        self._exposed: dict[int, tuple[Any, Access, RawSite]] = {}
        self._patched: list[tuple[type, str, Any]] = []

    def _known(self, tensor: Tensor) -> Any:
        block = self._monitor.live.get(tensor.untyped_storage().data_ptr())
        return block if block is not None and block.pinned else None

    def touched(self, tensor: Tensor, write: bool, operation: str) -> None:
        """A CPU operation reads or writes ``tensor`` now."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        block = self._find(tensor) if tensor.numel() else None
        if block is None:
            return
        nbytes, view = reach(tensor)
        lo = tensor.data_ptr()
        earlier = self._monitor.in_flight(block, lo, lo + nbytes, write)
        # a virtual device's own work runs on the host too
        if earlier is not None and not called_from(_DEVICE_AT_WORK):
            self._monitor.host_raced(earlier, write, operation, here(CALLERS), view, nbytes)

    # -- NumPy views
    def _viewed(self, tensor: Tensor, array: Any) -> None:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        block = self._find(tensor)
        if block is None:
            return
        lo = tensor.data_ptr()
        nbytes, _ = reach(tensor)
        earlier = self._monitor.in_flight(block, lo, lo + nbytes, False)
        if earlier is None or called_from(_DEVICE_AT_WORK):
            return
        key = id(array)
        reference = weakref.ref(array, lambda _: self._array_died(key))
        self._exposed[key] = (reference, earlier, here(CALLERS))

    def _array_died(self, key: int) -> None:
        _, earlier, site = self._exposed.pop(key)
        if not self._monitor.order.host_knows(earlier.stream, earlier.number):
            self._monitor.host_raced(earlier, False, "numpy", site)

    def close(self) -> None:
        """Say which views could not be followed."""
        for _, earlier, site in self._exposed.values():
            if self._monitor.order.host_knows(earlier.stream, earlier.number):
                self._monitor.report.note(
                    f"a NumPy view was taken at {as_site(site)} while {earlier.operation} at "
                    f"{as_site(earlier.site)} was in flight: reads through it are not seen"
                )
            else:
                self._monitor.host_raced(earlier, False, "numpy", site)
        self._exposed.clear()

    # -- patches
    def patch(self) -> None:
        """See ``Tensor.numpy`` and ``Tensor.tolist`` until :meth:`restore`."""
        numpy, tolist = Tensor.numpy, Tensor.tolist
        watch = self

        def watched_numpy(self: Tensor, *arguments: Any, **options: Any) -> Any:
            array = numpy(self, *arguments, **options)
            watch._viewed(self, array)
            return array

        def watched_tolist(self: Tensor) -> Any:
            if self.device.type == "cpu":
                watch.touched(self, False, "tolist")
            return tolist(self)

        replace(self._patched, torch.Tensor, "numpy", watched_numpy)
        replace(self._patched, torch.Tensor, "tolist", watched_tolist)

    def restore(self) -> None:
        """Undo :meth:`patch`."""
        put_back(self._patched)


def replace(done: list[tuple[type, str, Any]], owner: Any, name: str, value: Any) -> None:
    """Set an attribute and remember what was there; see :func:`put_back`."""
    done.append((owner, name, owner.__dict__.get(name, _MISSING)))
    setattr(owner, name, value)


def put_back(done: list[tuple[type, str, Any]]) -> None:
    """Undo :func:`replace`, last first."""
    while done:
        owner, name, value = done.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
