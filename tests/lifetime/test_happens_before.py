"""The clocks against a plain graph of operations, and the core's reports event by event."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.lifetime.findings import Edge, Kind, Report
from atom.lifetime.happens_before import HappensBefore
from atom.lifetime.monitor import Monitor, round_size
from atom.lifetime.shadow import Access, Block, Ghosts, View

STREAMS = (0, 1, 2)
EVENTS = ("x", "y")

actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(STREAMS), st.none()),
        st.tuples(st.just("record"), st.sampled_from(STREAMS), st.sampled_from(EVENTS)),
        st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.sampled_from(EVENTS)),
        st.tuples(st.just("observe"), st.none(), st.sampled_from(EVENTS)),
        st.tuples(st.just("wait_stream"), st.sampled_from(STREAMS), st.sampled_from(STREAMS)),
        st.tuples(st.just("observe_stream"), st.sampled_from(STREAMS), st.none()),
        st.tuples(st.just("observe_all"), st.none(), st.none()),
    ),
    max_size=40,
)


class Plain:
    """The order as sets of operations that lie before: nothing clever."""

    def __init__(self) -> None:
        self.before: dict[int, set[tuple[int, int]]] = {stream: set() for stream in STREAMS}
        self.host: set[tuple[int, int]] = set()
        self.events: dict[str, set[tuple[int, int]]] = {}
        self.counts = dict.fromkeys(STREAMS, 0)

    def submit(self, stream: int) -> None:
        self.counts[stream] += 1
        self.before[stream] |= self.host
        self.before[stream].add((stream, self.counts[stream]))

    def do(self, action: str, first: int, second: object) -> None:
        if action == "submit":
            self.submit(first)
        elif action == "record":
            self.events[str(second)] = self.before[first] | self.host
        elif action == "wait":
            self.before[first] |= self.events.get(str(second), set())
        elif action == "observe":
            self.host |= self.events.get(str(second), set())
        elif action == "wait_stream":
            self.before[first] |= self.before[int(str(second))] | self.host
        elif action == "observe_stream":
            self.host |= self.before[first]
        else:
            for stream in STREAMS:
                self.host |= self.before[stream]

    def ordered(self, first: int, number: int, second: int) -> bool:
        return first == second or (first, number) in self.before[second] | self.host


@given(actions)
def test_clocks_agree_with_plain_sets(script: list[tuple[str, int, object]]) -> None:
    order, plain = HappensBefore(), Plain()
    for action, first, second in script:
        plain.do(action, first, second)
        if action == "submit":
            assert order.submit(first) == plain.counts[first]
        elif action == "record":
            order.record(second, first)
        elif action == "wait":
            order.wait(second, first)
        elif action == "observe":
            order.observe(second)
        elif action == "wait_stream":
            order.wait_stream(first, int(str(second)))
        elif action == "observe_stream":
            order.observe_stream(first)
        else:
            order.observe_all()
        for stream in STREAMS:
            for number in range(1, plain.counts[stream] + 1):
                assert order.host_knows(stream, number) is ((stream, number) in plain.host)
                for other in STREAMS:
                    assert order.ordered(stream, number, other) is plain.ordered(
                        stream, number, other
                    )


def test_a_wait_takes_the_record_of_its_own_time() -> None:
    order = HappensBefore()
    order.submit(1)
    order.record("event", 1)
    order.wait("event", 0)
    second = order.submit(1)
    order.record("event", 1)
    assert order.ordered(1, 1, 0)
    assert not order.ordered(1, second, 0)


def test_a_forgotten_event_orders_nothing() -> None:
    order = HappensBefore()
    order.submit(1)
    order.record("event", 1)
    order.forget("event")
    order.observe("event")
    assert not order.host_knows(1, 1)


class Story:
    """A core that is told events by hand; a tensor of ``size`` bytes lies at ``base``."""

    def __init__(self) -> None:
        self.report = Report()
        self.core = Monitor(self.report)
        self.line = 0

    def place(self) -> tuple[tuple[str, int, str], ...]:
        self.line += 1
        return (("story.py", self.line, "tell"),)

    def own(self, base: int = 4096, size: int = 512, stream: int = 0) -> Block:
        return self.core.allocate(base, size, stream, self.place())

    def use(self, block: Block, stream: int, *, write: bool, lo: int = 0, hi: int = 256) -> None:
        number = self.core.submit(stream)
        self.core.access(
            block,
            block.base + lo,
            block.base + hi,
            write,
            stream,
            number,
            "write" if write else "read",
            self.place(),
            copy=not write,
        )

    def drop(self, block: Block) -> None:
        self.core.free(block.base, self.place())

    def copied(self) -> Block:
        """A block that stream 0 wrote and that stream 1 reads, ordered."""
        block = self.own()
        self.use(block, 0, write=True)
        self.core.order.wait_stream(1, 0)
        self.use(block, 1, write=False)
        return block

    def kinds(self) -> list[Kind]:
        return [finding.kind for finding in self.report.findings]


def test_a_free_under_a_foreign_read_is_found_at_once() -> None:
    story = Story()
    block = story.copied()
    assert story.kinds() == []
    story.drop(block)
    (finding,) = story.report.findings
    assert (finding.kind, finding.edge) == (Kind.FREED_IN_USE, Edge.REUSE)
    assert finding.second is None
    assert finding.first.site.line == 3
    assert finding.freed is not None
    assert finding.freed.line == 4


@pytest.mark.parametrize("how", ["event", "stream", "device", "join", "recorded"])
def test_each_order_lets_the_block_go(how: str) -> None:
    story = Story()
    block = story.copied()
    core = story.core
    if how == "event":
        core.record("done", 1)
        core.order.observe("done")
    elif how == "stream":
        core.order.observe_stream(1)
    elif how == "device":
        core.order.observe_all()
    elif how == "join":
        core.order.wait_stream(0, 1)
    else:
        core.record_stream(block.base, 1)
    story.drop(block)
    again = story.own()
    story.use(again, 0, write=True)
    assert story.kinds() == []


@pytest.mark.parametrize("how", ["event before", "other stream", "join the other way"])
def test_what_looks_like_an_order_is_none(how: str) -> None:
    story = Story()
    core = story.core
    if how == "event before":
        core.record("done", 1)
        block = story.copied()
        core.order.observe("done")
    elif how == "other stream":
        block = story.copied()
        core.record_stream(block.base, 2)
        core.order.observe_stream(2)
    else:
        block = story.copied()
        core.order.wait_stream(1, 0)
    story.drop(block)
    assert story.kinds() == [Kind.FREED_IN_USE]


def test_reuse_completes_the_finding_of_the_free() -> None:
    story = Story()
    story.drop(story.copied())
    again = story.own(size=1024)
    story.use(again, 0, write=True)
    (finding,) = story.report.findings
    assert finding.second is not None
    assert finding.next_owner is not None
    assert finding.second.site.line == 6
    assert finding.next_owner.site.line == 5


@pytest.mark.parametrize(("lo", "hi", "races"), [(0, 256, True), (256, 512, False)])
def test_reuse_is_matched_by_bytes(lo: int, hi: int, races: bool) -> None:
    story = Story()
    old = story.own()
    story.use(old, 0, write=False)
    story.drop(old)
    fresh = story.own()
    story.use(fresh, 1, write=True, lo=lo, hi=hi)
    assert story.kinds() == ([Kind.REUSE_RACE] if races else [])


def test_bytes_keep_their_history_through_splits_and_merges() -> None:
    story = Story()
    old = story.own(base=8192, size=2048)
    story.use(old, 0, write=False, lo=1024, hi=1536)
    story.drop(old)
    front = story.own(base=8192, size=1024)
    back = story.own(base=9216, size=1024)
    story.use(front, 1, write=True, lo=0, hi=1024)
    assert story.kinds() == []
    story.use(back, 1, write=True, lo=0, hi=512)
    assert story.kinds() == [Kind.REUSE_RACE]


def test_an_ordered_write_ends_the_history() -> None:
    story = Story()
    old = story.own()
    story.use(old, 0, write=False)
    story.drop(old)
    middle = story.own()
    story.use(middle, 0, write=True)
    story.core.order.wait_stream(1, 0)
    story.use(middle, 1, write=True)
    assert story.kinds() == []
    assert not middle.inherited


def test_a_write_by_the_same_stream_stands_for_what_was_before() -> None:
    story = Story()
    old = story.own()
    story.use(old, 0, write=True)
    story.drop(old)
    middle = story.own()
    story.use(middle, 0, write=True)
    # not ordered after either use of stream 0: one finding, between the two that live
    story.use(middle, 1, write=True)
    assert story.kinds() == [Kind.UNORDERED_WRITES]


def test_a_history_does_not_grow_with_splits_and_merges() -> None:
    story = Story()
    longest = 0
    for number in range(60):
        sizes = (3072,) if number % 2 else (512, 1024, 1536)
        base, blocks = 8192, []
        for size in sizes:
            block = story.own(base=base, size=size)
            longest = max(longest, len(block.inherited))
            # a tensor that leaves the end of its block alone, each time another part of it
            story.use(block, 0, write=True, lo=0, hi=size - 8 * (number % 7))
            story.use(block, 0, write=False, lo=0, hi=size // 2)
            blocks.append(block)
            base += size
        for block in blocks:
            story.drop(block)
    assert longest <= 24
    assert story.kinds() == []


def test_a_free_hands_on_what_no_later_use_stands_for() -> None:
    story = Story()
    old = story.own(size=2048)
    story.use(old, 0, write=True, lo=1024, hi=1536)
    story.drop(old)
    middle = story.own(size=2048)
    story.use(middle, 0, write=True, lo=0, hi=512)
    story.drop(middle)
    last = story.own(size=2048)
    assert len(last.inherited) == 2
    story.use(last, 0, write=True, lo=0, hi=2048)
    story.drop(last)
    assert len(story.own(size=2048).inherited) == 1


def test_what_one_stream_did_alone_is_known_when_another_comes() -> None:
    story = Story()
    whole = story.own(base=8192, size=2048)
    story.use(whole, 0, write=False, lo=1024, hi=1536)
    story.drop(whole)
    # the bytes come back in parts, as one block again, and in parts
    for _ in range(3):
        parts = [story.own(base=8192 + at, size=1024) for at in (0, 1024)]
        story.use(parts[0], 0, write=True, lo=0, hi=1024)
        for part in parts:
            story.drop(part)
        story.drop(story.own(base=8192, size=2048))
    last = story.own(base=8192, size=2048)
    story.use(last, 0, write=True, lo=1536, hi=2048)
    story.use(last, 1, write=True, lo=512, hi=1040)
    # of stream 0: the read of the first owner, and the last write of what was a part
    assert story.kinds() == [Kind.REUSE_RACE] * 2


def test_a_history_keeps_no_chain_of_former_owners() -> None:
    def blocks() -> int:
        gc.collect()
        return sum(isinstance(each, Block) for each in gc.get_objects())

    story, before = Story(), blocks()
    for _ in range(60):
        block = story.own()
        story.use(block, 0, write=True, hi=200)
        story.core.order.wait_stream(1, 0)
        story.use(block, 1, write=False, hi=256)
        story.core.order.wait_stream(0, 1)
        story.drop(block)
    assert story.kinds() == []
    assert blocks() - before < 10


def test_freed_ranges_past_the_limit_are_forgotten_aloud() -> None:
    story = Story()
    story.core._ghosts.most = 8
    blocks = [story.own(base=8192 * number) for number in range(1, 12)]
    for number, block in enumerate(blocks):
        story.use(block, 0, write=False)
        if number == 2:
            story.core.order.observe_stream(0)
    for block in blocks:
        story.drop(block)
    # three of the first nine are over, and of the six left two have to go
    assert "2 freed ranges were forgotten" in story.report.cannot_see[0]
    story.use(story.own(base=8192 * 11), 1, write=True)
    assert story.kinds() == [Kind.REUSE_RACE]


def test_unordered_uses_of_live_bytes() -> None:
    story = Story()
    block = story.own()
    story.use(block, 0, write=True)
    story.use(block, 1, write=False)
    assert story.kinds() == [Kind.READ_TOO_EARLY]
    story.use(block, 0, write=True)
    assert story.kinds() == [Kind.READ_TOO_EARLY, Kind.LIVE_OVERWRITE]
    story.use(block, 2, write=True)
    assert story.kinds()[2:] == [Kind.UNORDERED_WRITES, Kind.LIVE_OVERWRITE]
    story.use(story.own(base=65536), 3, write=True)
    assert len(story.report.findings) == 4


def test_the_host_reads_and_writes_too_early() -> None:
    story = Story()
    core = story.core
    host = core.allocate(1 << 30, 256, None, pinned=True)
    story.use(host, 1, write=True)
    core.host_access(host, host.base, host.base + 256, False, "tolist", story.place())
    core.host_access(host, host.base + 256, host.base + 300, False, "past", story.place())
    assert story.kinds() == [Kind.HOST_READ_TOO_EARLY]
    assert story.report.findings[0].edge is Edge.HOST_READ
    core.order.observe_stream(1)
    core.host_access(host, host.base, host.base + 256, True, "fill_", story.place())
    story.use(host, 1, write=False)
    core.host_access(host, host.base, host.base + 256, False, "tolist", story.place())
    assert len(story.report.findings) == 1
    core.host_access(host, host.base, host.base + 256, True, "fill_", story.place())
    assert story.kinds()[1:] == [Kind.HOST_WRITE_TOO_EARLY]


def test_many_ranges_of_one_block_are_forgotten_aloud() -> None:
    story = Story()
    block = story.own(size=1 << 20)
    for index in range(200):
        story.use(block, index % 2, write=False, lo=512 * index, hi=512 * index + 512)
    assert len(block.accesses) <= 64
    assert "differently placed uses" in story.report.cannot_see[0]
    story.drop(block)
    assert story.kinds() == [Kind.FREED_IN_USE]


@given(st.integers(1, 10**7))
def test_sizes_round_as_the_allocator_rounds(nbytes: int) -> None:
    rounded = round_size(nbytes)
    assert rounded % 512 == 0
    assert 0 <= rounded - nbytes < 512


views = st.builds(
    lambda lo, rows, row, gap, columns: (lo, (rows, columns), ((row + gap) * 4, 4)),
    st.integers(0, 24).map(lambda n: 4 * n),
    st.integers(1, 4),
    st.just(4),
    st.integers(0, 3),
    st.integers(1, 4),
)


@given(views, views)
def test_views_meet_exactly_where_a_byte_is_shared(
    first: tuple[int, tuple[int, int], tuple[int, int]],
    second: tuple[int, tuple[int, int], tuple[int, int]],
) -> None:
    block = Block(0, 4096, 0)

    def access(view: tuple[int, tuple[int, int], tuple[int, int]]) -> tuple[Access, set[int]]:
        lo, (rows, columns), (step, _) = view
        touched = {
            lo + step * row + 4 * column + byte
            for row in range(rows)
            for column in range(columns)
            for byte in range(4)
        }
        made = View("int32", (rows, columns), 4, (step, 4))
        return Access(block, lo, max(touched) + 1, True, 0, 1, "", (), made, False), touched

    (one, mine), (other, theirs) = access(first), access(second)
    assert one.meets(other) is bool(mine & theirs)
    assert other.meets(one) is bool(mine & theirs)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8), st.booleans()), max_size=30),
)
def test_ghosts_give_back_what_lies_in_a_range(script: list[tuple[int, int, bool]]) -> None:
    ghosts = Ghosts()
    kept: list[Access] = []
    for start, length, put in script:
        lo, hi = 512 * start, 512 * (start + length)
        if put:
            taken = ghosts.take(lo, hi)
            kept = [access for access in kept if access not in taken]
            access = Access(Block(lo, hi - lo, 0), lo, hi, True, 0, 1, "", (), View(), False)
            ghosts.put(lo, hi, [access])
            kept.append(access)
        else:
            found = ghosts.take(lo, hi)
            assert all(access.lo < hi and lo < access.hi for access in found)
            kept = [access for access in kept if access not in found]
    left = ghosts.take(0, 1 << 30)
    assert {id(access) for access in kept} <= {id(access) for access in left}


def test_a_graphs_block_is_never_free_while_the_graph_lives() -> None:
    story = Story()
    core = story.core
    block = core.allocate(4096, 512, 0, story.place(), private=True)
    story.use(block, 0, write=True)
    core.order.wait_stream(1, 0)
    story.use(block, 1, write=False)
    story.drop(block)
    assert story.kinds() == []
    # the capture hands the same bytes out again; a replay writes them
    assert core.allocate(4096, 1024, 0, story.place(), private=True) is block
    story.use(block, 0, write=True)
    assert story.kinds() == [Kind.LIVE_OVERWRITE]
