"""A request on its way: its tokens become text, are cut at stop strings, and are counted."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from atom.entrypoints.api_error import ApiError
from atom.entrypoints.async_engine import EngineStream
from atom.entrypoints.metrics import ServerMetrics
from atom.entrypoints.tokenizer import ServerTokenizer
from atom.model_engine.detokenizer import Detokenizer
from atom.model_engine.request_output import RequestOutput

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token with its log probability, for answers that carry them."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Piece:
    """What one output of the engine adds to an answer.

    Attributes:
        text: text that became certain; may be empty.
        tokens: the tokens, when their logprobs were asked for. Their text may come later.
        finish_reason: ``stop`` or ``length`` on the last piece.
    """

    text: str
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: str | None = None


@dataclass
class Usage:
    """Token counts of an answer.

    Attributes:
        prompt: tokens of the prompt.
        cached: those of them that a cache had.
        output: tokens generated, up to the one that completed a stop string.
    """

    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass
class Generation:
    """One request from the engine's first output to the answer's end.

    Attributes:
        stream: the engine's outputs.
        tokenizer: gives their text.
        metrics: is told of every token and of the end.
        endpoint: label of the metrics.
        began: when the request arrived, by ``time.monotonic``.
        stops: stop strings.
        usage: counts so far.
    """

    stream: EngineStream
    tokenizer: ServerTokenizer
    metrics: ServerMetrics
    endpoint: str
    began: float
    stops: Sequence[str] = ()
    usage: Usage = field(default_factory=Usage)
    _end: str = "disconnected"
    _closed: bool = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer piece by piece.

        Whoever reads it does so within :meth:`watched`, and calls :meth:`close` in the end.

        Raises:
            ApiError: if the request fails in the engine.
        """
        detokenizer = Detokenizer(self.tokenizer, self.stops)
        last = self.began
        reason = None
        while reason is None:
            output = await self.stream.next()
            last = self._observe(output, last)
            if output.finish_reason in ("error", "abort"):
                raise self._failure(output)
            piece = self._piece(detokenizer, output)
            reason = piece.finish_reason
            if reason is not None:
                # a stop string ends the answer and not the request
                self._end = reason
                self.stream.abort()
            if piece.text or piece.tokens or reason is not None:
                yield piece

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Whatever is raised within, other than that the client left, is how the request ended."""
        try:
            yield
        except Exception:
            self._end = "error"
            raise

    def close(self) -> None:
        """Abort the request if it has not ended, and count it."""
        if self._closed:
            return
        self._closed = True
        self.stream.abort()
        metrics = self.metrics
        metrics.requests.labels(self.endpoint, self._end).inc()
        metrics.prompt_tokens.inc(self.usage.prompt)
        metrics.cached_tokens.inc(self.usage.cached)
        metrics.output_tokens.inc(self.usage.output)
        metrics.whole.observe(time.monotonic() - self.began)

    def _piece(self, detokenizer: Detokenizer, output: RequestOutput) -> Piece:
        token_ids = output.new_token_ids
        # the engine keeps the token that ended the request; an answer leaves it out
        shown = token_ids[:-1] if output.finish_reason == "stop" else token_ids
        text, used = detokenizer.push(shown)
        reason = output.finish_reason
        if detokenizer.stopped:
            self.usage.output += used
            return Piece(text, self._sampled(output, used), "stop")
        if output.finished:
            text += detokenizer.finish()
            reason = "stop" if detokenizer.stopped else reason
        self.usage.output += len(token_ids)
        return Piece(text, self._sampled(output, len(shown)), reason)

    def _sampled(self, output: RequestOutput, count: int) -> tuple[SampledToken, ...]:
        if output.logprobs is None:
            return ()
        pairs = zip(output.new_token_ids[:count], output.logprobs[:count], strict=True)
        return tuple(SampledToken(token_id, logprob) for token_id, logprob in pairs)

    def _failure(self, output: RequestOutput) -> ApiError:
        message = output.error or "the request was aborted in the engine"
        _LOGGER.warning("request %s failed: %s", output.request_id, message)
        return ApiError(500, message, code="generation_failed")

    def _observe(self, output: RequestOutput, last: float) -> float:
        self.usage.prompt = output.num_prompt_tokens or self.usage.prompt
        self.usage.cached = output.num_cached_tokens or self.usage.cached
        count = len(output.new_token_ids)
        if not count:
            return last
        now = time.monotonic()
        first = self.usage.output == 0
        if first:
            self.metrics.first_token.observe(now - self.began)
        else:
            for _ in range(count):
                self.metrics.between_tokens.observe((now - last) / count)
        return now
