"""A stand-in for the engine, with its interface, that needs neither a model nor a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atom.model_engine.admission import QueueFull, RequestRefused
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams

MODEL = "fake"
LONGEST = 4096
#: what the stand-in says, again and again
SAYS = "The cat sat on the mat; größer als 猫 🙂. "


def says(tokens: int) -> str:
    """Text of that many tokens of every answer."""
    return (SAYS * 100).encode()[:tokens].decode(errors="replace")


@dataclass
class _Running:
    prompt: tuple[int, ...]
    params: SamplingParams
    said: int = 0


class FakeEngine:
    """Says :data:`SAYS` byte by byte to everyone, up to three tokens a step; not thread-safe.

    Args:
        step_seconds: what a step takes.
        most_waiting: requests it holds before it refuses one.
        eos_after: tokens after which a request ends by itself.

    Attributes:
        say_nothing_below: nobody gets a token before that many requests run at once.
        fail_next: error that the next request in a step fails with, alone.
        logprob: of a token.
        before_step: called at the start of each step, on the engine's thread.
    """

    def __init__(
        self, *, step_seconds: float = 0.0, most_waiting: int = 10_000, eos_after: int = 10**9
    ) -> None:
        self.step_seconds = step_seconds
        self.most_waiting = most_waiting
        self.eos_after = eos_after
        self.aborted: list[str] = []
        self.seen: list[SamplingParams] = []
        self.threads: set[int] = set()
        self.closed = False
        self.before_step: Callable[[], None] = lambda: None
        self.fail_next: str | None = None
        self.say_nothing_below = 0
        self.logprob: Callable[[int], float] = lambda token: -token / 256
        self._running: dict[str, _Running] = {}
        self._outputs: list[RequestOutput] = []
        self._count = 0

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        self._note_thread()
        params = params or SamplingParams()
        if len(self._running) >= self.most_waiting:
            raise QueueFull(f"{self.most_waiting} requests wait already")
        if prompt_token_ids[0] == ord("!"):
            raise RequestRefused("this prompt can never be served")
        self._count += 1
        name = request_id or f"request-{self._count}"
        self._running[name] = _Running(tuple(prompt_token_ids), params)
        self.seen.append(params)
        return name

    def abort_request(self, request_id: str) -> bool:
        self._note_thread()
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self.aborted.append(request_id)
        self._outputs.append(self._output(request_id, running, (), "abort"))
        return True

    def step(self) -> list[RequestOutput]:
        self._note_thread()
        self.before_step()
        time.sleep(self.step_seconds)
        if len(self._running) < self.say_nothing_below:
            return []
        self.say_nothing_below = 0
        for place, (name, running) in enumerate(list(self._running.items())):
            reason = None
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                del self._running[name]
                self._outputs.append(self._output(name, running, (), "error", error))
                continue
            count = 1 + (running.said + place) % 3
            most = running.params.max_tokens or 16
            tokens = tuple(self._byte(running.said + i) for i in range(count))
            tokens = tokens[: most - running.said]
            if running.said + len(tokens) >= most:
                reason = "length"
            if not running.params.ignore_eos and running.said + len(tokens) >= self.eos_after:
                tokens, reason = (*tokens[: self.eos_after - running.said], 0), "stop"
            running.said += len(tokens)
            if reason is not None:
                del self._running[name]
            self._outputs.append(self._output(name, running, tokens, reason))
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._running or self._outputs)

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._running),
            "waiting": 0,
            "used_blocks": 25,
            "num_blocks": 100,
            "hit_tokens": 3,
            "lookup_tokens": 4,
            "drafted_tokens": 30,
            "accepted_tokens": 20,
            "guard_errors": 2,
            "stale_payloads": 1,
            "something_new": 7,
        }

    def close(self) -> None:
        self.closed = True
        for name in list(self._running):
            self.abort_request(name)
        self._outputs.clear()

    def _byte(self, place: int) -> int:
        text = SAYS.encode()
        return text[place % len(text)]

    def _output(
        self,
        name: str,
        running: _Running,
        tokens: tuple[int, ...],
        reason: str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=name,
            new_token_ids=tokens,
            logprobs=tuple(map(self.logprob, tokens)) if running.params.logprobs else None,
            finished=reason is not None,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(running.prompt),
            num_cached_tokens=len(running.prompt) // 2,
            num_output_tokens=running.said,
        )

    def _note_thread(self) -> None:
        self.threads.add(threading.get_ident())
