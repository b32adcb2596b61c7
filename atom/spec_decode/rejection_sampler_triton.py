"""The rejection sampler in two launches: one pass over the vocabulary, then the verdict.

References: ``verify_reference`` and ``write_outputs_reference`` of
:mod:`atom.spec_decode.rejection_sampler`. With filters a third launch goes in front. Drafts with
probabilities are not done here.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.launch_sizes import ceil_div, next_power_of_2
from atom.spec_decode.rejection_sampler import HostOutputs, Verdict
from atom.spec_decode.sampling import SamplingTensors
from atom.spec_decode.sampling_triton import (
    CHUNK,
    NO_ENTRY,
    row_part_kernel,
    threshold_kernel,
    write_tags,
)


@triton.jit
def _judge(
    logits,
    query_start_loc,
    draft_ids,
    num_drafts,
    forced_bonus,
    part_score,
    part_entry,
    part_highest,
    part_sum,
    stride,
    draft_stride,
    parts,
    request,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    FORCED: tl.constexpr,
    LOGPROBS: tl.constexpr,
):
    """One request: ``(drafts, bonus, ids [WIDTH], next token, log probabilities [WIDTH])``."""
    first = tl.load(query_start_loc + request)
    rows = tl.load(query_start_loc + request + 1) - first
    drafts = tl.minimum(tl.minimum(tl.load(num_drafts + request), rows - 1), K)
    drafts = tl.maximum(drafts, 0)
    column = tl.arange(0, WIDTH)
    part = tl.arange(0, PARTS)
    live = column < tl.minimum(rows, K + 1)
    at = (request * (K + 1) + column[:, None]) * parts + part[None, :]
    there = live[:, None] & (part[None, :] < parts)
    score = tl.load(part_score + at, mask=there, other=float("-inf"))
    entry = tl.load(part_entry + at, mask=there, other=NO_ENTRY)
    best = tl.max(score, axis=1)
    target = tl.min(tl.where(score == best[:, None], entry, NO_ENTRY), axis=1).to(tl.int64)
    verified = column < drafts
    draft = tl.load(draft_ids + request * draft_stride + column, mask=verified, other=-1)
    if FORCED:
        bonus = tl.minimum(tl.maximum(tl.load(forced_bonus + request), 0), drafts)
    else:
        stands = verified & (draft == target)
        bonus = tl.min(tl.where(stands, WIDTH, column), axis=0)
    emitted = (column <= bonus) & live
    ids = tl.where(column < bonus, draft, target)
    logprob = tl.zeros((WIDTH,), tl.float32)
    if LOGPROBS:
        highest = tl.load(part_highest + at, mask=there, other=float("-inf"))
        share = tl.load(part_sum + at, mask=there, other=0.0)
        peak = tl.max(highest, axis=1)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(share * tl.exp(highest - safe[:, None]), axis=1)
        spot = (first + column).to(tl.int64) * stride + ids
        found = tl.load(logits + spot, mask=emitted, other=0.0).to(tl.float32)
        logprob = tl.where(emitted, found - (safe + tl.log(total)), 0.0)
    ids = tl.where(emitted, ids, -1)
    last = tl.max(tl.where(emitted & (column == bonus), ids, -1), axis=0)
    return drafts, bonus, ids, last, logprob


@triton.jit(do_not_specialize=["draft_stride", "parts"])
def verdict_kernel(
    logits,
    query_start_loc,
    draft_ids,
    num_drafts,
    forced_bonus,
    part_score,
    part_entry,
    part_highest,
    part_sum,
    num_rejected,
    num_bonus,
    sampled_ids,
    next_token,
    logprobs,
    stride,
    draft_stride,
    parts,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    FORCED: tl.constexpr,
    LOGPROBS: tl.constexpr,
):
    """Program ``s``: the verdict of request ``s`` into plain tensors."""
    request = tl.program_id(0)
    drafts, bonus, ids, last, logprob = _judge(
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        forced_bonus,
        part_score,
        part_entry,
        part_highest,
        part_sum,
        stride,
        draft_stride,
        parts,
        request,
        K,
        WIDTH,
        PARTS,
        FORCED,
        LOGPROBS,
    )
    column = tl.arange(0, WIDTH)
    tl.store(num_rejected + request, drafts - bonus)
    tl.store(num_bonus + request, bonus)
    tl.store(sampled_ids + request * (K + 1) + column, ids, mask=column <= K)
    tl.store(next_token + request, last)
    if LOGPROBS:
        tl.store(logprobs + request * (K + 1) + column, logprob, mask=column <= K)


@triton.jit(
    do_not_specialize=[
        "draft_stride",
        "requests",
        "parts",
        "status_tag",
        "ids_tag",
        "logprobs_tag",
    ],
)
def outputs_kernel(
    logits,
    query_start_loc,
    draft_ids,
    num_drafts,
    forced_bonus,
    part_score,
    part_entry,
    part_highest,
    part_sum,
    status_raw,
    ids_raw,
    logprobs_raw,
    record,
    state_slots,
    token_table,
    num_bonus,
    kept_ids,
    stride,
    draft_stride,
    requests,
    parts,
    status_last,
    ids_last,
    logprobs_last,
    status_tag,
    ids_tag,
    logprobs_tag,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    FORCED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    TAGGED: tl.constexpr,
):
    """Program ``s``: request ``s`` into the payloads; program 0 also writes record and tags."""
    request = tl.program_id(0)
    drafts, bonus, ids, last, logprob = _judge(
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        forced_bonus,
        part_score,
        part_entry,
        part_highest,
        part_sum,
        stride,
        draft_stride,
        parts,
        request,
        K,
        WIDTH,
        PARTS,
        FORCED,
        LOGPROBS,
    )
    column = tl.arange(0, WIDTH)
    front: tl.constexpr = 8 if TAGGED else 0
    status = (status_raw + front).to(tl.pointer_type(tl.int32))
    tl.store(status + request, drafts - bonus)
    tl.store(status + requests + request, bonus)
    sampled = (ids_raw + front).to(tl.pointer_type(tl.int64))
    tl.store(sampled + request * (K + 1) + column, ids, mask=column <= K)
    if LOGPROBS:
        found = (logprobs_raw + front).to(tl.pointer_type(tl.float32))
        tl.store(found + request * (K + 1) + column, logprob, mask=column <= K)
    # the drafter reads these; a payload may lie in host memory
    tl.store(num_bonus + request, bonus)
    tl.store(kept_ids + request * (K + 1) + column, ids, mask=column <= K)
    group = tl.load(state_slots + request).to(tl.int64)
    tl.store(token_table + group * (K + 1), last, mask=(group >= 0) & (last >= 0))
    if request == 0:
        word = tl.arange(0, WORDS)
        tl.store(status + 2 * requests + word, tl.load(record + word))
        if TAGGED:
            write_tags(status_raw, status_last, status_tag)
            write_tags(ids_raw, ids_last, ids_tag)
            if LOGPROBS:
                write_tags(logprobs_raw, logprobs_last, logprobs_tag)


class _Parts(NamedTuple):
    """What the pass over the vocabulary left: ``[requests, 1 + k, parts]`` each."""

    score: Tensor
    entry: Tensor
    highest: Tensor
    total: Tensor
    number: int


def _row_parts(
    logits: Tensor,
    query_start_loc: Tensor,
    requests: int,
    drafts: int,
    sampling: SamplingTensors | None,
    all_greedy: bool,
    logprobs: bool,
    outputs: HostOutputs | None = None,
) -> _Parts:
    vocabulary = logits.shape[1]
    parts = ceil_div(vocabulary, CHUNK)
    columns = requests * (drafts + 1)
    scratch = torch.empty(
        (4 if logprobs else 2, columns * parts), dtype=torch.float32, device=logits.device
    )
    result = _Parts(
        scratch[0],
        scratch[1].view(torch.int32),
        scratch[2 if logprobs else 0],
        scratch[3 if logprobs else 0],
        parts,
    )
    greedy = all_greedy or sampling is None
    filtered = sampling is not None and sampling.filtered and not greedy
    threshold = scratch
    if sampling is not None and filtered:
        threshold = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        threshold_kernel[(columns,)](
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            query_start_loc,
            threshold,
            logits.stride(0),
            vocabulary,
            K=drafts,
            BY_REQUEST=True,
            WIDTH=1024,
            num_warps=8,
        )
    row_part_kernel[(columns, parts)](
        logits,
        scratch if sampling is None else sampling.temperature,
        query_start_loc if sampling is None else sampling.seed,
        query_start_loc if sampling is None else sampling.positions,
        threshold,
        query_start_loc,
        result.score,
        result.entry,
        result.highest,
        result.total,
        *_raws(outputs, scratch),
        logits.stride(0),
        vocabulary,
        parts,
        *_tag_arguments(outputs),
        K=drafts,
        ALL_GREEDY=greedy,
        FILTERED=filtered,
        LOGPROBS=logprobs,
        OPENS=outputs is not None and outputs.status_tag != 0,
        num_warps=4,
    )
    return result


def _raws(outputs: HostOutputs | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if outputs is None:
        return unused, unused, unused
    logprobs = outputs.sampled_ids if outputs.logprobs is None else outputs.logprobs
    return outputs.status, outputs.sampled_ids, logprobs


def _tag_arguments(outputs: HostOutputs | None) -> tuple[int, ...]:
    """The last word of each payload, where its second tag lies, then the tags."""
    if outputs is None:
        return 0, 0, 0, 0, 0, 0
    raws = _raws(outputs, outputs.status)
    last = (raw.numel() // 8 - 1 for raw in raws)
    return (*last, outputs.status_tag, outputs.ids_tag, outputs.logprobs_tag)


def verify_triton(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    verdict: Verdict,
) -> None:
    """The Triton side of ``verify_reference``, for drafts without probabilities."""
    requests, drafts = draft_ids.shape
    wanted = verdict.logprobs is not None
    parts = _row_parts(logits, query_start_loc, requests, drafts, sampling, all_greedy, wanted)
    verdict_kernel[(requests,)](
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        num_drafts if forced_bonus is None else forced_bonus,
        parts.score,
        parts.entry,
        parts.highest,
        parts.total,
        verdict.num_rejected,
        verdict.num_bonus,
        verdict.sampled_ids,
        verdict.next_token,
        parts.score if verdict.logprobs is None else verdict.logprobs,
        logits.stride(0),
        draft_ids.stride(0),
        parts.number,
        K=drafts,
        WIDTH=next_power_of_2(drafts + 1),
        PARTS=next_power_of_2(parts.number),
        FORCED=forced_bonus is not None,
        LOGPROBS=wanted,
        num_warps=1,
    )


def write_outputs_triton(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    outputs: HostOutputs,
    record: Tensor,
    state_slots: Tensor,
    token_table: Tensor,
    num_bonus: Tensor,
    sampled_ids: Tensor,
) -> None:
    """The Triton side of ``write_outputs_reference``, for drafts without probabilities."""
    requests, drafts = draft_ids.shape
    wanted = outputs.logprobs is not None
    parts = _row_parts(
        logits, query_start_loc, requests, drafts, sampling, all_greedy, wanted, outputs
    )
    outputs_kernel[(requests,)](
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        num_drafts if forced_bonus is None else forced_bonus,
        parts.score,
        parts.entry,
        parts.highest,
        parts.total,
        *_raws(outputs, record),
        record,
        state_slots,
        token_table,
        num_bonus,
        sampled_ids,
        logits.stride(0),
        draft_ids.stride(0),
        requests,
        parts.number,
        *_tag_arguments(outputs),
        K=drafts,
        WIDTH=next_power_of_2(drafts + 1),
        PARTS=next_power_of_2(parts.number),
        WORDS=record.shape[0],
        FORCED=forced_bonus is not None,
        LOGPROBS=wanted,
        TAGGED=outputs.status_tag != 0,
        num_warps=1,
    )
