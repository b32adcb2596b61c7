"""Puts the chats of a task to an engine of this process, or over HTTP to any server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atom.benchmarks.gsm8k_task import (
    STOPS,
    TaskItem,
    cut_at_stops,
    flexible_extract,
    hash_of,
    is_right,
    strict_match,
)
from atom.benchmarks.load_http import checked_url, key_of
from atom.entrypoints.async_engine import AsyncEngine, EngineStopped
from atom.entrypoints.tokenizer import ServerTokenizer
from atom.errors import AtomError
from atom.model_engine.sequence import SamplingParams

#: tokens between two looks for a stop string
_LOOK_TOKENS = 16
#: more than the longest stop string has
_TAIL_TOKENS = 48


@dataclass(slots=True)
class Answer:
    """What came back for an item.

    Attributes:
        text: up to a stop string.
        error: why there is none, or ``None``.
        output_tokens: tokens; ``None`` if the server does not say.
        steps: outputs that brought tokens; ``None`` over HTTP.
    """

    text: str = ""
    error: str | None = None
    output_tokens: int | None = None
    steps: int | None = None


class Asker(Protocol):
    """Answers a chat."""

    async def ask(self, chat: Sequence[dict[str, str]]) -> Answer:
        """The answer. An item that fails is an answer with an error."""
        ...


class EngineAsker:
    """Asks an engine of this process, as its server would.

    Args:
        engine: started; it stays its owner's.
        tokenizer: of the model.
        vocab_size: ids of its tokens are below it.
        max_model_len: most tokens of a request.
        max_tokens: longest answer.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: ServerTokenizer,
        vocab_size: int,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._longest = max_model_len
        self._max_tokens = max_tokens

    async def ask(self, chat: Sequence[dict[str, str]]) -> Answer:
        """See :class:`Asker`."""
        prompt = self._tokenizer.chat(chat, {})
        room = min(self._max_tokens, self._longest - len(prompt))
        if room < 1:
            return Answer(error=f"a prompt of {len(prompt)} tokens leaves no room for an answer")
        answer = Answer(output_tokens=0, steps=0)
        tokens: list[int] = []
        try:
            params = SamplingParams(max_tokens=room, temperature=0.0)
            stream = await self._engine.submit(prompt, params)
            try:
                looked = 0
                while True:
                    output = await stream.next()
                    tokens.extend(output.new_token_ids)
                    answer.steps = (answer.steps or 0) + bool(output.new_token_ids)
                    if output.finish_reason in ("error", "abort"):
                        answer.error = output.error or "the request was aborted in the engine"
                    if output.finished:
                        break
                    if len(tokens) - looked >= _LOOK_TOKENS:
                        looked = len(tokens)
                        tail = self._text(tokens[-_TAIL_TOKENS:])
                        if any(stop in tail for stop in STOPS):
                            break
            finally:
                stream.abort()
        except (AtomError, EngineStopped) as error:
            answer.error = str(error)
        answer.output_tokens = len(tokens)
        answer.text = cut_at_stops(self._text(tokens))
        return answer

    def _text(self, tokens: Sequence[int]) -> str:
        """Text, with ids that no token has shown as ``<id>``: stale bytes may be any number."""
        if all(0 <= token < self._vocab_size for token in tokens):
            return self._tokenizer.decode(tokens)
        return "".join(
            self._tokenizer.decode([token]) if 0 <= token < self._vocab_size else f"<{token}>"
            for token in tokens
        )


class HttpAsker:
    """Asks ``/v1/chat/completions`` of a server.

    Args:
        base_url: where it is, with or without ``/v1``.
        model: name of the model there.
        max_tokens: longest answer.
        seconds: longest time of a request.
        api_key_env: variable with the key; ``None`` sends none.
        transport: what carries the requests; ``None`` is the network.

    Raises:
        BadInput: the URL, or the variable, cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        max_tokens: int,
        seconds: float,
        api_key_env: str | None = None,
        *,
        transport: Any = None,
    ) -> None:
        import httpx

        headers = {}
        if api_key_env is not None:
            headers["Authorization"] = f"Bearer {key_of(api_key_env)}"
        self._body = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stop": list(STOPS),
        }
        self._http = httpx.AsyncClient(
            base_url=checked_url(base_url),
            headers=headers,
            transport=transport,
            trust_env=False,
            timeout=httpx.Timeout(seconds, connect=10.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
        )

    async def ask(self, chat: Sequence[dict[str, str]]) -> Answer:
        """See :class:`Asker`."""
        import httpx

        try:
            response = await self._http.post(
                "chat/completions", json={**self._body, "messages": list(chat)}
            )
            if response.status_code != 200:
                return Answer(error=f"status {response.status_code}")
            content = response.json()
            text = content["choices"][0]["message"].get("content") or ""
            used = content.get("usage") or {}
            return Answer(cut_at_stops(str(text)), None, used.get("completion_tokens"))
        except httpx.HTTPError as error:
            # its text may name the host
            return Answer(error=f"the connection failed ({type(error).__name__})")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return Answer(error="the server's answer is no chat completion")

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()


async def ask_all(
    asker: Asker,
    chats: Sequence[Sequence[dict[str, str]]],
    concurrency: int,
    answers: dict[int, Answer],
) -> None:
    """Ask all chats, so many at a time, in their order.

    Args:
        asker: who answers.
        chats: one an item.
        concurrency: open at once.
        answers: filled in as they come, by place of the chat.
    """
    numbers = iter(range(len(chats)))

    async def lane() -> None:
        for number in numbers:
            answers[number] = await asker.ask(chats[number])

    await asyncio.gather(*(lane() for _ in range(min(concurrency, len(chats)))))


def item_rows(
    test: Sequence[TaskItem],
    chats: Sequence[Sequence[dict[str, str]]],
    answers: Sequence[Answer],
) -> list[dict[str, Any]]:
    """Rows of table ``items``, without the point's identity. A failed item is never right."""
    return [
        {
            "item": number,
            "outcome": "ok" if answer.error is None else "error",
            "strict": answer.error is None and is_right(strict_match(answer.text), item.answer),
            "flexible": answer.error is None
            and is_right(flexible_extract(answer.text), item.answer),
            "output_tokens": answer.output_tokens,
            "steps": answer.steps,
            "prompt_hash": hash_of(list(chat)),
            "answer_hash": hash_of(answer.text),
        }
        for number, (item, chat, answer) in enumerate(zip(test, chats, answers, strict=True))
    ]
