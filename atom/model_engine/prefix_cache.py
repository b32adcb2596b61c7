"""KV blocks and state checkpoints as counted, hashed and evicted resources.

Both pools know numbers only: no tensor, no sequence. Every operation is O(1) a block. What is
published carries the number of the step that computes it, so that it can be taken back.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from atom.errors import AtomError

_DIGEST_BYTES = 16


class CacheFault(AtomError):
    """A block, group or checkpoint was used against its account: a defect of the caller."""


def root_hash(salt: str) -> bytes:
    """What the first block of a prompt is chained to; prompts of two salts share nothing."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: array[int], block_size: int, num_blocks: int, salt: str
) -> None:
    """Bring ``hashes`` to ``num_blocks`` entries, each of its block's tokens and all before it.

    Args:
        hashes: hashes of the leading blocks; extended in place.
        token_ids: int64 array that holds at least ``num_blocks`` full blocks.
        block_size: tokens a block.
        num_blocks: blocks to have hashes of.
        salt: see :func:`root_hash`.
    """
    have = len(hashes)
    if have >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(have * block_size, num_blocks * block_size, block_size):
        tokens = token_ids[start : start + block_size].tobytes()
        parent = blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)


class BlockPool:
    """KV blocks with reference counts, and the index of those whose content is published.

    A block is used (count above 0), free and cached, or free and empty. Free cached blocks are
    given away last, the least recently used first.

    Args:
        num_blocks: blocks of the pool, numbered from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._steps = [0] * num_blocks
        self._index: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that :meth:`take` can give."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can be hit."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        """References to a block."""
        return self._ref_counts[block]

    def published_step(self, block: int) -> int:
        """Step that published a block; 0 when it is not published."""
        return self._steps[block]

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, if one is published. Changes nothing."""
        return self._index.get(block_hash)

    def find_all(self, block_hashes: Iterable[bytes]) -> list[int | None]:
        """:meth:`find` of each."""
        return list(map(self._index.get, block_hashes))

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these distinct blocks are free."""
        counts = self._ref_counts
        return sum(1 for block in blocks if not counts[block])

    def take(self, count: int) -> list[int]:
        """Give blocks with one reference and no published content.

        Raises:
            CacheFault: fewer are free.
        """
        if count > self.num_free:
            raise CacheFault(f"{count} blocks asked for, {self.num_free} free: check before")
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, used or free and cached.

        Raises:
            CacheFault: a block is free and empty.
        """
        for block in blocks:
            if not self._ref_counts[block]:
                if block not in self._cached:
                    raise CacheFault(f"block {block} is free and empty: nothing to share")
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. Later blocks are evicted before earlier ones.

        Raises:
            CacheFault: a block has no reference.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block]
            if count <= 0:
                raise CacheFault(f"block {block} was freed twice")
            self._ref_counts[block] = count - 1
            if count == 1:
                if self._hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, block_hash: bytes, step: int) -> bool:
        """Let a used block be hit. False when another block holds that content already.

        Raises:
            CacheFault: the block is free, or published with other content.
        """
        if not self._ref_counts[block]:
            raise CacheFault(f"block {block} is free: only a used block is published")
        if self._hashes[block] is not None:
            if self._hashes[block] == block_hash:
                return False
            raise CacheFault(f"block {block} is published with other content")
        if block_hash in self._index:
            return False
        self._index[block_hash] = block
        self._hashes[block] = block_hash
        self._steps[block] = step
        return True

    def withdraw_since(self, step: int) -> int:
        """Take back what ``step`` and later ones published; returns how many blocks."""
        late = [block for block in self._index.values() if self._steps[block] >= step]
        for block in late:
            self._forget(block)
            if not self._ref_counts[block]:
                del self._cached[block]
                self._empty.append(block)
        return len(late)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._index[block_hash]
        self._hashes[block] = None
        self._steps[block] = 0


class CheckpointPool:
    """Slots that hold a copy of a request's state at a block boundary, keyed by the block's hash.

    A slot is free, reserved (a save into it is scheduled), or published. A pinned slot is not
    evicted; one that is withdrawn while pinned becomes free with its last pin.

    Args:
        num_slots: slots of the pool, numbered from 0.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._index: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_slots
        self._steps = [0] * num_slots
        self._pins = [0] * num_slots
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def num_published(self) -> int:
        """Checkpoints that can be hit."""
        return len(self._index)

    @property
    def num_free(self) -> int:
        """Slots with nothing in them."""
        return len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """The slot with the state behind this block, if one is published. Changes nothing."""
        return self._index.get(block_hash)

    def published_step(self, slot: int) -> int:
        """Step that published a slot; 0 when it is not published."""
        return self._steps[slot]

    def pins(self, slot: int) -> int:
        """Pins on a slot."""
        return self._pins[slot]

    def touch(self, slot: int) -> None:
        """Make a published slot the last to be evicted."""
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def reserve(self) -> int | None:
        """A slot for a save, evicting the least recently used; ``None`` when all are held."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _none = self._idle.popitem(last=False)
            self._forget(slot)
            self.evictions += 1
        else:
            return None
        self._reserved.add(slot)
        return slot

    def cancel(self, slot: int) -> None:
        """Give a reserved slot back unused.

        Raises:
            CacheFault: it is not reserved.
        """
        if slot not in self._reserved:
            raise CacheFault(f"checkpoint slot {slot} is not reserved")
        self._reserved.remove(slot)
        self._free.append(slot)

    def publish(self, slot: int, block_hash: bytes, step: int) -> bool:
        """Let a reserved slot be hit. False, and the slot is free, when the state is there already.

        Raises:
            CacheFault: it is not reserved.
        """
        if block_hash in self._index:
            self.cancel(slot)
            return False
        if slot not in self._reserved:
            raise CacheFault(f"checkpoint slot {slot} is not reserved")
        self._reserved.remove(slot)
        self._index[block_hash] = slot
        self._hashes[slot] = block_hash
        self._steps[slot] = step
        self._idle[slot] = None
        return True

    def pin(self, slot: int) -> None:
        """Keep a published slot's content until :meth:`unpin`.

        Raises:
            CacheFault: it is neither published nor pinned.
        """
        if not self._pins[slot]:
            if slot not in self._idle:
                raise CacheFault(f"checkpoint slot {slot} holds nothing to pin")
            del self._idle[slot]
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Drop a pin.

        Raises:
            CacheFault: it has none.
        """
        if not self._pins[slot]:
            raise CacheFault(f"checkpoint slot {slot} was unpinned twice")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            if self._hashes[slot] is None:
                self._free.append(slot)
            else:
                self._idle[slot] = None

    def withdraw_since(self, step: int) -> int:
        """Take back what ``step`` and later ones published; returns how many slots."""
        late = [slot for slot in self._index.values() if self._steps[slot] >= step]
        for slot in late:
            self._forget(slot)
            if not self._pins[slot]:
                del self._idle[slot]
                self._free.append(slot)
        return len(late)

    def _forget(self, slot: int) -> None:
        block_hash = self._hashes[slot]
        assert block_hash is not None
        del self._index[block_hash]
        self._hashes[slot] = None
        self._steps[slot] = 0
