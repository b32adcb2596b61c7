"""One point of the throughput experiment on a server that is not ours, over HTTP.

Method. The load is that of ``throughput_point``. A server that a command starts is started for the
point, with the point's pool, and ended after it: it begins cold. One that runs already keeps its
prefix cache from point to point, which alone can double a result: before each point that cache is
reset where the server has an endpoint for it, and the point's prompts are salted in any case, so
that nothing of an earlier point can be found again. What it was started with is its owner's word.

The AgentX harness can put the load on in place of our client (``client``). It salts by itself: each
of its runs marks the beginning of its prompts with an id of its own.

What the engine of this package counts stays blank; cached tokens are what the server reports. The
record calls its figures measured: a server that says that it simulates a device is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from atom.benchmarks.agentic_sessions import write_traces
from atom.benchmarks.agentx_client import run_agentx
from atom.benchmarks.load_client import HttpClient, LoadResult, LoadSettings, run_load
from atom.benchmarks.server_process import Server, ServerFailed
from atom.benchmarks.server_template import ServerTemplate
from atom.benchmarks.session_model import Traces
from atom.benchmarks.throughput_point import (
    first_line,
    load_fields,
    load_outcome,
    load_settings,
    read_sessions,
    request_rows,
)
from atom.benchmarks.throughput_process import Tell
from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_settings import ThroughputPoint, ThroughputSettings

_LOGGER = logging.getLogger(__name__)
_WATCH_SECONDS = 0.5
_ASK_SECONDS = 10.0
_SIMULATED = (
    "the server says that its device is simulated, and this record calls figures measured: sweep "
    "its engine itself (--device virtual, no server), or serve on an accelerator"
)
#: names of variables and options whose values no record has
_SECRET_NAME = re.compile(r"key|token$|secret|passw|credential", re.I)
#: what keys look like, wherever they come from
_KEY = re.compile(r"\b(?:sk|pk|hf|ghp|nvapi|Bearer)[-_ ][\w-]{8,}")


def run_server_point(
    settings: ThroughputSettings,
    point: ThroughputPoint,
    tell: Tell,
    *,
    began: float | None = None,
    log: Path | None = None,
) -> Outcome:
    """Run one point against a server, and tell all that becomes known of it.

    Args:
        settings: of the sweep; they name a server.
        point: which.
        tell: called with fields of the point's row as they are known; see ``run_point``.
        began: when the point began, by ``time.time``; now by default.
        log: where the output of a server goes that is started here, and beside it a harness's;
            ``None`` forgets it.

    Returns:
        How it ended. Whatever fails is an outcome, not an exception.
    """
    began = time.time() if began is None else began
    outcome, detail = Outcome.START_FAILED, None
    with ExitStack() as stack:
        try:
            traces = read_sessions(settings)
            server = None
            if log is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="atom-server-"))
                log = Path(folder) / "log"
            if settings.server_command is not None:
                server = stack.enter_context(
                    Server(
                        ServerTemplate(settings.server_command),
                        pool_gib=point.pool_gib,
                        concurrency=point.concurrency,
                        log=log,
                    )
                )
                seconds = server.wait_until_ready(settings.server_start_seconds)
                _LOGGER.info("the server answers after %.1f s", seconds)
            tell(
                {
                    "setup_seconds": max(0.0, time.time() - began),
                    "exposure_seconds": 0.0,
                    "traces": len(traces.sessions),
                    "traces_dropped": sum(traces.dropped.values()),
                    "cold_start": "salt" if server is None else "process",
                }
            )
            outcome = Outcome.LOAD_FAILED
            outcome, detail = asyncio.run(_serve(settings, point, server, traces, tell, log))
        except ServerFailed as failure:
            outcome, detail = failure.outcome, str(failure)
        except Exception as error:
            _LOGGER.exception("the point failed")
            detail = f"{type(error).__name__}: {error}"
    tell(
        {
            "outcome": outcome.value,
            "outcome_detail": None
            if detail is None
            else first_line(_without_secrets(settings, detail)),
        }
    )
    return outcome


def _without_secrets(settings: ThroughputSettings, text: str) -> str:
    """A log may quote what a server was started with, and an error what it was asked at."""
    for secret in sorted(_secrets(settings), key=len, reverse=True):
        text = text.replace(secret, "...")
    return _KEY.sub("...", text)


def _secrets(settings: ThroughputSettings) -> set[str]:
    named = dict(os.environ)
    before = ""
    for word in shlex.split(settings.server_command or ""):
        name, _, value = word.partition("=")
        # NAME=VALUE, --name=VALUE, or --name VALUE
        named |= {name: value} if value else {before: word}
        before = word if word.startswith("-") else ""
    found = {
        value
        for name, value in named.items()
        if _SECRET_NAME.search(name) and len(value) > 3 and not value.isdecimal()
    }
    found.add(os.environ.get(settings.api_key_env or "", ""))
    if settings.base_url is not None:
        url = urlsplit(settings.base_url)
        found |= {url.hostname or "", url.username or "", url.password or ""}
    return found - {""}


async def _serve(
    settings: ThroughputSettings,
    point: ThroughputPoint,
    server: Server | None,
    traces: Traces,
    tell: Tell,
    log: Path,
) -> tuple[Outcome, str | None]:
    load = load_settings(settings, point)
    url = settings.base_url if server is None else server.base_url
    assert url is not None
    async with _client(settings, url) as client:
        if await client.simulates():
            raise ServerFailed(Outcome.START_FAILED, _SIMULATED, None)
        if server is None:
            cold = await client.start_cold()
            tell({"cold_start": cold.how})
            load = load.model_copy(update={"salt": cold.salt})
    start = time.monotonic()
    before = {child.pid for child in psutil.Process().children()}
    running = asyncio.create_task(_run_load(settings, traces, load, url, log))
    watching = None
    if server is not None:
        watching = asyncio.create_task(_watch(server, settings.server_silence_seconds))
    exposure = 0.0
    failure: ServerFailed | None = None
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=_WATCH_SECONDS)
            if failure is not None:
                continue
            exposure = time.monotonic() - start
            tell({"exposure_seconds": exposure})
            if watching is not None and watching.done():
                failure = watching.result()
                # nobody serves the rest of the load; what it has measured is its result
                running.cancel()
                _end_others(before)
        # a harness that was ended has no result
        result, note = (None, None) if running.cancelled() else running.result()
    finally:
        if watching is not None:
            watching.cancel()
    tell({"exposure_seconds": exposure})
    if result is not None:
        tell({**load_fields(result), "requests_table": request_rows(result.rows)})
    if failure is not None:
        return failure.outcome, str(failure)
    assert result is not None
    outcome, detail = await asyncio.to_thread(_outcome, server, result)
    return outcome, detail if outcome is not Outcome.OK else detail or note


@asynccontextmanager
async def _client(settings: ThroughputSettings, url: str) -> AsyncIterator[HttpClient]:
    client = HttpClient(
        url, settings.server_model, settings.api_key_env, vocab_size=settings.server_vocab_size
    )
    try:
        yield client
    finally:
        await client.close()


def _end_others(before: set[int]) -> None:
    """Kill the children that this process has had since: a harness, but no server."""
    for child in psutil.Process().children():
        if child.pid not in before:
            with suppress(psutil.NoSuchProcess):
                child.kill()


async def _run_load(
    settings: ThroughputSettings, traces: Traces, load: LoadSettings, url: str, log: Path
) -> tuple[LoadResult, str | None]:
    """The load's result, and what the record has to say of who made it."""
    if settings.client == "agentx":
        return await asyncio.to_thread(_run_agentx, settings, traces, load, url, log)
    async with _client(settings, url) as client:
        return await run_load(client, traces.sessions, load), None


def _run_agentx(
    settings: ThroughputSettings, traces: Traces, load: LoadSettings, url: str, log: Path
) -> tuple[LoadResult, str]:
    assert settings.server_tokenizer is not None
    with tempfile.TemporaryDirectory(prefix="atom-agentx-") as folder:
        # as read: without the sessions that were left out, and with their lengths scaled
        write_traces(traces, Path(folder) / "traces")
        found = run_agentx(
            url,
            settings.server_model,
            Path(folder) / "traces",
            settings.server_tokenizer,
            load,
            log=log.with_suffix(".agentx.log"),
            api_key_env=settings.api_key_env,
        )
    valid = str(found.submission_valid).lower()
    note = f"agentx {found.version}, submission_valid: {valid}"
    return found.as_load(), note


async def _watch(server: Server, silence: float) -> ServerFailed:
    """Returns how the server failed, once it has."""
    heard = asked = time.monotonic()
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            server.check()
        except ServerFailed as failure:
            return failure
        now = time.monotonic()
        if now - asked < min(_ASK_SECONDS, silence / 4):
            continue
        asked = now
        # another thread: the load goes on
        if await asyncio.to_thread(server.answers, silence / 4):
            heard = time.monotonic()
        elif (mute := time.monotonic() - heard) > silence:
            detail = f"the server has not answered for {mute:.0f} s"
            return ServerFailed(Outcome.HANG, detail, None)


def _outcome(server: Server | None, result: LoadResult) -> tuple[Outcome, str | None]:
    if server is not None:
        outcome, detail = server.verdict()
        if outcome is not Outcome.OK:
            return outcome, detail
    return load_outcome(result)
