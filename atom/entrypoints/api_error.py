"""Errors of the HTTP interface, in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what was wrong and what to do.
        param: the request's field at fault.
        code: a word for programs, e.g. ``context_length_exceeded``.
        headers: more headers of the answer, e.g. ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's ``type`` of the error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return kinds.get(self.status, other)

    def body(self) -> dict[str, Any]:
        """The answer's JSON; also what a stream carries when it fails halfway."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)

    def event(self) -> bytes:
        """The error as an event of a stream whose status has long been sent."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


def shutting_down() -> ApiError:
    """The answer to a request that comes while the server ends, or that is cut by it."""
    return ApiError(
        503,
        "the server is shutting down; send the request to another one, or later",
        code="shutting_down",
        headers={"Retry-After": "10"},
    )
