"""The clients measure the same: in process, over HTTP, and the AgentX harness."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from fake_engine import MODEL, FakeEngine
from serving import Running, serve

from atom.benchmarks.agentic_sessions import Session, generate_sessions
from atom.benchmarks.load_client import (
    EngineClient,
    HttpClient,
    LoadResult,
    LoadSettings,
    note_output,
    run_load,
)
from atom.benchmarks.load_exchange import Exchange
from atom.benchmarks.load_metrics import LoadSummary, RequestRow, summarise
from atom.entrypoints.async_engine import AsyncEngine, EngineStream
from atom.entrypoints.loading import load
from atom.entrypoints.tokenizer import ByteTokenizer
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams

#: sessions that fit the fake engine and the tiny model
_SESSIONS = generate_sessions(
    8, 3, block_tokens=8, max_context_tokens=400, first_input_median=1000, resumed_share=0.0,
    growth_median=160, output_median=40, output_least=80, output_sigma=0.3, think_median=0.01,
    away_share=0.0,
).sessions  # fmt: skip
_SETTINGS = LoadSettings(concurrency=2, duration_seconds=0.8, think_cap_seconds=0.02, seed=4)
#: of any of them: 80 at the record's scale, and more
_FEWEST_TOKENS = 10
#: most that may pass between the two ends of a connection on this machine, for the middle request
_TRANSPORT_SECONDS = 0.1


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

    def rows(self, result: LoadResult) -> list[RequestRow]:
        """The same requests as the client's, by what was seen at the engine."""
        assert len(result.rows) == len(self.exchanges)
        return [self._as_seen(row) for row in result.rows]

    def _as_seen(self, row: RequestRow) -> RequestRow:
        # a request starts at the engine after it was sent and before it is answered
        sizes = (row.prompt_tokens, row.output_tokens)
        until = row.first_token or row.started
        (one,) = (
            e
            for e in self.exchanges
            if row.started <= e.started <= until
            and (len(e.prompt_token_ids), e.output_tokens) == sizes
        )
        assert one.ended is not None
        assert one.first_token is not None
        return replace(
            row,
            prompt_tokens=one.prompt_tokens or 0,
            cached_tokens=one.cached_tokens,
            output_tokens=one.generated,
            started=one.started,
            first_token=one.first_token,
            ended=one.ended,
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


def over_http(url: str, sessions: Sequence[Session], vocab_size: int) -> LoadResult:
    async def main() -> LoadResult:
        client = HttpClient(url, MODEL, vocab_size=vocab_size)
        try:
            return await run_load(client, sessions, _SETTINGS)
        finally:
            await client.close()

    return asyncio.run(main())


def in_process(engine: FakeEngine, sessions: Sequence[Session]) -> LoadResult:
    async def main() -> LoadResult:
        running = AsyncEngine(engine)
        running.start()
        try:
            return await run_load(EngineClient(running), sessions, _SETTINGS)
        finally:
            await running.stop()

    return asyncio.run(main())


def assert_same(one: LoadSummary, other: LoadSummary, delay: float) -> None:
    """Counts are equal, the throughput is within 1%, and times are, but for what transport takes.

    Args:
        one: by a client.
        other: of the same requests, seen at the engine.
        delay: longest time that anything was on its way.
    """
    assert (one.requests, one.errors) == (other.requests, other.errors)
    assert one.tokens_per_request == other.tokens_per_request
    assert one.cached_share == other.cached_share
    for field in fields(LoadSummary):
        slack = 2 * delay if field.name.startswith("ttft") else 0.0
        if field.name.startswith("itl"):
            slack = delay / (_FEWEST_TOKENS - 1)
        if field.name in ("total_throughput", "output_throughput"):
            # their span is from the first start to the last end
            slack = getattr(other, field.name) * 2 * delay / one.window_seconds
        wanted = pytest.approx(getattr(other, field.name), rel=0.01, abs=slack)
        assert getattr(one, field.name) == wanted, field.name


def test_on_a_real_model_the_client_sees_what_happens_at_the_engine() -> None:
    tiny = load(
        "preset:tiny",
        "virtual",
        {"max_num_seqs": 2, "num_kv_blocks": 256, "state_checkpoint_tokens": 64},
    )
    with serve(
        tiny.engine, tokenizer=Letters(512), vocab_size=512, logprobs=False, longest=4096
    ) as running:
        tapped = Tapped(running)
        result = over_http(running.url, _SESSIONS, 512)
    assert {row.outcome for row in result.rows} == {"ok"}
    assert result.summary.requests >= 2
    assert result.summary.cached_share
    seen = tapped.rows(result)
    late = delays(result.rows, seen)
    # nothing arrives before it was sent, and little time passes in between
    assert min(late) >= 0
    assert statistics.median(late) < _TRANSPORT_SECONDS
    assert_same(result.summary, summarise(seen, result.window), max(late))


def test_the_two_clients_count_the_same_of_every_request() -> None:
    with serve(FakeEngine(step_seconds=0.002)) as running:
        http = over_http(running.url, _SESSIONS, 256)
    direct = in_process(FakeEngine(step_seconds=0.002), _SESSIONS)

    def counts(result: LoadResult) -> dict[tuple[str, int], tuple[object, ...]]:
        return {
            (row.session, row.turn): (
                row.phase,
                row.outcome,
                row.error,
                row.prompt_tokens,
                row.cached_tokens,
                row.output_tokens,
            )
            for row in result.rows
        }

    left, right = counts(http), counts(direct)
    common = left.keys() & right.keys()
    assert len(common) > 8
    # which request is the last of a lane's warm-up depends on nothing but the settings
    assert {key: left[key] for key in common} == {key: right[key] for key in common}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: replace(row, output_tokens=row.output_tokens + 1),
        lambda row: replace(row, first_token=(row.first_token or 0) + 0.2, ended=row.ended + 0.2),
    ],
)
def test_the_comparison_can_fail(spoil: Callable[[RequestRow], RequestRow]) -> None:
    row = RequestRow("a", 0, "profiling", "ok", "", 100, 0, 50, 0.0, 0.3, 2.0)
    one, other = (summarise([r], (0.0, 3.0)) for r in (row, spoil(row)))
    assert_same(one, one, 0.01)
    with pytest.raises(AssertionError):
        assert_same(one, other, 0.01)
