"""Runs scheduled steps of a model on a device, and sends what they produce to the host.

Nothing here waits for the device but the two ``receive`` methods, :meth:`ModelRunner.resolve_ell`
and :meth:`ModelRunner.close`. Whatever goes to the host goes through ``TokenIDProcessor`` or the
``ell`` ring, from payloads that are allocated afresh for the step and outside any graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom.device.interface import Device, DeviceKind, Stream
from atom.errors import StalePayload
from atom.model_engine.batch_arrays import (
    BlockTables,
    PrefillArrays,
    all_greedy,
    any_filter,
    check_groups,
    fill_confirmed,
    metadata_array,
    padded_counts,
    sampling_arrays,
)
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.input_staging import InputStaging, StagedInput
from atom.model_engine.memory_plan import MemoryPlan
from atom.model_engine.output_transfer import TokenIDProcessor
from atom.model_engine.scheduler import BatchKind, ScheduledBatch, ScheduledRow
from atom.model_engine.step_buffers import StepBuffers
from atom.model_engine.step_kernels import (
    PUBLISH_DRAFTS,
    RESTORE_STATES,
    SAMPLE,
    SAVE_STATES,
    StepModel,
)
from atom.model_engine.step_launches import (
    DecodeGraphs,
    StepLaunches,
    StepShape,
    capture_decode,
    graph_sizes,
    warm_up_prefill,
)
from atom.model_engine.step_runner import StepOutput, StepStatus, sends_status
from atom.model_ops.guard import CLEAR_RECORD, RECORD_WORDS
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP
from atom.models.registry import register, release
from atom.spec_decode.dspark import COMPUTE_ELL, EllResolver
from atom.spec_decode.dspark_verify import EllRing
from atom.transfer.payload import Payload, PayloadKind, epoch_tag


@dataclass(frozen=True)
class _Sent:
    """Rows of a step whose results are on their way: those of requests, and with padding."""

    rows: int
    sent_rows: int


@dataclass(frozen=True)
class _Prepared:
    """A decode step whose inputs are filled in but for contexts and counts.

    Attributes:
        rows: whose it is.
        inputs: theirs, not queued yet.
        metadata: int32 ``[4, M]`` among those.
        padded: rows with padding.
        greedy: whether no request draws its tokens.
    """

    rows: list[ScheduledRow]
    inputs: StagedInput
    metadata: NDArray[np.int32]
    padded: int
    greedy: bool


class ModelRunner:
    """One model on one device.

    Args:
        device: where it runs; the weights lie there already.
        target: the language model.
        mtp: its MTP layer; needed for drafts.
        settings: the engine's.
        plan: sizes of the pools.
        copy_stream: what to use as ``async_copy_stream``; ``None`` makes one.

    Attributes:
        processor: transfers of status, ids, logprobs and drafts.
        buffers: everything that lives as long as the runner.
    """

    def __init__(
        self,
        device: Device,
        target: Qwen3NextForCausalLM,
        mtp: Qwen3NextMTP | None,
        settings: EngineSettings,
        plan: MemoryPlan,
        *,
        copy_stream: Stream | None = None,
    ) -> None:
        self.device = device
        self.settings = settings
        self.plan = plan
        drafts = settings.draft_tokens
        self._handle = register(
            StepModel(
                *(target, mtp if drafts else None, settings.guard, settings.block_size, drafts),
                settings.recurrent_states,
            )
        )
        self.processor = TokenIDProcessor(
            device,
            settings.copy_protocol,
            copy_stream=copy_stream,
            copy_path=settings.copy_path,
            epoch_tag=settings.epoch_tag,
        )
        self.buffers = StepBuffers(device, target.config, settings, plan, dtype=target.dtype)
        self.kernels = StepLaunches(device, self.buffers, settings, self._handle)
        self._staging = InputStaging(device)
        self._statuses: deque[_Sent] = deque()
        self._outputs: deque[_Sent] = deque()
        self._prepared: _Prepared | None = None
        # what a slot is filled from, and what the device has of it but for contexts and counts
        host = torch.zeros(self.buffers.layout.nbytes, dtype=torch.uint8)
        self._host_bytes, self._host = host.numpy(), self.buffers.layout.arrays(host)
        self._tables = BlockTables(self._host.block_tables)
        self.ell_ring: EllRing | None = None
        self._ell: EllResolver | None = None
        if settings.dspark:
            self.ell_ring = EllRing(
                device,
                self.processor.async_copy_stream,
                settings.copy_protocol,
                slot_requests=settings.max_num_seqs,
                copy_path=settings.copy_path,
                epoch_tag=settings.epoch_tag,
            )
            self._ell = EllResolver(self.ell_ring)
        self.graph_sizes = graph_sizes(settings.max_num_seqs)
        self._graphs: dict[int, DecodeGraphs] = {}
        if device.properties.kind is not DeviceKind.VIRTUAL:
            # the first run of a kernel compiles and tunes it: no request shall wait for that
            warm_up_prefill(self.kernels)
            if settings.graphs:
                self._graphs = capture_decode(self.kernels, self.graph_sizes)

    # -- launching
    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Queue a step. See :class:`atom.model_engine.step_runner.StepRunner`."""
        if batch.kind is BatchKind.DECODE:
            self._launch_decode(batch, forced_bonus)
            return
        buffers = self.buffers
        restores, saves = batch.restores, batch.saves
        if restores:
            pairs = tuple(number for pair in restores for number in pair)
            self.device.launch(RESTORE_STATES, buffers.checkpoints, buffers.states, scalars=pairs)
        self._launch_prefill(batch)
        if saves:
            pairs = tuple(number for pair in saves for number in pair)
            self.device.launch(SAVE_STATES, buffers.states, buffers.checkpoints, scalars=pairs)

    def _launch_prefill(self, batch: ScheduledBatch) -> None:
        """A batch of prompt chunks. Its inputs are fresh blocks, as every eager step's are."""
        device, settings = self.device, self.settings
        prompt = PrefillArrays.make(batch)
        metadata = device.empty((4, settings.max_num_seqs), torch.int32)
        self._staging.send(metadata, metadata_array(batch, settings.max_num_seqs))
        block_tables = device.empty(prompt.block_tables.shape, torch.int32)
        self._staging.send(block_tables, prompt.block_tables)
        input_ids = device.empty(prompt.token_ids.shape, torch.int64)
        self._staging.send(input_ids, prompt.token_ids)
        shape = StepShape(
            len(batch.rows),
            len(prompt.token_ids),
            prompt.max_query_len,
            prompt.max_context_len,
            True,
        )
        self.kernels.forward(shape, metadata, block_tables, input_ids, batch.produces_output)
        if batch.produces_output:
            greedy = self._fill_sampling(batch)
            if not greedy:
                part = self.buffers.layout.sampling
                self._staging.send(self.buffers.inputs[part], self._host_bytes[part])
            self._sample_and_send(batch, shape, metadata, greedy=greedy, forced=False)
        if settings.draft_tokens:
            next_ids = device.empty(prompt.next_ids.shape, torch.int64)
            self._staging.send(next_ids, prompt.next_ids)
            self.kernels.draft(
                shape, metadata, block_tables, input_ids, batch.produces_output, next_ids
            )
            if batch.produces_output:
                self._send_drafts(batch, len(batch.rows))

    def prepare(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """See :class:`atom.model_engine.step_runner.StepRunner`. Of prompts nothing is prepared."""
        if batch.kind is BatchKind.DECODE:
            self._prepared = self._prepare_decode(batch, forced_bonus)

    def _prepare_decode(
        self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None
    ) -> _Prepared:
        buffers, host, most = self.buffers, self._host, self.settings.max_num_seqs
        host.metadata[:] = metadata_array(batch, most)
        if not sends_status(batch, self.settings):
            # the kernels' guard reports with the status; without one the host checks what it sends
            check_groups(host.metadata, batch, self.plan.num_groups)
        if forced_bonus is not None:
            host.forced_bonus[:] = padded_counts(forced_bonus, most)
        greedy = self._fill_sampling(batch)
        size = buffers.layout.bytes_with(self._table_rows(batch))
        left, self._prepared = self._prepared, None
        if left is not None:
            # a step that was prepared and not launched
            self._staging.take_back(left.inputs)
        staged = self._staging.open(buffers.inputs[:size])
        staged.values[:] = self._host_bytes[:size]
        metadata = buffers.layout.metadata(staged.values)
        return _Prepared(batch.rows, staged, metadata, self._padded(len(batch.rows)), greedy)

    def _launch_decode(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """A batch of decode rows, over inputs that live as long as the runner."""
        buffers, settings = self.buffers, self.settings
        prepared = self._prepared
        if prepared is None or prepared.rows is not batch.rows:
            prepared = self._prepare_decode(batch, forced_bonus)
        self._prepared = None
        fill_confirmed(prepared.metadata, batch.rows)
        self._staging.queue(prepared.inputs)
        self._tables.sent()
        padded, greedy = prepared.padded, prepared.greedy
        shape = self.kernels.decode_shape(padded)
        graphs = self._graphs.get(padded)
        if graphs is None:
            self.kernels.decode_forward(shape)
        else:
            graphs.forward.replay()
        forced = forced_bonus is not None
        self._sample_and_send(batch, shape, buffers.metadata, greedy=greedy, forced=forced)
        if settings.draft_tokens:
            if graphs is None or graphs.draft is None:
                self.kernels.decode_draft(shape)
            else:
                graphs.draft.replay()
            self._send_drafts(batch, padded)

    def _padded(self, rows: int) -> int:
        return next(size for size in self.graph_sizes if size >= rows)

    def _table_rows(self, batch: ScheduledBatch) -> int:
        """Leading rows of block tables that go with the step's inputs; large ones go ahead."""
        count = self._tables.update(batch)
        if self.buffers.layout.travels_along(count):
            return count
        self._staging.send(self.buffers.block_tables[:count], self._tables.values[:count])
        return 0

    def _fill_sampling(self, batch: ScheduledBatch) -> bool:
        """Note how each request draws its tokens, unless none does. Returns whether none does."""
        if all_greedy(batch):
            return True
        host, settings = self._host, self.settings
        numbers, top_k, seeds = sampling_arrays(batch, settings.max_num_seqs, settings.seed)
        host.temperature_top_p[:], host.top_k[:], host.seeds[:] = numbers, top_k, seeds
        return False

    # -- to the host
    def _sample_and_send(
        self,
        batch: ScheduledBatch,
        shape: StepShape,
        metadata: Tensor,
        *,
        greedy: bool,
        forced: bool,
    ) -> None:
        """Sample into fresh payloads, then send them: the status first, the host waits on it.

        The sampler's first launch opens them, its last one writes data and tags.

        The payloads die with this call. Nothing but the protocol keeps them alive until their
        copies have run.
        """
        processor, buffers, rows = self.processor, self.buffers, shape.rows
        step, query = batch.step, self.settings.query_tokens
        status = None
        if sends_status(batch, self.settings):
            status = processor.spec_status.new_verdict(
                step, rows, record_words=RECORD_WORDS, opened=False
            )
        ids = processor.new_token_ids(step, (rows, query), opened=False)
        payloads = [ids]
        if self.settings.logprobs:
            payloads.append(processor.new_logprobs(step, (rows, query), opened=False))
        unsent = buffers.unsent_status(rows, ids.layout.tagged)
        self.device.launch(
            SAMPLE,
            (
                buffers.logits,
                metadata,
                buffers.scratch[0],
                buffers.forced_bonus,
                buffers.temperature_top_p,
                buffers.top_k,
                buffers.seeds,
                buffers.record,
                *buffers.step_drafts,
            ),
            (
                unsent if status is None else status.raw,
                *(payload.raw for payload in payloads),
                buffers.token_table,
                buffers.num_bonus,
                buffers.sampled_ids,
            ),
            scalars=(
                rows,
                shape.tokens,
                shape.is_prefill,
                greedy,
                not greedy and any_filter(batch),
                forced,
                epoch_tag(step, PayloadKind.SPEC_STATUS) if ids.layout.tagged else 0,
                _tag(ids),
                _tag(payloads[1]) if len(payloads) > 1 else 0,
            ),
        )
        if status is not None:
            processor.spec_status.send(status)
            self._statuses.append(_Sent(len(batch.rows), rows))
        processor.send_to_cpu_async(*payloads)
        self._outputs.append(_Sent(len(batch.rows), rows))

    def _send_drafts(self, batch: ScheduledBatch, rows: int) -> None:
        processor, buffers = self.processor, self.buffers
        drafts = processor.draft_ids.new_payload(
            batch.step, (rows, self.settings.draft_tokens), torch.int64, opened=False
        )
        tag = _tag(drafts)
        marks = (drafts.layout.tags(drafts.raw),) if tag else ()
        self.device.launch(
            PUBLISH_DRAFTS, (buffers.draft_ids,), (drafts.data, *marks), scalars=(tag,)
        )
        processor.draft_ids.send(drafts)
        if self.ell_ring is None or self._ell is None:
            return
        count = len(batch.rows)
        ell = self.ell_ring.new_ell(batch.step, count, opened=False)
        tag = _tag(ell)
        marks = (ell.layout.tags(ell.raw),) if tag else ()
        self.device.launch(
            COMPUTE_ELL,
            (buffers.confidence,),
            (ell.data, *marks),
            scalars=(self.settings.dspark_threshold, tag),
        )
        self._ell.record(batch.step, [row.seq.request_id for row in batch.rows], ell)

    # -- from the device
    def receive_status(self) -> StepStatus:
        """See :class:`atom.model_engine.step_runner.StepRunner`."""
        expected = self._statuses.popleft()
        rejected, bonus, record = self.processor.spec_status.receive_status_and_record(
            expected.sent_rows
        )
        count = expected.rows
        return StepStatus(rejected[:count], bonus[:count], record)

    def receive_output(self) -> StepOutput:
        """See :class:`atom.model_engine.step_runner.StepRunner`."""
        expected = self._outputs.popleft()
        drafts_fault, ids_fault = None, None
        try:
            ids, logprobs = self.processor.recv_async_output()
        except StalePayload as error:
            ids_fault = error
        if self.settings.draft_tokens:
            # also behind stale ids: each step's drafts are received once
            try:
                self.processor.draft_ids.receive()
            except StalePayload as error:
                drafts_fault = str(error)
        if ids_fault is not None:
            raise ids_fault
        kept = ids[: expected.rows].tolist()
        tokens = [[token for token in row if token >= 0] for row in kept]
        values = None
        if logprobs is not None:
            found = logprobs[: expected.rows].tolist()
            values = [row[: len(ids)] for row, ids in zip(found, tokens, strict=True)]
        return StepOutput(tokens, values, drafts_fault)

    def resolve_ell(self) -> dict[int, int]:
        """See :class:`atom.model_engine.step_runner.StepRunner`."""
        return {} if self._ell is None else self._ell.resolve()

    def acknowledge_guard(self) -> None:
        """Clear the guard record behind everything that is queued."""
        self.device.launch(CLEAR_RECORD, (), (self.buffers.record,))

    def close(self) -> None:
        """Wait for all work, forget queued transfers and let the model go."""
        self.device.synchronize()
        self.processor.clean()
        if self.ell_ring is not None and self._ell is not None:
            self.ell_ring.drain()
            self._ell.clear()
        self._graphs.clear()
        self._statuses.clear()
        self._outputs.clear()
        release(self._handle)


def _tag(payload: Payload) -> int:
    """The payload's epoch tag; 0 if it has none."""
    layout = payload.layout
    return epoch_tag(payload.step, layout.kind) if layout.tagged else 0
