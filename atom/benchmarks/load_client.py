"""Runs sessions as a closed load: a fixed number of lanes, each with one live session.

A lane sends the requests of its session one after the other, with pauses between, and takes the
next session when its own ends. Whatever happens to a request is an outcome in its row.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import Field

from atom.benchmarks.agentic_sessions import Session, Turn, prompt_token_ids
from atom.benchmarks.load_exchange import (
    VOCAB_SIZE,
    Exchange,
    LoadClient,
    LoadFailure,
    LoadRefusal,
    time_limit,
)
from atom.benchmarks.load_http import HttpClient
from atom.benchmarks.load_metrics import LoadSummary, Outcome, Phase, RequestRow, summarise
from atom.benchmarks.session_load import SessionLoad, endless, first_turn
from atom.entrypoints.async_engine import AsyncEngine, EngineStopped
from atom.errors import AtomError, BadInput
from atom.model_engine.admission import RequestRefused
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams

__all__ = [
    "EngineClient",
    "HttpClient",
    "LoadClient",
    "LoadProgress",
    "LoadResult",
    "LoadSettings",
    "run_load",
]

#: seconds that a lane waits after a request that failed, so that a dead server is not hammered
_AFTER_FAILURE = 0.25


class LoadSettings(SessionLoad):
    """Settings of one load."""

    shuffle: bool = True
    """Whether the sessions' order is drawn, or is that of the traces."""

    output_tokens: int | None = Field(None, ge=1, le=2**20)
    """Most tokens to generate a request; empty takes the session's."""

    salt: str = ""
    """Changes every prompt, so that a cache kept from another load has nothing of this one."""

    request_seconds: float = Field(600.0, gt=0, le=86400)
    """Longest time of one request."""

    grace_seconds: float = Field(30.0, ge=0, le=86400)
    """Patience after the window with requests that have begun in it."""

    give_up_after: int = Field(100, ge=1, le=10**6)
    """Requests without an answer in a row after which the load ends."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Where a load stands.

    Attributes:
        phase: ``warmup`` or ``profiling``.
        elapsed_seconds: since the phase began.
        requests: requests of the phase that ended.
        errors: those of them that were not answered.
    """

    phase: Phase
    elapsed_seconds: float
    requests: int
    errors: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load gave.

    Attributes:
        rows: a row a request, in the order of their ends.
        summary: figures of the profiling window.
        window: start and end of it, by ``time.monotonic``. It ends when the last request ended that
            was sent within its duration, as the harness's does. A load that ends early, ends it.
        client_cpu_seconds: processor time of the thread that ran the load, within the window.
        ended: ``complete``, ``interrupted`` or ``gave up``.
    """

    rows: tuple[RequestRow, ...]
    summary: LoadSummary
    window: tuple[float, float]
    client_cpu_seconds: float
    ended: str = "complete"

    @property
    def client_cpu_share(self) -> float:
        """Share of one processor that the client took in the window."""
        return self.client_cpu_seconds / (self.window[1] - self.window[0])


class EngineClient:
    """Sends requests to an engine of this process.

    Args:
        engine: started; it stays its owner's.
        vocab_size: ids of prompts are below it; the default fits any model.
    """

    def __init__(self, engine: AsyncEngine, *, vocab_size: int = VOCAB_SIZE) -> None:
        self.vocab_size = vocab_size
        self._engine = engine

    async def send(self, exchange: Exchange) -> None:
        """Send a request and read its answer to the end.

        Raises:
            LoadFailure: it was refused or failed.
        """
        try:
            async with time_limit(exchange):
                await self._send(exchange)
        except (RequestRefused, BadInput) as error:
            raise LoadRefusal(str(error)) from None
        except (AtomError, EngineStopped) as error:
            raise LoadFailure(str(error)) from None

    async def close(self) -> None:
        """Does nothing: the engine is not the client's."""

    async def _send(self, exchange: Exchange) -> None:
        params = SamplingParams(max_tokens=exchange.output_tokens, temperature=0.0, ignore_eos=True)
        exchange.started = time.monotonic()
        stream = await self._engine.submit(exchange.prompt_token_ids, params)
        try:
            while True:
                output = await stream.next()
                note_output(exchange, output)
                if output.finish_reason in ("error", "abort"):
                    raise LoadFailure(output.error or "the request was aborted in the engine")
                if output.finished:
                    return
        finally:
            stream.abort()


def note_output(exchange: Exchange, output: RequestOutput) -> None:
    """Enter what an output of the engine brought, as of now."""
    exchange.prompt_tokens = output.num_prompt_tokens or exchange.prompt_tokens
    exchange.cached_tokens = max(output.num_cached_tokens, exchange.cached_tokens or 0)
    if output.new_token_ids:
        exchange.ended = time.monotonic()
        exchange.first_token = exchange.first_token or exchange.ended
        exchange.generated += len(output.new_token_ids)


async def run_load(
    client: LoadClient,
    sessions: Sequence[Session],
    settings: LoadSettings,
    *,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadResult:
    """Run sessions against a server until the window is over.

    ``concurrency`` lanes start at once, each at some place of a session. When all have sent their
    warm-up requests, the window starts. A session that comes up a second time has other token ids.
    At the end of the window no request is sent any more; those on their way may end within
    ``grace_seconds``.

    Args:
        client: where the requests go; not closed here.
        sessions: at least one.
        settings: the load.
        on_progress: told of every request that ended.

    Returns:
        Rows and figures; also after an interrupt (cancellation), which ends the load early.

    Raises:
        BadInput: there are no sessions.
    """
    if not sessions:
        raise BadInput("sessions: expected at least one")
    return await _Load(client, sessions, settings, on_progress).run()


class _Load:
    def __init__(
        self,
        client: LoadClient,
        sessions: Sequence[Session],
        settings: LoadSettings,
        on_progress: Callable[[LoadProgress], None] | None,
    ) -> None:
        self.client = client
        self.settings = settings
        self.on_progress = on_progress
        self.rows: list[RequestRow] = []
        self.phase: Phase = "warmup"
        self.ended = "complete"
        self._random = random.Random(settings.seed)
        self._supply = endless(sessions, self._random if settings.shuffle else None)
        self._warming = settings.concurrency
        self._warm = asyncio.Event()
        self._over = asyncio.Event()
        self._row_failures = 0
        self._start_phase("warmup")

    async def run(self) -> LoadResult:
        if self.settings.warmup_requests_per_lane == 0:
            self._start_window()
        lanes = [asyncio.create_task(self._lane()) for _ in range(self.settings.concurrency)]
        try:
            await self._until_over(lanes)
        except asyncio.CancelledError:
            # an interrupt: what was measured so far is the result
            self.ended = "interrupted"
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        finally:
            end = time.monotonic()
            cpu = time.thread_time() - self._cpu
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        window = (self._began, max(end, self._began + 1e-9))
        return LoadResult(tuple(self.rows), summarise(self.rows, window), window, cpu, self.ended)

    async def _until_over(self, lanes: Sequence[asyncio.Task[None]]) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._warm, self._over)]
        warm, over = waits
        first = asyncio.FIRST_COMPLETED
        try:
            # a lane ends before its time only with a defect
            await asyncio.wait({warm, over, *lanes}, return_when=first)
            _raise_defect(lanes)
            left = self._began + self.settings.duration_seconds - time.monotonic()
            await asyncio.wait({over, *lanes}, timeout=left, return_when=first)
            _raise_defect(lanes)
            self._over.set()
            if self.ended == "complete":
                await asyncio.wait(lanes, timeout=self.settings.grace_seconds)
            _raise_defect(lanes)
        finally:
            for wait in waits:
                wait.cancel()

    def _start_phase(self, phase: Phase) -> None:
        self.phase = phase
        self._began = time.monotonic()
        self._cpu = time.thread_time()
        self._counted = self._errors = 0

    def _start_window(self) -> None:
        self._start_phase("profiling")
        self._warm.set()

    async def _lane(self) -> None:
        settings = self.settings
        share = self._random.uniform(settings.start_least, settings.start_most)
        suffix, session = next(self._supply)
        start = first_turn(session, share)
        sent = 0
        while True:
            for number, turn in enumerate(session.turns[start:], start):
                if sent and number:
                    await self._pause(min(turn.think_seconds, settings.think_cap_seconds))
                if self._over.is_set():
                    return
                name, salt = session.session_id + suffix, settings.salt + suffix
                outcome = await self._request(name, number, turn, salt)
                sent += 1
                if outcome != "ok":
                    await self._pause(_AFTER_FAILURE)
                if sent == settings.warmup_requests_per_lane:
                    self._warming -= 1
                    if not self._warming:
                        self._start_window()
                    await self._warm.wait()
            suffix, session = next(self._supply)
            start = 0

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._over.wait()

    async def _request(self, name: str, number: int, turn: Turn, salt: str) -> Outcome:
        settings = self.settings
        ids = prompt_token_ids(turn, vocab_size=self.client.vocab_size, salt=salt)
        wanted = min(turn.output_tokens, settings.output_tokens or turn.output_tokens)
        exchange = Exchange(ids, wanted, settings.request_seconds)
        phase, outcome, said = self.phase, "ok", ""
        try:
            await self.client.send(exchange)
        except asyncio.CancelledError:
            outcome, said = "cancelled", "the load ended before the answer"
            raise
        except LoadFailure as error:
            outcome, said = error.outcome, str(error)
        except Exception as error:
            # one request's defect must not cost the others; its text may name anything
            outcome, said = "error", f"the client failed ({type(error).__name__})"
        finally:
            self._note(name, number, phase, outcome, said, exchange)
        return outcome  # type: ignore[return-value]

    def _note(
        self, name: str, number: int, phase: Phase, outcome: str, said: str, exchange: Exchange
    ) -> None:
        now = time.monotonic()
        self.rows.append(
            RequestRow(
                session=name,
                turn=number,
                phase=phase,
                outcome=outcome,  # type: ignore[arg-type]
                error=said,
                prompt_tokens=exchange.prompt_tokens or len(exchange.prompt_token_ids),
                cached_tokens=exchange.cached_tokens,
                output_tokens=exchange.generated,
                started=exchange.started,
                first_token=exchange.first_token,
                ended=(exchange.ended or now) if outcome == "ok" else now,
            )
        )
        if outcome == "cancelled":
            return
        self._row_failures = 0 if outcome == "ok" else self._row_failures + 1
        if self._row_failures >= self.settings.give_up_after:
            self.ended = "gave up"
            self._over.set()
        self._counted += 1
        self._errors += outcome != "ok"
        if self.on_progress is not None:
            elapsed = now - self._began
            self.on_progress(LoadProgress(self.phase, elapsed, self._counted, self._errors))


def _raise_defect(lanes: Sequence[asyncio.Task[None]]) -> None:
    for lane in lanes:
        if lane.done() and (defect := lane.exception()) is not None:
            raise defect
