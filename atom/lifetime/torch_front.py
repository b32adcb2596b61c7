"""Feeds the happens-before core from any PyTorch program, in pure Python.

Operations come from a dispatch mode (each with its stream, its storages' addresses and byte
ranges), allocations, frees, events and synchronisation from the ``torch.cuda._gpu_trace``
callbacks, and ``Event.query``, ``Stream.query`` and graphs from patches that are taken back at the
end. Exceptions in those callbacks are swallowed by torch, so nothing is raised there: findings are
collected.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor

from atom.lifetime.host_watch import HostWatch, reach
from atom.lifetime.monitor import Monitor, round_size
from atom.lifetime.shadow import Block, View
from atom.lifetime.sites import CALLERS, UNKNOWN, RawSite, here
from atom.lifetime.torch_layer import REGISTRIES, TorchLayer
from atom.lifetime.torch_plans import Plan
from atom.lifetime.watch_mode import WatchMode

#: bytes of the smallest block
_LEAST = round_size(1)
_MOST_LAYOUTS = 4096


class TorchFront:
    """One watch over torch's device work. Started and stopped by the sanitizer.

    Args:
        monitor: the core.
        layer: torch's device layer.
    """

    def __init__(self, monitor: Monitor, layer: TorchLayer) -> None:
        self.monitor = monitor
        self.layer = layer
        self.host = HostWatch(monitor, self._pinned_block)
        self.is_device = layer.is_device
        #: by the id of an operation: its own hash is slow; kept with it, so that ids stay unique
        self.plans: dict[int, tuple[Any, Plan | None]] = {}
        #: accesses of the graph that is being captured
        self.captured: list[tuple[Block, int, int, bool, str, Any]] | None = None
        self._wrappers: dict[type, bool] = {}
        #: bytes and view of each layout with strides that was seen
        self._layouts: dict[Any, tuple[int, View]] = {}
        self._views: dict[Any, View] = {}
        self._pinned: dict[int, Any] = {}
        self._callbacks: list[tuple[Any, Callable[..., None]]] = []
        # a tensor can die, and so call back, in the middle of our own work
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._busy = False

    def start(self) -> None:
        """Register the callbacks and adopt what is allocated."""
        for base, size, owner, private in self.layer.live_blocks():
            self.monitor.allocate(base, size, owner, UNKNOWN, private=private)
        for registry_name, method in REGISTRIES.items():
            registry = getattr(gpu_trace, registry_name)
            callback = getattr(self, f"_{method}")
            registry.add_callback(callback)
            self._callbacks.append((registry, callback))
        self.layer.activate()
        skip_compiler()

    def stop(self) -> None:
        """Take the callbacks back."""
        for registry, callback in self._callbacks:
            registry.callback_list.remove(callback)
        self._callbacks.clear()
        self.host.close()

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run ``action`` now, or behind what is running."""
        if self._busy:
            self._waiting.append((action, arguments))
            return
        self._busy = True
        try:
            while True:
                try:
                    action(*arguments)
                except RuntimeError as error:
                    # a tensor without a storage of its own (sparse, functional)
                    self.monitor.report.note(f"some work could not be read: {error}"[:200])
                if not self._waiting:
                    break
                action, arguments = self._waiting.popleft()
        finally:
            self._busy = False

    # -- callbacks of torch.cuda._gpu_trace
    def _allocated(self, address: int) -> None:
        if not address:
            return
        layer = self.layer
        self.do(self._allocate, address, layer.current_stream(layer.current_device()), here())

    def _allocate(self, address: int, owner: int, site: RawSite) -> None:
        # the size becomes known with the first tensor that is seen there
        private = self.captured is not None
        self.monitor.allocate(address, _LEAST, owner, site, private=private, unsized=True)

    def _freed(self, address: int) -> None:
        block = self.monitor.live.get(address)
        if block is None:
            return
        # the lines matter where another stream had a part in it
        alone = not block.shared and (block.stream is None or block.stream == block.owner)
        self.do(self.monitor.free, address, UNKNOWN if alone else here(CALLERS))

    def _event_recorded(self, event: int, stream: int) -> None:
        if self.captured is None:
            self.do(self.monitor.record, event, self.layer.stream_key(stream), here())

    def _event_waited(self, event: int, stream: int) -> None:
        if self.captured is None:
            self.do(self.monitor.order.wait, event, self.layer.stream_key(stream))

    def _event_observed(self, event: int) -> None:
        self.do(self.monitor.order.observe, event)

    def _event_deleted(self, event: int) -> None:
        self.do(self.monitor.order.forget, event)

    def _stream_waited(self, stream: int) -> None:
        self.do(self.monitor.order.observe_stream, self.layer.stream_key(stream))

    def _device_waited(self) -> None:
        self.do(self.monitor.order.observe_all)

    # -- operations
    def device_block(self, tensor: Tensor, lo: int) -> Block:
        """The block of a device tensor whose view begins at ``lo``; adopted if it is new to us."""
        monitor = self.monitor
        block = monitor.live.get(lo)
        if block is None:
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            block = monitor.live.get(base)
            if block is None:
                block = monitor.allocate(base, storage.nbytes(), None)
        if block.unsized:
            monitor.settle(block, round_size(tensor.untyped_storage().nbytes()))
        return block

    def adopt(self, tensor: Tensor) -> None:
        """Learn the size of a fresh tensor that nothing has touched yet."""
        self.device_block(tensor, tensor.data_ptr())

    def _pinned_block(self, tensor: Tensor) -> Block | None:
        """The pinned block of a CPU tensor, if a device ever touched it."""
        base = tensor.untyped_storage().data_ptr()
        block = self.monitor.live.get(base)
        if block is None or not block.pinned:
            return None
        reference = self._pinned.get(base)
        if reference is not None and reference.expired():
            # the pinned allocator gives a buffer away only behind its copies' events
            del self._pinned[base]
            self.monitor.drop_pinned(block)
            return None
        return block

    def _adopt_pinned(self, tensor: Tensor, lo: int) -> Block | None:
        block = self._pinned_block(tensor)
        if block is None and self.layer.is_pinned(tensor):
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            self._pinned[base] = torch.multiprocessing.reductions.StorageWeakRef(storage)
            block = self.monitor.allocate(base, storage.nbytes(), None, pinned=True)
        return block

    def tensors_of(
        self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Tensor, bool]], Tensor | None]:
        """The tensors of a call, each with whether it is written; the first on a device."""
        found = []
        first = None
        is_device = self.is_device
        given = len(args)
        for position, name, write in plan.arguments:
            value = args[position] if position < given else kwargs.get(name)
            if isinstance(value, Tensor):
                found.append((value, write))
                if first is None and is_device(value):
                    first = value
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        found.append((item, write))
                        if first is None and is_device(item):
                            first = item
        return found, first

    def begin(self, tensor: Tensor) -> tuple[int, int]:
        """Stream and number of an operation on the device of ``tensor``."""
        index = tensor.get_device()
        stream = self.layer.current_stream(index if index > 0 else 0)
        return stream, 0 if self.captured is not None else self.monitor.submit(stream)

    def touch(
        self,
        tensor: Tensor,
        write: bool,
        stream: int,
        number: int,
        operation: str,
        site: RawSite,
        copy: bool = False,
    ) -> None:
        """An operation on the device reads or writes ``tensor``."""
        lo = tensor.data_ptr()
        if not lo:
            return
        block: Block | None
        if self.is_device(tensor):
            block = self.monitor.live.get(lo)
            if block is None or block.unsized:
                block = self.device_block(tensor, lo)
        else:
            block = self._adopt_pinned(tensor, lo)
        if block is None:
            return
        if tensor.is_contiguous():
            nbytes = tensor.nbytes
            key = (tensor.dtype, tensor.shape)
            view = self._views.get(key)
            if view is None:
                view = self._view(*key, tensor.itemsize)
        else:
            nbytes, view = self._layout(tensor)
        if not nbytes:
            return
        if self.captured is not None:
            self.captured.append((block, lo, lo + nbytes, write, operation, view))
            return
        self.monitor.access(
            block, lo, lo + nbytes, write, stream, number, operation, site, view, copy
        )

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> View:
        if len(self._views) > _MOST_LAYOUTS:
            self._views.clear()
        view = self._views[dtype, shape] = View(dtype, shape, size)
        return view

    def _layout(self, tensor: Tensor) -> tuple[int, View]:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) > _MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[key] = reach(tensor)
        return known

    def replayed(self, accesses: list[Any], stream: int, site: RawSite) -> None:
        """A graph is replayed: its captured accesses happen again, on ``stream``."""
        monitor = self.monitor
        number = monitor.submit(stream)
        for captured in accesses:
            block: Block = captured[0]
            lo, hi, write, operation, view = captured[1:]
            if monitor.live.get(block.base) is block:
                name = f"graph replay ({operation})"
                monitor.access(block, lo, hi, write, stream, number, name, site, view)

    def observe_stream(self, stream: int) -> None:
        """The host has waited for ``stream``."""
        self.monitor.order.observe_stream(stream)

    def dispatches_itself(self, kind: type) -> bool:
        """Whether a tensor class takes its operations apart by itself."""
        known = self._wrappers.get(kind)
        if known is None:
            own = getattr(kind, "__torch_dispatch__", None)
            known = own is not None and own is not torch._C._disabled_torch_dispatch_impl
            self._wrappers[kind] = known
        return known

    def mode(self) -> WatchMode:
        """A dispatch mode for one thread."""
        return WatchMode(self)


def skip_compiler() -> None:
    """Keep torch.compile out of the code of this room."""
    skip = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if skip is None or not hasattr(skip, "skip_code"):
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("atom.lifetime."):
            for found in list(vars(module).values()):
                members = vars(found).values() if isinstance(found, type) else (found,)
                for member in members:
                    code = getattr(member, "__code__", None)
                    if code is not None and code.co_filename == module.__file__:
                        skip.skip_code(code)


def started_threads(make_mode: Callable[[], Any]) -> Callable[..., None]:
    """A ``Thread.start`` that enters a dispatch mode of its own in each new thread."""
    start = threading.Thread.start

    def watched_start(self: threading.Thread) -> None:
        run = self.run

        def watched_run() -> None:
            # the thread must not hold itself: what it owns would live on to the next collection
            del self.run
            with make_mode():
                run()

        self.run = watched_run  # type: ignore[method-assign]
        start(self)

    return watched_start
