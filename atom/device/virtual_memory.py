"""The virtual device's memory: arenas, allocators, and the tensors that lie in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.device.arena import Arena, OwnedSlice, Span
from atom.device.argument_checks import check_shape, check_tensor
from atom.device.caching_allocator import Block, CachingAllocator, Work
from atom.device.observer import DeviceObserver
from atom.device.pinned_allocator import PinnedAllocator, PinnedBuffer
from atom.errors import BadInput, DeviceError

_DEVICE_ADDRESS = 0x7F00_0000_0000
_PINNED_ADDRESS = 0x7E00_0000_0000
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Operand(NamedTuple):
    """A tensor as queued work names it.

    Attributes:
        span: its byte range.
        buffer: the pinned buffer that it lies in, ``None`` for device memory.
        mapped: whether it is a kernel's view of a pinned buffer.
    """

    span: Span
    buffer: PinnedBuffer | None
    mapped: bool


class VirtualMemory:
    """Device and pinned memory of one virtual device.

    Tensors own their blocks through the NumPy slice under their storage. When the last view dies
    the block is put on a list, which :meth:`collect` (start of every host call) works off.

    Args:
        memory_bytes: device memory.
        pinned_bytes: pinned host memory.
        work: the queued work.
        clock: host seconds.
        on_free: called with each device block whose last view died.
    """

    def __init__(
        self,
        memory_bytes: int,
        pinned_bytes: int,
        work: Work,
        clock: Callable[[], float],
        on_free: Callable[[Block], None],
    ) -> None:
        self.device = Arena("device", memory_bytes, _DEVICE_ADDRESS)
        self.host = Arena("pinned", pinned_bytes, _PINNED_ADDRESS)
        self.blocks = CachingAllocator(self.device.size, work, clock)
        self.buffers = PinnedAllocator(self.host.size, work)
        self._on_free = on_free
        #: references of what died since the last :meth:`collect`
        self.dead: list[Any] = []
        self.observer: DeviceObserver | None = None
        #: private pools whose graph died
        self.dead_pools: list[Any] = []

    def collect(self) -> None:
        """Free what died since the last call, in order of death."""
        while self.dead:
            owned = self.dead.pop(0).block
            if isinstance(owned, PinnedBuffer):
                self.buffers.free(owned)
            else:
                self._on_free(owned)
                self.blocks.free(owned)
        while self.dead_pools:
            self.blocks.release_pool(self.dead_pools.pop(0))

    def _own(self, owner: Any, block: Block | PinnedBuffer) -> None:
        reference = OwnedSlice(owner, self._died)
        reference.block = block
        block.reference = reference
        if self.observer is not None:
            self.observer.owned(block)

    def _died(self, reference: Any) -> None:
        self.dead.append(reference)
        if self.observer is not None:
            self.observer.died(reference.block)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream_id: int) -> Tensor:
        """A device tensor; see ``Device.empty``."""
        nbytes = _size(shape, dtype)
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self.blocks.allocate(nbytes, stream_id, site=_site())
        tensor, owner = self.device.tensor(block.offset, nbytes, shape, dtype)
        self._own(owner, block)
        return tensor

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A pinned host tensor; see ``Device.pinned``."""
        nbytes = _size(shape, dtype)
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        buffer = self.buffers.allocate(nbytes, site=_site())
        tensor, owner = self.host.tensor(buffer.offset, nbytes, shape, dtype)
        self._own(owner, buffer)
        return tensor

    def mapped(self, tensor: Tensor) -> Tensor:
        """A kernel's view of a pinned tensor; see ``Device.mapped``."""
        refuse_view(tensor, "mapped: the tensor")
        if tensor.numel() == 0:
            return tensor
        if self.host.alias_offset(tensor) is not None and self.host.has_alias:
            return tensor
        offset = self.host.offset(tensor)
        if offset is None or not tensor.is_contiguous():
            raise DeviceError("mapped: a contiguous tensor of this device's pinned() is needed")
        return self.host.alias(tensor, offset)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The device block that ``tensor`` is a view of."""
        storage = tensor.untyped_storage()
        return self.blocks.live.get(storage.data_ptr() - self.device.memory.ctypes.data)

    def operand(self, tensor: Tensor) -> Operand | None:
        """``tensor`` as queued work names it, ``None`` if it lies elsewhere."""
        if tensor.numel() == 0:
            return Operand(self.device.span(tensor, 0), None, False)
        offset = self.device.offset(tensor)
        if offset is not None:
            return Operand(self.device.span(tensor, offset), None, False)
        mapped = False
        offset = self.host.offset(tensor)
        if offset is None:
            offset = self.host.alias_offset(tensor)
            mapped = True
        if offset is None:
            return None
        buffer = self.buffers.find(offset)
        assert buffer is not None
        return Operand(self.host.span(tensor, offset), buffer, mapped or not self.host.has_alias)

    def view(self, span: Span) -> Tensor:
        """The bytes of ``span`` as they are now."""
        return (self.device if span.space == "device" else self.host).view(span)

    def address(self, tensor: Tensor) -> int:
        """Address of ``tensor``'s first byte, the same in every run."""
        for arena in (self.device, self.host):
            offset = arena.offset(tensor)
            if offset is None:
                offset = arena.alias_offset(tensor)
            if offset is not None:
                return arena.address(offset)
        return tensor.data_ptr()


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return prod(check_shape(shape, dtype)) * dtype.itemsize


def refuse_view(tensor: Tensor, what: str) -> None:
    """Refuse a tensor whose values are not the bytes it lies on.

    Raises:
        BadInput: a lazy conjugate or negative, not strided, or no tensor.
    """
    if check_tensor(what, tensor).is_conj() or tensor.is_neg():
        lazy = "conjugate" if tensor.is_conj() else "negative"
        raise BadInput(
            f"{what} is a lazy {lazy} view: queued work sees its bytes, not its values; take the "
            f"{lazy} in a kernel's body"
        )
    if tensor.layout is not torch.strided:
        raise BadInput(f"{what} has layout {tensor.layout}; allowed: torch.strided")


def _site() -> str:
    """``file:line`` of the nearest caller outside this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
