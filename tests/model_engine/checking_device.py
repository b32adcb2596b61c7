"""An engine whose device is a few dictionaries, to drive the real scheduler and check its accounts.

Its model's next token is a hash of all tokens before, so every output is known beforehand. What
it stores in KV slots, states and checkpoints is that hash too, so a step sees at once whether what
the scheduler gave it to read is what its request would have computed itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.scheduled_batch import (
    BatchKind,
    NeedsDrain,
    ScheduledBatch,
    ScheduledRow,
    SchedulerConfig,
)
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import FinishReason, Sequence

VOCABULARY = 6
EOS = 5
GARBAGE = -1


def values_of(tokens: list[int]) -> list[int]:
    """Hash of each prefix; entry 0 is that of no tokens."""
    values = [0]
    for token in tokens:
        values.append(hash((values[-1], token)))
    return values


def next_token(value: int) -> int:
    """The model: the token behind a prefix with this hash."""
    return (value >> 7) % VOCABULARY


def generate(prompt: list[int], most: int, *, ignore_eos: bool) -> list[int]:
    """Output of a request that runs alone."""
    value, output = values_of(prompt)[-1], list[int]()
    while len(output) < most and not (output and output[-1] == EOS and not ignore_eos):
        output.append(next_token(value))
        value = hash((value, output[-1]))
    return output


@dataclass
class Entry:
    """A launched output step whose status or ids may be on their way."""

    batch: ScheduledBatch
    statuses: list[tuple[int, int]]
    ids: list[list[int]]
    status_received: bool = False


@dataclass
class FakeEngine:
    """Runs steps in the engine's order: status drained before an output step, ids one step late.

    Args:
        config: the scheduler's limits.
        pools: its pools.
        random: draws accepted counts.
        faults: chance that a decode step's status reports a guard error.
        interrupt: called where a client may cancel: before and after a batch is made, and after its
            launch.
    """

    config: SchedulerConfig
    pools: BlockManager
    random: random.Random
    faults: float = 0.0
    interrupt: Callable[[], object] = lambda: None

    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    in_flight: deque[Entry] = field(default_factory=deque)
    kinds: list[BatchKind] = field(default_factory=list)
    done: list[Sequence] = field(default_factory=list)
    steps: int = 0
    drains: int = 0
    guard_errors: int = 0
    restores: int = 0
    last_step: int = 0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(self.config, self.pools, clock=lambda: self.now)

    # -- one step
    def step(self) -> bool:
        """Make and launch one step; False when nothing was left to run."""
        self.now += 1.0
        self.check_accounts()
        self.interrupt()
        could_decode, before = self.could_decode(), self.scheduler.stats()
        batch = self.scheduler.schedule()
        if isinstance(batch, NeedsDrain):
            assert self.in_flight, batch.reason
            self.drains += 1
            self.receive_statuses()
            self.receive_ids(0)
            return True
        if batch is None:
            self.receive_statuses()
            self.receive_ids(0)
            return False
        if self.kinds and batch.kind is self.kinds[-1]:
            # neither kind goes twice while the other has work
            put_back = self.scheduler.stats().preemptions > before.preemptions
            if batch.kind is BatchKind.PREFILL:
                assert put_back or not could_decode, "decode was starved"
            else:
                assert put_back or not before.prefilling, "prefill was starved"
        self.kinds.append(batch.kind)
        if batch.produces_output:
            self.receive_statuses()
        self.interrupt()
        self.scheduler.confirm(batch)
        if not batch.rows:
            self.receive_statuses()
            self.receive_ids(0)
            return True
        outputs = batch.produces_output
        self.launch(batch)
        self.last_step = batch.step
        self.interrupt()
        self.scheduler.launched(batch)
        self.steps += 1
        if outputs:
            self.receive_ids(1)
        return True

    def could_decode(self) -> bool:
        """Whether some request is past its prompt and not certain to be full already."""
        return any(
            seq.num_tokens + seq.num_pending_outputs < seq.max_total_tokens
            for seq in self.scheduler.running[self.scheduler.stats().prefilling :]
        )

    def launch(self, batch: ScheduledBatch) -> None:
        """Do the step's work, in the order in which a stream would."""
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(batch.rows) <= self.config.max_num_seqs
        groups = {row.seq.state_group for row in batch.rows}
        assert None not in groups, "a row has no group any more"
        assert len(groups) == len(batch.rows), "two rows share a group"
        for slot, group in batch.restores:
            value, step = self.checkpoints[slot]
            assert self.pools.checkpoints.pins(slot), "the checkpoint could be evicted"
            assert step not in self.withdrawn, "a withdrawn checkpoint was hit"
            self.states[group] = value
            self.restores += 1
        statuses, ids = list[tuple[int, int]](), list[list[int]]()
        written: set[tuple[int, int]] = set()
        for row in batch.rows:
            run = self.prefill if batch.kind is BatchKind.PREFILL else self.decode
            status, row_ids, places = run(batch.step, row)
            assert not written & places, "two requests write one place"
            written |= places
            statuses.append(status)
            ids.append(row_ids)
        for group, slot in batch.saves:
            self.checkpoints[slot] = (self.states[group], batch.step)
        if batch.produces_output:
            self.in_flight.append(Entry(batch, statuses, ids))

    def place(self, seq: Sequence, position: int) -> tuple[int, int]:
        """KV slot of a position; it must be in the block table."""
        size = self.pools.block_size
        return seq.block_table[position // size], position % size

    def check_context(self, row: ScheduledRow, values: list[int]) -> None:
        """What the row reads is what its own tokens give."""
        assert len(row.seq.block_table) <= self.config.max_blocks_per_seq(self.pools.block_size)
        for position in range(row.context_len):
            value, step = self.kv[self.place(row.seq, position)]
            assert value == values[position + 1], f"position {position} of {row.seq} is another's"
            if row.restore_slot is not None:
                assert step not in self.withdrawn, "withdrawn KV was hit"

    def write(self, step: int, seq: Sequence, position: int, value: int) -> tuple[int, int]:
        """Store KV; the block must be the request's alone and not published."""
        block, offset = self.place(seq, position)
        assert self.pools.blocks.ref_count(block) == 1, "a shared block is written"
        assert not self.pools.blocks.published_step(block), "a published block is written"
        self.kv[block, offset] = (value, step)
        return block, offset

    def prefill(
        self, step: int, row: ScheduledRow
    ) -> tuple[tuple[int, int], list[int], set[tuple[int, int]]]:
        seq = row.seq
        group = seq.state_group
        assert group is not None
        tokens = seq.token_ids.tolist()
        values = values_of(tokens)
        end = row.context_len + row.query_len
        assert row.context_len == seq.num_computed_tokens
        assert row.token_ids == tokens[row.context_len : end]
        assert row.query_len >= 1
        if row.context_len:
            assert self.states[group] == values[row.context_len], "another state was resumed"
        self.check_context(row, values)
        places = {
            self.write(step, seq, position, values[position + 1])
            for position in range(row.context_len, end)
        }
        self.states[group] = values[end]
        assert row.produces_output == (end == len(tokens))
        if not row.produces_output:
            return (0, 0), [], places
        token = next_token(values[end])
        self.tokens[group] = [*tokens, token]
        self.accepted[group] = 1
        for position in range(end, end + self.config.num_drafts - 1):
            places.add(self.write(step, seq, position, GARBAGE))
        return (0, 0), [token], places

    def decode(
        self, step: int, row: ScheduledRow
    ) -> tuple[tuple[int, int], list[int], set[tuple[int, int]]]:
        seq = row.seq
        group = seq.state_group
        assert group is not None
        tokens = self.tokens[group]
        assert row.context_len == len(tokens) - 1, "the context is not what was confirmed"
        assert seq.num_accepted_tokens == self.accepted[group], "another count was accepted"
        assert row.query_len == 1 + (seq.num_drafts or 0)
        values = values_of(tokens)
        assert self.states[group] == values[row.context_len]
        self.check_context(row, values)
        bonus = self.random.randint(0, row.query_len - 1)
        places = set()
        for position in range(row.context_len, row.context_len + row.query_len):
            right = position <= row.context_len + bonus
            if right:
                tokens.append(next_token(values[-1]))
                places.add(self.write(step, seq, position, values[-1]))
                self.states[group] = values[-1]
                values.append(hash((values[-1], tokens[-1])))
            else:
                places.add(self.write(step, seq, position, GARBAGE))
        end = row.context_len + row.query_len
        for position in range(end, end + self.config.num_drafts - 1):
            places.add(self.write(step, seq, position, GARBAGE))
        self.accepted[group] = bonus + 1
        return (row.query_len - 1 - bonus, bonus), tokens[-bonus - 1 :], places

    # -- what comes back
    def receive_statuses(self) -> None:
        for entry in self.in_flight:
            if entry.status_received:
                continue
            entry.status_received = True
            batch = entry.batch
            if batch.kind is BatchKind.DECODE and self.random.random() < self.faults:
                self.guard_errors += 1
                bad = self.random.choice(batch.rows)
                if bad.is_live:
                    self.end(bad.seq, FinishReason.ERROR)
                self.withdrawn |= set(range(batch.step, self.last_step + 1))
                for seq in self.scheduler.withdraw_since(batch.step):
                    self.scheduler.put_back(seq)
            # padding rows stand behind
            self.scheduler.update_from_status(
                batch,
                [rejected for rejected, _ in entry.statuses] + [7] * 3,
                [bonus for _, bonus in entry.statuses] + [7] * 3,
            )

    def receive_ids(self, keep: int) -> None:
        while len(self.in_flight) > keep:
            entry = self.in_flight.popleft()
            for row, ids in zip(entry.batch.rows, entry.ids, strict=True):
                if row.is_live and row.produces_output:
                    reason = self.scheduler.append_tokens(row.seq, [*ids, -1])
                    if reason is not None:
                        self.end(row.seq, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq, reason)
        self.done.append(seq)

    # -- accounts
    def check_accounts(self) -> None:
        """Every block and group is held by who says so, and by no one else."""
        pools, running = self.pools, self.scheduler.running
        holders: dict[int, int] = {}
        for seq in running:
            for block in seq.block_table:
                holders[block] = holders.get(block, 0) + 1
        for block in range(pools.num_blocks):
            assert pools.blocks.ref_count(block) == holders.get(block, 0), "a block is miscounted"
        assert pools.num_free_blocks + len(holders) == pools.num_blocks
        groups = [seq.state_group for seq in running]
        assert len(set(groups)) == len(groups)
        assert pools.num_free_groups == pools.num_groups - len(groups)
        for seq in self.scheduler.waiting:
            assert not seq.block_table
            assert seq.state_group is None
