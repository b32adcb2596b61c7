"""The two clients measure the same: in process and over HTTP."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from fake_engine import MODEL, FakeEngine
from serving import serve
from tapped import Letters, Tapped, assert_same, delays

from atom.benchmarks.agentic_sessions import Session, generate_sessions
from atom.benchmarks.load_client import (
    EngineClient,
    HttpClient,
    LoadResult,
    LoadSettings,
    run_load,
)
from atom.benchmarks.load_metrics import RequestRow, summarise
from atom.entrypoints.async_engine import AsyncEngine
from atom.entrypoints.loading import load

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
    seen = tapped.rows(result.rows)
    late = delays(result.rows, seen)
    # nothing arrives before it was sent, and little time passes in between
    assert min(late) >= 0
    assert statistics.median(late) < _TRANSPORT_SECONDS
    ours = summarise(seen, result.window)
    assert_same(result.summary, ours, max(late), fewest_tokens=_FEWEST_TOKENS)


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
    assert_same(one, one, 0.01, fewest_tokens=50)
    with pytest.raises(AssertionError):
        assert_same(one, other, 0.01, fewest_tokens=50)
