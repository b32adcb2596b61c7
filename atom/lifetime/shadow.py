"""Shadow memory: which work may still use which bytes, for live blocks and for freed ones."""

from __future__ import annotations

import bisect
import math
from typing import Any

from atom.lifetime.findings import Finding
from atom.lifetime.happens_before import StreamKey
from atom.lifetime.sites import UNKNOWN, RawSite

#: views with more runs of bytes than that are compared by their hulls
_MOST_RUNS = 65536


class View:
    """What an access touches: type, shape, and its strides where it has gaps.

    ``strides`` is ``None`` for a view without gaps; they count bytes otherwise.
    """

    __slots__ = ("dtype", "itemsize", "shape", "strides")

    def __init__(
        self,
        dtype: Any = None,
        shape: tuple[int, ...] = (),
        itemsize: int = 1,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.itemsize = itemsize
        self.strides = strides

    def __str__(self) -> str:
        if self.dtype is None:
            return ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def runs(self, start: int) -> list[tuple[int, int]] | None:
        """Byte runs ``(from, to)`` of the view at ``start``, sorted; ``None`` if too many."""
        if self.strides is None:
            return None
        run = self.itemsize
        axes = sorted(
            (stride, extent)
            for stride, extent in zip(self.strides, self.shape, strict=True)
            if extent > 1 and stride > 0
        )
        while axes and axes[0][0] == run:
            run *= axes.pop(0)[1]
        if math.prod(extent for _, extent in axes) > _MOST_RUNS:
            return None
        starts = [start]
        for stride, extent in axes:
            starts = [begin + stride * index for index in range(extent) for begin in starts]
        return sorted((begin, begin + run) for begin in starts)


NO_VIEW = View()


class Access:
    """One operation's use of a byte range. ``finding`` is set once it was reported at a free."""

    __slots__ = (
        "block",
        "copy",
        "finding",
        "hi",
        "lo",
        "number",
        "operation",
        "reported",
        "site",
        "stream",
        "view",
        "write",
    )

    def __init__(
        self,
        block: Block,
        lo: int,
        hi: int,
        write: bool,
        stream: StreamKey,
        number: int,
        operation: str,
        site: RawSite,
        view: View,
        copy: bool,
    ) -> None:
        self.block = block
        self.lo = lo
        self.hi = hi
        self.write = write
        self.stream = stream
        self.number = number
        self.operation = operation
        self.site = site
        self.view = view
        self.copy = copy
        self.finding: Finding | None = None
        self.reported: set[StreamKey] | None = None

    def meets(self, other: Access) -> bool:
        """Whether both touch a common byte; views with gaps are compared run by run."""
        if self.hi <= other.lo or other.hi <= self.lo:
            return False
        if self.view.strides is None and other.view.strides is None:
            return True
        mine = self.view.runs(self.lo)
        theirs = other.view.runs(other.lo)
        if mine is None and theirs is None:
            return True
        mine = mine or [(self.lo, self.hi)]
        theirs = theirs or [(other.lo, other.hi)]
        here = there = 0
        while here < len(mine) and there < len(theirs):
            if mine[here][1] <= theirs[there][0]:
                here += 1
            elif theirs[there][1] <= mine[here][0]:
                there += 1
            else:
                return True
        return False

    def covers(self, other: Access) -> bool:
        """Whether everything that conflicts with ``other`` conflicts with this one too."""
        return (
            self.lo <= other.lo
            and other.hi <= self.hi
            and self.view.strides is None
            and (self.write or not other.write)
        )


class Block:
    """A block of memory with an owner.

    Attributes:
        base, size: its bytes; the size is what the allocator rounds to, once it is known.
        owner: the stream it was allocated for; ``None`` if that was not seen.
        pinned: host memory that devices reach.
        private: memory of a captured graph, which nobody else gets while the graph lives.
        site: where it was allocated.
        accesses: the latest use by each stream of each range, by ``(lo, hi, stream, write)``.
        inherited: uses by former owners of the same bytes.
        inherited_from: the stream of all of those, or ``None`` if there are several streams.
        recorded: streams that the allocator was told of.
    """

    __slots__ = (
        "accesses",
        "base",
        "inherited",
        "inherited_from",
        "owner",
        "pinned",
        "private",
        "recorded",
        "site",
        "size",
        "streams",
    )

    def __init__(
        self,
        base: int,
        size: int,
        owner: StreamKey | None,
        site: RawSite = UNKNOWN,
        *,
        pinned: bool = False,
        private: bool = False,
    ) -> None:
        self.base = base
        self.size = size
        self.owner = owner
        self.site = site
        self.pinned = pinned
        self.private = private
        self.accesses: dict[tuple[int, int, StreamKey, bool], Access] = {}
        self.inherited: list[Access] = []
        self.inherited_from: StreamKey | None = None
        self.recorded: set[StreamKey] = set()
        self.streams: set[StreamKey] = set()

    def inherit(self, accesses: list[Access]) -> None:
        """Take over uses by former owners."""
        if not accesses:
            return
        self.inherited += accesses
        streams = {access.stream for access in self.inherited}
        self.inherited_from = streams.pop() if len(streams) == 1 else None


def outlasting(accesses: list[Access], lo: int, hi: int) -> list[Access]:
    """Those of ``accesses`` that no later one on the same stream stands for, newest first.

    What is not ordered after the earlier of two is not ordered after the later one either, which
    reaches over the same bytes and is a write if the other is. Only bytes ``[lo, hi)`` count: a
    freed block may have been split.
    """
    if len(accesses) < 2:
        return accesses
    kept: list[Access] = []
    for access in sorted(accesses, key=lambda each: each.number, reverse=True):
        first, last = max(access.lo, lo), min(access.hi, hi)
        for later in kept:
            if (
                later.stream == access.stream
                and (later.write or not access.write)
                and later.view.strides is None
                and max(later.lo, lo) <= first
                and last <= min(later.hi, hi)
            ):
                break
        else:
            kept.append(access)
    return kept


class Ghosts:
    """Uses of bytes that nobody owns at present, by address. Ranges do not overlap.

    Args:
        most: ranges to keep; past it the oldest half by address is dropped by :meth:`trim`.
    """

    def __init__(self, most: int = 20000) -> None:
        self.most = most
        self._bases: list[int] = []
        self._ranges: dict[int, tuple[int, list[Access]]] = {}

    def __len__(self) -> int:
        return len(self._bases)

    def put(self, lo: int, hi: int, accesses: list[Access]) -> None:
        """Keep the uses of a freed range."""
        if not accesses:
            return
        known = self._ranges.get(lo)
        if known is None:
            bisect.insort(self._bases, lo)
            self._ranges[lo] = (hi, accesses)
        else:
            self._ranges[lo] = (max(hi, known[0]), known[1] + accesses)

    def take(self, lo: int, hi: int) -> list[Access]:
        """Remove and return the uses of ``[lo, hi)``; the rest of a cut range stays."""
        bases = self._bases
        if not bases:
            return []
        index = bisect.bisect_left(bases, lo)
        if index and self._ranges[bases[index - 1]][0] > lo:
            index -= 1
        found: list[Access] = []
        rest: list[tuple[int, int, list[Access]]] = []
        while index < len(bases) and bases[index] < hi:
            start = bases.pop(index)
            stop, accesses = self._ranges.pop(start)
            for access in accesses:
                if access.lo < hi and lo < access.hi:
                    found.append(access)
            if start < lo:
                rest.append((start, lo, [a for a in accesses if a.lo < lo]))
            if stop > hi:
                rest.append((hi, stop, [a for a in accesses if a.hi > hi]))
        for start, stop, accesses in rest:
            self.put(start, stop, accesses)
        return found

    def trim(self, is_over: Any) -> int:
        """Drop uses for which ``is_over`` holds; returns how many ranges had to go for space."""
        for start in list(self._bases):
            stop, accesses = self._ranges.pop(start)
            kept = [access for access in accesses if not is_over(access)]
            if kept:
                self._ranges[start] = (stop, kept)
        lost = max(0, len(self._ranges) - self.most // 2)
        for start in list(self._ranges)[:lost]:
            del self._ranges[start]
        self._bases = sorted(self._ranges)
        return lost
