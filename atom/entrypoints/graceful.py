"""A web server that ends well: one signal lets streams finish, a second ends at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from atom.entrypoints.api import Server
from atom.entrypoints.terminal import tell

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: seconds for final chunks to reach their clients
_LAST_WORDS = 3.0
#: as ``timeout`` sends it to its child and then to the group that the child is in
_ONE_SIGNAL_SECONDS = 0.15
#: a client's connection may stay idle for this long between two requests
_KEEP_ALIVE_SECONDS = 120


class GracefulServer(uvicorn.Server):
    """Runs a :class:`Server` until a signal comes.

    The first SIGINT or SIGTERM closes the port and refuses new requests; those in flight may go on
    for ``shutdown_seconds``, then their streams end with an error. The second ends the process's
    work at once.

    Args:
        server: what is served.
        shutdown_seconds: patience with requests in flight.
        ready: called once requests are accepted.
    """

    def __init__(
        self, server: Server, shutdown_seconds: float, ready: Callable[[], None] = lambda: None
    ) -> None:
        config = uvicorn.Config(
            server.app,
            lifespan="on",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(shutdown_seconds + _LAST_WORDS) + 1,
        )
        super().__init__(config)
        self._server = server
        self._shutdown_seconds = shutdown_seconds
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._last_signal = -_ONE_SIGNAL_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over, and do not raise them again: an orderly end is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; the same one to the process and to its group counts once."""
        now = time.monotonic()
        if now - self._last_signal < _ONE_SIGNAL_SECONDS:
            return
        self._last_signal = now
        self._signals += 1
        self.should_exit = True
        self.force_exit = self._signals > 1
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_now if self.force_exit else self._drain)

    def _drain(self) -> None:
        assert self._loop is not None
        engine = self._server.engine
        engine.refuse("the server is shutting down")
        left = engine.num_streams
        more = (
            f": {left} requests in flight may take {self._shutdown_seconds:g} s more; a second "
            "signal ends them now"
        )
        tell(f"shutting down{more if left else ''}")
        self._loop.call_later(self._shutdown_seconds, self._cut)

    def _cut(self) -> None:
        self._server.engine.fail_all("the server is shutting down")

    def _end_now(self) -> None:
        assert self._loop is not None
        self._cut()
        # an end in the middle of everything is what was asked for, and no error to log
        logging.getLogger("uvicorn.error").disabled = True
        # a client that does not read, or a step that hangs, must not keep the process
        self._loop.call_later(0.5, os._exit, 130)
