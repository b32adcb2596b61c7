"""One thread that steps the engine, and streams of its outputs for asyncio.

The engine is not thread-safe: every call of it is made on its own thread. Requests and aborts reach
that thread through a queue, which it empties before each step; outputs come back to the event loop
in the order of the steps. Nothing waits for ever: if the engine fails, every request in flight ends
with an error and new ones are refused.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams

_LOGGER = logging.getLogger(__name__)
#: seconds between two looks at the engine's counters while it steps
_STATS_SECONDS = 0.25


class Engine(Protocol):
    """What the server needs of an engine; ``LLMEngine`` has it."""

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str: ...

    def abort_request(self, request_id: str) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class EngineStopped(Exception):
    """The engine takes no request any more: it failed, or the server is shutting down."""


class EngineStream:
    """Outputs of one request, in order."""

    def __init__(self, owner: AsyncEngine, request_id: str) -> None:
        self._owner = owner
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._ended = False
        self.request_id = request_id

    async def next(self) -> RequestOutput:
        """Wait for the next output; none follows one that is ``finished``."""
        return await self._outputs.get()

    def abort(self) -> None:
        """End the request in the engine; does nothing when it has ended. No output follows."""
        if not self._ended:
            self._ended = True
            self._owner._abort(self.request_id)

    def _push(self, output: RequestOutput) -> None:
        self._ended = self._ended or output.finished
        self._outputs.put_nowait(output)


@dataclass(frozen=True)
class _Add:
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    accepted: asyncio.Future[EngineStream]


@dataclass(frozen=True)
class _Abort:
    request_id: str


class _Stop:
    """Ends the thread."""


class AsyncEngine:
    """Runs an engine on a thread of its own.

    Args:
        engine: used by that thread alone from :meth:`start` on, and closed by it.
        stall_seconds: a step that takes longer counts as stalled, see :meth:`trouble`.
    """

    def __init__(self, engine: Engine, *, stall_seconds: float = 300.0) -> None:
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, EngineStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._refusal: str | None = None
        self._step_began: float | None = None
        self._stats: dict[str, float] = {}
        self._looked_at = 0.0
        self.failure: str | None = None  #: what ended the engine, when it failed

    # -- on the event loop
    def start(self) -> None:
        """Start the thread; call it on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._stats = dict(self._engine.stats())
        self._thread.start()

    async def stop(self, timeout: float = 30.0) -> bool:
        """Fail what is left, close the engine and end the thread. False if it did not end."""
        self.fail_all("the server is shutting down")
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    async def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> EngineStream:
        """Hand a request to the engine and wait until it took it, which is a step at most.

        Raises:
            RequestRefused: the engine can never serve it.
            QueueFull: it can not now.
            EngineStopped: the engine failed, or the server is shutting down.
        """
        if self._refusal is not None:
            raise EngineStopped(self._refusal)
        accepted: asyncio.Future[EngineStream] = asyncio.get_running_loop().create_future()
        self._commands.put(_Add(prompt_token_ids, params, accepted))
        try:
            return await accepted
        except asyncio.CancelledError:
            # the engine may have taken it just before
            if accepted.done() and not accepted.cancelled() and accepted.exception() is None:
                accepted.result().abort()
            raise

    def fail_all(self, message: str) -> None:
        """Refuse new requests and end those in flight with an error."""
        self._refusal = self._refusal or message
        for stream in list(self._streams.values()):
            stream.abort()
            stream._push(_failed(stream.request_id, message))

    def refuse(self, message: str) -> None:
        """Refuse new requests; those in flight go on."""
        self._refusal = self._refusal or message

    def trouble(self) -> str | None:
        """Why the engine cannot serve now; ``None`` when it can."""
        if self.failure is not None:
            return f"the engine failed: {self.failure}"
        began = self._step_began
        if began is not None and (took := time.monotonic() - began) > self._stall_seconds:
            return f"a step of the engine has not come back for {took:.0f} s"
        return self._refusal

    @property
    def num_streams(self) -> int:
        """Requests that the engine has taken and that have not ended."""
        return len(self._streams)

    def stats(self) -> dict[str, float]:
        """The engine's counters, at most a moment old."""
        return self._stats

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._commands.put(_Abort(request_id))

    def _accept(self, accepted: asyncio.Future[EngineStream], request_id: str) -> None:
        if accepted.done():
            # whoever asked has gone meanwhile
            self._abort(request_id)
            return
        stream = EngineStream(self, request_id)
        if self._refusal is not None:
            self._abort(request_id)
            accepted.set_exception(EngineStopped(self._refusal))
            return
        self._streams[request_id] = stream
        accepted.set_result(stream)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            # a request that was aborted has no stream any more
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            stream._push(output)

    def _end(self, failure: str | None) -> None:
        """The thread has ended: nobody reads its queue any more."""
        message = "the server is shutting down"
        if failure is not None:
            self.failure = failure
            message = f"the engine failed and the server must be restarted: {failure}"
            self._refusal = message
        self.fail_all(message)
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, _Add):
                _refuse(command.accepted, EngineStopped(message))

    # -- on the engine's thread
    def _run(self) -> None:
        failure: str | None = None
        try:
            while self._take_commands():
                if self._engine.has_unfinished_requests():
                    self._step()
        except Exception as error:
            _LOGGER.exception("the engine failed")
            failure = f"{type(error).__name__}: {error}"
        # told first: closing a broken device may take its time
        self._call(self._end, failure)
        self._step_began = None
        try:
            self._engine.close()
        except Exception:
            _LOGGER.exception("the engine did not close cleanly")

    def _take_commands(self) -> bool:
        """Do what was asked; wait for something when there is nothing to step."""
        while True:
            idle = not self._engine.has_unfinished_requests()
            if idle:
                self._look(force=True)
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                self._engine.abort_request(command.request_id)
            else:
                self._add(command)

    def _add(self, command: _Add) -> None:
        if command.accepted.cancelled():
            return
        try:
            request_id = self._engine.add_request(command.prompt_token_ids, command.params)
        except Exception as error:
            # whatever the engine refuses is this request's own affair
            self._call(_refuse, command.accepted, error)
            return
        self._call(self._accept, command.accepted, request_id)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        outputs = self._engine.step()
        self._step_began = None
        if outputs:
            self._call(self._deliver, outputs)
        self._look()

    def _look(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._looked_at > _STATS_SECONDS:
            self._looked_at = now
            self._stats = dict(self._engine.stats())

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # the loop is closed, so nobody waits for this
            _LOGGER.debug("the event loop ended before the engine")


def _refuse(accepted: asyncio.Future[EngineStream], error: Exception) -> None:
    if not accepted.done():
        accepted.set_exception(error)


def _failed(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id, (), finished=True, finish_reason="error", error=message)
