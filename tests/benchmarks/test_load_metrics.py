"""Figures of a load, against examples worked out by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.benchmarks.load_metrics import LoadSummary, RequestRow, summarise
from atom.errors import BadInput

#: waits 2 s for 100 prompt tokens, then 4 more tokens in 4 s
_ONE = RequestRow("a", 0, "profiling", "ok", "", 100, 30, 5, 10.0, 12.0, 16.0)
#: waits 4 s for 80 prompt tokens from 2 s before the window on, then 10 tokens in 20 s
_TWO = RequestRow("b", 0, "profiling", "ok", "", 80, None, 11, 8.0, 12.0, 32.0)


def test_figures_of_two_requests_by_hand() -> None:
    found = summarise([_ONE, _TWO], (10.0, 20.0))
    # in the window: all of the first; of the second half of its prompt and 8 of 20 s of decoding
    assert found.effective_total_throughput == pytest.approx((100 + 4 + 40 + 4) / 10)
    # from the first start to the last end, whatever the window
    assert found.total_throughput == pytest.approx((105 + 91) / 24)
    assert found.output_throughput == pytest.approx(16 / 24)
    assert found.ttft_mean_seconds == pytest.approx(3.0)
    assert found.ttft_p50_seconds == pytest.approx(3.0)
    assert found.ttft_p90_seconds == pytest.approx(3.8)
    assert found.ttft_p99_seconds == pytest.approx(3.98)
    # 4 s over 4 tokens, 20 s over 10
    assert found.itl_mean_seconds == pytest.approx(1.5)
    assert found.itl_p50_seconds == pytest.approx(1.5)
    assert found.itl_p90_seconds == pytest.approx(1.9)
    assert found.itl_p99_seconds == pytest.approx(1.99)
    assert found.tokens_per_request == pytest.approx(98.0)
    # of the one request that tells
    assert found.cached_share == pytest.approx(0.3)
    assert (found.requests, found.errors, found.window_seconds) == (2, 0, 10.0)


def test_a_request_within_the_window_counts_with_all_its_tokens() -> None:
    found = summarise([_ONE], (9.0, 19.0))
    assert found.effective_total_throughput == pytest.approx((100 + 5 - 1) / 10)


def test_a_single_token_has_no_time_between_tokens() -> None:
    found = summarise([replace(_ONE, output_tokens=1, ended=12.0)], (10.0, 20.0))
    assert math.isnan(found.itl_mean_seconds)
    assert found.effective_total_throughput == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("change", "requests", "errors"),
    [
        ({"phase": "warmup"}, 1, 0),
        ({"outcome": "cancelled"}, 1, 0),
        ({"outcome": "error", "error": "no end"}, 1, 1),
        ({"outcome": "refused", "error": "HTTP 429"}, 1, 1),
        ({"outcome": "error", "phase": "warmup"}, 1, 0),
        ({}, 2, 0),
    ],
)
def test_only_answers_within_the_profiling_phase_count(
    change: dict[str, object], requests: int, errors: int
) -> None:
    rows = [_ONE, replace(_TWO, **change)]  # type: ignore[arg-type]
    found = summarise(rows, (10.0, 20.0))
    assert (found.requests, found.errors) == (requests, errors)
    alone = summarise([_ONE], (10.0, 20.0))
    assert (found.total_throughput == alone.total_throughput) is (requests == 1)


def test_without_an_answer_rates_are_zero_and_times_unknown() -> None:
    found = summarise([replace(_ONE, outcome="error", first_token=None)], (0.0, 1.0))
    assert (found.requests, found.errors, found.total_throughput) == (0, 1, 0.0)
    assert found.effective_total_throughput == 0.0
    assert math.isnan(found.ttft_p99_seconds)
    assert found.cached_share is None


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(BadInput, match="window"):
        summarise([_ONE], (5.0, 5.0))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5000),
            st.integers(1, 300),
            st.floats(0, 50),
            st.floats(0.01, 20),
            st.floats(0.01, 20),
        ),
        min_size=1,
        max_size=8,
    ),
    st.floats(1, 40),
)
def test_windows_side_by_side_add_up_to_all_tokens(
    requests: list[tuple[int, int, float, float, float]], cut: float
) -> None:
    rows = [
        RequestRow("s", i, "profiling", "ok", "", prompt, 0, output, at, at + wait, at + wait + run)
        for i, (prompt, output, at, wait, run) in enumerate(requests)
    ]
    left, right = summarise(rows, (-1.0, cut)), summarise(rows, (cut, 100.0))
    both = sum(s.effective_total_throughput * s.window_seconds for s in (left, right))
    assert both == pytest.approx(sum(prompt + output - 1 for prompt, output, *_ in requests))


def test_every_figure_says_what_it_is() -> None:
    about = LoadSummary.__doc__ or ""
    percentiles = ("_p50_", "_p90_", "_p99_")
    names = [f.name for f in fields(LoadSummary) if not any(p in f.name for p in percentiles)]
    assert not [name for name in names if f"{name}:" not in about]
