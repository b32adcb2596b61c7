"""What a load measures: a row a request, and the figures of the field from such rows.

Definitions are those of the AgentX harness and of InferenceX, so that figures of any of our clients
may stand beside theirs. Figures are for the whole server: whoever wants them per GPU divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from atom.errors import BadInput

Phase = Literal["warmup", "profiling"]
Outcome = Literal["ok", "error", "refused", "cancelled"]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, however it ended.

    Attributes:
        session: id of its session, and the pass over the sessions if it is not the first.
        turn: its place in the session, from 0.
        phase: rows of the warm-up do not count.
        outcome: ``ok``; ``refused`` (the server said no), ``error`` (anything else went wrong) or
            ``cancelled`` (the load ended before the answer did).
        error: what went wrong, without addresses or keys; empty when nothing did.
        prompt_tokens: as the server counted them, else as they were sent.
        cached_tokens: prompt tokens that a cache had; ``None`` when the server does not say.
        output_tokens: tokens generated.
        started: when the request was sent, in seconds of ``time.monotonic``.
        first_token: when its first token arrived; ``None`` if none did.
        ended: when its last token arrived, or its end was known.
    """

    session: str
    turn: int
    phase: Phase
    outcome: Outcome
    error: str
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    started: float
    first_token: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Figures of a load, over the requests of its profiling window.

    Attributes:
        requests: requests that were answered.
        errors: requests that ended with an error or a refusal.
        effective_total_throughput: tokens/s. While a request waits for its first token it counts
            with prompt tokens / that time, afterwards with (output tokens - 1) / the rest; the sum
            over requests, averaged over the window by time. Cached tokens count whole.
        total_throughput: tokens/s, prompt and output tokens of the requests answered / (last end -
            first start).
        output_throughput: tokens/s, the same of output tokens alone.
        ttft_mean_seconds: from sending a request to its first token; percentiles are over requests.
        itl_mean_seconds: (end - first token) / (output tokens - 1) of a request with at least 2.
        tokens_per_request: prompt and output tokens, in the mean.
        cached_share: cached share of the prompt tokens of requests that report it, else ``None``.
        window_seconds: length of the window.
    """

    requests: int
    errors: int
    effective_total_throughput: float
    total_throughput: float
    output_throughput: float
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    itl_mean_seconds: float
    itl_p50_seconds: float
    itl_p90_seconds: float
    itl_p99_seconds: float
    tokens_per_request: float
    cached_share: float | None
    window_seconds: float


def summarise(rows: Sequence[RequestRow], window: tuple[float, float]) -> LoadSummary:
    """Figures of the rows of the profiling phase.

    Args:
        rows: of any phase and outcome, in any order.
        window: start and end of the profiling window, in seconds of the rows' clock.

    Returns:
        The figures; those that no row gives are NaN, throughputs 0.

    Raises:
        BadInput: the window is empty.
    """
    start, end = window
    if not end > start:
        raise BadInput(f"window: expected an end after the start, got {start:g} to {end:g}")
    counted = [row for row in rows if row.phase == "profiling"]
    valid = [row for row in counted if row.outcome == "ok" and row.first_token is not None]
    effective = sum(_tokens_within(row, start, end) for row in valid) / (end - start)
    outputs = sum(row.output_tokens for row in valid)
    tokens = outputs + sum(row.prompt_tokens for row in valid)
    span = max(row.ended for row in valid) - min(row.started for row in valid) if valid else 0.0
    ttft = [row.first_token - row.started for row in valid if row.first_token is not None]
    itl = [
        (row.ended - row.first_token) / (row.output_tokens - 1)
        for row in valid
        if row.first_token is not None and row.output_tokens > 1
    ]
    reported = [row for row in valid if row.cached_tokens is not None]
    prompts = sum(row.prompt_tokens for row in reported)
    cached = sum(row.cached_tokens or 0 for row in reported)
    return LoadSummary(
        requests=len(valid),
        errors=sum(row.outcome in ("error", "refused") for row in counted),
        effective_total_throughput=effective,
        total_throughput=tokens / span if span > 0 else 0.0,
        output_throughput=outputs / span if span > 0 else 0.0,
        ttft_mean_seconds=_mean(ttft),
        ttft_p50_seconds=_percentile(ttft, 50),
        ttft_p90_seconds=_percentile(ttft, 90),
        ttft_p99_seconds=_percentile(ttft, 99),
        itl_mean_seconds=_mean(itl),
        itl_p50_seconds=_percentile(itl, 50),
        itl_p90_seconds=_percentile(itl, 90),
        itl_p99_seconds=_percentile(itl, 99),
        tokens_per_request=tokens / len(valid) if valid else math.nan,
        cached_share=cached / prompts if prompts else None,
        window_seconds=end - start,
    )


def _tokens_within(row: RequestRow, start: float, end: float) -> float:
    """Tokens of a request that fall into the window when each phase spreads its own evenly."""
    assert row.first_token is not None
    prefill = _share(row.started, row.first_token, start, end) * row.prompt_tokens
    decode = _share(row.first_token, row.ended, start, end) * max(row.output_tokens - 1, 0)
    return prefill + decode


def _share(begin: float, finish: float, start: float, end: float) -> float:
    if finish <= begin:
        return 0.0
    return max(0.0, min(finish, end) - max(begin, start)) / (finish - begin)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else math.nan
