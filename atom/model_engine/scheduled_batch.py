"""What the scheduler hands to the engine: batches, their rows, its limits and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from atom.errors import AtomError, BadInput
from atom.model_engine.sequence import Sequence


class SchedulerFault(AtomError):
    """The scheduler's calls came in an order that cannot be right: a defect of the caller."""


class BatchKind(StrEnum):
    """A batch is wholly of one kind."""

    PREFILL = "prefill"
    DECODE = "decode"


class Restore(NamedTuple):
    """A checkpoint to copy into a request's group, before the forward pass."""

    checkpoint_slot: int
    group: int


class Save(NamedTuple):
    """A request's state to copy into a checkpoint, after the forward pass.

    After a prefill chunk the state stands in the group's first recurrent slot, and the conv history
    in the group's first rows.
    """

    group: int
    checkpoint_slot: int


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One request's part of a batch.

    Attributes:
        seq: the request.
        query_len: its tokens in this step.
        context_len: its tokens in the caches before: exact for prefill; for decode an upper bound
            until the batch is confirmed.
        produces_output: whether a token is sampled behind it; not for a middle chunk.
        generation: the request's when the row was made.
        restore_slot: checkpoint to resume from.
        save_slot: checkpoint to save the state into.
        save_hash: key of that checkpoint.
    """

    seq: Sequence
    query_len: int
    context_len: int
    produces_output: bool
    generation: int = -1
    restore_slot: int | None = None
    save_slot: int | None = None
    save_hash: bytes | None = None

    def __post_init__(self) -> None:
        self.generation = self.seq.generation

    @property
    def is_live(self) -> bool:
        """Whether the request still runs as it did then: not ended and not put back."""
        return self.generation == self.seq.generation

    @property
    def token_ids(self) -> list[int]:
        """Ids that a prefill row computes."""
        return self.seq.token_ids[self.context_len : self.context_len + self.query_len].tolist()

    def confirm(self, step_tokens: int) -> None:
        """Fill in the confirmed context length.

        A stale status can have moved the computed tokens too far. They are held to what the
        received ids allow, so that KV positions stay inside the block table.

        Args:
            step_tokens: most tokens of a decode row.
        """
        seq = self.seq
        most = seq.most_computed_tokens(step_tokens)
        if seq.num_computed_tokens > most:
            seq.num_computed_tokens = most
        self.context_len = seq.num_computed_tokens

    def take_status(self, num_rejected: int, num_bonus: int) -> None:
        """Count a decode row's confirmed tokens, unless its request ended or was put back.

        A bonus out of range goes on to the kernels as it came (their guard and the debug checks
        judge it); the computed tokens move only within what the step had.
        """
        seq = self.seq
        if self.generation == seq.generation and seq.pending_query_len:
            kept, most = self.query_len - num_rejected, self.query_len
            seq.num_computed_tokens += kept if 1 <= kept <= most else min(max(kept, 1), most)
            seq.pending_query_len = 0
            seq.num_bonus = num_bonus


@dataclass(slots=True, eq=False)
class ScheduledBatch:
    """One step.

    Attributes:
        kind: prefill or decode.
        step: its number, from 1, growing.
        rows: its requests.
    """

    kind: BatchKind
    step: int
    rows: list[ScheduledRow]

    @property
    def produces_output(self) -> bool:
        """Whether any row does: then the status before must be received first."""
        return any(row.produces_output for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.query_len for row in self.rows)

    @property
    def restores(self) -> list[Restore]:
        """Checkpoints to copy into groups before the forward pass."""
        return [
            Restore(row.restore_slot, row.seq.state_group)
            for row in self.rows
            if row.restore_slot is not None and row.seq.state_group is not None
        ]

    @property
    def saves(self) -> list[Save]:
        """States to copy into checkpoints after the forward pass."""
        return [
            Save(row.seq.state_group, row.save_slot)
            for row in self.rows
            if row.save_slot is not None and row.seq.state_group is not None
        ]


@dataclass(frozen=True, slots=True)
class NeedsDrain:
    """No batch before the outputs on their way are received: drain them, then schedule again.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits.

    Attributes:
        max_num_batched_tokens: token budget of a prefill batch, and bound of a decode batch.
        max_num_seqs: most requests that run at once.
        max_model_len: most tokens of a request, prompt and output together.
        num_drafts: draft tokens a step.
        max_queue: most requests that wait.
        watermark: share of the KV blocks that admission leaves free for the running ones' growth.
        eos_token_ids: tokens that end a request unless it says otherwise.

    Raises:
        BadInput: a value is out of range, or a decode batch could exceed the budget.
    """

    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 64
    max_model_len: int = 32768
    num_drafts: int = 3
    max_queue: int = 1024
    watermark: float = 0.01
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_model_len", self.max_model_len, 2),
            ("num_drafts", self.num_drafts, 0),
            ("max_queue", self.max_queue, 1),
        ):
            if value < least:
                raise BadInput(f"{name}: expected {least} or more, got {value}")
        if not 0 <= self.watermark < 1:
            raise BadInput(f"watermark: expected 0 or more, under 1, got {self.watermark}")
        decode = self.max_num_seqs * (1 + self.num_drafts)
        if decode > self.max_num_batched_tokens:
            raise BadInput(
                f"a decode step of max_num_seqs {self.max_num_seqs} requests, "
                f"{1 + self.num_drafts} tokens each, has {decode} tokens, over "
                f"max_num_batched_tokens {self.max_num_batched_tokens}; lower one, raise the other"
            )

    @property
    def overshoot_tokens(self) -> int:
        """Positions behind a request's longest length that a step may write before it ends.

        A request that is two tokens short may have a step pending and one to come, each of
        1 + drafts tokens, and drafts behind them.
        """
        return max(3 * self.num_drafts - 2, 0)

    def max_blocks_per_seq(self, block_size: int) -> int:
        """Width of a block table that holds any request."""
        return -(-(self.max_model_len + self.overshoot_tokens) // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts of one moment, and totals since the start.

    Attributes:
        waiting, running, prefilling: requests now; the prefilling ones run too.
        used_blocks, cached_blocks, num_blocks: KV blocks held, free with a content that can be
            hit, and in all.
        checkpoints: states that can be hit.
        hit_tokens: prompt tokens that came from the prefix cache, of ``lookup_tokens``.
        lookup_tokens: prompt tokens of all admissions, repeated ones included.
        preemptions: how often a request was put back.
        finished: requests that ended, for any reason.
    """

    waiting: int
    running: int
    prefilling: int
    used_blocks: int
    cached_blocks: int
    num_blocks: int
    checkpoints: int
    hit_tokens: int
    lookup_tokens: int
    preemptions: int
    finished: int
