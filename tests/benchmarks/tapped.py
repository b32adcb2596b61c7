"""What a client in the server's own process would see of the requests that others send to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from serving import Running

from atom.benchmarks.load_client import note_output
from atom.benchmarks.load_exchange import Exchange
from atom.benchmarks.load_metrics import LoadSummary, RequestRow
from atom.entrypoints.async_engine import EngineStream
from atom.entrypoints.tokenizer import ByteTokenizer
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams


class Letters(ByteTokenizer):
    """Every token is a letter, so that no token's text waits for the next one's."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


class Tapped:
    """Notes of each request of a server what a client in the server's process would see."""

    def __init__(self, running: Running) -> None:
        self.exchanges: list[Exchange] = []
        engine = running.server.engine
        submit = engine.submit

        async def tapped(prompt_token_ids: Sequence[int], params: SamplingParams) -> EngineStream:
            now = time.monotonic()
            exchange = Exchange(prompt_token_ids, params.max_tokens or 0, 0.0, started=now)
            self.exchanges.append(exchange)
            stream = await submit(prompt_token_ids, params)
            following = stream.next

            async def next_output() -> RequestOutput:
                output = await following()
                note_output(exchange, output)
                return output

            stream.next = next_output  # type: ignore[method-assign]
            return stream

        engine.submit = tapped  # type: ignore[method-assign]

    def rows(self, rows: Sequence[RequestRow], shift: float = 0.0) -> list[RequestRow]:
        """The same requests as a client's, by what was seen at the engine.

        Args:
            rows: every request that was sent.
            shift: what to add to a row's times to have them on the clock of this process.
        """
        assert len(rows) == len(self.exchanges)
        left = sorted(self.exchanges, key=lambda one: one.started)
        found = {}
        for place, row in sorted(enumerate(rows), key=lambda pair: pair[1].started):
            # in the order in which they were sent, told apart by their sizes
            sizes = (row.prompt_tokens, row.output_tokens)
            one = next(e for e in left if (len(e.prompt_token_ids), e.output_tokens) == sizes)
            left.remove(one)
            found[place] = _as_seen(row, one, shift)
        return [found[place] for place in range(len(rows))]


def _as_seen(row: RequestRow, one: Exchange, shift: float) -> RequestRow:
    assert one.ended is not None
    assert one.first_token is not None
    return replace(
        row,
        prompt_tokens=one.prompt_tokens or 0,
        cached_tokens=one.cached_tokens,
        output_tokens=one.generated,
        started=one.started - shift,
        first_token=one.first_token - shift,
        ended=one.ended - shift,
    )


def delays(rows: Sequence[RequestRow], seen: Sequence[RequestRow]) -> list[float]:
    """Seconds that each request, its first and its last token were on their way."""
    found = []
    for row, one in zip(rows, seen, strict=True):
        assert row.first_token is not None
        assert one.first_token is not None
        found += [one.started - row.started, row.first_token - one.first_token]
        found.append(row.ended - one.ended)
    return found


def assert_same(one: LoadSummary, other: LoadSummary, delay: float, *, fewest_tokens: int) -> None:
    """Counts are equal, the throughput is within 1%, and times are, but for what transport takes.

    Args:
        one: by a client.
        other: of the same requests, seen at the engine.
        delay: longest time that anything was on its way.
        fewest_tokens: output of the shortest answer.
    """
    assert (one.requests, one.errors) == (other.requests, other.errors)
    assert one.tokens_per_request == other.tokens_per_request
    assert one.cached_share == other.cached_share
    for field in fields(LoadSummary):
        slack = 2 * delay if field.name.startswith("ttft") else 0.0
        if field.name.startswith("itl"):
            slack = delay / (fewest_tokens - 1)
        if field.name in ("total_throughput", "output_throughput"):
            # their span is from the first start to the last end
            slack = getattr(other, field.name) * 2 * delay / one.window_seconds
        wanted = pytest.approx(getattr(other, field.name), rel=0.01, abs=slack)
        assert getattr(one, field.name) == wanted, field.name
