"""Finds missing orders: the happens-before core over shadow memory.

Any front end feeds it, event by event: allocations and frees, operations and the byte ranges that
they read and write, event records and waits, synchronisation, ``record_stream``, host reads. A
finding needs no unlucky timing: it says that nothing *orders* two uses, whatever ran first today.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atom.lifetime.advice import fix_for
from atom.lifetime.findings import Edge, Finding, Kind, Report, Use
from atom.lifetime.happens_before import HappensBefore, StreamKey
from atom.lifetime.shadow import NO_VIEW, Access, Block, Ghosts, Past, View, flat, outlasting
from atom.lifetime.sites import UNKNOWN, RawSite, as_site, deeper

#: accesses to remember for one block
_MOST_ACCESSES = 64
#: freed blocks that stand for their uses in one place
_MOST_STANDING = 8
HOST = "the host"
_EDGES = {
    Kind.FREED_IN_USE: Edge.REUSE,
    Kind.REUSE_RACE: Edge.REUSE,
    Kind.LIVE_OVERWRITE: Edge.REUSE,
    Kind.UNORDERED_WRITES: Edge.REUSE,
    Kind.READ_TOO_EARLY: Edge.PRODUCER,
    Kind.HOST_READ_TOO_EARLY: Edge.HOST_READ,
    Kind.HOST_WRITE_TOO_EARLY: Edge.REUSE,
}


def round_size(nbytes: int) -> int:
    """Bytes of the block that PyTorch's caching allocator gives for ``nbytes``."""
    return max(512, -(-nbytes // 512) * 512)


class Monitor:
    """See the module's text. Addresses are integers; pinned memory has addresses of its own.

    Args:
        report: takes the findings.
        stream_name: how a stream is called in findings.
    """

    def __init__(
        self, report: Report, stream_name: Callable[[StreamKey], str] = "stream {}".format
    ) -> None:
        self.report = report
        self.stream_name = stream_name
        self.order = HappensBefore()
        self.live: dict[int, Block] = {}
        #: live pinned blocks: host operations are looked at while there are any
        self.pinned = 0
        self._ghosts = Ghosts()
        self._bases: list[int] = []
        self._bases_known = False
        self._records: dict[StreamKey, list[tuple[int, RawSite]]] = {}

    # -- memory
    def allocate(
        self,
        base: int,
        size: int,
        owner: StreamKey | None,
        site: RawSite = UNKNOWN,
        *,
        pinned: bool = False,
        private: bool = False,
        unsized: bool = False,
    ) -> Block:
        """A tensor owns ``[base, base + size)`` from now on; ``size`` as the allocator rounds.

        ``unsized``: the size follows, see :meth:`settle`.
        """
        known = self.live.get(base)
        if known is not None:
            if private and known.private:
                # a capture hands the same bytes out again: the graph owns them all the time
                known.size = max(known.size, size)
                return known
            self.free(base, UNKNOWN, silently=True)
        block = Block(base, size, owner, site, pinned=pinned, private=private, unsized=unsized)
        self.live[base] = block
        self._bases_known = False
        if pinned:
            self.pinned += 1
        elif not unsized:
            self._remember(block)
        return block

    def settle(self, block: Block, size: int) -> None:
        """The block's size has become known."""
        block.unsized = False
        if size != block.size:
            block.size = size
            self._bases_known = False
        self._remember(block)

    def _remember(self, block: Block) -> None:
        """The block begins with the history of its bytes."""
        past = self._ghosts.take(block.base, block.base + block.size)
        if past:
            block.inherit(past)
            for each in past:
                if each.finding is not None:
                    block.site = deeper(block.site)
                    break

    def locate(self, address: int) -> Block | None:
        """The live block that holds ``address``."""
        block = self.live.get(address)
        if block is not None:
            return block
        if not self._bases_known:
            self._bases = sorted(self.live)
            self._bases_known = True
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        block = self.live[self._bases[index]]
        return block if address < block.base + block.size else None

    def record_stream(self, base: int, stream: StreamKey) -> None:
        """The allocator waits for ``stream`` before it gives the block away again."""
        block = self.locate(base)
        if block is not None:
            block.recorded |= {stream}

    def free(self, base: int, site: RawSite = UNKNOWN, *, silently: bool = False) -> None:
        """The last view of the block at ``base`` died, at ``site``."""
        block = self.live.get(base)
        if block is None or (block.private and not silently):
            return
        del self.live[base]
        self._bases_known = False
        owner = 0 if block.owner is None else block.owner
        if not block.shared:
            if block.stream is None or block.stream == owner:
                self._bury(block, block.remains())
                return
            block.share()
        order = self.order
        left: list[Access] = []
        latest: dict[StreamKey, Access] = {}
        for access in block.accesses.values():
            stream = access.stream
            if order.host_knows(stream, access.number):
                continue
            # the pinned allocator makes an event behind each copy, and none behind kernels
            recorded = stream in block.recorded and stream != owner
            if access.copy if block.pinned else recorded:
                continue
            left.append(access)
            if block.pinned or (
                stream != owner and not order.ordered(stream, access.number, owner)
            ):
                known = latest.get(stream)
                if known is None or access.number >= known.number:
                    latest[stream] = access
        if not silently:
            for access in latest.values():
                self._found_free(block, access, site)
                for other in left:
                    if other.stream == access.stream:
                        other.finding = access.finding
        if block.pinned:
            self.pinned -= 1
            return
        self._bury(block, [*left, *block.inherited])

    def _bury(self, block: Block, past: Sequence[Past]) -> None:
        """Keep what was done to the bytes of a freed block for their next owner."""
        end = block.base + block.size
        if block.shared or len(past) > _MOST_STANDING:
            left = [access for access in flat(past) if not self._is_over(access)]
            past = outlasting(left, block.base, end)[:_MOST_ACCESSES]
        # uses name their block: it must not name those before it in turn
        block.inherited = ()
        self._ghosts.put(block.base, end, past)
        if len(self._ghosts) > self._ghosts.most:
            lost = self._ghosts.trim(self._is_over)
            if lost:
                self.report.note(
                    f"uses of {lost} freed ranges were forgotten for space: a later race with "
                    "them would be missed"
                )

    def _is_over(self, past: Past) -> bool:
        return past.stream is not None and self.order.host_knows(past.stream, past.number)

    def drop_pinned(self, block: Block) -> None:
        """A pinned block is gone, and its allocator has waited for what used it."""
        if self.live.get(block.base) is block:
            del self.live[block.base]
            self.pinned -= 1
            self._bases_known = False

    # -- order
    def record(self, event: Any, stream: StreamKey, site: RawSite = UNKNOWN) -> None:
        """``event`` marks the present end of ``stream``."""
        number = self.order.record(event, stream)
        records = self._records.setdefault(stream, [])
        if site:
            records.append((number, site))
            del records[:-16]

    # -- accesses
    def submit(self, stream: StreamKey) -> int:
        """An operation is queued on ``stream``; its accesses follow."""
        self.report.operations += 1
        return self.order.submit(stream)

    def access(
        self,
        block: Block,
        lo: int,
        hi: int,
        write: bool,
        stream: StreamKey,
        number: int,
        operation: str,
        site: RawSite,
        view: View = NO_VIEW,
        copy: bool = False,
    ) -> None:
        """Operation ``number`` of ``stream`` reads or writes bytes ``[lo, hi)`` of ``block``."""
        alone = block.stream
        if alone == stream or (alone is None and block.claim(stream)):
            # in order with all that was: a free drops what it stands for
            accesses = block.accesses
            accesses[(lo, hi, stream, write)] = (number, operation, site, view, copy)
            if hi > block.hi:
                block.hi = hi
            if write and hi > block.written and lo == block.base and view.strides is None:
                block.written = hi
            if len(accesses) > _MOST_ACCESSES:
                self._shorten(block, None)
            return
        if not block.shared:
            block.share()
        access = Access(block, lo, hi, write, stream, number, operation, site, view, copy)
        # what the same stream left is in order with it
        if block.inherited and block.inherited_from != stream:
            self._check_inherited(block, access)
        accesses, streams = block.accesses, block.streams
        if stream not in streams:
            block.streams = streams = {*streams, stream}
        if len(streams) > 1:
            self._check_live(accesses.values(), access)
        accesses[(lo, hi, stream, write)] = access
        if len(accesses) > _MOST_ACCESSES:
            self._shorten(block, access)

    def _unordered(self, earlier: Access, access: Access) -> bool:
        return (
            earlier.stream != access.stream
            and (access.write or earlier.write)
            and not self.order.ordered(earlier.stream, earlier.number, access.stream)
            and earlier.meets(access)
        )

    def _check_live(self, accesses: Iterable[Access], access: Access) -> None:
        latest: dict[StreamKey, Access] = {}
        for earlier in accesses:
            if not self._unordered(earlier, access):
                continue
            if earlier.reported is None:
                earlier.reported = set()
            if access.stream in earlier.reported:
                continue
            earlier.reported.add(access.stream)
            known = latest.get(earlier.stream)
            if known is None or earlier.number > known.number:
                latest[earlier.stream] = earlier
        for earlier in latest.values():
            if not access.write:
                kind = Kind.READ_TOO_EARLY
            else:
                kind = Kind.UNORDERED_WRITES if earlier.write else Kind.LIVE_OVERWRITE
            access.site = deeper(access.site)
            self._found(kind, earlier, self._use(access), access.block)

    def _check_inherited(self, block: Block, access: Access) -> None:
        kept = []
        for earlier in outlasting(
            [*block.accesses.values(), *flat(block.inherited)], block.base, block.base + block.size
        ):
            if earlier.block is block:
                continue
            if self._unordered(earlier, access):
                self._found_reuse(earlier, access)
            elif not (
                access.covers(earlier)
                and self.order.ordered(earlier.stream, earlier.number, access.stream)
            ):
                kept.append(earlier)
        block.inherited = kept

    def _shorten(self, block: Block, latest: Access | None) -> None:
        order = self.order
        if latest is None:
            kept = {
                key: use
                for key, use in block.accesses.items()
                if not order.host_knows(key[2], use[0])
            }
        else:
            kept = {
                key: access
                for key, access in block.accesses.items()
                if access is latest
                or not (
                    order.host_knows(access.stream, access.number)
                    or (
                        latest.covers(access)
                        and order.ordered(access.stream, access.number, latest.stream)
                    )
                )
            }
        if len(kept) > _MOST_ACCESSES:
            # hulls of the oldest: a stream's latest number stays, which is what a free looks at
            for key in list(kept)[: len(kept) - _MOST_ACCESSES // 2]:
                del kept[key]
            self.report.note(
                "a block had more differently placed uses than are remembered: a race with the "
                "oldest of them would be missed"
            )
        block.accesses = kept
        if latest is not None:
            block.streams = {access.stream for access in kept.values()}

    # -- the host
    def in_flight(self, block: Block, lo: int, hi: int, write: bool) -> Access | None:
        """The latest device use of pinned bytes that a host access would race with."""
        found = None
        order = self.order
        for access in block.accesses.values():
            if (
                (write or access.write)
                and access.lo < hi
                and lo < access.hi
                and not order.host_knows(access.stream, access.number)
                and (found is None or access.number > found.number)
            ):
                found = access
        return found

    def host_access(
        self,
        block: Block,
        lo: int,
        hi: int,
        write: bool,
        operation: str,
        site: RawSite,
        view: View = NO_VIEW,
    ) -> None:
        """The host reads or writes pinned bytes now."""
        earlier = self.in_flight(block, lo, hi, write)
        if earlier is not None:
            self.host_raced(earlier, write, operation, site, view, hi - lo)

    def host_raced(
        self,
        earlier: Access,
        write: bool,
        operation: str,
        site: RawSite,
        view: View = NO_VIEW,
        nbytes: int = 0,
    ) -> None:
        """Report a host access that ``earlier`` is not known to be over for."""
        kind = Kind.HOST_WRITE_TOO_EARLY if write else Kind.HOST_READ_TOO_EARLY
        use = Use(operation, HOST, as_site(site), str(view), nbytes)
        self._found(kind, earlier, use, earlier.block)

    # -- findings
    def _use(self, access: Access) -> Use:
        return Use(
            access.operation,
            self.stream_name(access.stream),
            as_site(access.site),
            str(access.view),
            access.hi - access.lo,
        )

    def _owner(self, block: Block) -> Use | None:
        if not block.site:
            return None
        stream = "pinned memory"
        if not block.pinned:
            stream = "owner not seen" if block.owner is None else self.stream_name(block.owner)
        return Use("allocation", stream, as_site(block.site), nbytes=block.size)

    def _fix(self, kind: Kind, earlier: Access, second: Use | None) -> str:
        recorded = None
        for number, site in self._records.get(earlier.stream, ()):
            if number >= earlier.number:
                recorded = as_site(site)
                break
        block = earlier.block
        owner = self.stream_name(0 if block.owner is None else block.owner)
        return fix_for(kind, self._use(earlier), second, owner, recorded, pinned=block.pinned)

    def _found(self, kind: Kind, earlier: Access, second: Use | None, block: Block) -> Finding:
        return self.report.add(
            Finding(
                _EDGES[kind],
                kind,
                self._use(earlier),
                second,
                owner=self._owner(block),
                block_bytes=block.size,
                fix=self._fix(kind, earlier, second),
            )
        )

    def _found_free(self, block: Block, access: Access, site: RawSite) -> None:
        access.finding = self.report.add(
            Finding(
                Edge.REUSE,
                Kind.FREED_IN_USE,
                self._use(access),
                freed=as_site(site),
                owner=self._owner(block),
                block_bytes=block.size,
                fix=self._fix(Kind.FREED_IN_USE, access, None),
            )
        )

    def _found_reuse(self, earlier: Access, access: Access) -> None:
        access.site = deeper(access.site)
        finding = earlier.finding
        if finding is None:
            finding = self._found(Kind.REUSE_RACE, earlier, self._use(access), earlier.block)
            finding.next_owner = self._owner(access.block)
            self.report.changed(finding)
        elif finding.second is None:
            finding.second = self._use(access)
            finding.next_owner = self._owner(access.block)
            self.report.changed(finding)
