"""The load's lanes: order, phases, pauses and ends; and the client of an engine in this process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from fake_engine import FakeEngine

from atom.benchmarks.agentic_sessions import Session, Turn
from atom.benchmarks.load_client import (
    EngineClient,
    LoadProgress,
    LoadResult,
    LoadSettings,
    run_load,
)
from atom.benchmarks.load_exchange import Exchange, LoadFailure, LoadRefusal
from atom.entrypoints.async_engine import AsyncEngine
from atom.errors import BadInput


def session(name: str, turns: int = 3, *, think: float = 0.0, output: int = 5) -> Session:
    blocks = [(ord(name[0]) * 100, *range(number)) for number in range(turns)]
    return Session(
        name,
        tuple(
            Turn(64 * len(one), output, one, think if i else 0.0) for i, one in enumerate(blocks)
        ),
    )


def settings(**values: object) -> LoadSettings:
    plain: dict[str, object] = {
        "concurrency": 1,
        "duration_seconds": 0.15,
        "warmup_requests_per_lane": 0,
        "start_least": 0.0,
        "start_most": 0.0,
        "shuffle": False,
    }
    return LoadSettings.parse({**plain, **values})


class Scripted:
    """Answers as a function of the request's number says; by default after 10 ms."""

    vocab_size = 256

    def __init__(self, answer: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.answer = answer or (lambda number: asyncio.sleep(0.01))
        self.sent: list[Exchange] = []
        self.live = self.most_live = 0

    async def send(self, exchange: Exchange) -> None:
        self.sent.append(exchange)
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        try:
            exchange.started = time.monotonic()
            await self.answer(len(self.sent) - 1)
            exchange.first_token = exchange.ended = time.monotonic()
            exchange.generated = exchange.output_tokens
        finally:
            self.live -= 1

    async def close(self) -> None:
        pass


def load(client: Scripted, sessions: list[Session], **values: object) -> LoadResult:
    return asyncio.run(run_load(client, sessions, settings(**values)))


def places(result: LoadResult) -> list[tuple[str, int]]:
    return [(row.session, row.turn) for row in result.rows]


def fails(error: Exception, *, numbers: range = range(10**6)) -> Scripted:
    async def answer(number: int) -> None:
        await asyncio.sleep(0.001)
        if number in numbers:
            raise error

    return Scripted(answer)


# -- lanes
def test_a_lane_takes_its_next_session_when_its_own_has_ended() -> None:
    client = Scripted()
    result = load(client, [session("a", 2), session("b", 2)])
    expected = [(name, turn) for name in ("a", "b", "a#2", "b#2", "a#3") for turn in (0, 1)]
    assert places(result)[:6] == expected[:6]
    ids = [exchange.prompt_token_ids for exchange in client.sent]
    assert ids[1][:64] == ids[0]
    # the same session again has nothing in common with itself
    assert ids[4][:16] != ids[0][:16]
    assert result.ended == "complete"


def test_as_many_sessions_are_live_as_there_are_lanes() -> None:
    client = Scripted()
    result = load(client, [session(name) for name in "abcdef"], concurrency=3)
    assert client.most_live == 3
    assert {name for name, _ in places(result)[:3]} == {"a", "b", "c"}


def test_a_seed_orders_the_sessions_and_the_order_of_the_traces_can_stay() -> None:
    sessions = [session(name, 1) for name in "abcdefgh"]

    def order(**values: object) -> str:
        return "".join(name for name, _ in places(load(Scripted(), sessions, **values))[:8])

    assert order() == "abcdefgh"
    assert order(shuffle=True, seed=1) == order(shuffle=True, seed=1) != "abcdefgh"
    assert order(shuffle=True, seed=2) != order(shuffle=True, seed=1)


def test_lanes_start_where_they_are_told_and_only_their_first_session_does() -> None:
    result = load(Scripted(), [session("a", 4), session("b", 4)], start_least=0.5, start_most=0.5)
    assert places(result)[:4] == [("a", 2), ("a", 3), ("b", 0), ("b", 1)]
    assert places(load(Scripted(), [session("a", 4)], start_least=1.0, start_most=1.0))[0][1] == 3


def test_the_window_starts_when_every_lane_has_sent_its_warm_up() -> None:
    async def answer(number: int) -> None:
        # one lane is slow
        await asyncio.sleep(0.1 if number == 0 else 0.01)

    result = load(
        Scripted(answer), [session(n) for n in "abc"], concurrency=3, warmup_requests_per_lane=2
    )
    warm = [row for row in result.rows if row.phase == "warmup"]
    assert sorted((row.session, row.turn) for row in warm) == [
        (name, turn) for name in "abc" for turn in (0, 1)
    ]
    assert max(row.ended for row in warm) <= result.window[0]
    assert min(row.started for row in result.rows if row.phase == "profiling") >= result.window[0]


def test_the_window_ends_with_the_last_request_sent_within_it() -> None:
    result = load(Scripted(lambda _: asyncio.sleep(0.1)), [session("a", 9)])
    assert result.window[1] - result.window[0] == pytest.approx(0.2, abs=0.05)
    assert result.window[1] >= max(row.ended for row in result.rows)
    assert result.summary.requests == len(result.rows) == 2


def test_pauses_are_those_of_the_session_up_to_the_cap() -> None:
    starts = [
        [row.started for row in load(Scripted(), [session("a", 9, think=t)], **v).rows]
        for t, v in ((0.05, {}), (9.0, {"think_cap_seconds": 0.05}))
    ]
    for one in starts:
        assert one[1] - one[0] >= 0.06
    # nobody waits out a pause when the window is over
    began = time.monotonic()
    load(Scripted(), [session("a", 9, think=9.0)], think_cap_seconds=9.0)
    assert time.monotonic() - began < 2


def test_output_is_the_sessions_up_to_the_cap_and_the_salt_reaches_the_prompts() -> None:
    plain, capped = Scripted(), Scripted()
    load(plain, [session("a", output=7)])
    load(capped, [session("a", output=7)], output_tokens=3, salt="another")
    assert {exchange.output_tokens for exchange in plain.sent} == {7}
    assert {exchange.output_tokens for exchange in capped.sent} == {3}
    assert plain.sent[0].prompt_token_ids[:16] != capped.sent[0].prompt_token_ids[:16]


# -- what goes wrong
@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        (LoadFailure("the stream ended"), "error", "the stream ended"),
        (LoadRefusal("HTTP 429"), "refused", "HTTP 429"),
        # a defect's own text may name anything
        (RuntimeError("at http://user:key@host"), "error", "the client failed (RuntimeError)"),
    ],
)
def test_a_failed_request_is_a_row_and_the_others_go_on(
    error: Exception, outcome: str, said: str
) -> None:
    result = load(fails(error, numbers=range(1, 2)), [session("a", 9)], duration_seconds=0.4)
    assert [row.outcome for row in result.rows[:3]] == ["ok", outcome, "ok"]
    assert result.rows[1].error == said
    assert result.rows[1].ended >= result.rows[1].started
    assert result.summary.errors == 1
    assert result.ended == "complete"


def test_a_server_that_answers_nothing_ends_the_load_early() -> None:
    began = time.monotonic()
    result = load(
        fails(LoadFailure("gone")),
        [session("a")],
        concurrency=4,
        duration_seconds=60,
        give_up_after=6,
    )
    assert time.monotonic() - began < 5
    assert (result.ended, result.summary.requests) == ("gave up", 0)
    # those on their way fail, too
    assert 6 <= result.summary.errors < 6 + 4


def test_the_same_during_the_warm_up() -> None:
    result = load(
        fails(LoadFailure("gone")),
        [session("a", 99)],
        concurrency=2,
        duration_seconds=60,
        warmup_requests_per_lane=50,
        give_up_after=3,
    )
    assert (result.ended, result.summary.requests) == ("gave up", 0)


def test_what_has_not_ended_in_time_is_cancelled_and_kept() -> None:
    async def answer(number: int) -> None:
        await asyncio.sleep(0.01 if number < 3 else 60)

    result = load(Scripted(answer), [session("a", 9)], grace_seconds=0.05)
    assert [row.outcome for row in result.rows] == ["ok", "ok", "ok", "cancelled"]
    assert result.summary.requests == 3
    assert result.summary.errors == 0


def test_an_interrupt_keeps_the_rows() -> None:
    async def main() -> LoadResult:
        load = run_load(Scripted(), [session("a", 9)], settings(duration_seconds=60))
        task = asyncio.create_task(load)
        await asyncio.sleep(0.1)
        task.cancel()
        return await task

    result = asyncio.run(main())
    assert result.ended == "interrupted"
    assert result.summary.requests >= 2
    assert result.summary.window_seconds < 5


def test_a_defect_of_the_caller_is_not_swallowed() -> None:
    def progress(_: LoadProgress) -> None:
        raise ZeroDivisionError

    began = time.monotonic()
    for warmup in (0, 3):
        chosen = settings(duration_seconds=60, concurrency=2, warmup_requests_per_lane=warmup)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run_load(Scripted(), [session("a")], chosen, on_progress=progress))
    assert time.monotonic() - began < 10


def test_progress_counts_each_phase() -> None:
    told: list[LoadProgress] = []
    asyncio.run(
        run_load(
            fails(LoadFailure("no"), numbers=range(2, 3)),
            [session("a", 9)],
            settings(warmup_requests_per_lane=2, duration_seconds=0.4),
            on_progress=told.append,
        )
    )
    assert [(one.phase, one.requests, one.errors) for one in told[:4]] == [
        ("warmup", 1, 0),
        ("warmup", 2, 0),
        ("profiling", 1, 1),
        ("profiling", 2, 1),
    ]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"duration_seconds": 0}, "duration_seconds"),
        ({"start_least": 0.9, "start_most": 0.1}, "start_least 0.9 is more than start_most"),
        ({"concurency": 1}, "did you mean 'concurrency'"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        settings(**values)


def test_a_load_needs_sessions() -> None:
    with pytest.raises(BadInput, match="sessions"):
        load(Scripted(), [])


# -- the engine of this process
def engine_load(engine: FakeEngine, prompts: list[Session], **values: object) -> LoadResult:
    async def main() -> LoadResult:
        running = AsyncEngine(engine)
        running.start()
        try:
            return await run_load(EngineClient(running), prompts, settings(**values))
        finally:
            await running.stop()

    return asyncio.run(main())


def test_the_engines_own_counts_are_taken() -> None:
    result = engine_load(FakeEngine(step_seconds=0.01), [session("a", output=9)])
    row = result.rows[1]
    assert (row.outcome, row.prompt_tokens, row.cached_tokens, row.output_tokens) == (
        "ok",
        128,
        64,
        9,
    )
    assert row.first_token is not None
    assert row.started + 0.01 <= row.first_token < row.ended
    assert 0 < result.client_cpu_share < 1


def test_refusals_and_failures_of_the_engine_are_outcomes() -> None:
    engine = FakeEngine(step_seconds=0.002, most_waiting=1)
    result = engine_load(engine, [session(n) for n in "abcd"], concurrency=2)
    refused = [row for row in result.rows if row.outcome == "refused"]
    assert refused
    assert refused[0].error == "1 requests wait already"
    assert result.summary.requests > 0

    engine = FakeEngine(step_seconds=0.002)
    engine.fail_next = "a bad row"
    result = engine_load(engine, [session("a", 9)], duration_seconds=0.5)
    assert [(row.outcome, row.error) for row in result.rows[:2]] == [
        ("error", "a bad row"),
        ("ok", ""),
    ]


def test_a_request_that_takes_too_long_is_an_error_and_is_aborted() -> None:
    engine = FakeEngine(step_seconds=0.02)
    result = engine_load(engine, [session("a", output=900)], request_seconds=0.1)
    assert result.rows[0].error == "no end of the answer within 0.1 s"
    assert result.rows[0].output_tokens > 0
    assert engine.aborted


def test_an_engine_that_dies_leaves_rows() -> None:
    engine = FakeEngine(step_seconds=0.005)
    steps = iter(range(10**6))
    died = threading.Event()

    def before() -> None:
        if next(steps) == 5:
            died.set()
            raise RuntimeError("device lost")

    engine.before_step = before
    result = engine_load(engine, [session("a")], duration_seconds=30, give_up_after=2)
    assert died.is_set()
    assert result.ended == "gave up"
    assert [row.outcome for row in result.rows[-2:]] == ["error", "error"]
    assert "device lost" in result.rows[-1].error
