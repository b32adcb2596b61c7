"""Shadow memory: which work may still use which bytes, for live blocks and for freed ones."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, ClassVar, TypeAlias

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

    As long as one stream alone uses it, nothing can be out of order: its uses are kept as plain
    tuples then, and become :class:`Access` objects when another stream comes near. A freed block
    stands for its uses the same way in the history of its bytes.

    Attributes:
        base, size: its bytes; the size is what the allocator rounds to, once it is known.
        owner: the stream it was allocated for; ``None`` if that was not seen.
        pinned: host memory that devices reach.
        private: memory of a captured graph, which nobody else gets while the graph lives.
        site: where it was allocated.
        unsized: its size, and so the history of its bytes, is not known yet.
        accesses: the latest use by each stream of each range, by ``(lo, hi, stream, write)``:
            ``(number, operation, site, view, copy)`` while one stream is alone, else accesses.
        stream: the only stream that used these bytes, former owners included; ``None`` of none
            and of several.
        shared: each use is looked at.
        hi: end of the highest bytes that ``stream`` used.
        written: where the longest write without gaps from ``base`` ends.
        inherited: uses by former owners of the same bytes, or freed blocks that stand for theirs.
        inherited_from: the stream of all of those, or ``None`` if there are several streams.
        recorded: streams that the allocator was told of.
    """

    __slots__ = (
        "accesses",
        "base",
        "hi",
        "inherited",
        "inherited_from",
        "owner",
        "pinned",
        "private",
        "recorded",
        "shared",
        "site",
        "size",
        "stream",
        "streams",
        "unsized",
        "written",
    )
    #: what one stream did alone was never reported
    finding: ClassVar[None] = None

    def __init__(
        self,
        base: int,
        size: int,
        owner: StreamKey | None,
        site: RawSite = UNKNOWN,
        *,
        pinned: bool = False,
        private: bool = False,
        unsized: bool = False,
    ) -> None:
        self.base = base
        self.size = size
        self.owner = owner
        self.site = site
        self.pinned = pinned
        self.private = private
        self.unsized = unsized
        self.accesses: dict[tuple[int, int, StreamKey, bool], Any] = {}
        self.stream: StreamKey | None = None
        self.shared = pinned
        self.hi = self.written = 0
        self.inherited: Sequence[Past] = ()
        self.inherited_from: StreamKey | None = None
        self.recorded: frozenset[StreamKey] = NOBODY
        self.streams: Set[StreamKey] = set() if pinned else NOBODY

    @property
    def lo(self) -> int:
        """Where its bytes begin."""
        return self.base

    @property
    def number(self) -> int:
        """The latest operation of the stream that was alone."""
        return max((use[0] for use in self.accesses.values()), default=0)

    def claim(self, stream: StreamKey) -> bool:
        """Whether ``stream`` is the first to use these bytes, or goes on where it was alone."""
        if self.shared or (self.inherited and self.inherited_from != stream):
            return False
        self.stream = stream
        return True

    def uses(self) -> list[Access]:
        """The uses of a block that one stream had alone, one by one."""
        return [
            Access(self, lo, hi, write, stream, *use)
            for (lo, hi, stream, write), use in self.accesses.items()
        ]

    def share(self) -> None:
        """Another stream has come: keep accesses from now on."""
        self.accesses = dict(zip(self.accesses, self.uses(), strict=True))
        self.streams = {access.stream for access in self.accesses.values()}
        self.stream, self.shared = None, True
        self.inherited = flat(self.inherited)

    def inherit(self, past: Sequence[Past]) -> None:
        """Take over uses by former owners."""
        if not past:
            return
        if len(past) > 1 or self.inherited:
            # a block that was split comes back from each part
            past = list({id(each): each for each in (*self.inherited, *past)}.values())
        self.inherited = past
        streams = {each.stream for each in past}
        self.inherited_from = streams.pop() if len(streams) == 1 else None

    def remains(self) -> Sequence[Past]:
        """What stays of a freed block that one stream had alone: itself, and those former uses
        that none of its writes stands for."""
        past, self.inherited = self.inherited, ()
        if not self.accesses:
            return past
        end, written = self.base + self.size, self.written
        return (self, *(each for each in past if min(each.hi, end) > written))


#: a use, or a freed block in place of all of its uses
Past: TypeAlias = "Access | Block"
NOBODY: frozenset[StreamKey] = frozenset()


def flat(past: Iterable[Past]) -> list[Access]:
    """The uses one by one."""
    found: list[Access] = []
    for each in past:
        found += each.uses() if isinstance(each, Block) else (each,)
    return found


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
        self._ranges: dict[int, tuple[int, Sequence[Past]]] = {}

    def __len__(self) -> int:
        return len(self._bases)

    def put(self, lo: int, hi: int, past: Sequence[Past]) -> None:
        """Keep the uses of a freed range."""
        if not past:
            return
        known = self._ranges.get(lo)
        if known is None:
            bisect.insort(self._bases, lo)
            self._ranges[lo] = (hi, past)
        else:
            self._ranges[lo] = (max(hi, known[0]), (*known[1], *past) if known[1] else past)

    def take(self, lo: int, hi: int) -> Sequence[Past]:
        """Remove and return the uses of ``[lo, hi)``; the rest of a cut range stays."""
        known = self._ranges.get(lo)
        if known is not None and known[0] == hi:
            # the same bytes come and go: the range stays, empty
            self._ranges[lo] = (hi, ())
            return known[1]
        bases = self._bases
        if not bases:
            return ()
        index = bisect.bisect_left(bases, lo)
        if index and self._ranges[bases[index - 1]][0] > lo:
            index -= 1
        found: list[Past] = []
        rest: list[tuple[int, int, list[Past]]] = []
        while index < len(bases) and bases[index] < hi:
            start = bases.pop(index)
            stop, past = self._ranges.pop(start)
            for each in past:
                if each.lo < hi and lo < each.hi:
                    found.append(each)
            if start < lo:
                rest.append((start, lo, [each for each in past if each.lo < lo]))
            if stop > hi:
                rest.append((hi, stop, [each for each in past if each.hi > hi]))
        for start, stop, left in rest:
            self.put(start, stop, left)
        return found

    def trim(self, is_over: Callable[[Past], bool]) -> int:
        """Drop uses for which ``is_over`` holds; returns how many ranges had to go for space."""
        for start in list(self._bases):
            stop, past = self._ranges.pop(start)
            kept = [each for each in past if not is_over(each)]
            if kept:
                self._ranges[start] = (stop, kept)
        lost = max(0, len(self._ranges) - self.most // 2)
        for start in list(self._ranges)[:lost]:
            del self._ranges[start]
        self._bases = sorted(self._ranges)
        return lost
