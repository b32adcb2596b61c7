"""A pool of host memory as an account: which entries it holds, and which go when room is needed.

It knows bytes, not memory: the owner of the memory keeps an entry's place in ``Entry.place`` and is
told of every eviction. So a simulator of capacity uses the same pool as the engine.

Sizes are counted as they are taken from memory: rounded up to the alignment (4096 bytes by
default). An entry may lie in several pieces, so that no byte is lost to gaps: the pool is full
when its bytes are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from atom.errors import AtomError, BadInput
from atom.kv_transfer.eviction_orders import EvictionOrder, LeastRecentlyUsed, PairedPrefixes
from atom.kv_transfer.pool_entry import (
    ALIGNMENT_BYTES,
    Entry,
    EntryKind,
    PoolKey,
    PoolPolicy,
    Refusal,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "Entry",
    "EntryKind",
    "HostPool",
    "PoolCounts",
    "PoolFault",
    "PoolKey",
    "PoolPolicy",
    "Refusal",
]

#: evicted keys that are remembered, to tell "evicted" from "never stored"
_REMEMBERED = 2**17


class PoolFault(AtomError):
    """An entry was used against its account: a defect of the caller."""


@dataclass
class PoolCounts:
    """Totals of one kind of entry since the start.

    Attributes:
        stored: entries taken in.
        evicted: entries that went to make room.
        withdrawn: entries that were taken back.
        refused: entries that were not taken in, by reason.
    """

    stored: int = 0
    evicted: int = 0
    withdrawn: int = 0
    refused: dict[Refusal, int] = field(default_factory=dict)


class _Budget:
    """Bytes under one order."""

    def __init__(self, capacity: int, order: EvictionOrder) -> None:
        self.capacity = capacity
        self.order = order
        self.used = 0


class HostPool:
    """Entries under a byte budget. Not thread-safe.

    Args:
        capacity_bytes: size of the pool, rounded down to the alignment.
        policy: who goes when room is needed.
        state_share: ``isolated``: share of the bytes that states have for themselves.
        alignment: sizes are rounded up to a multiple of it.
        on_evict: called with each entry that is evicted or withdrawn, when its bytes are free.

    Raises:
        BadInput: a number is out of range.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: PoolPolicy = PoolPolicy.SHARED_LRU,
        *,
        state_share: float = 0.25,
        alignment: int = ALIGNMENT_BYTES,
        on_evict: Callable[[Entry], None] | None = None,
    ) -> None:
        if alignment < 1:
            raise BadInput(f"alignment: expected 1 byte or more, got {alignment}")
        if capacity_bytes < alignment:
            raise BadInput(
                f"capacity_bytes: expected {alignment} (one unit of the alignment) or more, "
                f"got {capacity_bytes}"
            )
        if not 0 < state_share < 1:
            raise BadInput(f"state_share: expected more than 0, under 1, got {state_share}")
        self.policy = PoolPolicy(policy)
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes // alignment * alignment
        self.on_evict = on_evict
        self.counts = {kind: PoolCounts() for kind in EntryKind}
        self._entries: dict[PoolKey, Entry] = {}
        self._ghosts: OrderedDict[PoolKey, None] = OrderedDict()
        self._kind_bytes = dict.fromkeys(EntryKind, 0)
        self._kind_entries = dict.fromkeys(EntryKind, 0)
        self._paired = self.policy is PoolPolicy.PAIRED
        if self.policy is PoolPolicy.ISOLATED:
            states = int(self.capacity_bytes * state_share) // alignment * alignment
            self._budgets = {
                EntryKind.STATE: _Budget(states, LeastRecentlyUsed()),
                EntryKind.KV: _Budget(self.capacity_bytes - states, LeastRecentlyUsed()),
            }
        else:
            order = PairedPrefixes() if self._paired else LeastRecentlyUsed()
            budget = _Budget(self.capacity_bytes, order)
            self._budgets = dict.fromkeys(EntryKind, budget)

    # -- what is there
    def __len__(self) -> int:
        """Entries that can be found."""
        return len(self._entries)

    def __contains__(self, key: PoolKey) -> bool:
        """Whether there is such an entry, landed or not. Changes nothing."""
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        """Bytes taken, alignment and withdrawn entries under a pin included."""
        return sum(self._kind_bytes.values())

    def kind_bytes(self, kind: EntryKind) -> int:
        """Bytes taken by one kind."""
        return self._kind_bytes[kind]

    def kind_entries(self, kind: EntryKind) -> int:
        """Entries of one kind, withdrawn ones under a pin included."""
        return self._kind_entries[kind]

    def share_bytes(self, kind: EntryKind) -> int:
        """Most bytes that entries of that kind can take."""
        return self._budgets[kind].capacity

    def occupied_bytes(self, nbytes: int) -> int:
        """Bytes that an entry of ``nbytes`` takes."""
        return -(-nbytes // self.alignment) * self.alignment

    def find(self, key: PoolKey) -> Entry | None:
        """The entry of that name, landed or not. Changes nothing."""
        return self._entries.get(key)

    def was_evicted(self, key: PoolKey) -> bool:
        """Whether it was here and went to make room, and not with its chunk, as a paired state.

        The last 131,072 are remembered.
        """
        return key in self._ghosts

    def eviction_order(self) -> Iterator[PoolKey]:
        """Names of what could go now, in the order in which it would (one kind after the other
        under ``isolated``)."""
        for budget in dict.fromkeys(self._budgets.values()):
            for entry in budget.order:
                yield entry.key

    # -- use
    def touch(self, key: PoolKey) -> bool:
        """Note a use; ``False`` if there is no such entry."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._budgets[key.kind].order.touch(entry)
        return True

    def pin(self, entry: Entry) -> None:
        """Keep an entry's bytes as they are until :meth:`unpin`.

        Raises:
            PoolFault: it is not in the pool.
        """
        if self._entries.get(entry.key) is not entry:
            raise PoolFault(f"{entry!r} is not in the pool: nothing to pin")
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Drop a pin. A withdrawn entry goes with its last.

        Raises:
            PoolFault: it has none.
        """
        if not entry.pins:
            raise PoolFault(f"{entry!r} was unpinned twice")
        entry.pins -= 1
        if entry.withdrawn and not entry.pins:
            self._give_back(entry)

    # -- in and out
    def reserve(
        self, key: PoolKey, nbytes: int, *, parent: Hashable | None = None, step: int = 0
    ) -> Entry | Refusal:
        """Take in an entry whose content is still to come; it is pinned once for its writer.

        Args:
            key: its name.
            nbytes: bytes of its content, 1 or more.
            parent: of a KV chunk, digest of the chunk before; ``None`` for a prompt's first.
            step: step that computes the content.

        Returns:
            The entry, for :meth:`land`, or why it was not taken in.
        """
        if nbytes < 1:
            raise PoolFault(f"an entry has 1 byte or more, got {nbytes}")
        refusal = self._refusal(key, nbytes, parent)
        if refusal is None:
            entry = Entry(key, nbytes, self.occupied_bytes(nbytes), parent, step)
            if self._make_room(entry):
                return self._take_in(entry)
            refusal = Refusal.PINNED
        refused = self.counts[key.kind].refused
        refused[refusal] = refused.get(refusal, 0) + 1
        return refusal

    def _refusal(self, key: PoolKey, nbytes: int, parent: Hashable | None) -> Refusal | None:
        if key in self._entries:
            return Refusal.PRESENT
        if self.occupied_bytes(nbytes) > self._budgets[key.kind].capacity:
            return Refusal.TOO_LARGE
        first = key.kind is EntryKind.KV and parent is None
        if self._paired and not first and self._prefix(key, parent) is None:
            return Refusal.NO_PREFIX
        return None

    def _make_room(self, entry: Entry) -> bool:
        """Evict what has to go for a new entry; if too little can go, nothing goes."""
        budget = self._budgets[entry.key.kind]
        needed = budget.used + entry.occupied - budget.capacity
        victims = self._victims(budget, needed, entry) if needed > 0 else []
        for victim in victims or ():
            self._evict(victim)
        return victims is not None

    def _victims(self, budget: _Budget, needed: int, entry: Entry) -> list[Entry] | None:
        prefix = self._prefix(entry.key, entry.parent)
        if prefix is None:
            return budget.order.victims(needed)
        # what it goes on from may be the end of a prefix now: it must not make room for it
        prefix.pins += 1
        try:
            return budget.order.victims(needed)
        finally:
            prefix.pins -= 1

    def _prefix(self, key: PoolKey, parent: Hashable | None) -> Entry | None:
        """Paired: the chunk that a new entry stands on, if it has one."""
        before = key.digest if key.kind is EntryKind.STATE else parent
        if not self._paired or before is None:
            return None
        return self._entries.get(PoolKey(EntryKind.KV, before))

    def _take_in(self, entry: Entry) -> Entry:
        kind = entry.key.kind
        entry.pins = 1
        self._entries[entry.key] = entry
        self._ghosts.pop(entry.key, None)
        budget = self._budgets[kind]
        budget.used += entry.occupied
        budget.order.add(entry)
        self._kind_bytes[kind] += entry.occupied
        self._kind_entries[kind] += 1
        self.counts[kind].stored += 1
        return entry

    def land(self, entry: Entry) -> None:
        """The content is complete: let it be loaded, and drop its writer's pin."""
        entry.landed = True
        self.unpin(entry)

    def insert(
        self, key: PoolKey, nbytes: int, *, parent: Hashable | None = None, step: int = 0
    ) -> bool:
        """A use of an entry that is made if it is not there: what a simulator needs.

        Returns:
            Whether it is there now.
        """
        if self.touch(key):
            return True
        made = self.reserve(key, nbytes, parent=parent, step=step)
        if isinstance(made, Refusal):
            return False
        self.land(made)
        return True

    def withdraw_since(self, step: int) -> int:
        """Take back what ``step`` and later ones computed; see :meth:`withdraw`."""
        return self.withdraw([e for e in self._entries.values() if e.step >= step])

    def withdraw(self, entries: Iterable[Entry]) -> int:
        """Forget entries; bytes under a pin are free with the last one.

        Under ``paired`` what goes on from a withdrawn chunk goes too.

        Returns:
            How many were forgotten.
        """
        gone = self._with_successors(entries) if self._paired else list(entries)
        for entry in gone:
            self._forget(entry)
            self.counts[entry.key.kind].withdrawn += 1
            entry.withdrawn = True
            if not entry.pins:
                self._give_back(entry)
        return len(gone)

    def _with_successors(self, entries: Iterable[Entry]) -> list[Entry]:
        after: dict[Hashable, list[Entry]] = {}
        for entry in self._entries.values():
            if entry.key.kind is EntryKind.STATE:
                after.setdefault(entry.key.digest, []).append(entry)
            elif entry.parent is not None:
                after.setdefault(entry.parent, []).append(entry)
        found: dict[PoolKey, Entry] = {}
        waiting = list(entries)
        while waiting:
            entry = waiting.pop()
            if entry.key in found:
                continue
            found[entry.key] = entry
            if entry.key.kind is EntryKind.KV:
                waiting += after.get(entry.key.digest, ())
        # the end of a prefix first
        order = {key: place for place, key in enumerate(self._entries)}
        return sorted(found.values(), key=lambda entry: -order[entry.key])

    def _evict(self, entry: Entry) -> None:
        self._forget(entry)
        self.counts[entry.key.kind].evicted += 1
        # a paired state never goes alone: that its chunk went says it all
        if not (self._paired and entry.key.kind is EntryKind.STATE):
            self._ghosts[entry.key] = None
        if len(self._ghosts) > _REMEMBERED:
            self._ghosts.popitem(last=False)
        self._give_back(entry)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            raise PoolFault(f"{entry!r} is not in the pool")
        self._budgets[entry.key.kind].order.discard(entry)
        del self._entries[entry.key]

    def _give_back(self, entry: Entry) -> None:
        kind = entry.key.kind
        self._budgets[kind].used -= entry.occupied
        self._kind_bytes[kind] -= entry.occupied
        self._kind_entries[kind] -= 1
        if self.on_evict is not None:
            self.on_evict(entry)
