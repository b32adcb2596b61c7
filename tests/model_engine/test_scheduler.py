"""The scheduler against a device that knows what every step has to read, and its single rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from checking_device import EOS, VOCABULARY, FakeEngine, generate
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.prefix_cache import BlockPool, CheckpointPool
from atom.model_engine.scheduler import (
    BatchKind,
    NeedsDrain,
    QueueFull,
    RequestRefused,
    ScheduledBatch,
    Scheduler,
    SchedulerConfig,
    SchedulerFault,
)
from atom.model_engine.sequence import FinishReason, SamplingParams, Sequence


def scheduler(
    *, blocks: int = 64, block_size: int = 4, checkpoints: int = 0, spacing: int = 8, **limits: Any
) -> Scheduler:
    given = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "max_model_len": 128, **limits}
    config = SchedulerConfig(**given)
    pools = BlockManager(
        blocks,
        block_size,
        config.max_num_seqs,
        num_checkpoints=checkpoints,
        checkpoint_spacing=spacing,
    )
    return Scheduler(config, pools)


def request(number: int, prompt: int | list[int], **params: Any) -> Sequence:
    ids = [number % 7] * prompt if isinstance(prompt, int) else prompt
    return Sequence(number, ids, SamplingParams(**params))  # type: ignore[arg-type]


def launch(made: Scheduler) -> ScheduledBatch:
    """Schedule and launch a batch whose statuses are all known."""
    batch = made.schedule()
    assert isinstance(batch, ScheduledBatch)
    made.confirm(batch)
    made.launched(batch)
    return batch


def receive(made: Scheduler, batch: ScheduledBatch, bonus: int = 0, token: int = 1) -> None:
    """Status and ids of a batch."""
    count = len(batch.rows)
    rejected = [row.query_len - 1 - bonus for row in batch.rows]
    made.update_from_status(batch, rejected, [bonus] * count)
    for row in batch.rows:
        if row.is_live and row.produces_output:
            reason = made.append_tokens(row.seq, [token] * (bonus + 1))
            if reason:
                made.finish(row.seq, reason)


# -- against the device


def serve(
    seed: int,
    requests: int,
    *,
    groups: int,
    drafts: int,
    block_size: int,
    blocks: int,
    checkpoints: int,
    spacing: int,
    budget: int,
    faults: float = 0.0,
) -> FakeEngine:
    """Random arrivals, prefixes, lengths and cancellations; ends when everything has ended."""
    draw = random.Random(seed)
    config = SchedulerConfig(
        max_num_batched_tokens=max(budget, groups * (1 + drafts)),
        max_num_seqs=groups,
        max_model_len=72,
        num_drafts=drafts,
        max_queue=6,
        watermark=draw.choice([0.0, 0.1]),
        eos_token_ids=(EOS,),
    )
    pools = BlockManager(
        blocks,
        block_size,
        groups,
        num_checkpoints=checkpoints,
        checkpoint_spacing=spacing * block_size,
    )
    engine = FakeEngine(config, pools, draw, faults)
    made = engine.scheduler
    trunk = [draw.randrange(VOCABULARY) for _ in range(60)]
    waits, added, aborted = dict[int, int](), list[Sequence](), set[int]()

    def maybe_cancel() -> None:
        if added and draw.random() < 0.03:
            chosen = draw.choice(added[-8:])
            if made.abort(chosen.request_id) is not None:
                aborted.add(chosen.request_id)
                assert chosen.finish_reason is FinishReason.ABORT

    engine.interrupt = maybe_cancel
    number = 0
    while number < requests or made.has_unfinished:
        if number < requests and draw.random() < 0.4:
            shared = draw.randrange(0, 50)
            prompt = trunk[:shared] + [
                draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 25))
            ]
            params = SamplingParams(
                max_tokens=draw.choice([1, 2, 7, 20, None]), ignore_eos=draw.random() < 0.5
            )
            seq = Sequence(number, prompt, params)  # type: ignore[arg-type]
            seq.num_drafts = draw.choice([None, *range(drafts + 1)])
            try:
                made.add(seq)
                added.append(seq)
                waits[number] = engine.steps
            except QueueFull:
                assert made.stats().waiting >= 6
            except RequestRefused:
                assert not made.get(number)
            number += 1
        if not engine.step():
            assert not made.has_unfinished, "something waits and nothing runs"
        for seq in made.running[made.stats().prefilling :]:
            if draw.random() < 0.2:
                seq.num_drafts = draw.randint(0, drafts)
        assert engine.steps < 400 * requests, "no progress"
    engine.receive_statuses()
    engine.receive_ids(0)
    engine.check_accounts()
    stats = made.stats()
    assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
    assert pools.num_free_groups == groups
    assert pools.checkpoints.num_free + stats.checkpoints == checkpoints
    assert stats.finished == len(added)
    for seq in added:
        assert seq.is_finished
        most = seq.max_total_tokens - seq.num_prompt_tokens
        whole = generate(seq.prompt_token_ids, most, ignore_eos=seq.params.ignore_eos)
        output = seq.output_token_ids
        if seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output == whole
        else:
            assert output == whole[: len(output)]
            assert seq.request_id in aborted or faults
    return engine


_RUN = settings(max_examples=60, deadline=None)


@_RUN
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 5),
    drafts=st.integers(0, 3),
    block_size=st.sampled_from([1, 3, 4]),
    room=st.floats(0.5, 4),
    checkpoints=st.integers(0, 5),
    spacing=st.integers(1, 4),
    budget=st.integers(1, 60),
    faults=st.sampled_from([0.0, 0.05]),
)
def test_everything_ends_and_reads_its_own_state(
    seed: int,
    groups: int,
    drafts: int,
    block_size: int,
    room: float,
    checkpoints: int,
    spacing: int,
    budget: int,
    faults: float,
) -> None:
    serve(
        seed,
        25,
        groups=groups,
        drafts=drafts,
        block_size=block_size,
        blocks=max(int(room * 80 / block_size), 1),
        checkpoints=checkpoints,
        spacing=spacing,
        budget=budget,
        faults=faults,
    )


_TIGHT: dict[str, Any] = {
    "groups": 4,
    "drafts": 3,
    "block_size": 4,
    "blocks": 32,
    "checkpoints": 6,
    "spacing": 2,
    "budget": 30,
}


def test_thousands_of_steps_in_a_tight_pool() -> None:
    engine = serve(7, 1500, **_TIGHT, faults=0.02)
    stats = engine.scheduler.stats()
    # the run is worth something only if all of these happened, and often
    assert engine.steps > 2000
    assert engine.restores > 50
    assert engine.drains > 20
    assert engine.guard_errors > 10
    assert stats.preemptions > 20
    assert stats.hit_tokens > 1000
    assert engine.pools.blocks.evictions > 50
    assert engine.pools.checkpoints.evictions > 20


def serve_many(runs: int) -> None:
    for seed in range(runs):
        serve(seed, 60, **_TIGHT, faults=0.1)


def _no_withdrawal(pool: BlockPool | CheckpointPool, step: int) -> int:
    return 0


def _share_without_counting(pool: BlockPool, blocks: list[int]) -> None:
    for block in blocks:
        pool._cached.pop(block, None)


def _no_growth(manager: BlockManager, seq: Sequence, num_tokens: int) -> bool:
    return True


def _count_all(row: Any, num_rejected: int, num_bonus: int) -> None:
    row.seq.num_computed_tokens += row.query_len
    row.seq.pending_query_len = 0


@pytest.mark.parametrize(
    ("target", "broken", "seen"),
    [
        ("prefix_cache.BlockPool.withdraw_since", _no_withdrawal, "withdrawn .* was hit"),
        ("prefix_cache.CheckpointPool.withdraw_since", _no_withdrawal, "withdrawn .* was hit"),
        ("prefix_cache.BlockPool.share", _share_without_counting, "miscounted"),
        ("block_manager.BlockManager.grow", _no_growth, "out of range"),
        ("block_manager.BlockManager.restored", lambda manager, seq: None, "another state"),
        ("scheduled_batch.ScheduledRow.take_status", _count_all, "another count"),
        ("scheduled_batch.ScheduledRow.is_live", property(lambda row: True), "no group any more"),
    ],
)
def test_the_device_sees_a_broken_account(
    monkeypatch: pytest.MonkeyPatch, target: str, broken: Callable[..., Any], seen: str
) -> None:
    monkeypatch.setattr(f"atom.model_engine.{target}", broken)
    with pytest.raises((AssertionError, IndexError), match=seen):
        serve_many(20)


# -- rules, one by one


def test_the_prompt_is_cut_at_the_last_boundary_before_its_end() -> None:
    made = scheduler(checkpoints=4)
    made.add(request(1, 21, max_tokens=4))
    batch = launch(made)
    assert [(row.query_len, row.produces_output) for row in batch.rows] == [(16, False)]
    assert not batch.produces_output
    group = batch.rows[0].seq.state_group
    assert [save.group for save in batch.saves] == [group]
    batch = launch(made)
    assert [(r.context_len, r.query_len, r.produces_output) for r in batch.rows] == [(16, 5, True)]
    assert not batch.saves
    again = request(2, [1] * 21, max_tokens=4)
    made.add(again)
    receive(made, batch)
    decode, batch = launch(made), launch(made)
    assert (decode.kind, batch.kind) == (BatchKind.DECODE, BatchKind.PREFILL)
    assert [(r.context_len, r.query_len) for r in batch.rows] == [(16, 5)]
    assert [restore.group for restore in batch.restores] == [again.state_group]
    assert again.num_cached_tokens == 16


def test_a_prompt_that_ends_on_a_boundary_leaves_a_checkpoint_at_both() -> None:
    made = scheduler(checkpoints=4)
    made.add(request(1, 24))
    ends = []
    for _ in range(2):
        batch = launch(made)
        ends.append((batch.rows[0].context_len + batch.rows[0].query_len, len(batch.saves)))
    assert ends == [(16, 1), (24, 1)]
    find = made.block_manager.find_hit
    assert find(request(2, [1] * 24)).num_tokens == 16, "the same prompt keeps a token to compute"
    assert find(request(3, [1] * 25)).num_tokens == 24


def test_two_equal_prompts_in_one_batch_save_one_checkpoint() -> None:
    made = scheduler(checkpoints=4)
    for number in range(2):
        made.add(request(number, [3] * 9))
    batch = launch(made)
    assert [row.query_len for row in batch.rows] == [8, 8]
    assert len(batch.saves) == 1
    assert made.stats().checkpoints == 1


def test_chunks_end_at_boundaries_and_share_the_budget() -> None:
    made = scheduler(checkpoints=8, max_num_batched_tokens=30)
    for number, length in enumerate((50, 12, 9)):
        made.add(request(number, length))
    spans = []
    for _ in range(4):
        batch = launch(made)
        if batch.kind is BatchKind.PREFILL:
            assert batch.num_tokens <= 30
            spans.append([(r.seq.request_id, r.context_len, r.query_len) for r in batch.rows])
        if batch.produces_output:
            receive(made, batch)
    # 6 tokens are left behind the first chunk: no boundary, so nobody is admitted for them
    assert spans == [[(0, 0, 24)], [(0, 24, 24)], [(0, 48, 2), (1, 0, 8), (2, 0, 8)]]


def test_a_budget_under_one_spacing_still_reaches_the_boundaries() -> None:
    made = scheduler(checkpoints=8, max_num_seqs=1, max_num_batched_tokens=6)
    made.add(request(0, 20))
    ends = []
    while not (batch := launch(made)).produces_output:
        ends.append(batch.rows[0].context_len + batch.rows[0].query_len)
    assert ends == [6, 8, 14, 16]
    assert made.stats().checkpoints == 2


def test_without_a_prefix_cache_chunks_fill_the_budget() -> None:
    made = scheduler(max_num_batched_tokens=30)
    made.add(request(0, 50))
    made.add(request(1, 15))
    first, second = launch(made), launch(made)
    assert [row.query_len for row in first.rows] == [30]
    assert [row.query_len for row in second.rows] == [20, 10]
    assert not first.saves
    assert second.produces_output


def test_where_prompts_part_a_checkpoint_is_taken_for_the_third() -> None:
    made = scheduler(checkpoints=8, max_num_batched_tokens=64, max_num_seqs=1)
    hits = []
    for number in range(3):
        seq = request(number, [6] * 18 + [number] * 20, max_tokens=1)
        made.add(seq)
        while made.has_unfinished:
            batch = launch(made)
            if batch.produces_output:
                receive(made, batch)
        hits.append(seq.num_cached_tokens)
    assert hits == [0, 0, 16]


def test_prefill_and_decode_alternate_while_both_have_work() -> None:
    made = scheduler(max_num_batched_tokens=16, blocks=200, max_num_seqs=4)
    made.add(request(0, 4, max_tokens=50, ignore_eos=True))
    receive(made, launch(made))
    for number in (1, 2, 3):
        made.add(request(number, 100, max_tokens=2))
    kinds = []
    for _ in range(12):
        batch = launch(made)
        kinds.append(batch.kind)
        if batch.produces_output:
            receive(made, batch)
    assert kinds == [BatchKind.DECODE, BatchKind.PREFILL] * 6


def test_the_first_decode_accepts_one_token() -> None:
    made = scheduler()
    seq = request(0, 5, max_tokens=30, ignore_eos=True)
    made.add(seq)
    receive(made, launch(made))
    batch = launch(made)
    row = batch.rows[0]
    assert (seq.num_accepted_tokens, row.context_len, row.query_len) == (1, 5, 4)
    receive(made, batch, bonus=2)
    assert (seq.num_accepted_tokens, seq.num_computed_tokens, seq.num_tokens) == (3, 8, 9)
    seq.num_drafts = 1
    assert [(row.context_len, row.query_len) for row in launch(made).rows] == [(8, 2)]


def test_a_request_that_is_certain_to_be_full_is_not_run_again() -> None:
    made = scheduler(num_drafts=0)
    seq = request(0, 5, max_tokens=2)
    made.add(seq)
    receive(made, launch(made))
    second = launch(made)
    assert isinstance(made.schedule(), NeedsDrain), "two tokens are on their way or here"
    receive(made, second)
    assert seq.finish_reason is FinishReason.LENGTH
    assert made.schedule() is None


def test_the_newest_goes_back_and_only_when_outputs_are_known() -> None:
    # 3 prompts fill 12 blocks but one place each: the second decode step needs more
    made = scheduler(blocks=12, max_num_seqs=3, num_drafts=0, max_num_batched_tokens=64)
    seqs = [request(number, 15, max_tokens=20, ignore_eos=True) for number in range(3)]
    for seq in seqs:
        made.add(seq)
    made.add(request(9, 3))
    receive(made, launch(made))
    decode = launch(made)
    assert [row.seq for row in decode.rows] == seqs
    assert isinstance(made.schedule(), NeedsDrain)
    assert made.stats().preemptions == 0
    receive(made, decode)
    batch = launch(made)
    assert [row.seq for row in batch.rows] == seqs[:2]
    assert made.waiting[0] is seqs[2], "before the one that came later"
    assert (seqs[2].state_group, seqs[2].block_table) == (None, [])
    assert seqs[2].num_tokens == 17, "what it generated is part of its next prompt"
    assert made.stats().preemptions == 1


def test_a_row_that_went_back_or_ended_is_ignored() -> None:
    made = scheduler()
    seqs = [request(number, 5, ignore_eos=True) for number in range(3)]
    for seq in seqs:
        made.add(seq)
    receive(made, launch(made))
    decode = launch(made)
    made.put_back(seqs[0])
    assert made.abort(1) is seqs[1]
    assert [row.is_live for row in decode.rows] == [False, False, True]
    receive(made, decode, bonus=1)
    assert [seq.num_output_tokens for seq in seqs] == [1, 1, 3]
    assert made.append_tokens(seqs[0], [4]) is None, "it awaits nothing"
    assert seqs[0].num_output_tokens == 1
    assert made.append_tokens(seqs[1], [4]) is None


def test_a_row_that_ends_before_its_launch_leaves_the_batch() -> None:
    made = scheduler(checkpoints=2)
    for number in range(2):
        made.add(request(number, [number + 1] * 9))
    batch = made.schedule()
    assert isinstance(batch, ScheduledBatch)
    assert len(batch.saves) == 2
    made.abort(0)
    made.confirm(batch)
    assert [row.seq.request_id for row in batch.rows] == [1]
    assert len(batch.saves) == 1
    assert made.block_manager.checkpoints.num_free == 1
    made.abort(1)
    made.launched(batch)
    assert made.block_manager.checkpoints.num_free == 2
    assert made.stats().used_blocks == 0
    made.add(request(2, 9))
    empty = made.schedule()
    assert isinstance(empty, ScheduledBatch)
    made.abort(2)
    made.confirm(empty)
    assert empty.rows == []
    assert made.schedule() is None, "an empty batch is discarded"


def test_a_discarded_batch_is_made_again() -> None:
    made = scheduler(checkpoints=3)
    made.add(request(0, 9))
    while made.has_unfinished:
        batch = launch(made)
        if batch.produces_output:
            receive(made, batch)
    made.add(request(1, [0] * 9))
    dropped = made.schedule()
    assert isinstance(dropped, ScheduledBatch)
    assert len(dropped.restores) == 1
    made.discard(dropped)
    again = made.schedule()
    assert isinstance(again, ScheduledBatch)
    assert again.step == dropped.step + 1
    assert again.restores == dropped.restores
    assert [(r.context_len, r.query_len) for r in again.rows] == [(8, 1)]


def test_a_status_that_is_pending_stops_the_next_step() -> None:
    made = scheduler()
    made.add(request(0, 5, ignore_eos=True))
    receive(made, launch(made))
    launch(made)
    batch = made.schedule()
    assert isinstance(batch, ScheduledBatch)
    assert batch.rows[0].context_len == 9, "the most that the pending step can confirm"
    with pytest.raises(SchedulerFault, match="was not received"):
        made.confirm(batch)
    with pytest.raises(SchedulerFault, match="without confirm"):
        made.launched(batch)
    with pytest.raises(SchedulerFault, match="too few rows"):
        made.update_from_status(batch, [], [])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), drafts=st.integers(0, 3), blocks=st.integers(12, 40))
def test_a_stale_status_never_leads_out_of_the_block_table(
    seed: int, drafts: int, blocks: int
) -> None:
    """Counts are another step's bytes; ids are right. All requests end all the same."""
    draw = random.Random(seed)
    made = scheduler(blocks=blocks, num_drafts=drafts, max_model_len=30, max_num_seqs=3)
    for number in range(6):
        made.add(request(number, draw.randint(1, 20), max_tokens=draw.choice([5, None])))
    before: ScheduledBatch | None = None
    steps = 0

    def status(batch: ScheduledBatch) -> None:
        stale = [draw.choice([0, 1, 3, -7, 16384, 2**31 - 1]) for _ in range(2)]
        made.update_from_status(batch, [stale[0]] * len(batch.rows), [stale[1]] * len(batch.rows))
        for row in batch.rows:
            if row.is_live and batch.kind is BatchKind.DECODE:
                assert row.seq.num_accepted_tokens == stale[1] + 1, "the guard judges it, not we"

    def ids(batch: ScheduledBatch) -> None:
        for row in batch.rows:
            if row.is_live and row.produces_output:
                count = draw.randint(1, row.query_len) if batch.kind is BatchKind.DECODE else 1
                reason = made.append_tokens(row.seq, [0] * count)
                if reason:
                    made.finish(row.seq, reason)

    while made.has_unfinished:
        steps += 1
        assert steps < 1000
        batch = made.schedule()
        if not isinstance(batch, ScheduledBatch):
            assert before is not None
            status(before)
            ids(before)
            before = None
            continue
        if batch.produces_output and before is not None:
            status(before)
        made.confirm(batch)
        for row in batch.rows:
            ahead = drafts - 1 if row.produces_output and drafts else 0
            places = row.context_len + row.query_len + ahead
            assert places <= len(row.seq.block_table) * 4
            assert len(row.seq.block_table) <= made.config.max_blocks_per_seq(4)
        made.launched(batch)
        if batch.produces_output:
            if before is not None:
                ids(before)
            before = batch
    assert made.stats().used_blocks == 0


def test_who_builds_on_withdrawn_work_computes_anew() -> None:
    made = scheduler(checkpoints=8, blocks=100, max_num_batched_tokens=16)

    def run_until(prefilled: Sequence, tokens: int) -> int:
        step = 0
        while prefilled.num_computed_tokens < tokens:
            batch = launch(made)
            step = batch.step
            if batch.produces_output:
                receive(made, batch)
        return step

    before, source = request(0, 9, ignore_eos=True), request(1, [1] * 14, ignore_eos=True)
    reader, middle = request(2, [1] * 14 + [2] * 4, ignore_eos=True), request(3, [5] * 60)
    made.add(before)
    faulty = run_until(before, 9) + 1
    for seq in (source, reader, middle):
        made.add(seq)
        run_until(seq, min(seq.num_tokens, 32))
    assert (reader.num_cached_tokens, middle.num_computed_tokens) == (8, 32)
    assert made.withdraw_since(faulty) == [source, reader]
    assert list(made.waiting) == [middle], "it was still prefilling: nothing of it is lost"
    assert (middle.num_computed_tokens, middle.block_table) == (0, [])
    assert before in made.running
    for lost in (source, reader, middle):
        probe = request(7, lost.prompt_token_ids)
        assert made.block_manager.find_hit(probe).num_tokens == 0
    assert made.block_manager.find_hit(request(8, [0] * 9)).num_tokens == 8
    made.put_back(reader)
    made.finish(source, FinishReason.ERROR)
    assert list(made.waiting) == [reader, middle], "in order of arrival"


def test_a_batch_that_would_resume_from_withdrawn_work_is_not_launched() -> None:
    made = scheduler(checkpoints=8)
    made.add(request(0, 9, max_tokens=1))
    faulty = launch(made).step
    receive(made, launch(made))
    reader = request(1, [0] * 9)
    made.add(reader)
    batch = made.schedule()
    assert isinstance(batch, ScheduledBatch)
    assert len(batch.restores) == 1
    assert made.withdraw_since(faulty) == []
    made.confirm(batch)
    assert (batch.rows, list(made.waiting)) == ([], [reader])
    again = launch(made)
    assert [(row.context_len, row.query_len) for row in again.rows] == [(0, 8)]


def test_room_that_is_kept_for_the_running_is_given_when_none_runs() -> None:
    made = scheduler(blocks=20, watermark=0.5, num_drafts=0)
    made.add(request(0, 4, max_tokens=1))
    first = launch(made)
    made.add(request(1, 60, max_tokens=1))
    assert isinstance(made.schedule(), NeedsDrain), "15 blocks are needed, 19 free, 10 kept"
    receive(made, first)
    assert [row.seq.request_id for row in launch(made).rows] == [1]


def test_pinned_memory_is_not_given_away() -> None:
    made = scheduler(blocks=8, max_num_seqs=1, num_drafts=0)
    seq = request(0, 16, max_tokens=1)
    made.add(seq)
    batch = launch(made)
    stored, group = seq.block_table[:3], seq.state_group
    assert group is not None
    made.block_manager.pin_blocks(stored)
    receive(made, batch)
    assert seq.is_finished
    assert made.stats().used_blocks == 3
    made.add(request(1, 24, max_tokens=1))
    assert made.schedule() is None, "a store still reads three blocks"
    made.block_manager.unpin_blocks(stored)
    assert len(launch(made).rows) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (128, {}, "128 tokens; with max_model_len 128 it may have 127"),
        (90, {"max_tokens": 30}, "need 32 KV blocks; the pool has 26, enough for 97 tokens"),
        (97, {"max_tokens": None}, "the pool has 26, enough for 97 tokens"),
    ],
)
def test_a_request_that_can_never_fit_is_refused(
    prompt: int, params: dict[str, Any], words: str
) -> None:
    made = scheduler(blocks=26)
    with pytest.raises(RequestRefused, match=words):
        made.add(request(0, prompt, **params))
    assert not made.has_unfinished


def test_the_longest_request_that_fits_is_served_to_its_end() -> None:
    made = scheduler(blocks=26)
    seq = request(0, 90, max_tokens=None, ignore_eos=True)
    made.add(seq)
    assert seq.max_total_tokens == 97
    while made.has_unfinished:
        batch = launch(made)
        if batch.produces_output:
            receive(made, batch)
    assert (seq.num_tokens, seq.finish_reason) == (97, FinishReason.LENGTH)
    assert made.stats().preemptions == 0


def test_a_full_queue_and_a_used_id_are_refused() -> None:
    made = scheduler(max_queue=2)
    first = request(0, 3)
    made.add(first)
    with pytest.raises(RequestRefused, match="request id 0 is in use"):
        made.add(request(0, 3))
    made.add(request(1, 3))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        made.add(request(2, 3))
    assert made.abort(1) is not None
    made.add(request(2, 3))
    seq = request(5, 3)
    seq.num_drafts = 4
    with pytest.raises(RequestRefused, match="expected 0 to 3, got 4"):
        made.add(seq)
    with pytest.raises(RequestRefused, match="in use"):
        made.add(first)


def test_a_request_is_cancelled_at_any_time() -> None:
    made = scheduler()
    assert made.abort(4) is None
    made.add(request(0, 3))
    made.add(request(1, 3))
    waiting = made.abort(0)
    assert waiting is not None
    assert waiting.finish_reason is FinishReason.ABORT
    batch = launch(made)
    assert made.abort(1) is batch.rows[0].seq
    assert made.abort(1) is None
    assert (made.has_unfinished, made.stats().used_blocks) == (False, 0)
    receive(made, batch)
    assert made.schedule() is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: expected 1 or more"),
        ({"max_model_len": 1}, "max_model_len: expected 2 or more"),
        ({"num_drafts": -1}, "num_drafts"),
        ({"watermark": 1.0}, "watermark: expected 0 or more, under 1"),
        ({"max_num_seqs": 9}, "9 requests, 4 tokens each, has 36 tokens"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        scheduler(**values)


def test_every_running_request_needs_a_group() -> None:
    with pytest.raises(BadInput, match="3 state groups cannot hold max_num_seqs 4"):
        Scheduler(SchedulerConfig(max_num_seqs=4), BlockManager(8, 4, 3))


def test_a_batch_of_another_call_is_refused() -> None:
    made = scheduler()
    made.add(request(0, 5))
    batch = made.schedule()
    assert isinstance(batch, ScheduledBatch)
    with pytest.raises(SchedulerFault, match="neither launched nor discarded"):
        made.schedule()
    made.confirm(batch)
    made.launched(batch)
    for call in (made.confirm, made.launched, made.discard):
        with pytest.raises(SchedulerFault, match="not the batch"):
            call(batch)
