"""The rejection sampler: which drafts of a step stand, and which token follows them.

The verifier has one row of logits for each token that went in: a request with ``d`` drafts has
``1 + d`` rows. Row ``i`` is the target's distribution of the token behind the first ``i`` drafts.

*Drafts without probabilities* (the drafter's likeliest token, a distribution with one entry). The
target's own token is drawn at every row; a draft is accepted while it is that token, and the first
that is not ends the step, with the target's token in its place. For such a distribution this is the
standard rule: the draft ``x`` stands with probability ``p(x)``, and what replaces it is drawn from
``p`` without ``x``. Moreover the text does not depend on the drafts at all, since each token is the
draw of its position: it is the same with any drafter, any number of drafts, or none.

*Drafts with probabilities* ``q``. A draft ``x`` is accepted with probability ``min(1, p(x)/q(x))``;
the first refused one is replaced by a draw from ``max(p - q, 0)``, normalised; behind the last
accepted draft comes a draw from ``p``. The distribution of the text is the target's; the text
itself does depend on the drafts. (Leviathan et al. 2023, Chen et al. 2023.)

*Forced.* ``forced_bonus`` overrides the comparison: the first so many drafts stand whatever the
target says, and the target's own token follows. The drafts are what is in the caches at those
positions, so text and state agree; the text is worthless, which load tests do not mind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atom.model_ops.guard import RECORD_WORDS
from atom.spec_decode.random_numbers import Purpose, uniform
from atom.spec_decode.sampling import (
    SamplingTensors,
    draw,
    greedy,
    is_warm,
    log_weights,
    usable,
)
from atom.transfer.payload import (
    PayloadKind,
    PayloadLayout,
    epoch_tag,
    open_tag,
    payload_layout,
)


class Verdict(NamedTuple):
    """What a step's verification writes. ``num_rejected + num_bonus`` is the number of drafts.

    Attributes:
        num_rejected: int32 ``[S]``, drafts that do not stand.
        num_bonus: int32 ``[S]``, drafts that do.
        sampled_ids: int64 ``[S, 1 + k]``: accepted drafts, the token behind them, then -1.
        next_token: int64 ``[S]``, the last of them; -1 for a request without rows.
        logprobs: float32 ``[S, 1 + k]``, log softmax of the bare logits at the emitted tokens
            (no temperature, no filter), 0 behind them; ``None`` if nobody wants it.
    """

    num_rejected: Tensor
    num_bonus: Tensor
    sampled_ids: Tensor
    next_token: Tensor
    logprobs: Tensor | None


def new_verdict(
    requests: int,
    drafts: int,
    *,
    logprobs: bool = False,
    device: torch.device | str = "cpu",
) -> Verdict:
    """An unwritten verdict for ``requests`` with up to ``drafts`` drafts each."""
    counts = torch.empty((2, requests), dtype=torch.int32, device=device)
    ids = torch.empty((requests, 1 + drafts), dtype=torch.int64, device=device)
    return Verdict(
        counts[0],
        counts[1],
        ids,
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty(ids.shape, dtype=torch.float32, device=device) if logprobs else None,
    )


class _Rows(NamedTuple):
    """Where each request's rows of logits lie."""

    request: Tensor  # int64 [N]: row -> request (of a padding row the last one)
    offset: Tensor  # int64 [N]: row -> tokens behind the request's first row
    of_request: Tensor  # int64 [S, 1 + k]: request, offset -> row
    drafts: Tensor  # int64 [S]: drafts that are verified
    active: Tensor  # bool [S]: whether the request has rows at all


def _rows(logits: Tensor, query_start_loc: Tensor, num_drafts: Tensor, drafts: int) -> _Rows:
    starts = query_start_loc.to(torch.int64)
    requests = len(starts) - 1
    row = torch.arange(logits.shape[0], device=logits.device)
    request = torch.searchsorted(starts[1:], row, right=True).clamp(max=requests - 1)
    column = torch.arange(1 + drafts, device=logits.device)
    lengths = starts[1:] - starts[:-1]
    # a request without rows verifies nothing, whatever its row of num_drafts holds
    verified = torch.minimum(num_drafts.to(torch.int64), lengths - 1).clamp(0, drafts)
    of_request = (starts[:-1, None] + column).clamp(max=logits.shape[0] - 1)
    return _Rows(request, row - starts[request], of_request, verified, lengths > 0)


def _accepted(
    logits: Tensor,
    rows: _Rows,
    of_rows: SamplingTensors,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    all_greedy: bool,
) -> tuple[Tensor, Tensor]:
    """Which drafts would stand alone, ``[S, k]``, and the token ``[S, 1 + k]`` if none does.

    The second tensor holds at column ``i`` what is emitted there if the drafts before ``i`` stand
    and, for ``i`` below the number of drafts, the draft at ``i`` does not.
    """
    weights = usable(logits) if all_greedy else log_weights(logits, of_rows)
    target = draw(weights, of_rows, Purpose.TARGET, all_greedy=all_greedy)[rows.of_request]
    matches = draft_ids == target[:, :-1]
    if draft_probs is None or all_greedy:
        return matches, target
    drafts = draft_ids.shape[1]
    vocabulary = logits.shape[1]
    inner = rows.of_request[:, :drafts].reshape(-1)
    settings = SamplingTensors(*(getattr(of_rows, name)[inner] for name in _PER_ROW))
    p = torch.softmax(weights, 1)[inner]
    q = draft_probs.reshape(-1, vocabulary).to(torch.float32)
    x = draft_ids.reshape(-1, 1).clamp(0, vocabulary - 1)
    chance = uniform(settings.seed, settings.positions, Purpose.ACCEPT)
    # u q < p rather than u < p / q: a q of 0 is no division
    stands = chance * q.gather(1, x)[:, 0] < p.gather(1, x)[:, 0]
    left = torch.log(torch.clamp_min(p - q, 0.0))
    # nothing is left only where p is q up to rounding: then p itself
    left = torch.where((p > q).any(1, keepdim=True), left, torch.log(p))
    instead = draw(left, settings, Purpose.RESIDUAL)
    warm = is_warm(settings.temperature).view(-1, drafts)
    stands = torch.where(warm, stands.view(-1, drafts), matches)
    instead = torch.where(warm, instead.view(-1, drafts), target[:, :-1])
    verified = torch.arange(drafts, device=logits.device) < rows.drafts[:, None]
    replaced = torch.where(verified, instead, target[:, :-1])
    return stands, torch.cat([replaced, target[:, -1:]], 1)


_PER_ROW = ("temperature", "top_k", "top_p", "seed", "positions")


def verify_reference(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: Tensor | None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    verdict: Verdict,
) -> None:
    """See :func:`verify`. Torch operations without a host wait; runs on any device."""
    requests, drafts = draft_ids.shape
    if logits.shape[0] == 0:
        _write_empty(verdict)
        return
    logits = logits.float()
    rows = _rows(logits, query_start_loc, num_drafts, drafts)
    if sampling is None:
        sampling = greedy(requests, device=logits.device)
    of_rows = sampling.of_rows(rows.request, rows.offset)
    if forced_bonus is not None:
        # the token behind a forced draft is the target's own: nothing was refused there
        draft_probs = None
    stands, instead = _accepted(logits, rows, of_rows, draft_ids, draft_probs, all_greedy)
    column = torch.arange(1 + drafts, device=logits.device)
    stands = stands & (column[:-1] < rows.drafts[:, None])
    bonus = stands.to(torch.int64).cumprod(1).sum(1)
    if forced_bonus is not None:
        bonus = torch.minimum(forced_bonus.to(torch.int64).clamp(min=0), rows.drafts)
    last = instead.gather(1, bonus[:, None])
    padded = torch.cat([draft_ids, draft_ids.new_zeros(requests, 1)], 1)
    ids = torch.where(column < bonus[:, None], padded, last)
    emitted = (column <= bonus[:, None]) & rows.active[:, None]
    verdict.num_bonus.copy_(bonus)
    verdict.num_rejected.copy_(rows.drafts - bonus)
    verdict.sampled_ids.copy_(torch.where(emitted, ids, -1))
    verdict.next_token.copy_(torch.where(rows.active, last[:, 0], -1))
    if verdict.logprobs is not None:
        at = rows.of_request
        found = logits[at, ids.clamp(0, logits.shape[1] - 1)] - torch.logsumexp(logits, 1)[at]
        verdict.logprobs.copy_(torch.where(emitted, found, 0.0))


def _write_empty(verdict: Verdict) -> None:
    """What a batch of padding alone gives."""
    verdict.num_bonus.zero_()
    verdict.num_rejected.zero_()
    verdict.sampled_ids.fill_(-1)
    verdict.next_token.fill_(-1)
    if verdict.logprobs is not None:
        verdict.logprobs.zero_()


def verify(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: Tensor | None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    verdict: Verdict,
) -> None:
    """Judge a step's drafts; everything goes into ``verdict``. No host wait, capturable.

    Args:
        logits: ``[N, vocabulary]``, any floating dtype, computed with in float32; rows at
            ``query_start_loc[S]`` and behind are padding.
        query_start_loc: int32 ``[S + 1]``, where each request's rows begin. A request may have no
            rows (padding, or a prompt that is not finished): it gets zeros and -1.
        draft_ids: int64 ``[S, k]``; only the first ``num_drafts`` of a row are read.
        num_drafts: int32 ``[S]``, 0 to k; at most the request's rows less 1 count.
        sampling: ``None`` is greedy.
        draft_probs: float32 ``[S, k, vocabulary]`` that the drafts were drawn from, or ``None``.
        forced_bonus: int32 ``[S]`` drafts to accept (at most the verified ones do), or ``None``.
        all_greedy: the host knows that every request is greedy.
        verdict: written, also for padding rows.
    """
    step = verify_reference
    if logits.is_cuda and draft_probs is None:
        from atom.spec_decode.rejection_sampler_triton import verify_triton

        step = verify_triton
    step(
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        sampling,
        draft_probs,
        forced_bonus,
        all_greedy,
        verdict,
    )


class HostOutputs(NamedTuple):
    """Raw bytes of a step's payloads, tags included, and the tags to write.

    Attributes:
        status: uint8, of int32 ``[2 * S + RECORD_WORDS]``: num_rejected, num_bonus, guard record.
            All three are exactly what travels, without rows that stay (``Payload.copied``).
        sampled_ids: uint8, of int64 ``[S, 1 + k]``.
        logprobs: uint8, of float32 ``[S, 1 + k]``, or ``None``.
        status_tag: see :func:`atom.transfer.payload.epoch_tag`; 0 if the payloads have no tags.
        ids_tag: likewise, of the ids.
        logprobs_tag: likewise, of the log probabilities; read only if there are some.
    """

    status: Tensor
    sampled_ids: Tensor
    logprobs: Tensor | None
    status_tag: int
    ids_tag: int
    logprobs_tag: int = 0

    @property
    def tags(self) -> tuple[int, int, int]:
        """All three tags."""
        return self.status_tag, self.ids_tag, self.logprobs_tag


#: bits between the tag of a finished payload and of an open one
_OPENING = epoch_tag(0) ^ open_tag(0)


def _layouts(
    outputs: HostOutputs, requests: int, drafts: int
) -> list[tuple[Tensor, PayloadLayout]]:
    tagged = outputs.status_tag != 0
    words = 2 * requests + RECORD_WORDS
    shape = (requests, 1 + drafts)
    found = [
        (
            outputs.status,
            payload_layout(PayloadKind.SPEC_STATUS, (words,), torch.int32, None, tagged),
        ),
        (
            outputs.sampled_ids,
            payload_layout(PayloadKind.TOKEN_IDS, shape, torch.int64, None, tagged),
        ),
    ]
    if outputs.logprobs is not None:
        layout = payload_layout(PayloadKind.LOGPROBS, shape, torch.float32, None, tagged)
        found.append((outputs.logprobs, layout))
    for raw, layout in found:
        if raw.dtype != torch.uint8 or raw.numel() != layout.host_bytes:
            raise ValueError(
                f"write_outputs: {layout.kind.label} {list(layout.shape)} needs "
                f"{layout.host_bytes} bytes with its tags, got {raw.numel()} of {raw.dtype}"
            )
    return found


def write_outputs_reference(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: Tensor | None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    outputs: HostOutputs,
    record: Tensor,
    state_slots: Tensor,
    token_table: Tensor,
    num_bonus: Tensor,
    sampled_ids: Tensor,
) -> None:
    """See :func:`write_outputs`."""
    requests, drafts = draft_ids.shape
    payloads = _layouts(outputs, requests, drafts)
    data = [layout.data(raw) for raw, layout in payloads]
    status = data[0]
    for (raw, layout), tag in zip(payloads, outputs.tags, strict=False):
        if layout.tagged:
            layout.tags(raw).fill_(tag ^ _OPENING)
    next_token = sampled_ids.new_empty(requests)
    verdict = Verdict(
        status[:requests],
        num_bonus,
        data[1],
        next_token,
        data[2] if outputs.logprobs is not None else None,
    )
    verify_reference(
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        sampling,
        draft_probs,
        forced_bonus,
        all_greedy,
        verdict,
    )
    sampled_ids.copy_(data[1])
    status[requests : 2 * requests] = num_bonus
    status[2 * requests :] = record
    # rows without a token write back what is there, so that no size depends on the data
    there = (state_slots >= 0) & (next_token >= 0)
    group = state_slots.clamp(min=0).to(torch.int64)
    spare = token_table.new_empty((token_table.shape[0] + 1,))
    spare[:-1] = token_table[:, 0]
    spare[torch.where(there, group, token_table.shape[0])] = next_token
    token_table[:, 0] = spare[:-1]
    for (raw, layout), tag in zip(payloads, outputs.tags, strict=False):
        if layout.tagged:
            layout.tags(raw).fill_(tag)


def write_outputs(
    logits: Tensor,
    query_start_loc: Tensor,
    draft_ids: Tensor,
    num_drafts: Tensor,
    sampling: SamplingTensors | None,
    draft_probs: Tensor | None,
    forced_bonus: Tensor | None,
    all_greedy: bool,
    outputs: HostOutputs,
    record: Tensor,
    state_slots: Tensor,
    token_table: Tensor,
    num_bonus: Tensor,
    sampled_ids: Tensor,
) -> None:
    """Judge a step's drafts and write all that follows: payloads with tags, and what stays here.

    The first eight arguments are those of :func:`verify`. On an accelerator it is two launches,
    three with filters (drafts with probabilities take torch's operations instead). The pass over
    the vocabulary opens the payloads and the last launch writes data and tags alike, so nobody else
    needs to open or stamp them.

    Args:
        logits, query_start_loc, draft_ids, num_drafts: see :func:`verify`.
        sampling, draft_probs, forced_bonus, all_greedy: see :func:`verify`.
        outputs: what goes to the host; may lie in mapped host memory, it is only written.
        record: int32 ``[RECORD_WORDS]``, the kernels' guard record; copied behind the status.
        state_slots: int32 ``[S]``, each request's row of ``token_table``; -1 for padding.
        token_table: int64 ``[groups, 1 + k]``; the next token goes into column 0.
        num_bonus: int32 ``[S]``, written, for later work of the step.
        sampled_ids: int64 ``[S, 1 + k]``, written, likewise: those of the payload, which may lie in
            host memory.

    Raises:
        ValueError: a payload has not the size that its shape and its tags take.
    """
    step = write_outputs_reference
    if logits.is_cuda and draft_probs is None:
        from atom.spec_decode.rejection_sampler_triton import write_outputs_triton

        _layouts(outputs, *draft_ids.shape)
        step = write_outputs_triton
    step(
        logits,
        query_start_loc,
        draft_ids,
        num_drafts,
        sampling,
        draft_probs,
        forced_bonus,
        all_greedy,
        outputs,
        record,
        state_slots,
        token_table,
        num_bonus,
        sampled_ids,
    )
