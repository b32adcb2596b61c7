"""The verdict: against a loop over Python numbers, and against the target's distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_cases import (
    Batch,
    K,
    assert_same,
    highest,
    judge_plainly,
    make_batch,
    settings,
)
from scipy import stats
from torch import Tensor

from atom.spec_decode import rejection_sampler
from atom.spec_decode.random_numbers import Purpose
from atom.spec_decode.rejection_sampler import (
    HostOutputs,
    Verdict,
    new_verdict,
    verify,
    verify_reference,
    write_outputs,
)
from atom.spec_decode.sampling import SamplingTensors, draw, draw_drafts, log_weights, probabilities
from atom.transfer.payload import (
    PayloadKind,
    epoch_tag,
    open_tag,
    payload_layout,
    read_payload,
)

LENGTHS = st.lists(st.integers(0, 1 + K), min_size=1, max_size=9)


def judged(batch: Batch, *, all_greedy: bool = False) -> Verdict:
    arguments = batch.arguments(all_greedy=all_greedy)
    verify(*arguments)
    verdict: Verdict = arguments[-1]
    return verdict


@given(LENGTHS, st.integers(0, 2**31), st.booleans(), st.integers(0, 3))
def test_greedy_is_the_loop(
    lengths: list[int], seed: int, all_greedy: bool, padding_rows: int
) -> None:
    batch = make_batch(lengths, 23, seed=seed, padding_rows=padding_rows)
    expected = judge_plainly(batch, highest(batch))
    assert_same(judged(batch, all_greedy=all_greedy), expected)


@given(LENGTHS, st.integers(0, 2**31))
def test_forced_is_the_loop(lengths: list[int], seed: int) -> None:
    batch = make_batch(lengths, 23, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    forced = torch.randint(0, K + 3, (len(lengths),), generator=generator).to(torch.int32)
    batch = batch.with_(forced_bonus=forced)
    assert_same(judged(batch), judge_plainly(batch, highest(batch)))


@given(LENGTHS, st.integers(0, 2**31), st.sampled_from([0.0, 1.0]), st.booleans())
def test_laws_of_a_verdict(lengths: list[int], seed: int, heat: float, with_q: bool) -> None:
    batch = make_batch(lengths, 11, seed=seed)
    sampling = settings(len(lengths), temperature=heat)
    batch = batch.with_(sampling=sampling)
    arguments = list(batch.arguments())
    if with_q:
        arguments[5] = torch.softmax(torch.randn(len(lengths), K, 11), 2)
    verify(*arguments)
    found: Verdict = arguments[-1]
    assert torch.equal(found.num_bonus + found.num_rejected, batch.num_drafts)
    assert int(found.num_bonus.min()) >= 0
    assert int(found.num_rejected.min()) >= 0
    for request, length in enumerate(lengths):
        ids = found.sampled_ids[request].tolist()
        emitted = int(found.num_bonus[request]) + 1 if length else 0
        assert all(0 <= token < 11 for token in ids[:emitted])
        assert ids[emitted:] == [-1] * (1 + K - emitted)
        assert int(found.next_token[request]) == (ids[emitted - 1] if length else -1)
        bonus = int(found.num_bonus[request])
        assert ids[:bonus] == batch.draft_ids[request, :bonus].tolist()
        assert found.logprobs is not None
        assert bool((found.logprobs[request, :emitted] <= 0).all())
        assert found.logprobs[request, emitted:].tolist() == [0.0] * (1 + K - emitted)


def test_padding_alone_and_stray_counts_are_harmless() -> None:
    batch = make_batch([0, 0], 9)
    nothing = judged(batch)
    assert nothing.num_bonus.tolist() == nothing.num_rejected.tolist() == [0, 0]
    assert nothing.next_token.tolist() == [-1, -1]
    stray = make_batch([2, 0, 1], 9).with_(num_drafts=torch.tensor([3, 7, -2], dtype=torch.int32))
    found = judged(stray)
    assert (found.num_bonus + found.num_rejected).tolist() == [1, 0, 0]


def test_drafts_behind_the_verified_ones_are_not_read() -> None:
    batch = make_batch([3, 2], 9)
    other = batch.draft_ids.clone()
    other[0, 2], other[1, 1:] = -5, 1 << 40
    for sampling in (None, settings(2, temperature=1.0)):
        one, two = (
            judged(batch.with_(draft_ids=ids, sampling=sampling))
            for ids in (batch.draft_ids, other)
        )
        assert_same(one, two)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}])
@pytest.mark.parametrize("with_q", [False, True])
def test_a_request_does_not_depend_on_its_batch(how: dict[str, Any], with_q: bool) -> None:
    lengths = [4, 1, 0, 3, 4, 2]
    batch = make_batch(lengths, 37, seed=3, sampling=settings(6, **how))
    q = torch.softmax(torch.randn(6, K, 37, generator=torch.Generator().manual_seed(0)), 2)
    whole = list(batch.arguments())
    whole[5] = q if with_q else None
    verify(*whole)
    order = [4, 5, 0]
    rows = [
        range(int(batch.query_start_loc[request]), int(batch.query_start_loc[request + 1]))
        for request in order
    ]
    s = batch.sampling
    part = Batch(
        torch.cat([batch.logits[list(found)] for found in rows]),
        torch.tensor([0, *[len(found) for found in rows]]).cumsum(0).to(torch.int32),
        batch.draft_ids[order],
        batch.num_drafts[order],
        s.of_rows(torch.tensor(order), torch.zeros(3, dtype=torch.int64)),
    )
    alone = list(part.arguments())
    alone[5] = q[order] if with_q else None
    verify(*alone)
    for one, many in zip(alone[-1], whole[-1], strict=True):
        torch.testing.assert_close(one, many[order], rtol=1e-5, atol=1e-6)


def plain_chain(logits: Tensor, one: SamplingTensors, count: int) -> list[int]:
    """Tokens without speculation: row ``i`` is the target's logits at the request's position i."""
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = []
    for i in range(count):
        here = one.of_rows(zero, zero + i)
        tokens.append(int(draw(log_weights(logits[i : i + 1], here), here, Purpose.TARGET)))
    return tokens


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.7]), st.integers(0, K))
def test_the_text_does_not_depend_on_greedy_drafts(seed: int, heat: float, length: int) -> None:
    """Token for token: any drafts, any number of them, or none. Position by position."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 5, generator=generator)
    sampling = settings(1, temperature=heat)
    expected = plain_chain(logits, sampling, 8)
    tokens: list[int] = []
    while len(tokens) < 8:
        done = len(tokens)
        here = sampling.of_rows(torch.tensor([0]), torch.tensor([done]))
        drafts = torch.randint(5, (1, K), generator=generator)
        batch = Batch(
            logits[done : done + 1 + length],
            torch.tensor([0, 1 + length], dtype=torch.int32),
            drafts,
            torch.tensor([length], dtype=torch.int32),
            here,
        )
        tokens += [token for token in judged(batch).sampled_ids[0].tolist() if token >= 0]
    assert tokens[:8] == expected


VOCABULARY = 5
TRIALS = 6_000


def target_of(first: Tensor) -> Tensor:
    """A toy target: logits of the next token, given the one before it."""
    rows = torch.randn(VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(11))
    return rows[first + 1] * 0.7


def drafter_of(first: Tensor) -> Tensor:
    rows = torch.randn(VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(12))
    return target_of(first) + rows[first + 1]


def two_tokens(drawn: bool, **how: Any) -> Tensor:
    """The first two tokens of many requests, by steps of speculation: their joint numbers."""
    one = settings(1, **how)
    sampling = SamplingTensors(
        one.temperature.expand(TRIALS),
        one.top_k.expand(TRIALS),
        one.top_p.expand(TRIALS),
        torch.arange(TRIALS),
        torch.zeros(TRIALS, dtype=torch.int64),
        one.filtered,
    )
    every = torch.arange(TRIALS)
    tokens = torch.full((TRIALS, 2), -1)
    done = torch.zeros(TRIALS, dtype=torch.int64)
    for _ in range(2):
        # the token before the step, then two drafts, one behind the other
        last = torch.where(done == 0, -1, tokens.gather(1, (done[:, None] - 1).clamp(0, 1))[:, 0])
        before, drafts, given = [last], [], []
        for i in range(2):
            here = sampling.of_rows(every, done + i)
            logits = drafter_of(before[-1])
            if drawn:
                draft, q = draw_drafts(logits, here, i)
                given.append(q)
            else:
                draft = logits.argmax(1)
            drafts.append(draft)
            before.append(draft)
        rows = torch.stack([target_of(token) for token in before], 1).reshape(-1, VOCABULARY)
        verdict = new_verdict(TRIALS, 2)
        verify(
            rows,
            torch.arange(TRIALS + 1, dtype=torch.int32) * 3,
            torch.stack(drafts, 1),
            torch.full((TRIALS,), 2, dtype=torch.int32),
            sampling.of_rows(every, done),
            torch.stack(given, 1) if drawn else None,
            None,
            False,
            verdict,
        )
        for i in range(3):
            place = done + i
            mask = (verdict.sampled_ids[:, i] >= 0) & (place < 2)
            tokens[every[mask], place[mask]] = verdict.sampled_ids[mask, i]
        done = done + verdict.num_bonus + 1
    assert int(tokens.min()) >= 0
    return tokens[:, 0] * VOCABULARY + tokens[:, 1]


def joint(**how: Any) -> np.ndarray[Any, Any]:
    """The target's own distribution of the first two tokens."""
    one = settings(VOCABULARY, **how)
    first = probabilities(target_of(torch.tensor([-1])), settings(1, **how))[0]
    second = probabilities(target_of(torch.arange(VOCABULARY)), one)
    return (first[:, None] * second).reshape(-1).numpy().astype(np.float64)


def fit(found: Tensor, expected: np.ndarray[Any, Any]) -> float:
    """P value of the numbers found under the expected distribution."""
    counts = np.bincount(found.numpy(), minlength=len(expected))
    alive = expected > 0
    if counts[~alive].sum():
        return 0.0
    goal = expected[alive] / expected[alive].sum() * counts.sum()
    return float(stats.chisquare(counts[alive], goal).pvalue)


HOWS = [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.4, "top_k": 3, "top_p": 0.9}]


@pytest.mark.parametrize("how", HOWS, ids=["plain", "cool", "filtered"])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy drafts", "drawn drafts"])
def test_speculation_keeps_the_distribution(how: dict[str, Any], drawn: bool) -> None:
    assert fit(two_tokens(drawn, **how), joint(**how)) > 1e-3


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy drafts", "drawn drafts"])
def test_a_wrong_rule_does_not_keep_it(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: drafts are accepted too often, one request in four at will."""
    judge = rejection_sampler._accepted

    def lenient(*arguments: Any) -> tuple[Tensor, Tensor]:
        stands, instead = judge(*arguments)
        lucky = torch.arange(stands.shape[0])[:, None] % 4 == 0
        return stands | lucky, instead

    monkeypatch.setattr(rejection_sampler, "_accepted", lenient)
    assert fit(two_tokens(drawn, temperature=1.0), joint(temperature=1.0)) < 1e-6


def test_a_wrong_remainder_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second control: a refused draft is replaced from the target, not from the remainder."""
    real = rejection_sampler.draw

    def from_target(
        weights: Tensor, sampling: SamplingTensors, purpose: int, **named: Any
    ) -> Tensor:
        if purpose == Purpose.RESIDUAL:
            rows = torch.arange(TRIALS * 3).view(TRIALS, 3)[:, :2].reshape(-1)
            weights = last[0][rows]
        last[0] = weights
        return real(weights, sampling, purpose, **named)

    last: list[Tensor] = [torch.empty(0)]
    monkeypatch.setattr(rejection_sampler, "draw", from_target)
    assert fit(two_tokens(True, temperature=1.0), joint(temperature=1.0)) < 1e-6


def test_a_draft_from_the_target_itself_always_stands() -> None:
    logits = torch.randn(8 * 4, 13, generator=torch.Generator().manual_seed(4))
    every = torch.arange(8)
    sampling = settings(8, temperature=1.0)
    drafts, given = [], []
    for i in range(K):
        draft, q = draw_drafts(logits[i::4], sampling.of_rows(every, torch.full((8,), i)), i)
        drafts.append(draft)
        given.append(q)
    batch = Batch(
        logits,
        torch.arange(9, dtype=torch.int32) * 4,
        torch.stack(drafts, 1),
        torch.full((8,), K, dtype=torch.int32),
        sampling,
    )
    arguments = list(batch.arguments())
    arguments[5] = torch.stack(given, 1)
    verify(*arguments)
    assert arguments[-1].num_bonus.tolist() == [K] * 8


def test_payloads_carry_status_record_ids_and_tags() -> None:
    batch = make_batch([4, 0, 2, 1], 19, seed=8)
    requests = 4
    expected = judge_plainly(batch, highest(batch))
    kinds = {
        PayloadKind.SPEC_STATUS: ((2 * requests + 8,), torch.int32),
        PayloadKind.TOKEN_IDS: ((requests, 1 + K), torch.int64),
        PayloadKind.LOGPROBS: ((requests, 1 + K), torch.float32),
    }
    layouts = [payload_layout(kind, *what) for kind, what in kinds.items()]
    raws = [torch.zeros(layout.host_bytes, dtype=torch.uint8) for layout in layouts]
    outputs = HostOutputs(*raws, *[epoch_tag(31, kind) for kind in kinds])
    record = torch.tensor([1, 2, 3, 16385, 5, 0, 0, 0], dtype=torch.int32)
    slots = torch.tensor([5, -1, 0, -1], dtype=torch.int32)
    table = torch.full((6, 1 + K), 50)
    counts, kept = torch.empty(4, dtype=torch.int32), torch.empty((4, 1 + K), dtype=torch.int64)
    front = batch.arguments()[:-1]
    behind: tuple[Any, ...] = (outputs, record, slots, table, counts, kept)
    write_outputs(*front, *behind)
    status, ids, logprobs = (
        read_payload(raw, layout, 31) for raw, layout in zip(raws, layouts, strict=True)
    )
    assert status.tolist() == [
        *expected.num_rejected.tolist(),
        *expected.num_bonus.tolist(),
        *record.tolist(),
    ]
    assert torch.equal(ids, expected.sampled_ids)
    assert expected.logprobs is not None
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(counts, expected.num_bonus)
    assert torch.equal(kept, expected.sampled_ids)
    tokens = expected.next_token
    column = [int(tokens[2]), 50, 50, 50, 50, int(tokens[0])]
    assert table[:, 0].tolist() == column
    assert bool((table[:, 1:] == 50).all())
    short = outputs._replace(sampled_ids=raws[1][:-8])
    refused = (*front, short, *behind[1:])
    with pytest.raises(ValueError, match="token ids"):
        write_outputs(*refused)


def test_payloads_are_open_until_the_data_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([2], 9)
    layouts = [
        payload_layout(PayloadKind.SPEC_STATUS, (10,), torch.int32),
        payload_layout(PayloadKind.TOKEN_IDS, (1, 1 + K), torch.int64),
    ]
    raws = [torch.zeros(layout.host_bytes, dtype=torch.uint8) for layout in layouts]
    tags = [epoch_tag(5, layout.kind) for layout in layouts]

    def stop(*arguments: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(rejection_sampler, "verify_reference", stop)
    slots, record = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    table = torch.zeros(1, 1 + K, dtype=torch.int64)
    outputs = HostOutputs(raws[0], raws[1], None, *tags)
    arguments: list[Any] = [*batch.arguments()[:-1], outputs, record, slots, table, slots, slots]
    with pytest.raises(InterruptedError):
        write_outputs(*arguments)
    for raw, layout in zip(raws, layouts, strict=True):
        assert layout.tags(raw).tolist() == [open_tag(5, layout.kind)] * 2


def test_the_reference_never_waits_for_the_host() -> None:
    """It runs where a read of a value would fail."""
    batch = make_batch([4, 1, 2], 19, sampling=settings(3, temperature=1.0, top_k=3))
    arguments = batch.to("meta").arguments()
    verify_reference(*arguments)
    many = list(arguments)
    many[5] = torch.empty(3, K, 19, device="meta")
    verify_reference(*many)
