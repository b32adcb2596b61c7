"""Answers in OpenAI's form, whole and in chunks, of text completions and of chat."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from atom.entrypoints.generation import Generation, Piece, SampledToken, Usage
from atom.entrypoints.tokenizer import ServerTokenizer

DONE = b"data: [DONE]\n\n"


class Answer:
    """Shapes the pieces of one generation; subclasses know what a choice looks like.

    Args:
        model: name that the client asked for.
        generation: gives the pieces.
        logprobs: whether choices carry logprobs.
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, model: str, generation: Generation, *, logprobs: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._generation = generation
        self._logprobs = logprobs
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        text, tokens, reason = "", list[SampledToken](), None
        with self._generation.watched():
            async for piece in self._generation.pieces():
                text += piece.text
                tokens += piece.tokens
                reason = piece.finish_reason
            choice = self._choice(Piece(text, tuple(tokens), reason))
        usage = usage_fields(self._generation.usage)
        return {**self._head(self.kind), "choices": [choice], "usage": usage}

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events, the closing one left to the caller."""
        head = self._head(self.chunk_kind)
        # with usage asked for, every chunk has the field, and only the last a value
        tail = {"usage": None} if include_usage else {}
        first = True
        with self._generation.watched():
            async for piece in self._generation.pieces():
                for choice in self._chunk_choices(piece, first=first):
                    yield event({**head, "choices": [choice], **tail})
                first = False
        if include_usage:
            usage = usage_fields(self._generation.usage)
            yield event({**head, "choices": [], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk_choices(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError


class TextAnswer(Answer):
    """Answer of ``/v1/completions``."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, generation: Generation, *, logprobs: bool) -> None:
        super().__init__(model, generation, logprobs=logprobs)
        self._offset = 0

    def _choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = self._text_logprobs(piece.tokens) if self._logprobs else None
        return {
            "index": 0,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def _chunk_choices(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        return [self._choice(piece)]

    def _text_logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        texts = [token_text(self._generation.tokenizer, token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [json_number(token.logprob) for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._with_logprobs({"index": 0, "message": message}, piece)

    def _chunk_choices(self, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        if first:
            # with the first text and not before it, so that it is not taken for it
            role = {"role": "assistant", "content": ""}
            choices.append({"index": 0, "delta": role, "logprobs": None, "finish_reason": None})
        if piece.text or piece.tokens:
            talk = Piece(piece.text, piece.tokens)
            choices.append(
                self._with_logprobs({"index": 0, "delta": {"content": piece.text}}, talk)
            )
        if piece.finish_reason is not None:
            end = {"index": 0, "delta": {}, "logprobs": None}
            choices.append({**end, "finish_reason": piece.finish_reason})
        return choices

    def _with_logprobs(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            content = [self._token_logprob(token) for token in piece.tokens]
            logprobs = {"content": content, "refusal": None}
        return {**choice, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _token_logprob(self, token: SampledToken) -> dict[str, Any]:
        data = self._generation.tokenizer.token_bytes(token.token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": json_number(token.logprob),
            "bytes": list(data),
            "top_logprobs": [],
        }


def token_text(tokenizer: ServerTokenizer, token_id: int) -> str:
    """Text of a token alone; a part of a character shows as the replacement character."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def json_number(value: float) -> float | None:
    """The number, or ``None`` for infinity and what is no number: JSON has neither."""
    return value if math.isfinite(value) else None


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def event(values: dict[str, Any]) -> bytes:
    """A server-sent event with JSON in it."""
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", errors="replace") + b"\n\n"
