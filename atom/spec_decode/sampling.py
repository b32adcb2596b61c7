"""From logits to tokens: temperature, top-k, top-p, and one token a row.

A row's distribution is the softmax of ``logits / temperature`` over the entries that pass two
filters, in this order: ``top_k`` keeps the k highest logits; ``top_p`` keeps, of what is left, the
fewest highest whose share of the probability is at least p. Entries as high as the lowest kept one
are kept too, so a filter is one threshold on the logits and does not depend on any sorting order.
A temperature below :data:`COLDEST`, such as 0, takes the highest logit, the first of several,
whatever the filters.

A token is drawn with the Gumbel trick: the highest ``logit / temperature + noise``. It needs one
pass over the vocabulary and no sums, and a row's draw depends on its seed and position alone.

A logit that is not a number is never drawn; the row's log probabilities show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atom.spec_decode.random_numbers import Purpose, gumbel

#: below it a row is greedy: a quotient of a logit and the smallest floats is infinite, and every
#: entry would be as high as the highest
COLDEST = 1e-5
_LOWEST = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each request of a batch is sampled.

    Attributes:
        temperature: float32 ``[S]``; greedy below :data:`COLDEST`.
        top_k: int32 ``[S]``; 0 is off.
        top_p: float32 ``[S]``; 1 is off. The highest entry is always kept.
        seed: int64 ``[S]``.
        positions: int64 ``[S]``, the position that the first token of this step will have in its
            request.
        filtered: whether any row may have a ``top_k`` or ``top_p``; ``False`` skips the filters.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    positions: Tensor
    filtered: bool = True

    def of_rows(self, request: Tensor, offset: Tensor) -> SamplingTensors:
        """The settings of single rows of logits.

        Args:
            request: int64 ``[N]``, each row's request.
            offset: int64 ``[N]``, tokens between the request's first position and the row's.
        """
        return SamplingTensors(
            self.temperature[request],
            self.top_k[request],
            self.top_p[request],
            self.seed[request],
            self.positions[request] + offset,
            self.filtered,
        )


def greedy(requests: int, *, device: torch.device | str = "cpu") -> SamplingTensors:
    """Settings of a batch in which every request is greedy."""
    number = torch.zeros(requests, dtype=torch.int64, device=device)
    ones = torch.ones(requests, dtype=torch.float32, device=device)
    return SamplingTensors(
        ones * 0, number.to(torch.int32), ones, number, number.clone(), filtered=False
    )


def is_warm(temperature: Tensor) -> Tensor:
    """Which rows draw their token; the others are greedy. Bool, of the temperature's shape."""
    return temperature >= COLDEST


def thresholds_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """The lowest logit of each row that passes its filters.

    Args:
        logits: float32 ``[N, vocabulary]``.
        temperature: float32 ``[N]``; greedy rows get a threshold too, which nobody asks for.
        top_k: int32 ``[N]``.
        top_p: float32 ``[N]``.

    Returns:
        float32 ``[N]``; minus infinity where nothing is filtered.
    """
    vocabulary = logits.shape[1]
    ordered = usable(logits).sort(dim=1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).to(torch.int64) - 1
    by_count = ordered.gather(1, last[:, None])
    scale = torch.where(is_warm(temperature), temperature, 1.0)[:, None]
    weight = torch.exp((ordered - ordered[:, :1]) / scale)
    weight = torch.where(ordered >= by_count, weight, 0.0)
    reached = weight.cumsum(1) >= top_p[:, None] * weight.sum(1, keepdim=True)
    # rounding can leave even the whole short of a share next to 1
    first = torch.where(reached.any(1), reached.to(torch.int8).argmax(1), vocabulary - 1)
    by_share = torch.where(top_p[:, None] < 1, ordered.gather(1, first[:, None]), _LOWEST)
    threshold = torch.maximum(by_share, by_count)[:, 0]
    return torch.where((top_k > 0) | (top_p < 1), threshold, _LOWEST)


def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """See :func:`thresholds_reference`; a kernel without a sort where there is one."""
    if logits.is_cuda:
        from atom.spec_decode.sampling_triton import row_thresholds

        return row_thresholds(logits, temperature, top_k, top_p)
    return thresholds_reference(logits, temperature, top_k, top_p)


def usable(logits: Tensor) -> Tensor:
    """Logits with minus infinity in place of what is not a number."""
    return torch.where(logits.isnan(), _LOWEST, logits)


def log_weights(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Unnormalised log probabilities of each row: filtered, then divided by the temperature.

    Args:
        logits: float32 ``[N, vocabulary]``.
        sampling: of the rows (``N`` each).

    Returns:
        float32 ``[N, vocabulary]``; of a greedy row its logits.
    """
    values = usable(logits)
    warm = is_warm(sampling.temperature)
    if sampling.filtered:
        threshold = thresholds(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        keep = (values >= threshold[:, None]) | ~warm[:, None]
        values = torch.where(keep, values, _LOWEST)
    return values / torch.where(warm, sampling.temperature, 1.0)[:, None]


def probabilities(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The distribution of each row, float32 ``[N, vocabulary]``; one entry of 1 in a greedy row."""
    values = log_weights(logits, sampling)
    chosen = torch.nn.functional.one_hot(values.argmax(1), logits.shape[1]).to(torch.float32)
    warm = is_warm(sampling.temperature)[:, None]
    return torch.where(warm, torch.softmax(values, 1), chosen)


def draw(
    weights: Tensor, sampling: SamplingTensors, purpose: int, *, all_greedy: bool = False
) -> Tensor:
    """One token a row from log weights.

    Args:
        weights: float32 ``[N, vocabulary]``, unnormalised log probabilities.
        sampling: of the rows; says which are greedy, and gives seeds and positions.
        purpose: what the noise is drawn for.
        all_greedy: every row is greedy, which saves the noise.

    Returns:
        int64 ``[N]``.
    """
    if all_greedy:
        return weights.argmax(1)
    noise = gumbel(sampling.seed, sampling.positions, purpose, weights.shape[1])
    warm = is_warm(sampling.temperature)[:, None]
    return torch.where(warm, weights + noise, weights).argmax(1)


def draw_drafts(logits: Tensor, sampling: SamplingTensors, offset: int) -> tuple[Tensor, Tensor]:
    """Drafts drawn from the drafter's own distribution, for standard speculative sampling.

    Exactness needs noise that is independent of the verifier's, and of earlier drafts of the same
    position: those decided on lengths, maybe.

    Args:
        logits: float32 ``[S, vocabulary]`` of the drafter at one draft position.
        sampling: of the requests, with the positions of the drafts.
        offset: drafts of this step in front of these.

    Returns:
        int64 ``[S]`` drafts and the float32 ``[S, vocabulary]`` they were drawn from.
    """
    purpose = Purpose.DRAFT + (offset << 8)
    drafts = draw(log_weights(logits, sampling), sampling, purpose)
    return drafts, probabilities(logits, sampling)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest entries of each row by the untempered, unfiltered distribution.

    Args:
        logits: float32 ``[N, vocabulary]``.
        count: entries, at most the vocabulary.

    Returns:
        float32 ``[N, count]`` log probabilities, falling, and their int64 ``[N, count]`` ids.
    """
    values, ids = logits.topk(min(count, logits.shape[1]), dim=1)
    return values - torch.logsumexp(logits, 1, keepdim=True), ids
