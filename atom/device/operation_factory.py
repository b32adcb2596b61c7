"""Makes the virtual device's operations: what they touch, what they do, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from atom.device.arena import Span
from atom.device.argument_checks import (
    check_amount,
    check_count,
    check_lists,
    check_path,
    check_tensor,
    check_traffic,
)
from atom.device.capture_guard import refuse_captured_tensors
from atom.device.interface import CopyPath, Kernel, Scalar
from atom.device.operations import Operation, OperationKind
from atom.device.pinned_allocator import PinnedBuffer
from atom.device.profiles import CopyLane, DeviceProfile
from atom.device.virtual_memory import Operand, VirtualMemory
from atom.errors import BadInput, DeviceError, FreedPinnedBuffer

FindOperand = Callable[[Tensor, str], Operand]


class Prepared(NamedTuple):
    """An operation and what the device has to know to queue it.

    Attributes:
        operation: to queue.
        own_lane: whether it takes no turn in a hardware queue.
        pinned: the pinned buffers it touches, each with its generation at the call.
    """

    operation: Operation
    own_lane: bool = False
    pinned: tuple[tuple[PinnedBuffer, int], ...] = ()


class OperationFactory:
    """See the module's text.

    Args:
        profile: times and paths.
        memory: where the operands lie.
        find: the operand of a tensor; raises for one that lies elsewhere.
    """

    def __init__(self, profile: DeviceProfile, memory: VirtualMemory, find: FindOperand) -> None:
        self._profile = profile
        self._memory = memory
        self._find = find

    def kernel(
        self,
        kernel: Kernel,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        scalars: tuple[Scalar, ...],
        flops: float,
    ) -> Prepared:
        """See ``Device.launch``."""
        name, body = kernel.name, kernel.body
        if type(reads) is not tuple or type(writes) is not tuple or type(scalars) is not tuple:
            check_lists(name, reads=reads, writes=writes, scalars=scalars)
            # a list could get a tensor later
            scalars = tuple(scalars)
        refuse_captured_tensors(name, body, scalars)
        flops = check_amount("flops", flops)
        spans: tuple[list[Span], list[Span]] = ([], [])
        touched: list[tuple[PinnedBuffer, int]] = []
        device_bytes = pinned_bytes = 0
        for role, tensors in enumerate((reads, writes)):
            for place, tensor in enumerate(tensors):
                what = f"{('reads', 'writes')[role]}[{place}] of kernel {name!r}"
                span, buffer, mapped = self._find(tensor, what)
                spans[role].append(span)
                if buffer is None:
                    device_bytes += span.nbytes
                    continue
                if not mapped:
                    raise DeviceError(f"{what} is a host tensor; pass device.mapped(tensor)")
                pinned_bytes += span.nbytes
                touched.append((buffer, buffer.generation))
        profile = self._profile
        seconds = profile.kernel_seconds + max(
            flops / profile.matmul_flops_per_second,
            device_bytes / profile.device_bytes_per_second,
            pinned_bytes / profile.d2h_bytes_per_second,
        )
        read_spans, write_spans, pinned = tuple(spans[0]), tuple(spans[1]), tuple(touched)
        view = self._memory.view

        def run(_: int) -> None:
            _refuse_freed(name, pinned)
            try:
                body(tuple(map(view, read_spans)), tuple(map(view, write_spans)), *scalars)
            except Exception as error:
                error.add_note(f"in kernel {name!r} of the virtual device")
                raise

        operation = Operation(
            OperationKind.KERNEL,
            name,
            seconds,
            occupancy=kernel.occupancy,
            run=run,
            reads=read_spans,
            writes=write_spans,
        )
        return Prepared(operation, pinned=pinned)

    def copy(self, target: Tensor, source: Tensor, path: CopyPath) -> Prepared | None:
        """See ``Device.copy``; ``None`` if there is nothing to copy."""
        if not (isinstance(target, Tensor) and isinstance(source, Tensor)):
            check_tensor("the copy's target", target)
            check_tensor("the copy's source", source)
        path = check_path(path)
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise BadInput(
                f"copy of {tuple(source.shape)} {source.dtype} into {tuple(target.shape)} "
                f"{target.dtype}: both ends need one type and one number of elements"
            )
        to, to_buffer, _ = self._find(target, "the copy's target")
        origin, origin_buffer, _ = self._find(source, "the copy's source")
        if not (to.contiguous and origin.contiguous):
            raise BadInput("copy: both ends must be contiguous; copy the pieces one by one")
        if to.nbytes == 0:
            return None
        memory = self._memory
        if to_buffer is not None and origin_buffer is not None:
            raise BadInput("copy: both ends are pinned host memory; use torch on the host")
        if to_buffer is None and origin_buffer is None:
            direction = "d2d"
        else:
            direction = "d2h" if to_buffer is not None else "h2d"
        sink = (memory.device if to_buffer is None else memory.host).memory
        well = (memory.device if origin_buffer is None else memory.host).memory
        # whole elements: no engine tears a word
        half = to.nbytes // 2 // target.element_size() * target.element_size()

        def run(part: int) -> None:
            start, stop = (0, half) if part == 0 else (half, to.nbytes)
            sink[to.offset + start : to.offset + stop] = well[
                origin.offset + start : origin.offset + stop
            ]

        pinned = tuple((b, b.generation) for b in (to_buffer, origin_buffer) if b is not None)
        prepared = self._transfer(direction, to.nbytes, path, run)
        prepared.operation.reads, prepared.operation.writes = (origin,), (to,)
        return prepared._replace(pinned=pinned)

    def traffic(self, nbytes: int, direction: str, path: CopyPath) -> Prepared:
        """See ``Device.traffic``."""
        nbytes = check_traffic(nbytes, direction)
        return self._transfer(direction, nbytes, check_path(path), None)

    def _transfer(
        self, direction: str, nbytes: int, path: CopyPath, run: Callable[[int], None] | None
    ) -> Prepared:
        profile = self._profile
        if direction == "d2d":
            path, seconds = CopyPath.KERNEL, 2 * nbytes / profile.device_bytes_per_second
        elif direction == "d2h":
            seconds = nbytes / profile.d2h_bytes_per_second
        else:
            seconds = nbytes / profile.h2d_bytes_per_second
        if path is CopyPath.ENGINE and nbytes <= profile.small_copy_bytes:
            path = profile.small_copy_path
        engine = direction if path is CopyPath.ENGINE else None
        if run is None:
            kind, parts = OperationKind.TRAFFIC, 1
        else:
            kind = OperationKind.ENGINE_COPY if engine else OperationKind.KERNEL_COPY
            parts = 2
        operation = Operation(
            kind,
            f"{direction} {nbytes} bytes",
            seconds if engine else seconds + profile.kernel_seconds,
            engine=engine,
            parts=parts,
            run=run,
        )
        return Prepared(operation, engine is not None and profile.engine_copy_lane is CopyLane.OWN)

    def matmul(self, size: int) -> Prepared:
        """See ``Device.matmul``."""
        size = check_count("matmul: size", size, 1)
        profile = self._profile
        seconds = profile.kernel_seconds + 2 * size**3 / profile.matmul_flops_per_second
        return Prepared(
            Operation(
                OperationKind.MATMUL, f"matmul {size}", seconds, occupancy=profile.matmul_occupancy
            )
        )

    def spin(self, seconds: float) -> Prepared:
        """See ``Device.spin``."""
        seconds = check_amount("spin: seconds", seconds)
        kernel_seconds = self._profile.kernel_seconds
        return Prepared(Operation(OperationKind.SPIN, "spin", seconds + kernel_seconds))


def _refuse_freed(kernel: str, pinned: tuple[tuple[PinnedBuffer, int], ...]) -> None:
    for buffer, generation in pinned:
        if buffer.generation != generation:
            raise FreedPinnedBuffer(
                f"kernel {kernel!r} ran after its pinned buffer of {buffer.size} bytes "
                f"(from {buffer.site}) was dropped. Kernels do not guard pinned memory: keep "
                "the tensor until an event after the kernel was waited on"
            )
