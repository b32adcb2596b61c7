"""Requests: what is refused in their parameters, and how sampled ids end them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.model_engine.sequence import FinishReason, SamplingParams, Sequence, token_array


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: expected 1 to"),
        ({"max_tokens": True}, "max_tokens: expected a whole number, got True"),
        ({"max_tokens": 2.0}, "max_tokens: expected a whole number, got 2.0"),
        ({"temperature": -0.1}, "temperature: expected 0 to 100, got -0.1"),
        ({"temperature": float("nan")}, "temperature: expected 0 to 100, got nan"),
        ({"temperature": "warm"}, "temperature: expected a number, got 'warm'"),
        ({"top_k": -2}, "top_k: expected -1 to"),
        ({"top_p": 0}, "top_p: expected more than 0"),
        ({"top_p": 1.01}, "top_p: expected 0 to 1"),
        ({"seed": 2**63}, "seed: expected"),
        ({"stop_token_ids": 5}, "stop_token_ids: expected a list"),
        ({"stop_token_ids": "12"}, "stop_token_ids: expected a list"),
        ({"stop_token_ids": (1, -1)}, r"stop_token_ids\[1\]: expected 0 to"),
        ({"stop_token_ids": range(1025)}, "1024 or fewer, got 1025"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false"),
        ({"logprobs": 21}, "logprobs: expected 0 to 20"),
        ({"logprobs": "all"}, "logprobs: expected a whole number"),
    ],
)
def test_a_bad_sampling_parameter_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        SamplingParams(**values)


def test_good_sampling_parameters() -> None:
    params = SamplingParams(stop_token_ids=[3, 4], top_k=-1, max_tokens=None)  # type: ignore[arg-type]
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(AttributeError):
        params.top_k = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("logprobs", "wanted", "top"), [(False, False, 0), (True, True, 0), (0, True, 0), (5, True, 5)]
)
def test_logprobs_are_a_flag_or_a_number(logprobs: bool | int, wanted: bool, top: int) -> None:
    params = SamplingParams(logprobs=logprobs)
    assert (params.wants_logprobs, params.top_logprobs) == (wanted, top)


@pytest.mark.parametrize("ids", [[], "text", [1.5], [2**63], [4, -1], [None]])
def test_a_prompt_that_is_no_token_ids_is_refused(ids: Any) -> None:
    with pytest.raises(BadInput, match="prompt"):
        Sequence(0, ids)


def test_a_prompt_array_is_read_without_a_copy() -> None:
    ids = array("q", [5, 6, 7])
    seq = Sequence(1, ids)
    assert seq.token_ids is ids
    assert np.frombuffer(seq.token_ids, dtype=np.int64).tolist() == [5, 6, 7]
    assert seq.prompt_token_ids == [5, 6, 7]
    assert token_array(np.array([1, 2])).tolist() == [1, 2]


@given(
    ids=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=12),
    stops=st.sets(st.integers(0, 9), max_size=2),
    eos=st.sets(st.integers(0, 9), max_size=2),
    ignore=st.booleans(),
    most=st.integers(1, 20),
)
def test_output_ends_at_the_first_reason(
    ids: list[list[int]], stops: set[int], eos: set[int], ignore: bool, most: int
) -> None:
    seq = Sequence(0, [1], SamplingParams(stop_token_ids=tuple(stops), ignore_eos=ignore))  # type: ignore[arg-type]
    seq.max_total_tokens = 1 + most
    reason = None
    for step in ids:
        reason = seq.append([*step, -1, 7], frozenset(eos))
        if reason:
            break
    ends = stops | (set() if ignore else eos)
    flat = [token for step in ids for token in step]
    end = next((place for place, token in enumerate(flat) if token in ends), len(flat))
    expected = flat[: min(end + 1, most)]
    assert seq.output_token_ids == expected
    assert seq.num_output_tokens == len(expected)
    if end < min(most, len(flat)):
        assert reason is FinishReason.STOP
    else:
        assert reason is (FinishReason.LENGTH if len(flat) >= most else None)
