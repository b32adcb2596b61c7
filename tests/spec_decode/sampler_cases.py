"""Batches for the sampler's tests, and the plainest way to judge one: loops over Python numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from atom.spec_decode.rejection_sampler import Verdict, new_verdict
from atom.spec_decode.sampling import SamplingTensors

K = 3


@dataclass(frozen=True)
class Batch:
    """Arguments of ``verify`` for drafts without probabilities."""

    logits: Tensor
    query_start_loc: Tensor
    draft_ids: Tensor
    num_drafts: Tensor
    sampling: SamplingTensors
    forced_bonus: Tensor | None = None

    def arguments(self, *, all_greedy: bool = False, wanted: bool = True) -> tuple[Any, ...]:
        requests, drafts = self.draft_ids.shape
        verdict = new_verdict(requests, drafts, logprobs=wanted, device=self.logits.device)
        for part in verdict:
            if part is not None:
                # what is left unwritten shows
                part.fill_(77)
        return (
            self.logits,
            self.query_start_loc,
            self.draft_ids,
            self.num_drafts,
            self.sampling,
            None,
            self.forced_bonus,
            all_greedy,
            verdict,
        )

    def to(self, device: str) -> Batch:
        return Batch(
            self.logits.to(device),
            self.query_start_loc.to(device),
            self.draft_ids.to(device),
            self.num_drafts.to(device),
            move(self.sampling, device),
            None if self.forced_bonus is None else self.forced_bonus.to(device),
        )

    def with_(self, **changes: Any) -> Batch:
        return replace(self, **changes)


def move(sampling: SamplingTensors, device: str) -> SamplingTensors:
    return SamplingTensors(
        sampling.temperature.to(device),
        sampling.top_k.to(device),
        sampling.top_p.to(device),
        sampling.seed.to(device),
        sampling.positions.to(device),
        sampling.filtered,
    )


def settings(
    requests: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    filtered: bool | None = None,
) -> SamplingTensors:
    number = torch.arange(requests)
    return SamplingTensors(
        torch.full((requests,), temperature),
        torch.full((requests,), top_k, dtype=torch.int32),
        torch.full((requests,), top_p),
        number * 7919 - 3,
        number * 11,
        (top_k > 0 or top_p < 1) if filtered is None else filtered,
    )


def make_batch(
    lengths: list[int],
    vocabulary: int,
    *,
    seed: int = 0,
    padding_rows: int = 0,
    likely: float = 0.6,
    sampling: SamplingTensors | None = None,
    drafts: int = K,
) -> Batch:
    """A batch of requests with so many rows of logits each (0 is padding).

    About ``likely`` of the drafts are the highest logit of their row.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = int(starts[-1]) + padding_rows
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    draft_ids = torch.randint(vocabulary, (len(lengths), drafts), generator=generator)
    for request, length in enumerate(lengths):
        for i in range(max(length - 1, 0)):
            if float(torch.rand((), generator=generator)) < likely:
                draft_ids[request, i] = logits[starts[request] + i].argmax()
    counts = torch.tensor([max(length - 1, 0) for length in lengths], dtype=torch.int32)
    if sampling is None:
        sampling = settings(len(lengths))
    return Batch(logits, starts.to(torch.int32), draft_ids, counts, sampling)


def judge_plainly(batch: Batch, tokens: list[list[int]]) -> Verdict:
    """The verdict of a batch, given the target's own token at every row of each request."""
    requests, drafts = batch.draft_ids.shape
    verdict = new_verdict(requests, drafts, logprobs=True)
    verdict.num_bonus.zero_()
    verdict.num_rejected.zero_()
    verdict.sampled_ids.fill_(-1)
    verdict.next_token.fill_(-1)
    assert verdict.logprobs is not None
    verdict.logprobs.zero_()
    for request, own in enumerate(tokens):
        if not own:
            continue
        proposed = batch.draft_ids[request].tolist()[: len(own) - 1]
        bonus = 0
        if batch.forced_bonus is None:
            while bonus < len(proposed) and proposed[bonus] == own[bonus]:
                bonus += 1
        else:
            bonus = min(int(batch.forced_bonus[request]), len(proposed))
        emitted = [*proposed[:bonus], own[bonus]]
        verdict.num_bonus[request] = bonus
        verdict.num_rejected[request] = len(proposed) - bonus
        verdict.next_token[request] = emitted[-1]
        for i, token in enumerate(emitted):
            row = batch.logits[int(batch.query_start_loc[request]) + i]
            verdict.sampled_ids[request, i] = token
            verdict.logprobs[request, i] = torch.log_softmax(row, 0)[token]
    return verdict


def highest(batch: Batch) -> list[list[int]]:
    """The highest logit's entry at every row of each request."""
    starts = batch.query_start_loc.tolist()
    rows = batch.logits.tolist()
    return [
        [max(range(len(row)), key=row.__getitem__) for row in rows[first:last]]
        for first, last in pairwise(starts)
    ]


def assert_same(found: Verdict, expected: Verdict, *, tolerance: float = 1e-4) -> None:
    for name in ("num_rejected", "num_bonus", "sampled_ids", "next_token"):
        one, other = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert torch.equal(one, other), f"{name}: {one.tolist()} is not {other.tolist()}"
    if found.logprobs is not None and expected.logprobs is not None:
        torch.testing.assert_close(
            found.logprobs.cpu(), expected.logprobs.cpu(), atol=tolerance, rtol=tolerance
        )
