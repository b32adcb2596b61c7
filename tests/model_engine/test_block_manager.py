"""The pools against plain models: nothing is given twice, nothing is lost, nothing stale is hit."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom.errors import BadInput
from atom.model_engine.block_manager import NO_HIT, BlockManager
from atom.model_engine.prefix_cache import BlockPool, CacheFault, CheckpointPool, extend_hashes
from atom.model_engine.sequence import Sequence

_BLOCKS = 7
_SLOTS = 3
_CONTENTS = [bytes([number]) for number in range(9)]


class BlockPoolMachine(RuleBasedStateMachine):
    """A block pool beside lists and dictionaries that say the same in the plainest way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(_BLOCKS)
        self.refs: Counter[int] = Counter()
        self.published: dict[bytes, tuple[int, int]] = {}
        self.lru: list[int] = []
        self.holders: list[list[int]] = []
        self.step = 0
        self.withdrawn: set[tuple[bytes, int]] = set()

    def content_of(self, block: int) -> bytes | None:
        return next((key for key, (held, _) in self.published.items() if held == block), None)

    @rule(count=st.integers(0, _BLOCKS))
    def take(self, count: int) -> None:
        free = _BLOCKS - len(+self.refs)
        if count > free:
            with pytest.raises(CacheFault):
                self.pool.take(count)
            return
        empty = free - len(self.lru)
        evicted, self.lru = self.lru[: max(count - empty, 0)], self.lru[max(count - empty, 0) :]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not any(self.refs[block] for block in taken)
        for block in evicted:
            assert block in taken
            key = self.content_of(block)
            assert key is not None
            del self.published[key]
        assert not any(self.content_of(block) for block in taken)
        self.refs.update(taken)
        self.holders.append(taken)

    @rule(keys=st.sets(st.sampled_from(_CONTENTS)))
    def share_what_is_found(self, keys: set[bytes]) -> None:
        blocks = [block for key in sorted(keys) if (block := self.pool.find(key)) is not None]
        assert self.pool.count_free(blocks) == sum(block in self.lru for block in blocks)
        self.pool.share(blocks)
        self.lru = [block for block in self.lru if block not in blocks]
        self.refs.update(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(held)
        for block in reversed(held):
            self.refs[block] -= 1
            if not self.refs[block] and self.content_of(block) is not None:
                self.lru.append(block)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data(), key=st.sampled_from(_CONTENTS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        self.step += 1
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        before = self.content_of(block)
        if before is not None and before != key:
            with pytest.raises(CacheFault):
                self.pool.publish(block, key, self.step)
            return
        assert self.pool.publish(block, key, self.step) == (key not in self.published)
        self.published.setdefault(key, (block, self.step))

    @rule(back=st.integers(0, 6))
    def withdraw(self, back: int) -> None:
        since = self.step - back
        late = {key: held for key, held in self.published.items() if held[1] >= since}
        assert self.pool.withdraw_since(since) == len(late)
        for key, (block, step) in late.items():
            del self.published[key]
            self.withdrawn.add((key, step))
            if block in self.lru:
                self.lru.remove(block)

    @rule(block=st.integers(0, _BLOCKS - 1))
    def refuse_a_second_free(self, block: int) -> None:
        if not self.refs[block]:
            with pytest.raises(CacheFault, match="twice"):
                self.pool.release([block])
            with pytest.raises(CacheFault, match="free"):
                self.pool.publish(block, _CONTENTS[0], self.step)

    @invariant()
    def accounts_are_exact(self) -> None:
        used = len(+self.refs)
        assert self.pool.num_used == used
        assert self.pool.num_free + self.pool.num_used == _BLOCKS
        assert self.pool.num_cached == len(self.lru)
        assert [self.pool.ref_count(block) for block in range(_BLOCKS)] == [
            self.refs[block] for block in range(_BLOCKS)
        ]
        for key in _CONTENTS:
            found = self.pool.find(key)
            assert found == self.published.get(key, (None,))[0]
            if found is not None:
                assert (key, self.pool.published_step(found)) not in self.withdrawn


class CheckpointPoolMachine(RuleBasedStateMachine):
    """A checkpoint pool beside its plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CheckpointPool(_SLOTS)
        self.published: dict[bytes, tuple[int, int]] = {}
        self.order: list[int] = []
        self.reserved: list[int] = []
        self.pins: Counter[int] = Counter()
        self.step = 0

    def held(self) -> set[int]:
        return {slot for slot, _ in self.published.values()} | set(self.reserved) | set(+self.pins)

    @rule()
    def reserve(self) -> None:
        held = self.held()
        slot = self.pool.reserve()
        if len(held) < _SLOTS:
            assert slot is not None
            assert slot not in held
        elif self.order:
            assert slot == self.order.pop(0)
            self.published = {k: v for k, v in self.published.items() if v[0] != slot}
        else:
            assert slot is None
            return
        assert slot is not None
        self.reserved.append(slot)

    @precondition(lambda self: self.reserved)
    @rule(key=st.sampled_from(_CONTENTS[:5]), keep=st.booleans())
    def publish_or_cancel(self, key: bytes, keep: bool) -> None:
        self.step += 1
        slot = self.reserved.pop()
        if not keep:
            self.pool.cancel(slot)
        elif self.pool.publish(slot, key, self.step):
            assert key not in self.published
            self.published[key] = (slot, self.step)
            self.order.append(slot)
        else:
            assert key in self.published
        if slot not in self.order:
            with pytest.raises(CacheFault, match="not reserved"):
                self.pool.cancel(slot)

    @rule(key=st.sampled_from(_CONTENTS[:5]))
    def pin(self, key: bytes) -> None:
        slot = self.pool.find(key)
        assert slot == self.published.get(key, (None,))[0]
        if slot is not None:
            self.pool.touch(slot)
            self.pool.pin(slot)
            self.pins[slot] += 1
            self.order = [other for other in self.order if other != slot]

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.pool.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            if slot in {held for held, _ in self.published.values()}:
                self.order.append(slot)
            with pytest.raises(CacheFault, match="twice"):
                self.pool.unpin(slot)

    @rule(back=st.integers(0, 3))
    def withdraw(self, back: int) -> None:
        late = [k for k, (_, step) in self.published.items() if step >= self.step - back]
        assert self.pool.withdraw_since(self.step - back) == len(late)
        for key in late:
            slot, _ = self.published.pop(key)
            self.order = [other for other in self.order if other != slot]

    @invariant()
    def accounts_are_exact(self) -> None:
        assert self.pool.num_published == len(self.published)
        assert self.pool.num_free == _SLOTS - len(self.held())
        assert [self.pool.pins(slot) for slot in range(_SLOTS)] == [
            self.pins[slot] for slot in range(_SLOTS)
        ]


_SHORT = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = _SHORT
TestCheckpointPool = CheckpointPoolMachine.TestCase
TestCheckpointPool.settings = _SHORT


def manager(blocks: int = 20, **others: object) -> BlockManager:
    given: dict[str, object] = {"num_checkpoints": 4, "checkpoint_spacing": 4, **others}
    return BlockManager(blocks, 2, 2, **given)  # type: ignore[arg-type]


def computed(pools: BlockManager, seq: Sequence, *, step: int, saves: tuple[int, ...]) -> None:
    """Allocate, compute and publish a whole prompt, with checkpoints at these boundaries."""
    pools.allocate(seq, seq.num_tokens, NO_HIT)
    pools.publish(seq, seq.num_tokens, step)
    for boundary in saves:
        slot = pools.checkpoints.reserve()
        assert slot is not None
        pools.publish_checkpoint(slot, pools.block_hash_at(seq, boundary), step)


@pytest.mark.parametrize(
    ("saves", "prompt", "tokens", "branch"),
    [
        ((), range(12), 0, 8),  # KV alone is no prefix: it only says where prompts part
        ((4,), range(12), 4, 8),
        ((4, 8), range(12), 8, 0),
        ((4, 8, 12), range(12), 8, 0),  # a token is left to compute
        ((4, 8, 12), range(13), 12, 0),
        ((4, 8, 12), [0, 1, 2, 3, 9, 9, 9, 9, 9], 4, 0),
        ((8,), [0, 1, 2, 3, 4, 5, 9, 9, 9], 0, 4),
        ((4,), [9, *range(1, 12)], 0, 0),  # the first block differs, so all hashes do
    ],
)
def test_a_hit_needs_blocks_and_a_checkpoint(
    saves: tuple[int, ...], prompt: list[int], tokens: int, branch: int
) -> None:
    pools = manager()
    first = Sequence(0, range(12))  # type: ignore[arg-type]
    computed(pools, first, step=1, saves=saves)
    hit = pools.find_hit(Sequence(1, prompt))  # type: ignore[arg-type]
    assert (hit.num_tokens, hit.branch_tokens) == (tokens, branch)
    assert list(hit.blocks) == first.block_table[: tokens // 2]
    assert (hit.checkpoint is None) == (tokens == 0)


def test_prompts_of_two_salts_share_nothing() -> None:
    pools = manager()
    computed(pools, Sequence(0, array("q", range(9)), cache_salt="a"), step=1, saves=(4, 8))
    assert pools.find_hit(Sequence(1, array("q", range(9)), cache_salt="b")) == NO_HIT
    assert pools.find_hit(Sequence(2, array("q", range(9)), cache_salt="a")).num_tokens == 8


def test_hashes_that_a_caller_knows_stand_for_the_tokens() -> None:
    pools = manager()
    known = [b"one", b"two", b"three", b"four"]
    computed(pools, Sequence(0, array("q", bytes(72)), block_hashes=known[:]), step=1, saves=(4, 8))
    other = Sequence(1, array("q", bytes(72)), block_hashes=[*known[:3], b"other"])
    assert pools.find_hit(other).num_tokens == 4


@given(
    ids=st.lists(st.integers(0, 2**40), min_size=8, max_size=40),
    other=st.integers(0, 39),
    size=st.integers(1, 4),
)
def test_a_hash_stands_for_its_block_and_all_before(ids: list[int], other: int, size: int) -> None:
    count = len(ids) // size
    whole: list[bytes] = []
    extend_hashes(whole, array("q", ids), size, count, "")
    piecewise: list[bytes] = []
    for number in range(count + 1):
        extend_hashes(piecewise, array("q", ids), size, number, "")
    assert piecewise == whole
    assert len(set(whole)) == count
    place = other % (count * size)
    changed = [*ids[:place], ids[place] + 1, *ids[place + 1 :]]
    again: list[bytes] = []
    extend_hashes(again, array("q", changed), size, count, "")
    same = place // size
    assert again[:same] == whole[:same]
    assert not set(again[same:]) & set(whole)


def test_withdrawn_content_is_not_hit_and_its_blocks_come_back() -> None:
    pools = manager()
    early, late = Sequence(0, array("q", range(9))), Sequence(1, array("q", range(50, 59)))
    computed(pools, early, step=3, saves=(8,))
    computed(pools, late, step=4, saves=(8,))
    pools.free(late)
    assert pools.withdraw_since(4) == (4, 1)
    assert pools.find_hit(Sequence(2, array("q", range(50, 59)))) == NO_HIT
    assert pools.find_hit(Sequence(3, array("q", range(9)))).num_tokens == 8
    assert pools.withdraw_since(3) == (4, 1)
    assert pools.find_hit(Sequence(4, array("q", range(9)))) == NO_HIT
    assert early.block_table
    pools.free(early)
    assert (pools.num_free_blocks, pools.blocks.num_cached) == (20, 0)
    assert pools.checkpoints.num_free == 4


def test_the_tail_of_a_freed_prompt_is_evicted_first() -> None:
    pools = manager(blocks=8)
    first = Sequence(0, array("q", range(12)))
    computed(pools, first, step=1, saves=(4, 8))
    pools.free(first)
    pools.allocate(Sequence(1, array("q", [7] * 8)), 8)
    assert pools.find_hit(Sequence(2, array("q", range(12)))).num_tokens == 8


def test_pinned_blocks_and_groups_are_free_with_their_last_pin() -> None:
    pools = manager(blocks=4)
    seq = Sequence(0, array("q", range(8)))
    pools.allocate(seq, 8)
    group, blocks = seq.state_group, seq.block_table[:2]
    assert group is not None
    pools.pin_group(group)
    pools.pin_blocks(blocks)
    pools.free(seq)
    assert (pools.num_free_blocks, pools.num_free_groups) == (2, 1)
    assert not set(pools.blocks.take(2)) & set(blocks)
    pools.unpin_group(group)
    pools.unpin_blocks(blocks)
    assert (pools.num_free_blocks, pools.num_free_groups) == (2, 2)
    with pytest.raises(CacheFault, match="freed twice"):
        pools.unpin_group(group)
    with pytest.raises(CacheFault, match="nothing to pin"):
        pools.pin_group(group)


def test_a_checkpoint_to_restore_outlives_its_withdrawal() -> None:
    pools = manager(num_checkpoints=1)
    first = Sequence(0, array("q", range(9)))
    computed(pools, first, step=1, saves=(8,))
    second = Sequence(1, array("q", range(9)))
    pools.allocate(second, 9, pools.find_hit(second))
    assert second.num_computed_tokens == 8
    assert second.block_table[:4] == first.block_table[:4]
    pools.withdraw_since(1)
    assert pools.checkpoints.reserve() is None, "the slot is still to be read"
    pools.restored(second)
    assert pools.checkpoints.reserve() is not None


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pools = manager(blocks=3)
    seq = Sequence(0, array("q", range(8)))
    assert not pools.can_allocate(8, NO_HIT)
    with pytest.raises(CacheFault, match="does not fit"):
        pools.allocate(seq, 8)
    assert (pools.num_free_blocks, pools.num_free_groups, seq.block_table) == (3, 2, [])
    pools.allocate(seq, 5)
    assert not pools.grow(seq, 7)
    assert pools.grow(seq, 6)
    with pytest.raises(CacheFault, match="already"):
        pools.allocate(seq, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_blocks": 0}, "num_blocks: expected 1 or more, got 0"),
        ({"num_groups": 0}, "num_groups"),
        ({"num_checkpoints": -1}, "num_checkpoints"),
        ({"checkpoint_spacing": 24}, "multiple of the block size 16, got 24"),
        ({"checkpoint_spacing": 0}, "multiple of the block size 16, got 0"),
    ],
)
def test_bad_pool_sizes_are_refused(values: dict[str, int], words: str) -> None:
    sizes = {"num_blocks": 4, "block_size": 16, "num_groups": 2, **values}
    with pytest.raises(BadInput, match=words):
        BlockManager(**sizes)  # type: ignore[arg-type]
