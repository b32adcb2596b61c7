"""Arenas: the memory of the virtual device and its pinned host memory, as lazily mapped bytes.

A tensor of an arena is a NumPy slice wrapped by ``torch.from_numpy``. The slice is owned by the
tensor's storage, so it dies with the last view, and a weak reference tells the allocator. Queued
work never holds the tensor: it holds a :class:`Span`, which is an offset, a shape and strides.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from atom.errors import DeviceError

PAGE_BYTES = 2 * 2**20


class Span(NamedTuple):
    """A strided view of an arena's bytes.

    Attributes:
        space: ``device`` or ``pinned``.
        offset: byte offset of the first element.
        nbytes: bytes from the first to past the last element that the view reaches.
        dtype: element type.
        shape: elements a dimension.
        strides: elements to step a dimension.
    """

    space: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return 0 in self.shape
            step *= extent
        return True


class OwnedSlice(weakref.ref):
    """Weak reference to a block's NumPy slice that remembers the block."""

    __slots__ = ("block",)
    block: Any


class Arena:
    """``size`` bytes of address space; pages are touched only when they are written.

    The pinned arena is mapped twice: host code sees a buffer at one address and kernels, through
    ``Device.mapped``, at another, so that a kernel given the host's view is noticed.

    Args:
        space: ``device`` or ``pinned``, for spans and errors.
        size: bytes; rounded up to 2 MiB.
        base_address: address that :meth:`address` gives to offset 0, so that addresses in records
            are the same in every run.
    """

    def __init__(self, space: str, size: int, base_address: int) -> None:
        self.space = space
        self.size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self.base_address = base_address
        file = None
        try:
            file = _anonymous_file(self.size) if space == "pinned" else None
            memory = _map(self.size, file)
            alias = memory if file is None else _map(self.size, file)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceError(
                f"the virtual device's {space} memory of {self.size} bytes cannot be mapped "
                f"({error}); pass a smaller {'memory' if space == 'device' else 'pinned'}_bytes"
            ) from None
        finally:
            # a mapping outlives its file's descriptor
            if file is not None:
                os.close(file)
        self.memory = np.frombuffer(memory, dtype=np.uint8)
        self._alias = self.memory if alias is memory else np.frombuffer(alias, dtype=np.uint8)
        self._start = self.memory.ctypes.data
        self._alias_start = self._alias.ctypes.data
        self._whole = torch.from_numpy(self.memory)
        self._as_dtype: dict[torch.dtype, Tensor] = {torch.uint8: self._whole}

    def tensor(
        self, offset: int, nbytes: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, np.ndarray]:
        """A tensor that owns ``nbytes`` at ``offset``, and the slice whose death frees them."""
        owner = self.memory[offset : offset + nbytes]
        return torch.from_numpy(owner).view(dtype).reshape(tuple(shape)), owner

    def offset(self, tensor: Tensor) -> int | None:
        """Byte offset of ``tensor``'s first element, or ``None`` if it lies elsewhere."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 <= offset < self.size else None

    @property
    def has_alias(self) -> bool:
        """Whether device aliases have addresses of their own, so that a mix-up is noticed."""
        return self._alias is not self.memory

    def alias_offset(self, tensor: Tensor) -> int | None:
        """As :meth:`offset`, for a tensor made by :meth:`alias`."""
        offset = tensor.data_ptr() - self._alias_start
        return offset if 0 <= offset < self.size else None

    def alias(self, tensor: Tensor, offset: int) -> Tensor:
        """The contiguous ``tensor`` at ``offset`` through the second mapping of the same bytes.

        The alias keeps ``tensor`` alive.
        """
        piece = self._alias[offset : offset + tensor.numel() * tensor.element_size()]
        weakref.finalize(piece, _let_go, tensor).atexit = False
        return torch.from_numpy(piece).view(tensor.dtype).reshape(tensor.shape)

    def span(self, tensor: Tensor, offset: int) -> Span:
        """Describe ``tensor``, whose first element is at byte ``offset``."""
        shape = tuple(tensor.shape)
        strides = tensor.stride()
        reach = 1
        for extent, stride in zip(shape, strides, strict=True):
            if extent == 0:
                reach = 0
                break
            reach += (extent - 1) * stride
        nbytes = reach * tensor.element_size()
        return Span(self.space, offset, nbytes, tensor.dtype, shape, strides)

    def view(self, span: Span) -> Tensor:
        """The bytes of ``span`` as a tensor, for a kernel body that runs now."""
        whole = self._as_dtype.get(span.dtype)
        if whole is None:
            whole = self._as_dtype[span.dtype] = self._whole.view(span.dtype)
        return torch.as_strided(whole, span.shape, span.strides, span.offset // span.dtype.itemsize)

    def address(self, offset: int) -> int:
        """Address shown for ``offset``: the same in every run."""
        return self.base_address + offset


def _let_go(_: Tensor) -> None:
    """Called when an alias died; the reference to its tensor goes with the call."""


def _anonymous_file(size: int) -> int | None:
    """Descriptor of a sparse file in memory, or ``None`` where the system has none (not Linux)."""
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("pinned", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


def _map(size: int, file: int | None) -> mmap.mmap:
    if file is not None:
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # a trial touches a few blocks: a huge page would clear 2 MiB for each
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


class SegmentSpace:
    """Address space that segments are cut from: lowest fitting hole first, 2 MiB aligned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)]

    def take(self, size: int) -> int | None:
        """Offset of ``size`` bytes, or ``None`` if no hole fits."""
        reach = -(-size // PAGE_BYTES) * PAGE_BYTES
        for index, (start, length) in enumerate(self._holes):
            if length >= reach:
                if length == reach:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + reach, length - reach)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Return what :meth:`take` gave."""
        self._holes.append((start, -(-size // PAGE_BYTES) * PAGE_BYTES))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for begin, length in self._holes:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._holes = merged

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max((length for _, length in self._holes), default=0)
