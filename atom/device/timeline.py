"""Records of what the virtual device ran and who owned which block."""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.device.arena import Span
from atom.device.caching_allocator import Block
from atom.device.operations import Operation, OperationKind


@dataclass(frozen=True)
class WorkRecord:
    """One operation that ran.

    Attributes:
        name: the kernel's name, or what the copy moves.
        kind: ``kernel``, ``engine_copy``, ``kernel_copy``, ``traffic``, ``matmul``, ``spin`` or
            ``wait``.
        stream_id: stream it was queued on; 0 is the default stream.
        hardware_queue: queue that it took a turn in, ``None`` if in none.
        submitted_seconds: when the host queued it.
        start_seconds: when it began to take time.
        end_seconds: when its last bytes were in place.
        reads, writes: byte ranges, each ``(space, offset, bytes)``.
    """

    name: str
    kind: str
    stream_id: int
    hardware_queue: int | None
    submitted_seconds: float
    start_seconds: float
    end_seconds: float
    reads: tuple[tuple[str, int, int], ...]
    writes: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class BlockRecord:
    """One ownership of a device block.

    Attributes:
        offset: byte offset in the device's arena.
        address: device address.
        nbytes: bytes of the block.
        stream_id: stream that owns it.
        allocated_seconds: host time of the allocation.
        freed_seconds: host time at which the last reference died; ``None`` while it is owned.
        owner: label given by ``VirtualDevice.label``, else ``file:line`` of the allocation.
    """

    offset: int
    address: int
    nbytes: int
    stream_id: int
    allocated_seconds: float
    freed_seconds: float | None
    owner: str


@dataclass(frozen=True)
class Timeline:
    """What ran, in order of its end, and who owned the blocks, in order of allocation."""

    work: tuple[WorkRecord, ...]
    blocks: tuple[BlockRecord, ...]


def _ranges(spans: tuple[Span, ...]) -> tuple[tuple[str, int, int], ...]:
    return tuple((span.space, span.offset, span.nbytes) for span in spans)


@dataclass
class Recorder:
    """Collects records while tracing is on."""

    work: list[WorkRecord] = field(default_factory=list)
    blocks: list[BlockRecord] = field(default_factory=list)

    def operation(self, operation: Operation) -> None:
        """Keep an operation that finished."""
        self.work.append(
            WorkRecord(
                operation.name,
                OperationKind(operation.kind).name.lower(),
                operation.stream.stream_id if operation.stream else -1,
                operation.lane,
                operation.submitted,
                operation.start,
                operation.end,
                _ranges(operation.reads),
                _ranges(operation.writes),
            )
        )

    def block(self, block: Block, address: int, freed: float | None) -> None:
        """Keep one ownership of a block."""
        self.blocks.append(self.describe(block, address, freed))

    @staticmethod
    def describe(block: Block, address: int, freed: float | None) -> BlockRecord:
        """The record of ``block``'s present owner."""
        return BlockRecord(
            block.offset,
            address,
            block.size,
            block.stream_id,
            block.allocated_at,
            freed,
            block.label or block.site,
        )
