"""Load client of any server with OpenAI's completions interface, over HTTP with streaming.

Nothing that names the server or its user leaves this module: messages are cleaned of addresses,
host names and keys before they reach a row.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atom.benchmarks.load_exchange import (
    VOCAB_SIZE,
    Exchange,
    LoadFailure,
    LoadRefusal,
    time_limit,
)
from atom.errors import BadInput

if TYPE_CHECKING:
    import httpx

#: a longer line of a stream is no event of a completion
_LONGEST_LINE = 2**20
_LONGEST_MESSAGE = 200
#: no request has more
_MOST_TOKENS = 2**31
#: what empties a prefix cache, of vLLM (in its development mode) and of SGLang
_RESETS = ("reset_prefix_cache?reset_external=true", "flush_cache")
_RESET_SECONDS = 60.0
_ASK_SECONDS = 10.0
#: statuses whose message may quote the key
_ABOUT_KEYS = (401, 403, 407)
_CLEANED = (
    (re.compile(r"\S+://\S+"), "URL"),
    (re.compile(r"\S+@\S+"), "ADDRESS"),
    (re.compile(r"\[?[0-9a-fA-F]*(?::[0-9a-fA-F]*){3,}\]?(?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b\d+\.\d+\.\d+\.\d+(?::\d+)?"), "ADDRESS"),
    (re.compile(r"\b[\w-]*[A-Za-z][\w-]*(?:\.[\w-]*[A-Za-z0-9][\w-]*)+(?::\d+)?"), "NAME"),
    (re.compile(r"\b(?=[\w*-]*\d)[\w*-]{16,}"), "..."),
)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """How a point on a server that keeps running began without what earlier points left there.

    Attributes:
        how: ``reset and salt``, or ``salt`` where the server has no endpoint for it.
        salt: for the point's prompts. A reset may leave a tier behind the prefix cache as it is, so
            they are salted in any case.
    """

    how: str
    salt: str


class HttpClient:
    """Streams completions of token prompts, with the server's own token counts.

    Args:
        base_url: where the server is, with or without ``/v1``. A user and password in it are sent
            and never recorded.
        model: name of the model there.
        api_key_env: name of the environment variable that holds the key; ``None`` sends none.
        vocab_size: ids of prompts are below it; the default fits any model.
        connect_seconds: longest time for a connection to be made.
        transport: what carries the requests; ``None`` is the network.

    Raises:
        BadInput: the URL, or the variable, cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None = None,
        *,
        vocab_size: int = VOCAB_SIZE,
        connect_seconds: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx

        self.vocab_size = vocab_size
        self._model = model
        url = checked_url(base_url)
        self._secrets = [part for part in (url.host, url.username, url.password) if part]
        headers = {}
        if api_key_env is not None:
            key = key_of(api_key_env)
            self._secrets.append(key)
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            transport=transport,
            # a proxy or a .netrc of the environment must not stand between
            trust_env=False,
            timeout=httpx.Timeout(None, connect=connect_seconds),
            # a server may close what is idle for a few seconds
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )

    async def send(self, exchange: Exchange) -> None:
        """Send a request and read its answer to the end.

        Raises:
            LoadFailure: it was refused or failed.
        """
        import httpx

        try:
            async with time_limit(exchange):
                await self._send(exchange)
        except httpx.ConnectError:
            raise LoadFailure("the server took no connection") from None
        except httpx.HTTPError as error:
            # its text may name the host
            raise LoadFailure(f"the connection failed ({type(error).__name__})") from None

    async def start_cold(self) -> ColdStart:
        """Empty the server's prefix cache if it has an endpoint for that, and draw a salt.

        Call it when the server has nothing to do: it does not empty what a request holds.
        """
        how = "reset and salt" if await self._reset() else "salt"
        return ColdStart(how, secrets.token_hex(8))

    async def simulates(self) -> bool:
        """Whether the server says of a model that it runs on a simulated device, as ours does."""
        import httpx

        try:
            answer = await self._http.get("models", timeout=_ASK_SECONDS)
            known = answer.json()["data"] if answer.status_code == 200 else ()
            return any(one.get("simulated") is True for one in known)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
            # one that says nothing of it has a device
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _reset(self) -> bool:
        import httpx

        for path in _RESETS:
            try:
                # beside /v1, not below it
                answer = await self._http.post(f"../{path}", timeout=_RESET_SECONDS)
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                return True
        return False

    async def _send(self, exchange: Exchange) -> None:
        body = {
            "model": self._model,
            "prompt": list(exchange.prompt_token_ids),
            "max_tokens": exchange.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body, separators=(",", ":")).encode()
        exchange.started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        request = self._http.build_request("POST", "completions", content=content, headers=headers)
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise self._failure(response.status_code, await response.aread())
            await self._read(response, exchange)
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response, exchange: Exchange) -> None:
        finished = False
        usage: dict[str, Any] | None = None
        async for data in _events(response):
            now = time.monotonic()
            if data == "[DONE]":
                break
            try:
                event = json.loads(data)
            except ValueError:
                raise LoadFailure("an event of the stream is not JSON") from None
            if not isinstance(event, dict):
                raise LoadFailure("an event of the stream is no object")
            if event.get("error") is not None:
                raise LoadFailure(f"error in the stream: {self._message(event)}")
            text, ends = _choice(event)
            if text:
                exchange.first_token = exchange.first_token or now
                exchange.ended = now
            if ends:
                finished = True
                exchange.ended = now
            if isinstance(event.get("usage"), dict):
                usage = event["usage"]
        if usage is not None:
            _count(usage, exchange)
        if not finished:
            raise LoadFailure("the stream ended before the answer did")
        if usage is None:
            raise LoadFailure("the stream has no token counts (stream_options.include_usage)")
        if exchange.first_token is None and exchange.generated:
            # tokens without text of their own came with the last event
            exchange.first_token = exchange.ended

    def _failure(self, status: int, content: bytes) -> LoadFailure:
        kind = LoadRefusal if 400 <= status < 500 or status == 503 else LoadFailure
        if status in _ABOUT_KEYS:
            return kind(f"HTTP {status}")
        try:
            said = self._message(json.loads(content))
        except ValueError:
            said = ""
        return kind(f"HTTP {status}" + (f": {said}" if said else ""))

    def _message(self, values: Any) -> str:
        error = values.get("error", values) if isinstance(values, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        if not isinstance(message, str):
            return ""
        for secret in self._secrets:
            message = message.replace(secret, "...")
        for pattern, stand_in in _CLEANED:
            message = pattern.sub(stand_in, message)
        return " ".join(message.split())[:_LONGEST_MESSAGE]


def key_of(api_key_env: str) -> str:
    """The key in a variable.

    Raises:
        BadInput: there is none, or one that cannot be sent.
    """
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise BadInput(f"api_key_env: the variable {api_key_env} is not set, or empty")
    if not (key.isascii() and key.isprintable()):
        raise BadInput(f"api_key_env: {api_key_env} holds what no header can carry")
    return key


def checked_url(base_url: str) -> httpx.URL:
    """Where completions are, below a server's address.

    Raises:
        BadInput: it is no address of a server.
    """
    import httpx

    # the text itself may hold a password: it is not repeated
    try:
        url = httpx.URL(base_url.rstrip("/").removesuffix("/v1") + "/v1/")
    except (httpx.InvalidURL, ValueError):
        raise BadInput("base_url: no URL; expected one such as http://HOST:PORT") from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise BadInput(
            "base_url: expected http:// or https://, a host, and no query, such as http://HOST:PORT"
        )
    return url


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Data of the server-sent events of a stream, one a line."""
    held = b""
    async for part in response.aiter_bytes():
        *lines, held = (held + part).split(b"\n")
        # a server gone mad must not fill the memory with a line that never ends
        if len(held) > _LONGEST_LINE:
            raise LoadFailure(f"a line of the stream has over {_LONGEST_LINE} bytes")
        for line in lines:
            if (data := _data(line)) is not None:
                yield data
    if (data := _data(held)) is not None:
        yield data


def _data(line: bytes) -> str | None:
    text = line.strip()
    if text.startswith(b"data:"):
        return text.removeprefix(b"data:").strip().decode(errors="replace")
    if text and not text.startswith((b":", b"event:", b"id:", b"retry:")):
        raise LoadFailure("a line of the stream is no server-sent event")
    return None


def _choice(event: dict[str, Any]) -> tuple[bool, bool]:
    """Whether an event brings text, and whether it ends the answer."""
    choices = event.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise LoadFailure("choices in the stream are no list of objects")
    text = any(one.get("text") for one in choices)
    return text, any(one.get("finish_reason") is not None for one in choices)


def _count(usage: dict[str, Any], exchange: Exchange) -> None:
    counts: list[Any] = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    for count in (*counts, 0 if cached is None else cached):
        if type(count) is not int or not 0 <= count <= _MOST_TOKENS:
            raise LoadFailure("token counts of the stream are none that an answer can have")
    prompt, generated = counts
    if (cached or 0) > prompt:
        raise LoadFailure("the stream counts more cached tokens than the prompt has")
    exchange.prompt_tokens, exchange.generated = prompt, generated
    exchange.cached_tokens = cached
