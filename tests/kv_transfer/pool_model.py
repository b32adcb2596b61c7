"""A host pool as plainly as it can be written: a list in order of use, searched each time."""

from __future__ import annotations

from dataclasses import dataclass

from atom.kv_transfer.host_pool import EntryKind, PoolKey, PoolPolicy, Refusal


@dataclass
class Item:
    """One entry."""

    key: PoolKey
    size: int
    parent: object
    step: int
    pins: int = 1
    withdrawn: bool = False


class PlainPool:
    """See the module's text. ``log`` is what was evicted or withdrawn, in order."""

    def __init__(
        self, capacity: int, policy: PoolPolicy, state_share: float, alignment: int
    ) -> None:
        self.policy = policy
        self.alignment = alignment
        capacity = capacity // alignment * alignment
        state = int(capacity * state_share) // alignment * alignment
        self.capacity = {EntryKind.STATE: state, EntryKind.KV: capacity - state}
        if policy is not PoolPolicy.ISOLATED:
            self.capacity = dict.fromkeys(EntryKind, capacity)
        #: least recently used first
        self.items: list[Item] = []
        self.doomed: list[Item] = []
        self.log: list[PoolKey] = []

    def find(self, key: PoolKey) -> Item | None:
        return next((item for item in self.items if item.key == key), None)

    def used(self, kind: EntryKind) -> int:
        every = [*self.items, *self.doomed]
        if self.policy is PoolPolicy.ISOLATED:
            every = [item for item in every if item.key.kind is kind]
        return sum(item.size for item in every)

    def _unit(self, item: Item) -> list[Item]:
        """Paired: a chunk and its state, in order of going."""
        return [
            other
            for kind in (EntryKind.STATE, EntryKind.KV)
            for other in self.items
            if other.key == PoolKey(kind, item.key.digest)
        ]

    def touch(self, key: PoolKey) -> bool:
        item = self.find(key)
        if item is None:
            return False
        moved = self._unit(item) if self.policy is PoolPolicy.PAIRED else [item]
        for each in moved:
            self.items.remove(each)
            self.items.append(each)
        return True

    def _next(self, kind: EntryKind, gone: list[Item], kept: object) -> list[Item]:
        """What goes next: one item, or a unit."""
        left = [item for item in self.items if item not in gone]
        for item in left:
            if self.policy is PoolPolicy.ISOLATED and item.key.kind is not kind:
                continue
            if self.policy is not PoolPolicy.PAIRED:
                if not item.pins:
                    return [item]
                continue
            unit = [each for each in self._unit(item) if each not in gone]
            if any(each.pins for each in unit) or item.key.digest == kept:
                continue
            followed = any(
                other.parent == item.key.digest and other.key.kind is EntryKind.KV for other in left
            )
            if not followed:
                return unit
        return []

    def reserve(self, key: PoolKey, nbytes: int, parent: object, step: int) -> Refusal | None:
        size = -(-nbytes // self.alignment) * self.alignment
        if self.find(key):
            return Refusal.PRESENT
        if size > self.capacity[key.kind]:
            return Refusal.TOO_LARGE
        kept = None
        if self.policy is PoolPolicy.PAIRED:
            kept = key.digest if key.kind is EntryKind.STATE else parent
            if kept is not None and not self.find(PoolKey(EntryKind.KV, kept)):
                return Refusal.NO_PREFIX
        gone: list[Item] = []
        while (
            self.used(key.kind) + size - sum(item.size for item in gone) > self.capacity[key.kind]
        ):
            following = self._next(key.kind, gone, kept)
            if not following:
                return Refusal.PINNED
            gone += following
        for item in gone:
            self.items.remove(item)
            self.log.append(item.key)
        self.items.append(Item(key, size, parent, step))
        if self.policy is PoolPolicy.PAIRED:
            self.touch(key)
        return None

    def unpin(self, item: Item) -> None:
        item.pins -= 1
        if item.withdrawn and not item.pins:
            self.doomed.remove(item)
            self.log.append(item.key)

    def withdraw_since(self, step: int) -> None:
        late = [item for item in self.items if item.step >= step]
        if self.policy is PoolPolicy.PAIRED:
            more = True
            while more:
                names = {item.key.digest for item in late if item.key.kind is EntryKind.KV}
                new = [
                    item
                    for item in self.items
                    if item not in late
                    and (
                        (item.key.kind is EntryKind.STATE and item.key.digest in names)
                        or (item.key.kind is EntryKind.KV and item.parent in names)
                    )
                ]
                more = bool(new)
                late += new
        for item in late:
            self.items.remove(item)
            item.withdrawn = True
            if item.pins:
                self.doomed.append(item)
            else:
                self.log.append(item.key)
