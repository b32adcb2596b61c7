"""What every request passes before its body is read: the API key, the body's size, its pace."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.entrypoints.api_error import ApiError

#: answers without a key: probes and scrapers have none, and learn nothing about requests
OPEN_PATHS = frozenset({"/health", "/metrics"})


class ApiKey:
    """Answers 401 to requests without the key, on every path but :data:`OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "")
            scheme, _, key = given.partition(" ")
            # blanks alone: a byte of a letter can look like a space of latin-1
            key = key.strip(" \t")
            # compared in constant time: the time must not tell how much of a guess was right
            right = hmac.compare_digest(key.encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                error = ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Answers 413 to a body above the limit, as soon as it is seen, and 408 to one too slow.

    Args:
        app: what is behind.
        most_bytes: largest body.
        seconds: longest time for a body to arrive.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, seconds: float) -> None:
        self._app = app
        self._most = most_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._most:
            await self._too_large().response()(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._seconds
        taken, whole = 0, False

        async def limited() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the body did not arrive within {self._seconds:g} s",
                    headers={"Connection": "close"},
                ) from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self._most:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._most} bytes",
            code="body_too_large",
            # what is left of it is not read
            headers={"Connection": "close"},
        )
