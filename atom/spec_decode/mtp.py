"""Drafting with the MTP layer: it runs over a step's tokens, then guesses on from the last one.

Two parts follow the sampler, both without any wait of the host, and both fit into a CUDA graph:

1. :func:`draft_first_pass` runs the layer over all tokens of the step, with the ids moved one place
   to the left. That fills the layer's own KV cache for these positions.
2. :func:`draft` takes each request's last accepted position, whose next id is the token just
   sampled. Its output gives the first draft; every further draft is one more token through the
   layer, at the position behind, with the layer's own output as hidden state.

A prompt chunk that ends before its prompt needs the first part alone (:func:`draft_plan` with the
next prompt token as known id): without it the cache would have a hole.

Drafts are the likeliest tokens, at any temperature. As a distribution they are one-hot, which the
rejection sampler knows as drafts without probabilities: it keeps the target's distribution exactly.

Places of the layer's KV cache that hold a rejected token's keys are never read before they are
written again. Let ``p`` be a request's last accepted position. The first pass wrote ``p`` and all
before it from true states. Draft ``i`` reads places up to ``p + i`` and writes ``p + i`` itself,
after the drafts before it wrote theirs: so it reads neither what the first pass wrote behind ``p``
nor an older step's drafts. The next step's first pass begins at ``p + 1`` with true states, and its
token ``i`` reads up to ``p + 1 + i``, all written by then. The same holds for the model's own
layers, whose next step begins at ``p + 1``, too.

A block that the prefix cache shares may hold, at its very last position, keys that were made with
another request's next token. That can cost a draft; it cannot change an output, since drafts are
verified by the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.decode_inputs import table_rows
from atom.models.qwen3_next_mtp import Qwen3NextMTP


class Drafts(NamedTuple):
    """Guesses of one step. Rows without tokens hold nothing meaningful.

    Attributes:
        ids: int64 ``[S, k]``.
        confidence: float32 ``[S, k]``, the layer's probability of each of them.
    """

    ids: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Where a step's drafts go, derived on the device.

    Attributes:
        next_ids: int64 ``[T]``, for each token of the step the id behind it; 0 for padding and
            behind the last accepted one.
        last_index: int64 ``[S]``, packed index of each row's last accepted token.
        query_start_loc: int32 ``[S + 1]``, of a batch with one token a row.
        positions: int64 ``[k, S]``: of the last accepted token, then of the drafts' own passes.
        context_lens: int32 ``[k, S]``, tokens in cache before each pass.
        slot_mapping: int64 ``[k, S]``; -1 where a row has no block for the position.
    """

    next_ids: Tensor
    last_index: Tensor
    query_start_loc: Tensor
    positions: Tensor
    context_lens: Tensor
    slot_mapping: Tensor


def draft_plan(
    input_ids: Tensor,
    meta: AttentionMetadata,
    draft_tokens: int,
    block_size: int,
    *,
    sampled_ids: Tensor | None = None,
    num_bonus: Tensor | None = None,
    known_next_ids: Tensor | None = None,
) -> DraftPlan:
    """Derive a step's :class:`DraftPlan`.

    Args:
        input_ids: int64 ``[T]``, the step's tokens.
        meta: the batch.
        draft_tokens: drafts to make, ``k``, at least 1.
        block_size: tokens of a KV block.
        sampled_ids: int64 ``[S, 1 + k]``, the verdict's accepted ids; prefill rows have one. May be
            left out if every row's next id is known.
        num_bonus: int32 ``[S]``, accepted drafts of each row; decode only.
        known_next_ids: int64 ``[S]``, prefill only: the prompt token behind a chunk that ends
            before its prompt, -1 for a chunk that ends with it.
    """
    if input_ids.is_cuda:
        from atom.spec_decode import mtp_triton

        run = mtp_triton.draft_plan
    else:
        run = draft_plan_reference
    return run(
        *(input_ids, meta, draft_tokens, block_size),
        sampled_ids=sampled_ids,
        num_bonus=num_bonus,
        known_next_ids=known_next_ids,
    )


def draft_plan_reference(
    input_ids: Tensor,
    meta: AttentionMetadata,
    draft_tokens: int,
    block_size: int,
    *,
    sampled_ids: Tensor | None = None,
    num_bonus: Tensor | None = None,
    known_next_ids: Tensor | None = None,
) -> DraftPlan:
    """:func:`draft_plan` in plain torch, on any device."""
    starts = meta.query_start_loc.long()
    tokens = torch.arange(meta.num_tokens, device=input_ids.device)
    row = torch.searchsorted(starts[1:], tokens, right=True)
    used = row < meta.num_rows
    row = row.clamp(max=meta.num_rows - 1)
    if meta.is_prefill:
        after = torch.full_like(starts[1:], -1) if known_next_ids is None else known_next_ids
        if sampled_ids is not None:
            after = torch.where(after >= 0, after, sampled_ids[:, 0])
        next_ids = torch.where(tokens + 1 == starts[row + 1], after[row], input_ids.roll(-1))
        last = starts[1:] - 1
    else:
        assert sampled_ids is not None
        assert num_bonus is not None
        offset = (tokens - starts[row]).clamp(max=sampled_ids.shape[1] - 1)
        next_ids = sampled_ids[row, offset]
        last = torch.minimum(starts[:-1] + num_bonus.clamp(min=0), starts[1:] - 1)
    next_ids = torch.where(used, next_ids, 0).clamp(min=0)

    # rows without tokens stand at the end
    filled = starts[1:] > starts[:-1]
    last = torch.where(filled, last, 0)
    query_start_loc = torch.zeros_like(meta.query_start_loc)
    query_start_loc[1:] = filled.cumsum(0)
    step = torch.arange(draft_tokens, device=input_ids.device)[:, None]
    wished = meta.positions[last] + step
    capacity = (meta.block_tables >= 0).sum(1) * block_size
    # past the blocks a pass attends to what there is, and stores nothing
    positions = torch.minimum(wished, capacity - 1).clamp(min=0)
    block = meta.block_tables.gather(1, (positions // block_size).T).T.long()
    slots = block * block_size + positions % block_size
    fits = filled & (wished < capacity)
    positions = torch.where(filled, positions, 0)
    return DraftPlan(
        next_ids=next_ids,
        last_index=last,
        query_start_loc=query_start_loc,
        positions=positions,
        context_lens=positions.int(),
        slot_mapping=torch.where(fits, slots, -1),
    )


def draft_first_pass(
    mtp: Qwen3NextMTP, hidden: Tensor, meta: AttentionMetadata, kv_cache: Tensor, plan: DraftPlan
) -> Tensor:
    """Run the MTP layer over a step's tokens, which fills its cache for them.

    Args:
        mtp: the layer.
        hidden: ``[T, H]``, the model's states behind its final norm.
        meta: the step's batch.
        kv_cache: the layer's own, ``[2, blocks, block size, HKV, DH]``; changed in place.
        plan: of this step.

    Returns:
        ``[T, H]``, the layer's states.
    """
    states: Tensor = mtp(plan.next_ids, hidden, meta, kv_cache)
    return states


def draft(
    mtp: Qwen3NextMTP,
    states: Tensor,
    meta: AttentionMetadata,
    kv_cache: Tensor,
    plan: DraftPlan,
    *,
    out: Drafts | None = None,
) -> Drafts:
    """Guess as many tokens behind each row's last accepted one as the plan has passes.

    Args:
        mtp: the layer.
        states: ``[T, H]``, of :func:`draft_first_pass`.
        meta: the step's batch.
        kv_cache: the layer's own; changed in place.
        plan: of this step.
        out: where they go; allocated by default.

    Returns:
        ``out``.
    """
    state = states.index_select(0, plan.last_index)
    passes, rows = plan.positions.shape
    if out is None:
        out = Drafts(
            torch.empty((rows, passes), dtype=torch.int64, device=state.device),
            torch.empty((rows, passes), dtype=torch.float32, device=state.device),
        )
    for number in range(passes):
        if number:
            ids = out.ids[:, number - 1]
            state = mtp(ids, state, _one_token(meta, plan, number), kv_cache)
        likeliest(mtp.project(state), out.ids[:, number], out.confidence[:, number])
    return out


def keep_drafts(token_table: Tensor, groups: Tensor, ids: Tensor) -> None:
    """Put each request's drafts behind its last token in the token table.

    Args:
        token_table: int64 ``[groups + 1, 1 + k]``; changed in place. Its last row takes what
            padding rows have, and rows of a group that there is not.
        groups: int32 ``[S]``, state groups.
        ids: int64 ``[S, k]``.
    """
    if ids.is_cuda:
        from atom.spec_decode import mtp_triton

        mtp_triton.keep_drafts(token_table, groups, ids)
    else:
        keep_drafts_reference(token_table, groups, ids)


def keep_drafts_reference(token_table: Tensor, groups: Tensor, ids: Tensor) -> None:
    """:func:`keep_drafts` in plain torch, on any device."""
    token_table[table_rows(groups, token_table), 1:] = ids


def likeliest(logits: Tensor, ids: Tensor, confidence: Tensor) -> None:
    """The likeliest id of each row, the first of equals, and its probability.

    Args:
        logits: ``[S, vocabulary]``, any floating dtype.
        ids: int64 ``[S]``, written; may be a column.
        confidence: float32 ``[S]``, written; may be a column.
    """
    if logits.is_cuda:
        from atom.spec_decode import mtp_triton

        mtp_triton.likeliest(logits, ids, confidence)
    else:
        likeliest_reference(logits, ids, confidence)


def likeliest_reference(logits: Tensor, ids: Tensor, confidence: Tensor) -> None:
    """:func:`likeliest` in plain torch, on any device."""
    values = logits.float()
    best = values.argmax(dim=-1)
    top = values.gather(-1, best[:, None])[:, 0]
    ids.copy_(best)
    confidence.copy_(torch.exp(top - values.logsumexp(dim=-1)))


def _one_token(meta: AttentionMetadata, plan: DraftPlan, number: int) -> AttentionMetadata:
    """The batch of one draft's pass: a token a row, behind those of the step."""
    rows = meta.num_rows
    return AttentionMetadata(
        query_start_loc=plan.query_start_loc,
        context_lens=plan.context_lens[number],
        state_slots=meta.state_slots,
        num_accepted_tokens=meta.num_accepted_tokens,
        state_table=meta.state_table,
        block_tables=meta.block_tables,
        positions=plan.positions[number],
        slot_mapping=plan.slot_mapping[number],
        num_tokens=rows,
        max_query_len=1,
        max_context_len=meta.max_context_len + meta.max_query_len + number,
        is_prefill=False,
    )
