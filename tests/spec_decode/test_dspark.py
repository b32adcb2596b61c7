"""Confidence to ell, its adoption a fixed number of steps later, and that outputs do not change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "spec_decode"), str(_TESTS / "model_ops")]
from interpreter import assert_check_passes, check_names  # noqa: E402
from sampler_cases import settings  # noqa: E402

from atom.config import CopyProtocol  # noqa: E402
from atom.device.virtual import VirtualDevice  # noqa: E402
from atom.errors import StalePayload  # noqa: E402
from atom.spec_decode.dspark import (  # noqa: E402
    COMPUTE_ELL,
    LAG,
    EllResolver,
    compute_ell,
    compute_ell_body,
    compute_ell_reference,
)
from atom.spec_decode.dspark_verify import MAX_ELL_INFLIGHT, EllMismatch, EllRing  # noqa: E402
from atom.spec_decode.rejection_sampler import new_verdict, verify  # noqa: E402
from atom.spec_decode.sampling import SamplingTensors, draw_drafts, probabilities  # noqa: E402
from atom.transfer.payload import Payload, epoch_tag  # noqa: E402

NAN = float("nan")


@pytest.mark.parametrize(
    ("confidence", "threshold", "expected"),
    [
        ([0.9, 0.9, 0.9], 0.3, 3),
        ([0.9, 0.3, 1.0], 0.3, 1),
        ([0.5, 0.5, 0.5], 0.25, 2),
        ([0.2, 1.0, 1.0], 0.3, 0),
        ([0.9, NAN, 1.0], 0.3, 1),
        ([NAN, 0.9, 1.0], 0.3, 0),
        ([1.0, 1.0, 1.0], 1.0, 3),
    ],
)
def test_ell_by_hand(confidence: list[float], threshold: float, expected: int) -> None:
    found = compute_ell(torch.tensor([confidence]), threshold)
    assert found.dtype == torch.int32
    assert found.tolist() == [expected]


@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=9),
    st.floats(2.0**-7, 1, width=32),
    st.floats(2.0**-7, 1, width=32),
)
def test_laws_of_ell(rows: list[list[float]], one: float, other: float) -> None:
    confidence = torch.tensor(rows)
    low, high = (compute_ell(confidence, value) for value in sorted((one, other)))
    assert bool((high <= low).all())
    assert 0 <= int(high.min()) <= int(low.max()) <= 4
    for row, ell in zip(rows, high.tolist(), strict=True):
        # more of a worse draft never helps: every verified prefix passes by itself
        passes = np.cumprod(np.array(row, dtype=np.float32)) >= np.float32(max(one, other))
        assert ell == (4 if passes.all() else int(np.argmin(passes)))


def check_ell() -> None:
    from atom.spec_decode.dspark_triton import write_ell

    generator = torch.Generator().manual_seed(0)
    for requests, drafts in ((1, 1), (5, 3), (300, 7)):
        confidence = torch.rand(requests + 2, drafts + 1, generator=generator)[:requests, :drafts]
        confidence = confidence.sqrt()
        confidence[0, 0] = NAN
        ell = torch.full((requests,), 99, dtype=torch.int32)
        raw = torch.zeros(5, dtype=torch.int64)
        write_ell(confidence, ell, raw[::4], 0.4, 2**52 + 16)
        assert torch.equal(ell, compute_ell_reference(confidence, 0.4))
        assert raw.tolist() == [2**52 + 16, 0, 0, 0, 2**52 + 16]
        ell.fill_(99)
        write_ell(confidence, ell, None, 0.4, 0)
        assert torch.equal(ell, compute_ell_reference(confidence, 0.4))


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)


@pytest.mark.gpu
def test_ell_on_hardware() -> None:
    confidence = torch.rand(100, 3, generator=torch.Generator().manual_seed(1)).sqrt()
    ell = torch.empty(100, dtype=torch.int32, device="cuda")
    tags = torch.zeros(9, dtype=torch.int64, device="cuda")
    compute_ell_body((confidence.cuda(),), (ell, tags[::8]), 0.5, 1234 << 40)
    assert torch.equal(ell.cpu(), compute_ell_reference(confidence, 0.5))
    assert tags[::8].tolist() == [1234 << 40] * 2
    assert torch.equal(compute_ell(confidence.cuda(), 0.5), ell)


class Bench:
    """A virtual device, a ring, and a resolver."""

    def __init__(self, lag: int = LAG, protocol: CopyProtocol = CopyProtocol.HOLD) -> None:
        self.device = VirtualDevice("MI355X")
        self.stream = self.device.new_stream()
        self.ring = EllRing(self.device, self.stream, protocol, slots=2, slot_requests=8)
        self.resolver = EllResolver(self.ring, lag)
        self.confidence = self.device.empty((8, 3), torch.float32)
        self.device.launch(ONES, (), (self.confidence,), scalars=(0.8,))

    def payload(self, step: int, requests: int, threshold: float = 0.5) -> Payload:
        ell = self.ring.new_ell(step, requests)
        tags = ell.layout.tags(ell.raw)
        tag = epoch_tag(step, ell.layout.kind)
        self.device.launch(
            COMPUTE_ELL, (self.confidence,), (ell.data, tags), scalars=(threshold, tag)
        )
        return ell

    def record(self, step: int, requests: list[int], *, ell: int = 3) -> None:
        # 0.8, 0.64 and 0.512 are the products
        threshold = {3: 0.5, 2: 0.6, 1: 0.7, 0: 0.9}[ell]
        self.resolver.record(step, requests, self.payload(step, len(requests), threshold))


def _fill(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], value: float) -> None:
    writes[0].fill_(value)


ONES = COMPUTE_ELL.__class__("fill", _fill)


@pytest.mark.parametrize("lag", [1, 2, 3, MAX_ELL_INFLIGHT])
@pytest.mark.parametrize("landed", [True, False])
def test_an_ell_is_adopted_a_fixed_number_of_steps_later(lag: int, landed: bool) -> None:
    bench = Bench(lag)
    for step in range(1, 12):
        adopted = bench.resolver.resolve()
        source = step - lag
        expected = {source: source % 4, 100: source % 4} if source >= 1 else {}
        assert adopted == expected, f"step {step}"
        bench.record(step, [step, 100], ell=step % 4)
        if landed:
            bench.device.synchronize()
        else:
            bench.device.spin(0.001, stream=bench.stream)
    bench.ring.drain()


def test_what_has_landed_early_is_not_adopted_early() -> None:
    """The map of landed values would give it; that is why it decides nothing."""
    bench = Bench()
    bench.record(1, [5], ell=1)
    bench.device.synchronize()
    assert bench.ring.ell_by_req == {5: 1}
    assert bench.resolver.resolve() == {}
    bench.record(2, [5], ell=2)
    bench.device.synchronize()
    assert bench.resolver.resolve() == {5: 1}
    assert bench.resolver.resolve() == {}


def test_adopting_waits_for_that_copy_and_no_other() -> None:
    bench = Bench()
    bench.record(1, [5], ell=1)
    bench.device.synchronize()
    bench.device.spin(10.0, stream=bench.stream)
    bench.record(2, [5], ell=2)
    before = bench.device.host_seconds()
    assert bench.resolver.resolve() == {5: 1}
    assert bench.device.host_seconds() - before < 1.0
    bench.record(3, [5], ell=3)
    assert bench.resolver.resolve() == {5: 2}
    assert bench.device.host_seconds() - before >= 9.0


def test_a_resolver_that_falls_behind_loses_nothing() -> None:
    bench = Bench()
    for step in range(1, 9):
        bench.record(step, [step], ell=step % 4)
    assert bench.resolver.resolve() == {step: step % 4 for step in range(1, 8)}


def test_the_ring_does_not_grow_with_requests() -> None:
    bench = Bench()
    for step in range(1, 60):
        bench.resolver.resolve()
        bench.record(step, [1000 + step])
    assert len(bench.ring._ell_by_req) <= LAG + 1
    assert len(bench.ring._ell_by_step) <= MAX_ELL_INFLIGHT
    bench.resolver.clear()
    assert bench.resolver.resolve() == {}
    assert bench.ring.ell_by_req == {}


def test_a_stale_ell_is_named_and_dropped() -> None:
    bench = Bench(lag=1)
    ell = bench.payload(7, 2)
    bench.device.launch(ONES, (), (ell.data,), scalars=(1,))
    tags = ell.layout.tags(ell.raw)
    bench.device.launch(ONES, (), (tags,), scalars=(epoch_tag(8, ell.layout.kind),))
    bench.resolver.record(7, [1, 2], ell)
    with pytest.raises(StalePayload, match="step 8"):
        bench.resolver.resolve()
    bench.record(8, [1, 2], ell=2)
    assert bench.resolver.resolve() == {1: 2, 2: 2}


def test_a_step_that_recorded_nothing_cannot_be_waited_for() -> None:
    bench = Bench()
    bench.record(1, [5])
    with pytest.raises(EllMismatch, match="no ell of step 4"):
        bench.ring.wait_ell(4)
    assert bench.ring.wait_ell(1) == {5: 3}
    with pytest.raises(EllMismatch, match="taken once"):
        bench.ring.wait_ell(1)


@pytest.mark.parametrize("lag", [0, MAX_ELL_INFLIGHT + 1])
def test_other_lags_are_refused(lag: int) -> None:
    with pytest.raises(ValueError, match="lag"):
        Bench(lag)


# -- lossless: a toy target and drafter, ragged lengths from confidence

VOCABULARY = 4
K = 2
TOKENS = 3
TRIALS = 6_000


def rows_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY + 1, VOCABULARY, generator=generator)


def target_of(last: Tensor) -> Tensor:
    return rows_of(1)[last + 1] * 0.9


def drafter_of(last: Tensor) -> Tensor:
    return target_of(last) + rows_of(2)[last + 1]


def generate(
    heat: float, *, drawn: bool, lag: int | None, threshold: float = 0.45, trials: int = TRIALS
) -> tuple[Tensor, Tensor]:
    """Tokens of many requests, and all verified lengths. ``lag`` ``None``: all drafts always."""
    one = settings(1, temperature=heat)
    every = torch.arange(trials)
    sampling = SamplingTensors(
        one.temperature.expand(trials),
        one.top_k.expand(trials),
        one.top_p.expand(trials),
        every * 31 + 5,
        torch.zeros(trials, dtype=torch.int64),
        False,
    )
    tokens = torch.full((trials, TOKENS + K), -1)
    done = torch.zeros(trials, dtype=torch.int64)
    recorded: list[Tensor] = []
    lengths: list[Tensor] = []
    for _ in range(TOKENS):
        place = (done - 1).clamp(0)[:, None]
        last = torch.where(done == 0, -1, tokens.gather(1, place)[:, 0])
        before, drafts, given, sure = [last], [], [], []
        for i in range(K):
            here = sampling.of_rows(every, done + i)
            logits = drafter_of(before[-1])
            q = torch.softmax(logits / max(heat, 0.5), 1)
            if drawn:
                draft, q = draw_drafts(logits, here, i)
                given.append(q)
            else:
                draft = logits.argmax(1)
            sure.append(q.gather(1, draft[:, None])[:, 0])
            drafts.append(draft)
            before.append(draft)
        recorded.append(compute_ell(torch.stack(sure, 1), threshold))
        ell = torch.full((trials,), K, dtype=torch.int32)
        if lag is not None and len(recorded) > lag - 1:
            ell = recorded[-lag]
        lengths.append(ell)
        starts = torch.cat([torch.zeros(1), (ell + 1).cumsum(0)]).to(torch.int32)
        every_row = torch.stack([target_of(token) for token in before], 1)
        ragged = every_row[torch.arange(1 + K) <= ell[:, None]]
        verdict = new_verdict(trials, K)
        verify(
            ragged,
            starts,
            torch.stack(drafts, 1),
            ell,
            sampling.of_rows(every, done),
            torch.stack(given, 1) if drawn else None,
            None,
            False,
            verdict,
        )
        for i in range(1 + K):
            spot = done + i
            mask = (verdict.sampled_ids[:, i] >= 0) & (spot < TOKENS + K)
            tokens[every[mask], spot[mask]] = verdict.sampled_ids[mask, i]
        done = (done + verdict.num_bonus + 1).clamp(max=TOKENS + K - 1)
    return tokens[:, :TOKENS], torch.cat(lengths)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_lengths_do_not_change_a_text_with_greedy_drafts(heat: float) -> None:
    expected, _ = generate(heat, drawn=False, lag=None, trials=300)
    assert int(expected.min()) >= 0
    seen: set[int] = set()
    for lag in (1, 2):
        for threshold in (0.3, 0.6, 0.8, 0.9, 0.97, 0.99):
            found, lengths = generate(heat, drawn=False, lag=lag, threshold=threshold, trials=300)
            seen.update(lengths.tolist())
            assert torch.equal(found, expected)
    assert seen == {0, 1, 2}


def joint() -> Any:
    """The target's own distribution of the first tokens, at temperature 1."""
    one, many = settings(1, temperature=1.0), settings(VOCABULARY, temperature=1.0)
    found = probabilities(target_of(torch.tensor([-1])), one)[0]
    step = probabilities(target_of(torch.arange(VOCABULARY)), many)
    for _ in range(TOKENS - 1):
        found = (found.view(-1, VOCABULARY, 1) * step).reshape(-1)
    return found.numpy().astype(np.float64)


def fit(tokens: Tensor) -> float:
    number = torch.zeros(len(tokens), dtype=torch.int64)
    for i in range(TOKENS):
        number = number * VOCABULARY + tokens[:, i]
    counts = np.bincount(number.numpy(), minlength=VOCABULARY**TOKENS)
    goal = joint()
    return float(stats.chisquare(counts, goal / goal.sum() * len(tokens)).pvalue)


def test_lengths_do_not_change_the_distribution_with_drawn_drafts() -> None:
    found, lengths = generate(1.0, drawn=True, lag=LAG)
    assert set(lengths.tolist()) == {0, 1, 2}
    assert fit(found) > 1e-3


def test_lengths_from_the_very_drafts_they_cut_would() -> None:
    """The control, and the reason for the lag."""
    found, _ = generate(1.0, drawn=True, lag=1)
    assert fit(found) < 1e-6
