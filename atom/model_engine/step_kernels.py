"""The device work of a step, as kernel bodies that both devices run.

Each body gets its tensors from the launch and finds its model by a handle among the scalars:
queued work names memory, it does not own it. Weights are no operands; they live as long as the
handle. On an accelerator a body runs at once and may be captured in a graph; on the virtual device
it runs when the queue reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atom.config import GuardMode, RecurrentStates
from atom.device.interface import Kernel
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.decode_inputs import (
    CONTEXT_LENS,
    QUERY_LENS,
    STATE_SLOTS,
    StepDrafts,
    StepInputs,
    decode_inputs,
    prefill_inputs,
    table_rows,
)
from atom.model_ops.guard import mapped_pool
from atom.model_ops.replay_ring import ReplayRing
from atom.models.caches import ModelCaches
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP
from atom.models.registry import lookup
from atom.spec_decode.mtp import Drafts, draft_first_pass, draft_plan, keep_drafts
from atom.spec_decode.mtp import draft as draft_further
from atom.spec_decode.rejection_sampler import HostOutputs, write_outputs
from atom.spec_decode.sampling import SamplingTensors


@dataclass(frozen=True)
class StepModel:
    """What a body looks up by its handle.

    Attributes:
        target: the language model.
        mtp: its MTP layer, or ``None`` without speculation.
        guard: what the state kernels do about a bad count or slot.
        block_size: tokens of a KV block.
        draft_tokens: drafts a step.
        recurrent_states: how they are kept.
    """

    target: Qwen3NextForCausalLM
    mtp: Qwen3NextMTP | None
    guard: GuardMode
    block_size: int
    draft_tokens: int
    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT


Tensors = Sequence[Tensor]
#: tensors that a decode's forward pass leaves for the sampler
_STEP_DRAFTS = 4


def _inputs(scratch: Tensors, rows: int) -> StepInputs:
    starts, positions, slots, ids, table = scratch
    return StepInputs(starts[: rows + 1], positions, slots, ids, table[:rows])


def _caches(pools: Tensors, kept: RecurrentStates) -> ModelCaches:
    replay = None
    if kept is RecurrentStates.REPLAY:
        pools, replay = pools[:-2], ReplayRing(pools[-2], pools[-1])
    mtp = pools[3] if len(pools) > 3 else None
    return ModelCaches(pools[0], pools[1], pools[2], mtp, replay)


def _metadata(
    reads: Tensors,
    inputs: StepInputs,
    rows: int,
    tokens: int,
    max_query_len: int,
    max_context_len: int,
    is_prefill: bool,
) -> AttentionMetadata:
    """Metadata from the inputs that :func:`forward` has derived."""
    return inputs.attention_metadata(
        reads[0][:, :rows],
        reads[1][:rows],
        tokens,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        is_prefill=is_prefill,
    )


def forward(
    reads: Tensors,
    writes: Tensors,
    handle: int,
    rows: int,
    tokens: int,
    max_query_len: int,
    max_context_len: int,
    is_prefill: bool,
    wants_logits: bool,
) -> None:
    """Kernel body: derive the step's inputs, run the model, compute logits.

    Reads metadata int32 ``[4, M]``, block tables int32 ``[rows or more, blocks]``, and the token
    table int64 ``[groups, 1 + k]`` (decode) or the packed prompt ids int64 ``[T]`` (prefill).
    Writes logits, hidden ``[T or more, H]``, the guard record, five scratch tensors, the pools, and
    the rings if states are kept by replay.
    A prefill's logits are those of each row's last token, ``[rows, vocabulary]``; a decode's are
    those of all tokens. A decode also writes, behind those, what the sampler needs: the drafts
    that it verifies int64 ``[M, k]``, their number int32 ``[M]``, the position of the first
    verified token int64 ``[M]``, and the row's place in the token table int32 ``[M]``.
    """
    model: StepModel = lookup(handle)
    logits, hidden_out, record = writes[0], writes[1], writes[2]
    scratch = writes[3:8]
    pools = writes[8:] if is_prefill else writes[8:-_STEP_DRAFTS]
    metadata, block_tables = reads[0][:, :rows], reads[1][:rows]
    inputs = _inputs(scratch, rows)
    if is_prefill:
        prefill_inputs(metadata, block_tables, tokens, model.block_size, out=inputs)
        input_ids = reads[2]
    else:
        decode_inputs(
            *(metadata, block_tables, reads[2], tokens, model.block_size),
            out=inputs,
            drafts=StepDrafts(*writes[len(writes) - _STEP_DRAFTS :]),
        )
        input_ids = inputs.input_ids[:tokens]
    meta = _metadata(reads, inputs, rows, tokens, max_query_len, max_context_len, is_prefill)
    caches = _caches(pools, model.recurrent_states)
    with torch.no_grad(), mapped_pool(*pools):
        hidden = model.target(
            *(input_ids, meta, caches), guard=model.guard, record=record, out=hidden_out[:tokens]
        )
        if wants_logits:
            if is_prefill:
                hidden = hidden[(meta.query_start_loc[1:] - 1).long()]
            model.target.project(hidden, out=logits[: hidden.shape[0]])


def sample(
    reads: Tensors,
    writes: Tensors,
    rows: int,
    tokens: int,
    is_prefill: bool,
    all_greedy: bool,
    filtered: bool,
    forced: bool,
    status_tag: int,
    ids_tag: int,
    logprobs_tag: int,
) -> None:
    """Kernel body: the rejection sampler, straight into the step's fresh payloads.

    Reads logits, metadata, query starts, forced bonuses int32 ``[M]``, the sampling settings
    (temperature and top-p float32 ``[2, M]``, top-k int32 ``[M]``, seeds int64 ``[M]``), the guard
    record, and what a decode's forward pass left of its drafts. Writes the raw payloads of status,
    ids and (if wanted) logprobs, and for later work of the step: the token table, bonus int32
    ``[M]`` and sampled ids int64 ``[M, 1 + k]``.
    """
    logits, metadata, starts, forced_bonus, numbers, top_k, seeds, record = reads[:8]
    step_drafts, num_drafts, positions, places = (tensor[:rows] for tensor in reads[8:])
    status, ids = writes[0], writes[1]
    token_table, num_bonus, sampled_ids = writes[-3:]
    if is_prefill:
        starts = torch.arange(rows + 1, dtype=torch.int32, device=logits.device)
        num_drafts = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        places = table_rows(metadata[STATE_SLOTS, :rows], token_table).int()
        logits = logits[:rows]
        if not all_greedy:
            ends = metadata[CONTEXT_LENS, :rows] + metadata[QUERY_LENS, :rows]
            positions = ends.long()
    else:
        starts, logits = starts[: rows + 1], logits[:tokens]
    sampling = None
    if not all_greedy:
        sampling = SamplingTensors(
            numbers[0, :rows], top_k[:rows], numbers[1, :rows], seeds[:rows], positions, filtered
        )
    write_outputs(
        logits,
        starts,
        step_drafts,
        num_drafts,
        sampling,
        None,
        forced_bonus[:rows] if forced else None,
        all_greedy,
        HostOutputs(
            status, ids, writes[2] if len(writes) > 5 else None, status_tag, ids_tag, logprobs_tag
        ),
        record,
        places,
        token_table,
        num_bonus[:rows],
        sampled_ids[:rows],
    )


def draft(
    reads: Tensors,
    writes: Tensors,
    handle: int,
    rows: int,
    tokens: int,
    max_query_len: int,
    max_context_len: int,
    is_prefill: bool,
    wants_drafts: bool,
) -> None:
    """Kernel body: the MTP layer over a step's tokens, then drafts for the next step.

    Reads metadata, block tables, the step's ids, hidden, bonus and sampled ids, and for a prefill
    the prompt token behind each chunk, int64 ``[rows]``, -1 behind a prompt's last. Writes the
    token table (drafts), draft ids int64 ``[M, k]``, confidence float32 ``[M, k]``, five scratch
    tensors and the MTP layer's KV pool.
    """
    model: StepModel = lookup(handle)
    assert model.mtp is not None
    input_ids, hidden, num_bonus, sampled_ids = reads[2:6]
    token_table, draft_ids, confidence = writes[:3]
    scratch, kv_cache = writes[3:8], writes[8]
    inputs = _inputs(scratch, rows)
    meta = _metadata(reads, inputs, rows, tokens, max_query_len, max_context_len, is_prefill)
    with torch.no_grad():
        plan = draft_plan(
            input_ids[:tokens],
            meta,
            model.draft_tokens,
            model.block_size,
            sampled_ids=sampled_ids[:rows],
            num_bonus=num_bonus[:rows],
            known_next_ids=reads[6] if is_prefill else None,
        )
        states = draft_first_pass(model.mtp, hidden[:tokens], meta, kv_cache, plan)
        if not wants_drafts:
            return
        drafts = Drafts(draft_ids[:rows], confidence[:rows])
        draft_further(model.mtp, states, meta, kv_cache, plan, out=drafts)
        keep_drafts(token_table, meta.state_slots, drafts.ids)


def publish_drafts(reads: Tensors, writes: Tensors, tag: int) -> None:
    """Kernel body: copy draft ids int64 ``[M, k]`` into a fresh payload, then write its tags."""
    data = writes[0]
    data.copy_(reads[0][: data.shape[0]])
    if len(writes) > 1:
        writes[1].fill_(tag)


def save_states(reads: Tensors, writes: Tensors, *pairs: int) -> None:
    """Kernel body: copy states of groups into checkpoints; ``pairs`` is group, checkpoint, ..."""
    conv, recurrent = reads
    conv_saved, recurrent_saved = writes
    history = conv_saved.shape[2]
    stride = recurrent.shape[1] // conv.shape[1]
    for group, place in zip(pairs[::2], pairs[1::2], strict=True):
        conv_saved[:, place] = conv[:, group, :history]
        recurrent_saved[:, place] = recurrent[:, group * stride]


def restore_states(reads: Tensors, writes: Tensors, *pairs: int) -> None:
    """Kernel body: copy checkpoints into groups; ``pairs`` is checkpoint, group, ..."""
    conv_saved, recurrent_saved = reads
    conv, recurrent = writes
    history = conv_saved.shape[2]
    stride = recurrent.shape[1] // conv.shape[1]
    for place, group in zip(pairs[::2], pairs[1::2], strict=True):
        conv[:, group, :history] = conv_saved[:, place]
        recurrent[:, group * stride] = recurrent_saved[:, place]


def fill(reads: Tensors, writes: Tensors, value: int) -> None:
    """Kernel body: fill with a number."""
    for tensor in writes:
        tensor.fill_(value)


FORWARD = Kernel("forward", forward)
SAMPLE = Kernel("rejection_sampler", sample)
DRAFT = Kernel("mtp_draft", draft)
PUBLISH_DRAFTS = Kernel("publish_drafts", publish_drafts)
SAVE_STATES = Kernel("save_states", save_states)
RESTORE_STATES = Kernel("restore_states", restore_states)
FILL = Kernel("fill", fill)
