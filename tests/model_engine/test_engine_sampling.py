"""Drawn tokens of a whole engine with drafts follow the model's own distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from engines import make_engine, tiny_model
from scipy import stats

from atom.benchmarks.greedy_equality import forced_logits
from atom.model_engine.sequence import SamplingParams

PROMPT = [17, 301, 44]
REQUESTS = 260
TOP_K = 3
TEMPERATURE = 0.7
TOKENS = 3
#: how often a right engine may be refused
LEVEL = 1e-4

Text = tuple[int, ...]


def exact_distribution() -> dict[Text, float]:
    """Probability of each continuation of three tokens: products of softmaxes, a text at a time.

    The first token comes from the prompt's step, the others from steps with drafts.
    """
    model = tiny_model().model

    def next_tokens(text: list[int]) -> dict[int, float]:
        top = forced_logits(model, text)[-1].topk(TOP_K)
        shares = torch.softmax(top.values.double() / TEMPERATURE, 0)
        return dict(zip(top.indices.tolist(), shares.tolist(), strict=True))

    found: dict[Text, float] = {(): 1.0}
    for _ in range(TOKENS):
        found = {
            (*text, token): probability * share
            for text, probability in found.items()
            for token, share in next_tokens([*PROMPT, *text]).items()
        }
    return found


def drawn(requests: int, **settings: Any) -> tuple[Counter[Text], float]:
    """Continuations of many requests with a seed each, and the share of accepted drafts."""
    engine = make_engine(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_waiting=requests,
        num_kv_blocks=256,
        prefix_caching=False,
        **settings,
    )
    for seed in range(requests):
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            seed=seed,
            ignore_eos=True,
        )
        engine.add_request(PROMPT, params, request_id=str(seed))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    engine.close()
    counters = engine.counters
    share = counters.accepted_tokens / max(counters.drafted_tokens, 1)
    return Counter(tuple(row) for row in tokens.values()), share


def probability_of(counts: Counter[Text], expected: dict[Text, float]) -> float:
    """p-value of a chi-square test; cells of few expected counts are one."""
    requests = counts.total()
    large = [text for text, share in expected.items() if share * requests >= 5]
    observed = [counts[text] for text in large]
    goal = [expected[text] * requests for text in large]
    if len(large) < len(expected):
        observed.append(requests - sum(observed))
        goal.append(requests - sum(goal))
    return float(stats.chisquare(observed, goal).pvalue)


@pytest.fixture(scope="module")
def expected() -> dict[Text, float]:
    found = exact_distribution()
    assert sum(found.values()) == pytest.approx(1)
    return found


def test_drafts_do_not_change_the_distribution(expected: dict[Text, float]) -> None:
    counts, accepted = drawn(REQUESTS, draft_tokens=3)
    assert set(counts) <= set(expected)
    # enough cells for the test to tell anything
    assert sum(share * REQUESTS >= 5 for share in expected.values()) > 12
    assert accepted > 0.05
    assert probability_of(counts, expected) > LEVEL


def test_drafts_that_are_taken_unseen_do(expected: dict[Text, float]) -> None:
    """The control: the same engine with forced acceptance, which asks the target nothing."""
    counts, accepted = drawn(160, draft_tokens=3, forced_acceptance_length=2.32)
    assert accepted > 0
    assert probability_of(counts, expected) < LEVEL
