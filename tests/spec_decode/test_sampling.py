"""Temperature, top-k and top-p against a plain model, and draws against probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampler_cases import settings
from scipy import stats
from torch import Tensor

from atom.spec_decode.random_numbers import Purpose
from atom.spec_decode.sampling import (
    COLDEST,
    SamplingTensors,
    draw,
    draw_drafts,
    greedy,
    log_weights,
    probabilities,
    thresholds_reference,
    top_logprobs,
)


def plainly(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution of one row, by sorting a list. Equal logits stand or fall together."""
    if temperature == 0:
        best = max(range(len(logits)), key=logits.__getitem__)
        return [float(i == best) for i in range(len(logits))]
    falling = sorted(logits, reverse=True)
    floor = falling[min(top_k, len(logits)) - 1] if top_k else -math.inf
    weight = {x: math.exp((x - falling[0]) / temperature) for x in set(logits)}
    kept = [x for x in falling if x >= floor]
    if top_p < 1:
        goal, share, floor = top_p * sum(weight[x] for x in kept), 0.0, kept[0]
        for x in kept:
            floor = x
            share += weight[x]
            if share >= goal:
                break
    total = sum(weight[x] for x in logits if x >= floor)
    return [weight[x] / total if x >= floor else 0.0 for x in logits]


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 2.3]),
    st.integers(0, 14),
    # a share that a sum of such weights can meet exactly would be a matter of rounding
    st.sampled_from([0.0, 0.0137, 0.31, 0.5003, 0.777, 0.9501, 1.0]),
)
def test_filters_are_those_of_the_plain_model(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    values = [x / 8 for x in logits]
    sampling = settings(1, temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(torch.tensor([values]), sampling)[0]
    expected = plainly(values, temperature, top_k, top_p)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30, unique=True),
    st.integers(1, 40),
    st.floats(0, 1, width=32),
)
def test_filters_keep_at_least_one_and_at_most_k(
    logits: list[float], top_k: int, top_p: float
) -> None:
    row = torch.tensor([logits])
    heat = torch.ones(1)
    count, share = torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p])
    kept = row >= thresholds_reference(row, heat, count, share)[:, None]
    assert 1 <= int(kept.sum()) <= top_k
    assert bool(kept[0, row.argmax()])
    looser = row >= thresholds_reference(row, heat, count, share.clamp(min=0.9))[:, None]
    assert bool((looser | ~kept).all())


def test_rows_are_filtered_each_by_its_own_settings() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    heat, count, share = [0.0, 0.5, 1.0, 1.5, 1.0], [0, 3, 0, 7, 0], [0.5, 1.0, 0.3003, 0.8003, 1.0]
    plain = settings(5)
    sampling = SamplingTensors(
        torch.tensor(heat),
        torch.tensor(count, dtype=torch.int32),
        torch.tensor(share),
        plain.seed,
        plain.positions,
    )
    found = probabilities(logits, sampling)
    for row in range(5):
        expected = plainly(logits[row].tolist(), heat[row], count[row], share[row])
        assert found[row].tolist() == pytest.approx(expected, abs=1e-5)


def draws(logits: Tensor, count: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Many draws from one row, and the row's distribution."""
    one = settings(1, **how)
    many = SamplingTensors(
        one.temperature.expand(count),
        one.top_k.expand(count),
        one.top_p.expand(count),
        torch.arange(count) // 100,
        torch.arange(count) % 100,
        one.filtered,
    )
    found = draw(log_weights(logits.expand(count, -1), many), many, Purpose.TARGET)
    return found, probabilities(logits[None], one)[0]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 2.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
    ],
    ids=["plain", "cool", "top-k", "top-p"],
)
def test_draws_follow_the_distribution(how: dict[str, float]) -> None:
    logits = torch.tensor([1.0, 0.2, -0.5, 0.9, -1.4, 0.0, 0.7, -2.5])
    found, expected = draws(logits, 8000, **how)
    counts = np.bincount(found.numpy(), minlength=8)
    alive = expected.numpy() > 0
    assert counts[~alive].sum() == 0
    goal = expected.numpy()[alive].astype(np.float64)
    assert stats.chisquare(counts[alive], goal / goal.sum() * 8000).pvalue > 1e-3
    # draws that are somewhat warmer do not pass for it
    other, _ = draws(logits, 8000, **{**how, "temperature": how["temperature"] * 1.5})
    wrong = np.bincount(other.numpy(), minlength=8)
    same = stats.chisquare(wrong[alive], goal / goal.sum() * wrong[alive].sum()).pvalue
    assert same < 1e-3 or wrong[~alive].sum() > 0


def test_a_rare_entry_is_rare() -> None:
    """No rounding of the noise lets an entry of almost no weight win."""
    logits = torch.full((1 << 15,), -30.0)
    logits[5] = 0.0
    found, _ = draws(logits, 40, temperature=1.0)
    assert set(found.tolist()) == {5}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    sampling = settings(6, temperature=1.0)
    whole = draw(log_weights(logits, sampling), sampling, Purpose.TARGET)
    order = torch.tensor([4, 2, 5, 0])
    part = sampling.of_rows(order, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(draw(log_weights(logits[order], part), part, Purpose.TARGET), whole[order])
    later = sampling.of_rows(torch.arange(6), torch.ones(6, dtype=torch.int64))
    assert not torch.equal(draw(log_weights(logits, later), later, Purpose.TARGET), whole)


def test_greedy_rows_take_the_first_highest_and_no_noise() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [float("nan"), -5.0, -4.0]])
    sampling = greedy(2)
    for all_greedy in (True, False):
        weights = log_weights(logits, sampling)
        found = draw(weights, sampling, Purpose.TARGET, all_greedy=all_greedy)
        assert found.tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-44, 1e-40, 1e-38, 0.99 * COLDEST])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_next_to_0_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(3)) * 8
    sampling = settings(6, temperature=temperature, top_p=top_p)
    assert torch.equal(log_weights(logits, sampling), logits)
    found = draw(log_weights(logits, sampling), sampling, Purpose.TARGET)
    assert torch.equal(found, logits.argmax(1))
    chosen = torch.nn.functional.one_hot(found, 90).to(torch.float32)
    assert torch.equal(probabilities(logits, sampling), chosen)


def test_the_coldest_draw_is_still_one() -> None:
    logits = torch.tensor([-40.0, 30.0, 29.99, 30.0])
    found, expected = draws(logits, 400, temperature=COLDEST)
    assert set(found.tolist()) == {1, 3}
    assert expected.tolist() == [0, 0.5, 0, 0.5]


def test_what_is_not_a_number_is_never_drawn() -> None:
    logits = torch.zeros(4)
    logits[2] = float("nan")
    found, expected = draws(logits, 500, temperature=1.0)
    assert set(found.tolist()) == {0, 1, 3}
    assert expected[2] == 0


def test_drafts_come_from_their_own_noise() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)).expand(400, -1)
    one = settings(400, temperature=1.5)
    drafts, q = draw_drafts(logits, one, 0)
    target = draw(log_weights(logits, one), one, Purpose.TARGET)
    assert torch.allclose(q, probabilities(logits, one))
    # with shared noise all would agree; independent ones agree as often as chance has it
    chance = float((q[0] ** 2).sum())
    agree = int((drafts == target).sum())
    assert stats.binomtest(agree, 400, chance).pvalue > 1e-3


def test_top_logprobs() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(6))
    values, ids = top_logprobs(logits, 5)
    whole = torch.log_softmax(logits, 1)
    assert torch.allclose(values, whole.sort(1, descending=True).values[:, :5], atol=1e-6)
    assert torch.allclose(whole.gather(1, ids), values, atol=1e-6)
    assert top_logprobs(logits, 99)[0].shape == (3, 30)
