"""The order in which a pool's entries go.

``victims`` changes nothing: a caller that finds that too little can go has evicted nothing. Pinned
entries keep their place and are passed over.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Generator, Hashable, Iterator
from typing import Protocol

from atom.kv_transfer.pool_entry import Entry, EntryKind, PoolKey


class EvictionOrder(Protocol):
    """What a policy decides."""

    def add(self, entry: Entry) -> None:
        """Take in a new entry, as the one used last."""

    def touch(self, entry: Entry) -> None:
        """The entry was used."""

    def discard(self, entry: Entry) -> None:
        """The entry is gone."""

    def victims(self, needed: int) -> list[Entry] | None:
        """Entries to evict, in this order, to free ``needed`` bytes; ``None`` if it cannot be."""

    def __iter__(self) -> Iterator[Entry]:
        """All that could be evicted now, in the order in which it would go."""


class LeastRecentlyUsed:
    """One list over whatever it is given."""

    def __init__(self) -> None:
        self._entries: OrderedDict[PoolKey, Entry] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        self._entries[entry.key] = entry

    def touch(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        self._entries.move_to_end(entry.key)

    def discard(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        del self._entries[entry.key]

    def victims(self, needed: int) -> list[Entry] | None:
        """See :class:`EvictionOrder`."""
        found: list[Entry] = []
        for entry in self._entries.values():
            if needed <= 0:
                break
            if not entry.pins:
                found.append(entry)
                needed -= entry.occupied
        return found if needed <= 0 else None

    def __iter__(self) -> Iterator[Entry]:
        """See :class:`EvictionOrder`."""
        return iter([entry for entry in self._entries.values() if not entry.pins])


class PairedPrefixes:
    """The chunk that was used least recently among those that nothing goes on from.

    A chunk and the state behind it are one unit. So whatever is in the pool can be reached: of each
    chunk and each state, all chunks before are there too.
    """

    def __init__(self) -> None:
        self._units: dict[Hashable, Entry] = {}
        #: chunks without successors by time of use; an entry that was used since is put in again
        #: when it comes up
        self._heap: list[tuple[int, int, Entry]] = []
        self._clock = 0
        self._ties = 0

    def _push(self, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = True
            self._ties += 1
            heapq.heappush(self._heap, (entry.stamp, self._ties, entry))

    def _unit(self, entry: Entry) -> Entry:
        return entry if entry.key.kind is EntryKind.KV else self._units[entry.key.digest]

    def add(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        if entry.key.kind is EntryKind.STATE:
            unit = self._units[entry.key.digest]
            unit.state = entry
            self.touch(unit)
            return
        self._units[entry.key.digest] = entry
        if entry.parent is not None:
            self._units[entry.parent].children += 1
        self.touch(entry)
        self._push(entry)

    def touch(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        self._clock += 1
        self._unit(entry).stamp = self._clock

    def discard(self, entry: Entry) -> None:
        """See :class:`EvictionOrder`."""
        if entry.key.kind is EntryKind.STATE:
            self._units[entry.key.digest].state = None
            return
        del self._units[entry.key.digest]
        parent = self._units.get(entry.parent) if entry.parent is not None else None
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._push(parent)

    def victims(self, needed: int) -> list[Entry] | None:
        """See :class:`EvictionOrder`."""
        found: list[Entry] = []
        leaves = self._leaves()
        while needed > 0 and (unit := next(leaves, None)) is not None:
            for entry in (unit.state, unit):
                if entry is not None:
                    found.append(entry)
                    needed -= entry.occupied
        leaves.close()
        return found if needed <= 0 else None

    def _leaves(self) -> Generator[Entry, None, None]:
        """Units as they would go one after the other; the heap is put back at the end."""
        popped: list[Entry] = []
        left: dict[Hashable, int] = {}
        try:
            while self._heap:
                stamp, _, entry = heapq.heappop(self._heap)
                entry.queued = False
                digest = entry.key.digest
                if self._units.get(digest) is not entry or left.get(digest, entry.children):
                    # gone, or something goes on from it since
                    continue
                if stamp != entry.stamp:
                    self._push(entry)
                    continue
                popped.append(entry)
                if entry.pins or (entry.state is not None and entry.state.pins):
                    continue
                yield entry
                parent = self._units.get(entry.parent) if entry.parent is not None else None
                if parent is not None:
                    left[entry.parent] = left.get(entry.parent, parent.children) - 1
                    if not left[entry.parent]:
                        self._push(parent)
        finally:
            for entry in popped:
                self._push(entry)

    def __iter__(self) -> Iterator[Entry]:
        """See :class:`EvictionOrder`."""
        order: list[Entry] = []
        for unit in self._leaves():
            order += [entry for entry in (unit.state, unit) if entry is not None]
        return iter(order)
