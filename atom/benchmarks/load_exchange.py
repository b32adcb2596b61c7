"""One request and its answer as a load client sees them: what a client fills in, how it fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

#: ids of prompts that any model has
VOCAB_SIZE = 256


class LoadFailure(Exception):
    """A request failed; the message names no address and no key."""

    outcome = "error"


class LoadRefusal(LoadFailure):
    """The server said no before it began."""

    outcome = "refused"


@dataclass(slots=True)
class Exchange:
    """A request on its way; a client fills it in as the answer comes.

    Attributes:
        prompt_token_ids: what is asked.
        output_tokens: tokens to generate, neither more nor fewer.
        seconds: longest time that the answer may take.
        started: when it was sent, by ``time.monotonic``.
        first_token: when its first token arrived.
        ended: when its last token arrived.
        prompt_tokens: as the server counted them.
        cached_tokens: prompt tokens that a cache had; ``None`` when the server does not say.
        generated: tokens that arrived.
    """

    prompt_token_ids: Sequence[int]
    output_tokens: int
    seconds: float
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    ended: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated: int = 0


@asynccontextmanager
async def time_limit(exchange: Exchange) -> AsyncIterator[None]:
    """Hold what runs inside to the exchange's seconds.

    Raises:
        LoadFailure: it took longer.
    """
    try:
        async with asyncio.timeout(exchange.seconds):
            yield
    except TimeoutError:
        raise LoadFailure(f"no end of the answer within {exchange.seconds:g} s") from None


class LoadClient(Protocol):
    """Sends requests to one server or engine."""

    #: ids of prompts are below it
    vocab_size: int

    async def send(self, exchange: Exchange) -> None:
        """Send a request and read its answer to the end.

        Raises:
            LoadFailure: it was refused or failed; ``exchange`` keeps what was seen until then.
        """
        ...

    async def close(self) -> None:
        """Give back what the client holds; the server goes on."""
        ...
