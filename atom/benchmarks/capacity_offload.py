"""The CPU tier's copies as times: what :class:`Offload` queues, without the bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from atom.benchmarks.capacity_clock import SimulatedClock, TimedEvent
from atom.benchmarks.capacity_machine import Machine
from atom.kv_transfer.offload import ChunkCopy, Offload, StateCopy, TransferJob
from atom.kv_transfer.pool_entry import Entry


class NoMemory:
    """Entries that lie nowhere; see :class:`atom.kv_transfer.host_memory.EntryMemory`."""

    def take(self, entry: Entry) -> None:
        """Nothing to give."""

    def give(self, entry: Entry) -> None:
        """Nothing to take back."""

    def views(self, entry: Entry, start: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """No bytes."""
        return iter(())


class TimedOffload(Offload):
    """Stores and loads that take time and move nothing.

    Stores run one after the other, loads likewise, each at its direction's rate. A job is what the
    real one moves through one staging block or more, here taken as one. What ends when is asked
    through the inherited methods.

    Args:
        machine: rates and sizes.
        clock: the engine's.
        chunk_tokens: tokens of a KV entry.
        block_size: tokens of a block.
        most_bytes_in_flight: of stores under way.
    """

    def __init__(
        self,
        machine: Machine,
        clock: SimulatedClock,
        *,
        chunk_tokens: int,
        block_size: int,
        most_bytes_in_flight: int,
    ) -> None:
        self.machine = machine
        self.clock = clock
        self.memory = NoMemory()
        self.chunk_blocks = chunk_tokens // block_size
        self.most_bytes_in_flight = most_bytes_in_flight
        self.state_bytes = machine.state_image_bytes
        self._block_bytes = [machine.kv_bytes_per_token * block_size]
        self._events = []
        self.stores: deque[TransferJob] = deque()
        self.loads: deque[TransferJob] = deque()
        self.store_bytes_in_flight = 0
        self.stored_bytes = self.loaded_bytes = 0
        #: when the store stream and the load stream have done all that was queued
        self._store_free = self._load_free = 0.0

    @property
    def next_end(self) -> float | None:
        """Earliest time at which a copy under way changes what the block manager sees."""
        times = [job.sources_read or job.done for job in self.stores] + [j.done for j in self.loads]
        return min((event.time for event in times if isinstance(event, TimedEvent)), default=None)

    def store(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> list[TransferJob]:
        """See :meth:`Offload.store`: behind what the default stream was given, and earlier stores.

        Its sources are read when its turn comes; packing them is not counted.
        """
        nbytes = self._bytes(chunks, states)
        start = max(self._store_free, self.clock.device_free, self.clock.now)
        self._store_free = (
            start + self.machine.copy_seconds + nbytes / self.machine.store_bytes_per_second
        )
        done, read = TimedEvent(self.clock, self._store_free), TimedEvent(self.clock, start)
        job = TransferJob(tuple(chunks), tuple(states), nbytes, done, read)
        self.stores.append(job)
        self.store_bytes_in_flight += nbytes
        self.stored_bytes += nbytes
        return [job]

    def load(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> TransferJob:
        """See :meth:`Offload.load`: the bytes come at once, the pools are written behind the
        default stream. A machine whose loads block runs them on the default stream itself."""
        nbytes = self._bytes(chunks, states)
        seconds = self.machine.copy_seconds + nbytes / self.machine.load_bytes_per_second
        if self.machine.loads_block:
            self._load_free = self.clock.launch(seconds)
        else:
            arrived = max(self._load_free, self.clock.now) + seconds
            self._load_free = max(arrived, self.clock.device_free)
        job = TransferJob(
            tuple(chunks), tuple(states), nbytes, TimedEvent(self.clock, self._load_free)
        )
        self.loads.append(job)
        self.loaded_bytes += nbytes
        return job

    def join(self, job: TransferJob) -> None:
        """See :meth:`Offload.join`."""
        job.done.wait()

    def close(self) -> None:
        """Forget what is under way."""
        self.stores.clear()
        self.loads.clear()

    def _retire(self, job: TransferJob) -> None:
        """Events of a model need not be used again."""

    def _bytes(self, chunks: Sequence[ChunkCopy], states: Sequence[StateCopy]) -> int:
        blocks = sum(len(chunk.blocks) for chunk in chunks)
        return blocks * self._block_bytes[0] + len(states) * self.state_bytes
