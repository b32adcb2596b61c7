"""Clients that vanish: whatever is done for one ends when its connection does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atom.entrypoints.answers import DONE
from atom.entrypoints.api_error import ApiError

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work, or cancel it as soon as the client disconnects.

    Args:
        receive: of a request whose body was read.
        work: what its answer needs.

    Raises:
        ClientGone: if it disconnected first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise ClientGone
        # a result that came meanwhile is handed on: it may hold something to be given back
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


class EventStream(Response):
    """Server-sent events of one generation; a client that disconnects ends it.

    An error halfway becomes an event of its own: the status was sent long before.

    Args:
        events: the events; the closing one is added here.
        close: called when nothing more is sent, whatever the reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            _LOGGER.debug("a client left its stream")
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        headers = list(self.raw_headers)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._events:
                await _write(send, chunk)
        except ApiError as error:
            await _write(send, error.event())
        except Exception:
            _LOGGER.exception("a stream failed")
            await _write(send, ApiError(500, "the server failed while it answered").event())
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _write(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
