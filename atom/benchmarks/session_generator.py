"""Seeded sessions that resemble recorded ones of a coding agent, for when there are no traces.

The defaults of :class:`SessionShape` follow the medians and the spread of 63 sessions of the public
corpus callanjfox/kv-cache-tester.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from pydantic import Field

from atom.benchmarks.session_model import (
    BLOCK_TOKENS,
    Session,
    Traces,
    Turn,
    hash_of,
    within_context,
)
from atom.config import Settings
from atom.errors import BadInput


class SessionShape(Settings):
    """Shape of generated sessions. Medians and spreads are those of log-normal distributions.

    Lengths are in tokens at the record's scale, where a block has 64; ``block_tokens`` scales them.
    """

    turns_median: float = Field(18.5, ge=1, le=1000)
    """Requests of a fresh session."""

    resumed_turns_median: float = Field(10.0, ge=1, le=1000)
    """Requests of a session that goes on from an earlier conversation."""

    turns_sigma: float = Field(0.7, ge=0, le=3)
    """Spread of the requests of a session."""

    turns_least: int = Field(4, ge=1, le=10000)
    """Fewest requests of a session."""

    turns_most: int = Field(60, ge=1, le=10000)
    """Most requests of a session."""

    first_input_median: float = Field(18500.0, ge=1, le=1e6)
    """Prompt of a fresh session's first request: instructions, tools and a task."""

    first_input_sigma: float = Field(0.27, ge=0, le=3)
    """Spread of such a prompt."""

    resumed_share: float = Field(0.4, ge=0, le=1)
    """Share of sessions that go on from an earlier conversation."""

    resumed_input_median: float = Field(82000.0, ge=1, le=1e6)
    """Prompt of such a session's first request."""

    resumed_input_sigma: float = Field(0.65, ge=0, le=3)
    """Spread of such a prompt."""

    growth_least: float = Field(120.0, ge=0, le=1e6)
    """Tokens that a prompt is longer than the one before, at least."""

    growth_median: float = Field(670.0, ge=1, le=1e6)
    """Growth beyond the least."""

    growth_sigma: float = Field(1.6, ge=0, le=3)
    """Spread of the growth."""

    output_least: float = Field(70.0, ge=0, le=1e5)
    """Tokens generated, at least."""

    output_median: float = Field(180.0, ge=1, le=1e5)
    """Tokens generated beyond the least."""

    output_sigma: float = Field(1.15, ge=0, le=3)
    """Spread of the tokens generated."""

    think_median: float = Field(8.0, ge=0, le=1e5)
    """Pause in seconds before a request that follows by itself: a tool ran."""

    think_sigma: float = Field(0.6, ge=0, le=4)
    """Spread of such pauses."""

    away_share: float = Field(0.27, ge=0, le=1)
    """Share of requests before which the user had to read, or was away."""

    away_median: float = Field(60.0, ge=0, le=1e5)
    """Pause in seconds before such a request."""

    away_sigma: float = Field(1.7, ge=0, le=4)
    """Spread of such pauses."""

    rewrite_share: float = Field(0.015, ge=0, le=1)
    """Share of requests that rewrite a part of the conversation before them."""

    rewrite_kept: float = Field(0.4, ge=0, le=1)
    """Share of the prompt before it that such a request keeps, in the mean."""

    input_most: int = Field(450000, ge=64, le=2**22)
    """Longest prompt; a session ends before it."""


def generate_sessions(
    count: int,
    seed: int,
    *,
    block_tokens: int = BLOCK_TOKENS,
    max_context_tokens: int | None = None,
    **shape: Any,
) -> Traces:
    """Draw sessions that resemble the recorded ones.

    Args:
        count: sessions.
        seed: equal seeds give equal sessions; more of them continue the same list.
        block_tokens: tokens that a hash stands for; lengths scale with it.
        max_context_tokens: longest request, prompt and output together. A session ends before its
            first longer request; ``dropped`` counts the requests and sessions that are lost so.
        **shape: fields of :class:`SessionShape`.

    Raises:
        BadInput: a value is out of range, or no request is short enough.
    """
    if count < 1:
        raise BadInput(f"count: expected at least 1 session, got {count}")
    if seed < 0:
        raise BadInput(f"seed: expected 0 or more, got {seed}")
    if block_tokens < 1:
        raise BadInput(f"block_tokens: expected at least 1, got {block_tokens}")
    form = SessionShape.parse(shape, where="shape of sessions")
    dropped: Counter[str] = Counter()
    sessions = [_session(number, seed, form, block_tokens) for number in range(count)]
    source = f"generated: seed {seed}"
    kept = within_context(sessions, max_context_tokens, dropped, source)
    return Traces(kept, dict(dropped), block_tokens, source)


def _session(number: int, seed: int, form: SessionShape, block_tokens: int) -> Session:
    random = np.random.default_rng([seed, number])
    name = f"generated_{seed}_{number:04d}"
    scale = block_tokens / BLOCK_TOKENS
    resumed = random.random() < form.resumed_share
    median = form.resumed_turns_median if resumed else form.turns_median
    wished = round(_draw(random, median, form.turns_sigma))
    count = min(max(wished, form.turns_least), form.turns_most)
    length = (
        _draw(random, form.resumed_input_median, form.resumed_input_sigma)
        if resumed
        else _draw(random, form.first_input_median, form.first_input_sigma)
    )
    length = min(length, form.input_most)
    hashes: tuple[int, ...] = ()
    fresh = 0
    turns: list[Turn] = []
    for place in range(count):
        if place:
            length += form.growth_least + _draw(random, form.growth_median, form.growth_sigma)
        if length > form.input_most:
            break
        kept = len(hashes)
        if place and random.random() < form.rewrite_share:
            kept = int(kept * min(1.0, 2 * form.rewrite_kept * random.random()))
        tokens = max(1, round(length * scale))
        blocks = -(-tokens // block_tokens)
        added = max(0, blocks - kept)
        hashes = hashes[:kept] + tuple(hash_of(name, fresh + one) for one in range(added))
        fresh += added
        output = form.output_least + _draw(random, form.output_median, form.output_sigma)
        think = _think(random, form) if place else 0.0
        generated = max(1, round(output * scale))
        turns.append(Turn(tokens, generated, hashes, think, block_tokens))
    return Session(name, tuple(turns))


def _think(random: np.random.Generator, form: SessionShape) -> float:
    if random.random() < form.away_share:
        return _draw(random, form.away_median, form.away_sigma)
    return _draw(random, form.think_median, form.think_sigma)


def _draw(random: np.random.Generator, median: float, sigma: float) -> float:
    return float(median * math.exp(sigma * random.standard_normal()))
