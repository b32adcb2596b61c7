"""The engine's own scheduler, block managers and host pool over a model of time.

Nothing of their logic is repeated here: :class:`CapacityEngine` is the engine with a
:class:`TimedRunner` under it. What it adds is a leap: while nothing can come between, decode steps
repeat the same decision, and many of them are taken at once.
"""

from __future__ import annotations

import math

import numpy as np

from atom.benchmarks.capacity_clock import SimulatedClock
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.capacity_offload import TimedOffload
from atom.benchmarks.capacity_runner import TOKEN, TimedRunner
from atom.errors import BadInput
from atom.kv_transfer.host_pool import HostPool
from atom.model_engine.block_manager import BlockManager
from atom.model_engine.engine_settings import EngineSettings, scheduler_config
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch, ScheduledRow
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import Sequence
from atom.model_engine.step_runner import sends_status
from atom.model_engine.tiered_blocks import TieredBlockManager

#: fewer steps are not worth a leap, and more are not looked ahead at once
_LEAST_STEPS, _MOST_STEPS = 3, 512


class CapacityScheduler(Scheduler):
    """The scheduler, which also says when its next decisions repeat.

    Attributes:
        looks_up_at_arrival: see :class:`Machine`.
    """

    looks_up_at_arrival = False

    def add(self, seq: Sequence) -> None:
        """See :meth:`Scheduler.add`."""
        super().add(seq)
        if self.looks_up_at_arrival and isinstance(self.block_manager, TieredBlockManager):
            self.block_manager.touch_prefix(seq)

    def repeats(self, batch: ScheduledBatch) -> bool:
        """Whether the next batch is sure to be of the same requests as this decode batch.

        So it is while every request of the batch goes on, none prefills, and none waits that could
        be admitted: all places are taken, or the head of the queue lacks memory, or it waits for a
        load whose end is not seen.
        """
        if batch.kind is not BatchKind.DECODE or self._prefilling:
            return False
        if self.waiting and not self._head_is_held():
            return False
        if self._last_kind is not BatchKind.DECODE or len(batch.rows) != len(self._decoding):
            return False
        return all(
            row.is_live and row.seq is seq
            for row, seq in zip(batch.rows, self._decoding.values(), strict=True)
        )

    def _head_is_held(self) -> bool:
        if self.num_running >= self.config.max_num_seqs:
            return True
        manager, head = self.block_manager, self.waiting[0]
        if isinstance(manager, TieredBlockManager) and manager.awaits_load(head):
            return True
        stuck, publications, needed = self._stuck or (None, 0, 0)
        same = stuck is head and publications == manager.publications
        return same and needed > manager.blocks.num_free

    def leapt(self, steps: int) -> int:
        """Count steps that were taken at once; returns the number of the last."""
        self._step += steps
        return self._step


class CapacityEngine(LLMEngine):
    """The engine over a :class:`TimedRunner`, with the leap.

    Args:
        settings: of the engine; with drafts the acceptance is forced.
        machine: the costs.
        num_checkpoints: see :class:`BlockManager`; blocks are ``settings.num_kv_blocks``.

    Raises:
        BadInput: settings that no model of time can run.
    """

    scheduler: CapacityScheduler
    runner: TimedRunner

    def __init__(self, settings: EngineSettings, machine: Machine) -> None:
        if settings.num_kv_blocks is None:
            raise BadInput("num_kv_blocks: a capacity model has no memory to size the pool from")
        if settings.draft_tokens and settings.forced_acceptance_length is None:
            raise BadInput(
                "forced_acceptance_length: a capacity model verifies no drafts; force a length, or "
                "set draft_tokens to 0"
            )
        if settings.dspark:
            raise BadInput("dspark: a capacity model has no confidence to size verification with")
        self.clock = SimulatedClock()
        self.offload: TimedOffload | None = None
        manager = self._manager(settings, machine)
        scheduler = CapacityScheduler(scheduler_config(settings), manager, clock=self.clock)
        scheduler.looks_up_at_arrival = machine.looks_up_at_arrival
        super().__init__(settings, scheduler, TimedRunner(machine, self.clock, settings))
        self.leapt_steps = 0

    def _manager(self, settings: EngineSettings, machine: Machine) -> BlockManager:
        assert settings.num_kv_blocks is not None
        blocks, size, groups = settings.num_kv_blocks, settings.block_size, settings.max_num_seqs
        if settings.cpu_pool_bytes is None:
            return BlockManager(
                *(blocks, size, groups),
                num_checkpoints=settings.num_state_checkpoints,
                checkpoint_spacing=settings.state_checkpoint_tokens,
                prefix_caching=settings.prefix_caching,
            )
        self.offload = TimedOffload(
            machine,
            self.clock,
            chunk_tokens=settings.offload_chunk_tokens,
            block_size=size,
            most_bytes_in_flight=settings.offload_in_flight_bytes,
        )
        return TieredBlockManager(
            *(blocks, size, groups),
            num_checkpoints=settings.num_state_checkpoints,
            checkpoint_spacing=settings.state_checkpoint_tokens,
            chunk_tokens=settings.offload_chunk_tokens,
            offload=self.offload,
            pool=HostPool(
                settings.cpu_pool_bytes,
                settings.offload_policy,
                state_share=settings.offload_state_share,
            ),
        )

    def leap(self, until: float) -> int:
        """Take decode steps at once while the scheduler's decision repeats.

        Every time, count and account is what so many calls of :meth:`step` would have left, but
        for the numbers of the blocks that are given.

        Args:
            until: a step that begins at this time or later is not taken: something happens then.

        Returns:
            Steps taken.
        """
        if len(self._in_flight) != 1:
            return 0
        entry = self._in_flight[0]
        batch = entry.batch
        if entry.status_received is sends_status(batch, self.settings):
            return 0
        if not self.scheduler.repeats(batch):
            return 0
        if self.scheduler.waiting and self.offload is not None:
            next_end = self.offload.next_end
            until = min(until, math.inf if next_end is None else next_end)
        seqs = [row.seq for row in batch.rows]
        pending = [len(ids) - 1 for ids in self.runner.outputs[0][1].token_ids]
        steps = self._sure_steps(seqs, pending)
        if steps < _LEAST_STEPS or self.clock.now >= until:
            return 0
        return self._leap(batch, seqs, pending, steps, until)

    def _sure_steps(self, seqs: list[Sequence], pending: list[int]) -> int:
        """Steps after which every request still goes on, with a token to spare."""
        mean = 1.0 if self._forced is None else 1.0 + self._forced.mean_bonus
        left = min(
            seq.max_total_tokens - seq.num_tokens - 2 - bonus
            for seq, bonus in zip(seqs, pending, strict=True)
        )
        return min(int(left / mean) - 2, _MOST_STEPS)

    def _leap(
        self,
        batch: ScheduledBatch,
        seqs: list[Sequence],
        pending: list[int],
        steps: int,
        until: float,
    ) -> int:
        drafts, forced = self.settings.draft_tokens, self._forced
        # bonus of the step in flight, then of each step of the leap
        bonus = np.zeros((len(seqs), steps + 1), dtype=np.int64)
        bonus[:, 0] = pending
        if forced is not None:
            for index, seq in enumerate(seqs):
                bonus[index, 1:] = forced.upcoming(seq.request_id, drafts, steps)
        tokens = np.cumsum(1 + bonus, axis=1)
        times = self._times(batch, tokens, steps, until)
        taken = len(times)
        needed = self._needed(seqs, tokens, taken)
        while taken and not self._fits(seqs, needed):
            # before the blocks run out the scheduler decides anew
            taken //= 2
            needed = self._needed(seqs, tokens, taken)
        if taken < _LEAST_STEPS:
            return 0
        clock = self.clock
        clock.now, clock.device_free, spent = times[taken - 1]
        self.runner.decode_seconds += spent
        self._apply(seqs, bonus, tokens, taken, needed)
        return taken

    def _times(
        self, batch: ScheduledBatch, tokens: np.ndarray, steps: int, until: float
    ) -> list[tuple[float, float, float]]:
        """The steps, at most ``steps``, that begin before ``until``.

        Returns:
            For each, as it is after it: the host's time, when the device is free, and the device's
            time that went into them.
        """
        machine, rows = self.runner.machine, len(batch.rows)
        sums = tokens.sum(axis=0).tolist()
        base = sum(row.context_len for row in batch.rows)
        now, free, end = self.clock.now, self.clock.device_free, self.runner.outputs[0][0]
        with_status = bool(self.runner.statuses)
        spent = 0.0
        times: list[tuple[float, float, float]] = []
        while len(times) < steps and now < until:
            if with_status:
                now = max(now, end)
            now += machine.host_seconds
            seconds = machine.decode_seconds(rows, base + sums[len(times)])
            free = max(free, now) + seconds
            # what the step before produced is received after the launch
            now = max(now, end)
            end = free
            spent += seconds
            times.append((now, free, spent))
        return times

    def _needed(self, seqs: list[Sequence], tokens: np.ndarray, taken: int) -> list[int]:
        """Tokens that each request has blocks for after so many steps, as the scheduler asks."""
        if not taken:
            return [0] * len(seqs)
        drafts = self.settings.draft_tokens
        query, lookahead = 1 + drafts, max(drafts - 1, 0)
        # when the last step is scheduled, the outputs of all but the one before it are received
        seen = tokens[:, taken - 2] if taken > 1 else np.zeros(len(seqs), dtype=np.int64)
        found = []
        for seq, more in zip(seqs, seen.tolist(), strict=True):
            context = min(
                seq.num_computed_tokens + more + seq.pending_query_len,
                seq.num_tokens + more - 1 + query * seq.num_pending_outputs,
            )
            found.append(context + query + lookahead)
        return found

    def _fits(self, seqs: list[Sequence], needed: list[int]) -> bool:
        manager = self.scheduler.block_manager
        missing = sum(
            max(0, manager.blocks_for(count) - len(seq.block_table))
            for seq, count in zip(seqs, needed, strict=True)
        )
        return missing <= manager.blocks.num_free

    def _apply(
        self,
        seqs: list[Sequence],
        bonus: np.ndarray,
        tokens: np.ndarray,
        taken: int,
        needed: list[int],
    ) -> None:
        """Leave everything but the clock as ``taken`` steps would have."""
        drafts, rows = self.settings.draft_tokens, len(seqs)
        with_status = bool(self.runner.statuses)
        if self._forced is not None:
            for seq in seqs:
                self._forced.skip(seq.request_id, taken)
        received = tokens[:, taken - 1].tolist()
        new_rows = []
        last_seen, last = bonus[:, taken - 1].tolist(), bonus[:, taken].tolist()
        for seq, count, seen, row_needed in zip(seqs, received, last_seen, needed, strict=True):
            if not self.scheduler.block_manager.grow(seq, row_needed):
                raise BadInput("a leap was taken without blocks for it")
            seq.token_ids.extend([TOKEN] * count)
            if with_status:
                seq.num_computed_tokens += count
                seq.num_bonus = seen
            else:
                # without drafts a step's status is known at its launch
                seq.num_computed_tokens += taken
            context = seq.num_computed_tokens if with_status else seq.num_computed_tokens - 1
            new_rows.append(ScheduledRow(seq, 1 + drafts, context, True))
        step = self.scheduler.leapt(taken)
        entry = self._in_flight[0]
        entry.batch = ScheduledBatch(BatchKind.DECODE, step, new_rows)
        entry.num_accepted = [seen + 1 for seen in last_seen]
        self.runner.outputs.popleft()
        if with_status:
            self.runner.statuses.popleft()
        self.runner.expect(self.clock.device_free, last, status=with_status)
        counters = self.counters
        counters.steps += taken
        counters.decode_steps += taken
        counters.generated_tokens += sum(received)
        if with_status:
            counters.drafted_tokens += drafts * rows * taken
            counters.accepted_tokens += int(bonus[:, :taken].sum())
        self.leapt_steps += taken
