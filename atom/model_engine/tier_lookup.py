"""What the device and the host pool have of a prompt together, and what is loaded of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey
from atom.kv_transfer.offload import TransferJob
from atom.kv_transfer.tier_counts import Cause
from atom.model_engine.block_manager import BlockManager, PrefixHit
from atom.model_engine.prefix_cache import extend_hashes
from atom.model_engine.sequence import Sequence


@dataclass
class Found:
    """What the pool could add to a prompt.

    Attributes:
        num_tokens: boundary up to which everything is on the device or in the pool; 0 for none
            behind what the device has.
        chunks: entries to load, with the numbers of the prompt's blocks that are missing.
        present: blocks of the prefix that are on the device.
        state: the state to load, or ``None`` if it is on the device, in checkpoint ``slot``.
        slot: see there.
        failures: what the look-up hoped for and did not find: at most one of KV, and each state on
            the way down to one that is there.
    """

    num_tokens: int = 0
    chunks: list[tuple[Entry, list[int]]] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    state: Entry | None = None
    slot: int | None = None
    failures: list[tuple[EntryKind, Cause]] = field(default_factory=list)


@dataclass(eq=False)
class Load:
    """A load for one request.

    Attributes:
        chunks: as in :class:`Found`.
        blocks: target block of each missing block of the prompt, by its number.
        present: blocks of the prefix that were on the device, kept there for it.
        hashes: of the prompt's blocks.
        slot: checkpoint slot of the state, loaded or there already; ``None`` once given back.
        pinned_slot: whether the slot is published and pinned for this load, not reserved.
        job: its last job; ``None`` once the host saw it end.
        published: whether its blocks can be hit.
        void: whether its content was taken back.
        owner: the request that has not been admitted yet, or ``None``.
        rest: blocks that its request needs beside, to be admitted.
    """

    chunks: list[tuple[Entry, list[int]]]
    state: Entry | None
    blocks: dict[int, int]
    present: list[int]
    hashes: list[bytes]
    slot: int | None
    job: TransferJob | None = None
    published: bool = False
    void: bool = False
    owner: int | None = None
    pinned_slot: bool = False
    rest: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether its content can be neither hit nor given up yet."""
        return not self.published and not self.void

    @property
    def entries(self) -> list[Entry]:
        """What it reads."""
        found = [entry for entry, _ in self.chunks]
        return found if self.state is None else [*found, self.state]


def look_up(
    manager: BlockManager, pool: HostPool, chunk_blocks: int, seq: Sequence, hit: PrefixHit
) -> Found:
    """The longest boundary behind ``hit`` that both cover. Changes no account.

    Args:
        manager: blocks and checkpoints of the device.
        pool: entries of the host.
        chunk_blocks: KV blocks of an entry.
        seq: the request; hashes of its blocks are computed as needed.
        hit: what the device has alone.
    """
    spacing = manager.checkpoint_spacing // manager.block_size
    count = (seq.num_tokens - 1) // manager.block_size // spacing * spacing
    hashes = seq.block_hashes
    extend_hashes(hashes, seq.token_ids, manager.block_size, count, seq.cache_salt)
    blocks = manager.blocks.find_all(hashes[:count])
    chunks: list[tuple[Entry, list[int]]] = []
    failures: list[tuple[EntryKind, Cause]] = []
    reach = 0
    for end in range(chunk_blocks, count + 1, chunk_blocks):
        start = end - chunk_blocks
        if None in blocks[start:end]:
            missing = [number for number in range(start, end) if blocks[number] is None]
            entry, cause = _entry(pool, PoolKey(EntryKind.KV, hashes[end - 1]))
            if entry is None:
                if cause is not Cause.ABSENT:
                    failures.append((EntryKind.KV, cause))
                break
            chunks.append((entry, missing))
        reach = end
    for end in range(reach // spacing * spacing, hit.num_tokens // manager.block_size, -spacing):
        state = None
        slot = manager.checkpoints.find(hashes[end - 1])
        if slot is None:
            state, cause = _entry(pool, PoolKey(EntryKind.STATE, hashes[end - 1]))
            if state is None:
                # KV without its state is no prefix: the pair fails
                if cause is not Cause.ABSENT:
                    failures.append((EntryKind.STATE, cause))
                continue
        wanted = [(entry, numbers) for entry, numbers in chunks if numbers[0] < end]
        kept = [block for block in blocks[:end] if block is not None]
        return Found(end * manager.block_size, wanted, kept, state, slot, failures)
    return Found(failures=failures)


def _entry(pool: HostPool, key: PoolKey) -> tuple[Entry | None, Cause]:
    entry = pool.find(key)
    if entry is None:
        return None, Cause.EVICTED if pool.was_evicted(key) else Cause.ABSENT
    return (entry, Cause.ABSENT) if entry.landed else (None, Cause.NOT_LANDED)
