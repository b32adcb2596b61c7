"""The OpenAI-compatible HTTP interface of an engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from atom.entrypoints.answers import Answer, ChatAnswer, TextAnswer
from atom.entrypoints.api_error import ApiError, shutting_down
from atom.entrypoints.async_engine import AsyncEngine, Engine, EngineStopped
from atom.entrypoints.connection import ClientGone, EventStream, while_connected
from atom.entrypoints.generation import Generation
from atom.entrypoints.metrics import ServerMetrics
from atom.entrypoints.middleware import ApiKey, BodyLimit
from atom.entrypoints.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_body,
)
from atom.entrypoints.tokenizer import ServerTokenizer
from atom.errors import AtomError, BadInput
from atom.model_engine.admission import QueueFull, RequestRefused
from atom.model_engine.sequence import SamplingParams

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_ENDPOINTS = ("completions", "chat/completions")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ServedModel:
    """The model behind a server.

    Attributes:
        name: what clients call it.
        tokenizer: turns text into its tokens and back.
        vocab_size: its token ids are below this.
        max_model_len: most tokens of a request, prompt and output together.
        logprobs: whether the engine computes logprobs.
        simulated: whether its device is: what a client times is then no measurement.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    tokenizer: ServerTokenizer
    vocab_size: int
    max_model_len: int
    logprobs: bool
    simulated: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes.

    Attributes:
        body_bytes: largest request body.
        body_seconds: longest time for a body to arrive.
        stall_seconds: a step of the engine that takes longer makes ``/health`` answer 503.
    """

    body_bytes: int = 32 * 2**20
    body_seconds: float = 60.0
    stall_seconds: float = 300.0


class Server:
    """Answers requests with an engine's tokens.

    Args:
        engine: belongs to the server from its start to its end, and is closed by it.
        model: what it runs.
        limits: what it takes.
        api_key: key that requests must bring; ``None`` asks for none.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        limits: ServerLimits | None = None,
        api_key: str | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        self.engine = AsyncEngine(engine, stall_seconds=limits.stall_seconds)
        self.model = model
        self.metrics = ServerMetrics(self.engine.stats, lambda: self.engine.num_streams)
        # one thread: a tokenizer is not safe to encode with from several
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.app = FastAPI(
            title="atom", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan
        )
        self._add_routes()
        self._add_error_handlers()
        self.app.add_middleware(
            BodyLimit, most_bytes=limits.body_bytes, seconds=limits.body_seconds
        )
        if api_key is not None:
            # added last, so outermost: nothing of a request without the key is read
            self.app.add_middleware(ApiKey, key=api_key)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine.start()
        try:
            yield
        finally:
            await self.engine.stop()
            self._encoder.shutdown(wait=False, cancel_futures=True)

    def _add_routes(self) -> None:
        route = self.app.add_api_route
        route("/v1/completions", self._completions, methods=["POST"])
        route("/v1/chat/completions", self._chat, methods=["POST"])
        route("/v1/models", self._models, methods=["GET"])
        route("/v1/models/{name:path}", self._one_model, methods=["GET"])
        route("/health", self._health, methods=["GET"])
        route("/metrics", self._metrics, methods=["GET"])

    def _add_error_handlers(self) -> None:
        async def api_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            self._count_refusal(request, error)
            return error.response()

        async def http_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            said = f"{request.method} {request.url.path}: {error.detail}"
            return ApiError(error.status_code, said, headers=error.headers).response()

        async def client_gone(request: Request, error: Exception) -> Response:
            # nobody reads it
            return Response(status_code=499)

        async def unexpected(request: Request, error: Exception) -> Response:
            # one whose answer had begun was counted when that ended
            if not getattr(request.state, "counted", False):
                endpoint = request.url.path.removeprefix("/v1/")
                known = endpoint if endpoint in _ENDPOINTS else "other"
                self.metrics.requests.labels(known, "error").inc()
            said = "the server failed to answer; its log says why"
            # the web server closes the connection behind it: a client must not use it again
            return ApiError(500, said, headers={"Connection": "close"}).response()

        self.app.add_exception_handler(ApiError, api_error)
        self.app.add_exception_handler(HTTPException, http_error)
        self.app.add_exception_handler(ClientGone, client_gone)
        # the same in the middle of a body
        self.app.add_exception_handler(ClientDisconnect, client_gone)
        self.app.add_exception_handler(Exception, unexpected)

    # -- routes
    async def _completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        prompt = body.one_prompt()

        async def encode() -> list[int]:
            if isinstance(prompt, str):
                return await self._on_encoder(lambda: self.model.tokenizer.encode(prompt))
            if (most := max(prompt)) >= self.model.vocab_size:
                raise ApiError(
                    400,
                    f"prompt: token {most} is not in the vocabulary of {self.model.vocab_size}",
                    param="prompt",
                )
            return prompt

        return await self._answer(request, body, encode, TextAnswer)

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        options = body.template_options()
        messages = [message.plain() for message in body.messages]

        async def encode() -> list[int]:
            return await self._on_encoder(lambda: self.model.tokenizer.chat(messages, options))

        return await self._answer(request, body, encode, ChatAnswer)

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_fields()]})

    async def _one_model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_fields())

    async def _health(self) -> Response:
        trouble = self.engine.trouble()
        values = {
            "status": trouble or "ok",
            "model": self.model.name,
            "requests_in_flight": self.engine.num_streams,
        }
        return JSONResponse(values, status_code=200 if trouble is None else 503)

    async def _metrics(self) -> Response:
        return Response(self.metrics.page(), headers={"Content-Type": _METRICS_TYPE})

    # -- parts of an answer
    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        given = request.headers.get("content-type", "application/json")
        if given.partition(";")[0].strip().lower() != "application/json":
            # also keeps pages in a browser from posting here without being asked
            raise ApiError(415, f"Content-Type is {given}; expected application/json")
        body = parse_body(kind, await request.body())
        self._check_model(body.model)
        if body.wants_logprobs and not self.model.logprobs:
            raise ApiError(
                400, "this server computes no logprobs (--no-logprobs)", param="logprobs"
            )
        if isinstance(body, CompletionRequest) and body.logprobs:
            raise ApiError(
                400,
                f"logprobs={body.logprobs}: only the sampled token's logprob is known; send 0",
                param="logprobs",
                code="unsupported_parameter",
            )
        return body

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        encode: Callable[[], Any],
        shape: type[Answer],
    ) -> Response:
        began = time.monotonic()
        endpoint = request.url.path.removeprefix("/v1/")
        generation = await while_connected(
            request.receive, self._submit(body, encode, endpoint, began)
        )
        request.state.counted = True
        answer = shape(self.model.name, generation, logprobs=body.wants_logprobs)
        if body.stream:
            events = answer.events(include_usage=body.include_usage)
            return EventStream(events, generation.close)
        try:
            return JSONResponse(await while_connected(request.receive, answer.whole()))
        finally:
            generation.close()

    async def _submit(
        self, body: GenerationRequest, encode: Callable[[], Any], endpoint: str, began: float
    ) -> Generation:
        prompt: list[int] = await encode()
        most = self._most_tokens(body, len(prompt))
        try:
            params = SamplingParams(
                max_tokens=most,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=body.top_k or 0,
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=body.seed,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                ignore_eos=bool(body.ignore_eos),
                logprobs=body.wants_logprobs,
            )
            stream = await self.engine.submit(prompt, params)
        except QueueFull as error:
            raise ApiError(
                429, str(error), code="queue_full", headers={"Retry-After": "1"}
            ) from None
        except RequestRefused as error:
            raise ApiError(400, str(error), param=body.prompt_field) from None
        except BadInput as error:
            field = str(error).partition(":")[0].partition("[")[0]
            param = field if field in type(body).model_fields else None
            raise ApiError(400, str(error), param=param) from None
        except EngineStopped as error:
            if self.engine.failure is None:
                raise shutting_down() from None
            raise ApiError(503, str(error), code="engine_failed") from None
        except AtomError as error:
            raise ApiError(503, str(error), code="engine_failed") from None
        return Generation(stream, self.model.tokenizer, self.metrics, endpoint, began, body.stops)

    def _most_tokens(self, body: GenerationRequest, prompt: int) -> int | None:
        """Tokens to generate at most (``None``: what fits), or an error if it is too long."""
        if prompt == 0:
            raise ApiError(400, "the prompt is empty: a model needs a token to go on from")
        longest, asked = self.model.max_model_len, body.most_tokens
        left = longest - prompt
        # the default of completions is no wish of the client's
        wished = asked if body.max_tokens is not None or asked != body.default_max_tokens else None
        if left < 1 or (wished or 0) > left:
            output = "" if wished is None else f" and {wished} of output"
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens{output}; together at most {longest} fit "
                "(--max-model-len)",
                param=body.prompt_field,
                code="context_length_exceeded",
            )
        return None if asked is None else min(asked, left)

    def _count_refusal(self, request: Request, error: ApiError) -> None:
        endpoint = request.url.path.removeprefix("/v1/")
        # one that began to be answered has been counted
        if endpoint in _ENDPOINTS and error.code != "generation_failed":
            self.metrics.requests.labels(endpoint, "refused").inc()

    async def _on_encoder(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def _check_model(self, name: str) -> None:
        if name != self.model.name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!a} here; this server runs {self.model.name!r}",
                param="model",
                code="model_not_found",
            )

    def _model_fields(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "atom",
            "max_model_len": model.max_model_len,
            "simulated": model.simulated,
        }


_Body = TypeVar("_Body", bound=GenerationRequest)
