"""The seam over ``torch.cuda``: NVIDIA GPUs through CUDA and AMD GPUs through HIP.

PyTorch keeps a current stream. Here it stays on one home stream (the default stream, or the
capture stream inside :meth:`Accelerator.capture`), and a call for another stream switches to it
and back with ``torch.cuda.set_stream``: the stream context manager costs several times more, and a
status copy is made of few microseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from atom.device import interface
from atom.device.accelerator_properties import (
    accelerator_properties,
    machine_slug,
    why_no_accelerator,
)
from atom.device.accelerator_streams import (
    AcceleratorEvent,
    AcceleratorStream,
    make_current,
    raw_of,
)
from atom.device.argument_checks import (
    check_amount,
    check_count,
    check_path,
    check_shape,
    check_traffic,
)
from atom.device.host_room import free_host_bytes, on_processors, processors_near
from atom.device.host_visibility import why_no_host_writes
from atom.device.interface import CopyPath, Device, Kernel, Scalar
from atom.errors import DeviceError, DeviceOutOfMemory

__all__ = [
    "Accelerator",
    "AcceleratorEvent",
    "AcceleratorGraph",
    "AcceleratorStream",
    "accelerator_properties",
    "machine_slug",
    "why_no_accelerator",
]


#: pinned buffers from here on are taken from the GPU's memory node
_LARGE_BYTES = 2**26


class AcceleratorGraph:
    """A ``torch.cuda.CUDAGraph``."""

    def __init__(self, device: Accelerator, raw: torch.cuda.CUDAGraph) -> None:
        self._device = device
        self.raw = raw

    def replay(self, stream: interface.Stream | None = None) -> None:
        """Queue the captured work again."""
        if stream is None:
            self.raw.replay()
        else:
            with self._device.switched_to(stream):
                self.raw.replay()


class _HostMemory:
    """Pinned memory as the CUDA array interface shows it; keeps the tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class Accelerator(Device):
    """One GPU of this host.

    Args:
        index: which of the visible devices.

    Raises:
        DeviceError: there is no usable device; says why.
    """

    def __init__(self, index: int = 0) -> None:
        reason = why_no_accelerator()
        if reason is not None:
            raise DeviceError(f"no accelerator: {reason}")
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"no accelerator {index}: {torch.cuda.device_count()} visible, counted from 0"
            )
        self.index = index
        torch.cuda.set_device(index)
        self.properties = accelerator_properties(index)
        default = AcceleratorStream(torch.cuda.default_stream(index), default=True)
        self.default_stream = default
        self._default_raw, self._default_current = default.raw, default.make_current
        self._home: torch.cuda.Stream = default.raw
        torch.cuda.set_stream(self._home)
        self._torch_device = torch.device("cuda", index)
        self._cycles_per_second: float | None = None
        self._bulk: dict[str, tuple[Tensor, Tensor]] = {}
        self._matrices: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    # -- streams and events

    def new_stream(self, priority: int = 0) -> AcceleratorStream:
        """A stream from PyTorch's pool: 32 a priority, then the first again."""
        return AcceleratorStream(torch.cuda.Stream(self.index, priority=priority), default=False)

    def new_event(self, timing: bool = False) -> AcceleratorEvent:
        """An event."""
        return AcceleratorEvent(timing)

    def synchronize(self) -> None:
        """Block the host until all work has run."""
        torch.cuda.synchronize(self.index)

    def host_seconds(self) -> float:
        """``time.perf_counter``."""
        return time.perf_counter()

    @contextmanager
    def switched_to(self, stream: interface.Stream | None) -> Iterator[None]:
        """Make ``stream`` PyTorch's current stream, then go home."""
        if stream is None or raw_of(stream) == self._home:
            yield
            return
        make_current(stream)
        try:
            yield
        finally:
            self._go_home()

    def _go_home(self) -> None:
        """Make the home stream current again: the default one but in a capture."""
        if self._home is self._default_raw:
            self._default_current()
        else:
            torch.cuda.set_stream(self._home)

    # -- memory

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, *, stream: interface.Stream | None = None
    ) -> Tensor:
        """An uninitialised device tensor from PyTorch's caching allocator."""
        try:
            if stream is None or stream is self.default_stream:
                return torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)
            with self.switched_to(stream):
                return torch.empty(tuple(shape), dtype=dtype, device=self._torch_device)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.index)
            stats = self.memory_stats()
            raise DeviceOutOfMemory(
                f"{self.properties.name}: no room for shape {tuple(shape)} of {dtype}: "
                f"{free:,} of {total:,} bytes free on the device; this process has reserved "
                f"{stats.get('reserved_bytes.all.current', 0):,} and holds "
                f"{stats.get('allocated_bytes.all.current', 0):,} in tensors. PyTorch: {error}"
            ) from None
        except (TypeError, RuntimeError):
            # only now: a check costs as much as the allocation
            check_shape(shape, dtype)
            raise

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised page-locked host tensor; a large one from the GPU's memory node.

        Raises:
            DeviceOutOfMemory: the host cannot pin so much.
        """
        try:
            if prod(shape) * dtype.itemsize < _LARGE_BYTES:
                return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
            with on_processors(self._near):
                return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        except (AttributeError, TypeError, RuntimeError) as error:
            check_shape(shape, dtype)
            # a failed cudaHostAlloc has no type of its own
            if "out of memory" not in str(error).lower():
                raise
            free = free_host_bytes()
            raise DeviceOutOfMemory(
                f"no pinned host memory for shape {tuple(shape)} of {dtype}: "
                f"{'unknown' if free is None else f'{free:,}'} bytes are free on this host or in "
                f"this container. PyTorch: {str(error).splitlines()[0]}"
            ) from None

    @cached_property
    def _near(self) -> frozenset[int]:
        raw = torch.cuda.get_device_properties(self.index)
        try:
            address = f"{raw.pci_domain_id:04x}:{raw.pci_bus_id:02x}:{raw.pci_device_id:02x}.0"
        except AttributeError:
            # not every build of PyTorch tells
            return frozenset()
        return processors_near(address)

    def mapped(self, pinned: Tensor) -> Tensor:
        """A device tensor over the bytes of ``pinned``; it keeps ``pinned`` alive."""
        if pinned.is_cuda:
            return pinned
        if not pinned.is_pinned() or not pinned.is_contiguous():
            raise DeviceError("mapped: a contiguous pinned host tensor is needed")
        alias = torch.as_tensor(_HostMemory(pinned), device=self._torch_device)
        if alias.data_ptr() != pinned.data_ptr():
            raise DeviceError("mapped: this runtime gave a copy in place of an alias")
        return alias.view(pinned.dtype).view(pinned.shape)

    def why_no_host_writes(self) -> str | None:
        """See :class:`Device`."""
        return why_no_host_writes(self.properties.kind, os.environ)

    @property
    def capturing(self) -> bool:
        """Whether :meth:`capture` is under way."""
        return self._home is not self._default_raw

    def record_stream(self, tensor: Tensor, stream: interface.Stream) -> None:
        """Tell the allocator that ``stream`` uses ``tensor``."""
        tensor.record_stream(raw_of(stream))

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats``."""
        return dict(torch.cuda.memory_stats(self.index))

    def allocator_sample(self) -> interface.AllocatorSample:
        """From PyTorch's nested statistics: making them flat costs several times their reading."""
        found = torch.cuda.memory_stats_as_nested_dict(self.index)
        active, blocks, reserved, segments = (
            int(found[name]["all"]["current"]) for name in interface.SAMPLED
        )
        retries = int(found["num_alloc_retries"])
        return interface.AllocatorSample(active, blocks, reserved, segments, retries)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        torch.cuda.empty_cache()

    # -- work

    def launch(
        self,
        kernel: Kernel,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        scalars: tuple[Scalar, ...] = (),
        stream: interface.Stream | None = None,
        flops: float = 0.0,
    ) -> None:
        """Run the kernel's body with ``stream`` current."""
        for tensor in writes:
            if not tensor.is_cuda:
                raise DeviceError(
                    f"launch {kernel.name!r}: a host tensor is written; pass device.mapped(tensor)"
                )
        if stream is None or stream is self.default_stream:
            kernel.body(tuple(reads), tuple(writes), *scalars)
            return
        make_current(stream)
        try:
            kernel.body(tuple(reads), tuple(writes), *scalars)
        finally:
            self._go_home()

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        *,
        stream: interface.Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """Queue a copy. ``KERNEL`` runs an elementwise kernel over mapped host memory."""
        for tensor in (target, source):
            if not tensor.is_cuda and not tensor.is_pinned():
                raise DeviceError("copy: a pageable host tensor would block the host; pin it")
        path = path if path is CopyPath.ENGINE else check_path(path)
        if path is CopyPath.KERNEL:
            target, source = self._as_words(target), self._as_words(source)
        home = stream is None or stream is self.default_stream
        if not home:
            make_current(stream)
        try:
            if path is CopyPath.KERNEL:
                torch.bitwise_or(source, 0, out=target)
            else:
                target.copy_(source, non_blocking=True)
        finally:
            if not home:
                self._go_home()

    def _as_words(self, tensor: Tensor) -> Tensor:
        flat = (tensor if tensor.is_cuda else self.mapped(tensor)).view(-1)
        size = flat.numel() * flat.element_size()
        aligned = size % 8 == 0 and flat.data_ptr() % 8 == 0
        if aligned and (flat.storage_offset() * flat.element_size()) % 8 == 0:
            return flat.view(torch.int64)
        return flat.view(torch.uint8)

    def traffic(
        self,
        nbytes: int,
        direction: str,
        *,
        stream: interface.Stream | None = None,
        path: CopyPath = CopyPath.ENGINE,
    ) -> None:
        """A bulk transfer between persistent buffers: ``direction`` is ``d2h`` or ``h2d``."""
        nbytes, path = check_traffic(nbytes, direction), check_path(path)
        buffers = self._bulk.get(direction)
        if buffers is None or buffers[0].numel() < nbytes:
            # the old pair may still be in use by queued work
            self.synchronize()
            buffers = (
                torch.zeros(nbytes, dtype=torch.uint8, device=self._torch_device),
                torch.zeros(nbytes, dtype=torch.uint8).pin_memory(),
            )
            self.synchronize()
            self._bulk[direction] = buffers
        on_device, on_host = buffers[0][:nbytes], buffers[1][:nbytes]
        pair = (on_host, on_device) if direction == "d2h" else (on_device, on_host)
        self.copy(*pair, stream=stream, path=path)

    def matmul(self, size: int, *, stream: interface.Stream | None = None) -> None:
        """A ``size`` x ``size`` x ``size`` bf16 matrix product on persistent operands."""
        size = check_count("matmul: size", size, 1)
        key = (size, 0 if stream is None else stream.stream_id)
        operands = self._matrices.get(key)
        if operands is None:
            shared = next((held for (n, _), held in self._matrices.items() if n == size), None)
            if shared is None:
                generator = torch.Generator(self._torch_device).manual_seed(0)
                left, right = (
                    torch.randn(
                        (size, size),
                        dtype=torch.bfloat16,
                        device=self._torch_device,
                        generator=generator,
                    )
                    for _ in range(2)
                )
            else:
                left, right = shared[0], shared[1]
            operands = (left, right, torch.empty_like(left))
            self.synchronize()
            self._matrices[key] = operands
        left, right, out = operands
        with self.switched_to(stream):
            torch.mm(left, right, out=out)

    def spin(self, seconds: float, *, stream: interface.Stream | None = None) -> None:
        """Park ``stream`` with PyTorch's spin kernel, calibrated once against event time."""
        seconds = check_amount("spin: seconds", seconds)
        if self._cycles_per_second is None:
            self._cycles_per_second = self._calibrate_spin()
        with self.switched_to(stream):
            torch.cuda._sleep(max(1, int(seconds * self._cycles_per_second)))

    def _calibrate_spin(self) -> float:
        cycles = 20_000_000
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # the first spin wakes the clocks up
        torch.cuda._sleep(cycles)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (start.elapsed_time(end) / 1e3)

    @contextmanager
    def capture(self) -> Iterator[AcceleratorGraph]:
        """Capture the block's work into a graph, on a capture stream of PyTorch's own."""
        raw = torch.cuda.CUDAGraph()
        previous = self._home
        try:
            with torch.cuda.graph(raw):
                self._home = torch.cuda.current_stream(self.index)
                yield AcceleratorGraph(self, raw)
        finally:
            self._home = previous
