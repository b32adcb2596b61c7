"""Continuous batching: which requests' tokens the next step computes, and where their state lies.

Prefill and decode are separate batches. While both have work they alternate strictly, so neither
waits more than one step for the other. Within prefill the queue is first come, first served; a
request is put back only after all that came later, so the oldest one always moves on.

Outputs are deferred. When :meth:`Scheduler.schedule` makes a step, the status and ids of the step
before may still be on their way, so memory is allocated for the most tokens that they can confirm.
Not thread-safe: one host thread runs an engine.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Numbers
from operator import attrgetter

from atom.errors import BadInput
from atom.model_engine.admission import (
    QueueFull,
    RequestRefused,
    admission_tokens,
    longest_total,
)
from atom.model_engine.block_manager import BlockManager, PrefixHit
from atom.model_engine.prefill_chunks import chunk_length, prefill_row
from atom.model_engine.scheduled_batch import (
    BatchKind,
    NeedsDrain,
    ScheduledBatch,
    ScheduledRow,
    SchedulerConfig,
    SchedulerFault,
    SchedulerStats,
)
from atom.model_engine.sequence import FinishReason, Sequence, SequenceStatus

__all__ = [
    "BatchKind",
    "NeedsDrain",
    "QueueFull",
    "RequestRefused",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerFault",
    "SchedulerStats",
]


class Scheduler:
    """Queues requests, makes batches, and keeps each request's account of computed tokens.

    A step's calls, in order: :meth:`schedule`; for an output step :meth:`update_from_status` of the
    output step before; :meth:`confirm`; the forward pass; :meth:`launched` (or :meth:`discard`);
    then :meth:`append_tokens` and :meth:`finish` for the ids of the output step before.

    Args:
        config: its limits.
        block_manager: pools that it alone uses.
        clock: seconds; a simulator passes its own.

    Raises:
        BadInput: the pools hold fewer groups than ``max_num_seqs``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_manager.num_groups < config.max_num_seqs:
            raise BadInput(
                f"{block_manager.num_groups} state groups cannot hold max_num_seqs "
                f"{config.max_num_seqs} requests; lower it or make more groups"
            )
        self.config = config
        self.block_manager = block_manager
        self.clock = clock
        self.waiting: deque[Sequence] = deque()
        self._prefilling: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._eos = frozenset(config.eos_token_ids)
        self._spare_blocks = int(config.watermark * block_manager.num_blocks)
        self._arrivals = self._step = 0
        self._last_kind = BatchKind.DECODE
        self._open: ScheduledBatch | None = None
        # request, publications and free blocks it lacked when the queue's head last did not fit
        self._stuck: tuple[Sequence, int, int] | None = None
        self._hit_tokens = self._lookup_tokens = self._preemptions = self._finished = 0

    # -- requests
    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks and a group, prefilling ones first."""
        return [*self._prefilling.values(), *self._decoding.values()]

    @property
    def num_running(self) -> int:
        """How many sequences hold blocks and a group."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._by_id)

    def get(self, request_id: int) -> Sequence | None:
        """The unfinished request of that id."""
        return self._by_id.get(request_id)

    def add(self, seq: Sequence) -> None:
        """Put a request at the end of the queue.

        Raises:
            QueueFull: too many wait.
            RequestRefused: it is longer than the model's length or the pool, or its id is in use.
        """
        if seq.request_id in self._by_id or seq.arrival >= 0:
            raise RequestRefused(f"request id {seq.request_id} is in use")
        longest = longest_total(seq, self.config, self.block_manager)
        most = self.config.num_drafts
        drafts = most if seq.num_drafts is None else seq.num_drafts
        if not 0 <= drafts <= most:
            raise RequestRefused(f"num_drafts: expected 0 to {most}, got {drafts}")
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests wait already; try again later")
        seq.num_drafts = drafts
        seq.max_total_tokens = longest
        seq.arrival = self._arrivals
        self._arrivals += 1
        if seq.arrival_time is None:
            seq.arrival_time = self.clock()
        self._by_id[seq.request_id] = seq
        self.waiting.append(seq)

    def abort(self, request_id: int) -> Sequence | None:
        """End a request at any time; ``None`` when none of that id is unfinished."""
        seq = self._by_id.get(request_id)
        if seq is not None:
            self.finish(seq, FinishReason.ABORT)
        return seq

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a request and free what it holds; does nothing for one that is not here or has ended.

        The memory may be given away at once: all that reads or writes it is ordered on the default
        stream, and what is not (a store) holds a pin.
        """
        if self._by_id.get(seq.request_id) is not seq:
            return
        self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.finish_time = self.clock()
        del self._by_id[seq.request_id]
        self._finished += 1

    def put_back(self, seq: Sequence) -> None:
        """Take all from a running request and queue it again, to compute prompt and output anew.

        Outputs of it that are on their way are lost: their rows are dead, and it generates them
        again. It goes before all that came later.
        """
        if seq.status is not SequenceStatus.RUNNING:
            raise SchedulerFault(f"request {seq.request_id} does not run")
        self._leave(seq)
        seq.status = SequenceStatus.WAITING
        place = bisect_left(self.waiting, seq.arrival, key=attrgetter("arrival"))
        self.waiting.insert(place, seq)
        self._preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self._prefilling.pop(seq.request_id, None)
        self._decoding.pop(seq.request_id, None)
        self.block_manager.free(seq)
        seq.generation += 1
        seq.pending_query_len = seq.num_pending_outputs = seq.num_bonus = 0
        self._stuck = None

    # -- making a step
    def schedule(self) -> ScheduledBatch | NeedsDrain | None:
        """The next step's batch.

        Returns:
            A batch; :class:`NeedsDrain` when outputs on their way must be received first; or
            ``None`` when nothing can run (no requests, or all free memory is pinned).

        Raises:
            SchedulerFault: the batch before was neither launched nor discarded.
        """
        if self._open is not None:
            raise SchedulerFault(f"step {self._open.step} was neither launched nor discarded")
        first, then = BatchKind.PREFILL, BatchKind.DECODE
        if self._last_kind is BatchKind.PREFILL:
            first, then = then, first
        for kind in (first, then):
            prefill = kind is BatchKind.PREFILL
            made = self._schedule_prefill() if prefill else self._schedule_decode()
            if isinstance(made, NeedsDrain):
                return made
            if made:
                self._last_kind = kind
                self._step += 1
                self._open = ScheduledBatch(kind, self._step, made)
                return self._open
        return NeedsDrain("nothing else can run") if self._outputs_pending() else None

    def _outputs_pending(self) -> bool:
        return any(seq.num_pending_outputs for seq in self._decoding.values())

    def _schedule_prefill(self) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        saved: set[bytes] = set()
        manager = self.block_manager
        budget = self.config.max_num_batched_tokens
        for seq in self._prefilling.values():
            length = chunk_length(
                manager, seq, seq.num_computed_tokens, seq.branch_tokens, budget, bool(rows)
            )
            if length:
                rows.append(prefill_row(manager, seq, length, saved))
                budget -= length
            if not budget:
                return rows
        while self.waiting and budget and self.num_running < self.config.max_num_seqs:
            seq = self.waiting[0]
            hit = self._fitting_hit(seq)
            if hit is None:
                manager.look_ahead(self.waiting)
                break
            length = chunk_length(
                manager, seq, hit.num_tokens, hit.branch_tokens, budget, bool(rows)
            )
            if not length:
                break
            self._admit(seq, hit)
            rows.append(prefill_row(manager, seq, length, saved))
            budget -= length
        return rows

    def _fitting_hit(self, seq: Sequence) -> PrefixHit | None:
        """What the cache has of the queue's head, or ``None`` when the rest does not fit."""
        manager = self.block_manager
        # until something is published the hit can only shrink
        stuck, publications, needed = self._stuck or (None, 0, 0)
        same = stuck is seq and publications == manager.publications
        if (same and needed > manager.num_free_blocks) or not manager.num_free_groups:
            return None
        tokens = admission_tokens(seq, self.config)
        spare = self._spare_blocks if self.num_running else 0
        hit = manager.resume(seq, tokens, spare)
        if hit is None or manager.can_allocate(tokens, hit, spare=spare):
            self._stuck = None
            return hit
        self._stuck = (seq, manager.publications, manager.least_needed(tokens, hit) + spare)
        return None

    def _admit(self, seq: Sequence, hit: PrefixHit) -> None:
        self.block_manager.allocate(seq, admission_tokens(seq, self.config), hit)
        self.waiting.popleft()
        self._prefilling[seq.request_id] = seq
        seq.status = SequenceStatus.RUNNING
        self._lookup_tokens += seq.num_tokens
        self._hit_tokens += hit.num_tokens
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = self.clock()
            seq.num_cached_tokens = hit.num_tokens

    def _schedule_decode(self) -> list[ScheduledRow] | NeedsDrain:
        rows: list[ScheduledRow] = []
        most, lookahead = 1 + self.config.num_drafts, max(self.config.num_drafts - 1, 0)
        size = self.block_manager.block_size
        for seq in list(self._decoding.values()):
            tokens, pending = len(seq.token_ids), seq.num_pending_outputs
            # each step gives a token: a request that is certain to be full is not run again
            if tokens + pending >= seq.max_total_tokens or seq.status is not SequenceStatus.RUNNING:
                continue
            assert seq.num_drafts is not None
            query_len = min(1 + seq.num_drafts, most)
            context_len = min(
                seq.num_computed_tokens + seq.pending_query_len, tokens - 1 + most * pending
            )
            needed = context_len + query_len + lookahead
            if needed > len(seq.block_table) * size and not self.block_manager.grow(seq, needed):
                if self._outputs_pending():
                    return NeedsDrain("a request may have to be put back, and outputs are pending")
                for newest in self._make_room(seq, needed):
                    rows = [row for row in rows if row.seq is not newest]
                if seq.status is not SequenceStatus.RUNNING:
                    continue
            rows.append(ScheduledRow(seq, query_len, context_len, True))
        return rows

    def _make_room(self, seq: Sequence, num_tokens: int) -> Iterator[Sequence]:
        """Put back the newest requests until ``seq`` has its blocks or went back itself."""
        while not self.block_manager.grow(seq, num_tokens):
            newest = max(self.running, key=attrgetter("arrival"))
            self.put_back(newest)
            yield newest
            if newest is seq:
                return

    # -- what became of a step
    def confirm(self, batch: ScheduledBatch) -> None:
        """Make a batch final: drop rows that ended since, fill in confirmed context lengths.

        To be called after the status before was received, before anything that it decides is sent.
        A batch without rows afterwards is discarded and must not be launched.

        Raises:
            SchedulerFault: a status that a row depends on was not received.
        """
        self._check_open(batch)
        live = [row for row in batch.rows if row.is_live]
        for row in live:
            if row.seq.pending_query_len:
                raise SchedulerFault(f"the status before step {batch.step} was not received")
            row.confirm(1 + self.config.num_drafts)
        if len(live) < len(batch.rows):
            self._drop_saves(row for row in batch.rows if not row.is_live)
            batch.rows = live
        if not batch.rows:
            self._open = None

    def launched(self, batch: ScheduledBatch) -> None:
        """The batch's work is queued: count it, and publish what its prefill rows fill.

        Raises:
            SchedulerFault: it is not the open batch, or was not confirmed.
        """
        self._check_open(batch)
        manager = self.block_manager
        for row in batch.rows:
            seq = row.seq
            if not row.is_live:
                self._drop_saves((row,))
                continue
            if batch.kind is BatchKind.DECODE:
                if seq.pending_query_len:
                    raise SchedulerFault(f"step {batch.step} was launched without confirm()")
                seq.pending_query_len = row.query_len
                seq.num_pending_outputs += 1
                continue
            manager.restored(seq)
            seq.num_computed_tokens += row.query_len
            manager.publish(seq, seq.num_computed_tokens, batch.step)
            if row.save_slot is not None and row.save_hash is not None:
                manager.publish_checkpoint(row.save_slot, row.save_hash, batch.step)
            if row.produces_output:
                del self._prefilling[seq.request_id]
                self._decoding[seq.request_id] = seq
                seq.num_pending_outputs += 1
        self._open = None

    def discard(self, batch: ScheduledBatch) -> None:
        """The batch will not be launched: its requests stay as they are and are scheduled again."""
        self._check_open(batch)
        self._drop_saves(batch.rows)
        self._open = None

    def _check_open(self, batch: ScheduledBatch) -> None:
        if batch is not self._open:
            raise SchedulerFault(f"step {batch.step} is not the batch that schedule() gave last")

    def _drop_saves(self, rows: Iterable[ScheduledRow]) -> None:
        for row in rows:
            if row.save_slot is not None:
                self.block_manager.checkpoints.cancel(row.save_slot)
                row.save_slot = None

    def update_from_status(
        self, batch: ScheduledBatch, num_rejected: Numbers[int], num_bonus: Numbers[int]
    ) -> None:
        """Take in an output step's status: how many tokens of each row are confirmed.

        Rows whose request ended or was put back meanwhile are ignored. A count out of range is not
        refused here: see :meth:`ScheduledRow.take_status`.

        Args:
            batch: the launched batch.
            num_rejected: rejected drafts of each row; entries behind the rows are padding.
            num_bonus: accepted drafts of each row, likewise.

        Raises:
            SchedulerFault: there are fewer counts than rows.
        """
        if min(len(num_rejected), len(num_bonus)) < len(batch.rows):
            raise SchedulerFault(f"the status of step {batch.step} has too few rows")
        if batch.kind is BatchKind.DECODE:
            for row, rejected, bonus in zip(batch.rows, num_rejected, num_bonus, strict=False):
                row.take_status(int(rejected), int(bonus))

    def append_tokens(self, seq: Sequence, ids: Iterable[int]) -> FinishReason | None:
        """Take in a step's sampled ids of a request; ids behind its end are dropped.

        Args:
            seq: the request of a live row; one that awaits no output is left as it is.
            ids: accepted tokens in order; the first negative one ends them.

        Returns:
            Why it ends now, for :meth:`finish`, or ``None``.
        """
        if not seq.num_pending_outputs:
            return None
        seq.num_pending_outputs -= 1
        if seq.first_token_time is None:
            seq.first_token_time = self.clock()
        return seq.append(ids, self._eos)

    def withdraw_since(self, step: int) -> list[Sequence]:
        """Take back what a faulty step and later ones published, and who builds on it.

        Prefilling requests that wrote or read any of it are put back at once.

        Returns:
            Decoding requests that did: to be finished with an error or put back by the caller.
        """
        self.block_manager.withdraw_since(step)
        self._stuck = None
        suspects = [s for s in self.running if max(s.cache_step, s.publish_step) >= step]
        for seq in suspects:
            if seq.request_id in self._prefilling:
                self.put_back(seq)
        return [seq for seq in suspects if seq.status is SequenceStatus.RUNNING]

    def stats(self) -> SchedulerStats:
        """Counts of now, and totals since the start."""
        blocks = self.block_manager.blocks
        return SchedulerStats(
            waiting=len(self.waiting),
            running=self.num_running,
            prefilling=len(self._prefilling),
            used_blocks=blocks.num_used,
            cached_blocks=blocks.num_cached,
            num_blocks=blocks.num_blocks,
            checkpoints=self.block_manager.checkpoints.num_published,
            hit_tokens=self._hit_tokens,
            lookup_tokens=self._lookup_tokens,
            preemptions=self._preemptions,
            finished=self._finished,
        )
