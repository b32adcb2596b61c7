"""The engine: requests in, tokens out, one step at a time.

Order of things, as in the engine under study. Prefill and decode are separate batches. A step's
tokens are received after the next step was launched. The status of a decode step goes through the
host: it is drained at the top of every step that produces output, but not in a pure middle prefill
chunk, which needs none. That gap is where an unprotected copy can be overtaken.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from atom.errors import AtomError, BadInput, StalePayload
from atom.model_engine.debug_checks import DebugChecks
from atom.model_engine.engine_counters import EngineCounters
from atom.model_engine.engine_settings import EngineSettings, StatusCheck
from atom.model_engine.request_desk import RequestDesk
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.scheduler import (
    BatchKind,
    NeedsDrain,
    ScheduledBatch,
    ScheduledRow,
    Scheduler,
)
from atom.model_engine.sequence import FinishReason, SamplingParams
from atom.model_engine.sequence import Sequence as Request
from atom.model_engine.step_checks import judge_status, read_record, token_fault
from atom.model_engine.step_runner import StepRunner, StepStatus, sends_status
from atom.model_ops.guard import GuardError, GuardFault
from atom.spec_decode.forced_acceptance import ForcedAcceptance

_LOGGER = logging.getLogger(__name__)


class EngineDead(AtomError):
    """The device or the model failed; this engine cannot go on."""


class RequestFailed(AtomError):
    """A request ended with an error; the engine goes on."""


@dataclass
class _InFlight:
    """An output step whose results are not all received."""

    batch: ScheduledBatch
    num_accepted: list[int]
    status_received: bool = False
    #: accepted drafts of each row by its status, where that is checked
    num_bonus: list[int] | None = None


class LLMEngine:
    """Continuous batching over one runner. Not thread-safe: one thread steps it.

    Args:
        settings: what the engine does.
        scheduler: owns requests, blocks and state groups.
        runner: launches the steps.
        vocab_size: token ids of a prompt are below it; ``None`` does not check.
    """

    def __init__(
        self,
        settings: EngineSettings,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.settings = settings
        self.scheduler = scheduler
        self.runner = runner
        self.vocab_size = vocab_size
        self.counters = EngineCounters()
        #: the latest fault that the kernels' guard reported, or ``None``
        self.last_guard_fault: GuardFault | None = None
        self.debug_checks = DebugChecks(
            settings.draft_tokens, enabled=settings.status_check is StatusCheck.DEBUG
        )
        self._forced = (
            None
            if settings.forced_acceptance_length is None
            else ForcedAcceptance(settings.forced_acceptance_length, settings.draft_tokens)
        )
        self._desk = RequestDesk(vocab_size, logprobs=settings.logprobs)
        self._in_flight: deque[_InFlight] = deque()
        self._dead: str | None = None
        #: first step since whose status no record was read; 0 for none
        self._record_lost_since = 0

    # -- requests
    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        block_hashes: Sequence[bytes] = (),
    ) -> str:
        """Queue a request.

        Args:
            prompt_token_ids: at least one.
            params: how to sample; ``None`` means the defaults.
            request_id: a name of one's own; ``None`` makes one.
            block_hashes: chained hashes of the prompt's leading full blocks, where the caller knows
                them (a simulator); the rest is computed.

        Returns:
            The request's id.

        Raises:
            BadInput: the prompt has no tokens, or something in it is no token id.
            RequestRefused: it is longer than the model or the pool, wants logprobs that this engine
                does not compute, or its id runs.
            QueueFull: too many wait.
            EngineDead: the engine has failed before.
        """
        self._refuse_if_dead()
        request, name = self._desk.make(prompt_token_ids, params or SamplingParams(), request_id)
        request.block_hashes.extend(block_hashes)
        self.scheduler.add(request)
        self._desk.open(request, name)
        return name

    def abort_request(self, request_id: str) -> bool:
        """End a request now. Its last output comes from the next :meth:`step`."""
        request = self._desk.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.abort(request.request_id)
        self.counters.aborted += 1
        self._close_request(request, FinishReason.ABORT)
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._desk.requests or self._in_flight or self._desk.outputs)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._desk.requests)

    # -- steps
    def step(self) -> list[RequestOutput]:
        """Launch one step, and receive what earlier steps produced.

        Raises:
            EngineDead: the engine has failed before, or was closed.
            Exception: what failed now, of the device or the model. All requests are lost, and every
                later call raises ``EngineDead``.
        """
        self._refuse_if_dead()
        try:
            self._step()
        except Exception as error:
            self._dead = f"{type(error).__name__}: {error}"
            raise
        return self._desk.take_outputs()

    def _step(self) -> None:
        if self.settings.dspark:
            self._adopt_ell()
        batch = self.scheduler.schedule()
        while isinstance(batch, NeedsDrain):
            self._drain()
            batch = self.scheduler.schedule()
        if batch is None:
            self._drain()
            return
        deferred = batch.produces_output
        # the device does nothing from the end of its step until the launch: whatever the status
        # does not decide comes before the wait for it
        rows, forced = batch.rows, self._forced_bonuses(batch)
        self.runner.prepare(batch, forced)
        if deferred:
            self._receive_statuses()
        self.scheduler.confirm(batch)
        if not batch.rows:
            self._drain()
            return
        if forced is not None and batch.rows is not rows:
            forced = [bonus for bonus, row in zip(forced, rows, strict=True) if row.is_live]
        self._launch(batch, forced)
        if deferred:
            self._receive_outputs(1)

    def _adopt_ell(self) -> None:
        """Size the next verification of each request; one that is lost costs nothing but rows."""
        try:
            adopted = self.runner.resolve_ell()
        except StalePayload as error:
            self.counters.stale_payloads += 1
            _LOGGER.error("ell is stale: %s", error)
            return
        for number, drafts in adopted.items():
            request = self.scheduler.get(number)
            if request is not None:
                request.num_drafts = min(max(drafts, 0), self.settings.draft_tokens)

    def _forced_bonuses(self, batch: ScheduledBatch) -> list[int] | None:
        if self._forced is None or batch.kind is not BatchKind.DECODE:
            return None
        return [
            self._forced.next_bonus(row.seq.request_id, row.query_len - 1) for row in batch.rows
        ]

    def _launch(self, batch: ScheduledBatch, forced: list[int] | None) -> None:
        counters, decodes = self.counters, batch.kind is BatchKind.DECODE
        if decodes and self.debug_checks.enabled:
            self._check_accepted(batch)
        self.runner.launch(batch, forced)
        accepted: list[int] = []
        if decodes:
            accepted = [row.seq.num_accepted_tokens for row in batch.rows]
            counters.decode_steps += 1
        else:
            counters.prefill_steps += 1
            counters.middle_chunks += not batch.produces_output
            counters.prompt_tokens += sum(row.query_len for row in batch.rows)
        counters.steps += 1
        self.scheduler.launched(batch)
        if not batch.produces_output:
            return
        entry = _InFlight(batch, accepted)
        if not sends_status(batch, self.settings):
            # nothing was drafted, so nothing can be rejected: the host knows it without a transfer
            entry.status_received = True
            nothing = [0] * len(batch.rows)
            self.scheduler.update_from_status(batch, nothing, nothing)
        self._in_flight.append(entry)

    def _drain(self) -> None:
        """Receive everything that is in flight."""
        self._receive_statuses()
        self._receive_outputs(0)

    # -- status
    def _receive_statuses(self) -> None:
        for entry in self._in_flight:
            if not entry.status_received:
                entry.status_received = True
                self._receive_status(entry)

    def _receive_status(self, entry: _InFlight) -> None:
        try:
            status = self.runner.receive_status()
        except StalePayload as error:
            self.counters.stale_payloads += 1
            _LOGGER.error("status of step %d is stale: %s", entry.batch.step, error)
            self._record_lost_since = self._record_lost_since or entry.batch.step
            for row in entry.batch.rows:
                self._fail(row, f"the status of step {entry.batch.step} was lost: {error}")
            return
        self._take_record(entry, status.record)
        if entry.batch.kind is BatchKind.DECODE:
            self._take_status(entry, status)

    def _take_record(self, entry: _InFlight, words: Sequence[int]) -> None:
        """Act on a guard record. It comes with the status, so it can be stale with it."""
        if not words:
            return
        try:
            fault = read_record(words, self.settings.max_num_seqs)
        except BadInput as error:
            self.counters.impossible_statuses += 1
            self._record_lost_since = self._record_lost_since or entry.batch.step
            _LOGGER.error("step %d: %s", entry.batch.step, error)
            if self.settings.status_check is StatusCheck.RAISE:
                for row in entry.batch.rows:
                    self._fail(row, f"the status of step {entry.batch.step} was lost: {error}")
            # the kernels' own record is sticky: the next status brings it again
            return
        if fault is not None:
            self._guard_fault(entry, fault)
        self._record_lost_since = 0

    def _take_status(self, entry: _InFlight, status: StepStatus) -> None:
        rows = entry.batch.rows
        if self.debug_checks.enabled:
            self.debug_checks.check_status(
                list(status.num_bonus[: len(rows)]), [row.seq.request_id for row in rows]
            )
        judged = judge_status(rows, status, entry.batch.step)
        self.counters.drafted_tokens += judged.drafted
        self.counters.accepted_tokens += judged.accepted
        self.counters.impossible_statuses += len(judged.faults)
        if self.settings.status_check is StatusCheck.RAISE:
            entry.num_bonus = list(status.num_bonus[: len(rows)])
            for index, text in judged.faults.items():
                self._fail(rows[index], text)
        self.scheduler.update_from_status(entry.batch, judged.rejected, status.num_bonus)

    def _check_accepted(self, batch: ScheduledBatch) -> None:
        self.debug_checks.check_accepted(
            [row.seq.num_accepted_tokens for row in batch.rows],
            [row.seq.request_id for row in batch.rows],
            [row.seq.num_bonus for row in batch.rows],
            [[row.seq.state_group or 0] for row in batch.rows],
        )

    def _guard_fault(self, entry: _InFlight, fault: GuardFault) -> None:
        """Fail the rows that a kernel refused, take back what was published since, and go on."""
        self.counters.guard_errors += 1
        self.last_guard_fault = fault
        step, most = entry.batch.step, self.settings.query_tokens
        # the record names the first bad row; the host knows every count that it sent
        bad = {i for i, count in enumerate(entry.num_accepted) if not 1 <= count <= most}
        if fault.row < len(entry.batch.rows) and not self._record_lost_since:
            # of a record whose status was lost, the row is one of another batch
            bad.add(fault.row)
        for index in sorted(bad):
            row = entry.batch.rows[index]
            error = GuardError(
                fault, request=self._desk.names.get(row.seq.request_id), highest_count=most
            )
            _LOGGER.error("step %d: %s", step, error)
            self._fail(row, f"step {step}: {error}")
        # what the faulty step and later ones published, and who builds on it
        for request in self.scheduler.withdraw_since(self._record_lost_since or step):
            self.scheduler.put_back(request)
        self.runner.acknowledge_guard()

    # -- outputs
    def _receive_outputs(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            entry = self._in_flight.popleft()
            try:
                output = self.runner.receive_output()
            except StalePayload as error:
                self.counters.stale_payloads += 1
                _LOGGER.error("tokens of step %d are stale: %s", entry.batch.step, error)
                for row in entry.batch.rows:
                    self._fail(row, f"tokens of step {entry.batch.step} were lost: {error}")
                continue
            if output.drafts_fault is not None:
                # nobody needs them: the device verifies its own
                self.counters.stale_payloads += 1
                _LOGGER.error("step %d: %s", entry.batch.step, output.drafts_fault)
            for index, row in enumerate(entry.batch.rows):
                if not (row.produces_output and row.is_live):
                    continue
                fault = self._token_fault(entry, index, output.token_ids[index])
                if fault is not None:
                    self.counters.impossible_statuses += 1
                    self._fail(row, fault)
                else:
                    logprobs = None if output.logprobs is None else output.logprobs[index]
                    self._emit(row.seq, output.token_ids[index], logprobs)

    def _token_fault(self, entry: _InFlight, index: int, ids: Sequence[int]) -> str | None:
        if self.settings.status_check is not StatusCheck.RAISE:
            return None
        bonus = None if entry.num_bonus is None else entry.num_bonus[index]
        row = entry.batch.rows[index]
        return token_fault(ids, row, self.vocab_size, bonus, entry.batch.step)

    def _emit(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[float] | None
    ) -> None:
        before = request.num_output_tokens
        reason = self.scheduler.append_tokens(request, token_ids)
        count = request.num_output_tokens - before
        self.counters.generated_tokens += count
        wanted = logprobs is not None and request.params.wants_logprobs
        kept = tuple(logprobs[:count]) if wanted and logprobs is not None else None
        if reason is not None:
            self.scheduler.finish(request, reason)
            self.counters.finished += 1
            self._close_request(request, reason, tuple(token_ids[:count]), kept)
        else:
            self._desk.put(request, tuple(token_ids[:count]), kept)

    def _fail(self, row: ScheduledRow, error: str) -> None:
        """End one request with an error; the others go on."""
        if not row.is_live:
            return
        self.scheduler.finish(row.seq, FinishReason.ERROR)
        self.counters.failed += 1
        self._close_request(row.seq, FinishReason.ERROR, error=error)

    def _close_request(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] | None = None,
        error: str | None = None,
    ) -> None:
        self._desk.close(request, reason, token_ids, logprobs, error)
        if self._forced is not None:
            self._forced.forget(request.request_id)

    # -- whole runs
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[list[int]]:
        """Run prompts to their end and return their output tokens, in order.

        Raises:
            RequestRefused: a prompt that cannot be served; none of the others runs on.
            RequestFailed: a request failed; its error is in the message.
        """
        tokens: dict[str, list[int]] = {}
        try:
            for prompt in prompts:
                tokens[self.add_request(prompt, params)] = []
            while self.has_unfinished_requests():
                for output in self.step():
                    tokens.get(output.request_id, []).extend(output.new_token_ids)
                    if output.error is not None and output.request_id in tokens:
                        raise RequestFailed(f"{output.request_id}: {output.error}")
        except BaseException:
            for name in tokens:
                self.abort_request(name)
            raise
        return list(tokens.values())

    def stats(self) -> dict[str, float]:
        """Counters, and what the scheduler holds now, by name."""
        tier = self.scheduler.block_manager.tier_stats()
        return {**asdict(self.counters), **asdict(self.scheduler.stats()), **tier}

    def close(self) -> None:
        """Abort what runs, wait for the device and give its memory back."""
        try:
            for name in list(self._desk.requests):
                self.abort_request(name)
            if self._dead is None:
                self._drain()
        finally:
            self._dead = self._dead or "it was closed"
            self.scheduler.block_manager.close()
            self.runner.close()

    def _refuse_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"this engine does not run ({self._dead}); start a new one")
