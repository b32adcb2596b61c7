"""Where requests come in by name, and their outputs go out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from atom.model_engine.admission import RequestRefused
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import FinishReason, SamplingParams, token_array
from atom.model_engine.sequence import Sequence as Request


class RequestDesk:
    """Names of the unfinished requests, and outputs that nobody has taken yet.

    Args:
        vocab_size: token ids of a prompt are below it; ``None`` does not check.
        logprobs: whether the engine computes those of sampled tokens.

    Attributes:
        requests: unfinished ones by name.
        names: name of each by its number.
        outputs: in the order in which they arose.
    """

    def __init__(self, vocab_size: int | None, *, logprobs: bool) -> None:
        self._vocab_size = vocab_size
        self._logprobs = logprobs
        self._numbers = itertools.count()
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.outputs: list[RequestOutput] = []

    def make(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, name: str | None
    ) -> tuple[Request, str]:
        """A request and its name; nothing is kept yet.

        Raises:
            BadInput: the prompt has no tokens, or something in it is no token id.
            RequestRefused: it wants what this engine cannot give, or its name is in use.
        """
        if params.wants_logprobs and not self._logprobs:
            raise RequestRefused("logprobs: this engine computes none; start it with logprobs=true")
        if params.top_logprobs:
            raise RequestRefused(
                f"logprobs={params.top_logprobs}: of the sampled tokens alone (true), not of others"
            )
        number = next(self._numbers)
        while name is None and f"request-{number}" in self.requests:
            number = next(self._numbers)
        name = f"request-{number}" if name is None else name
        if name in self.requests:
            raise RequestRefused(f"request id {name!r} is in use")
        request = Request(number, token_array(prompt_token_ids), params)
        if self._vocab_size is not None:
            largest = max(request.token_ids)
            if largest >= self._vocab_size:
                raise RequestRefused(
                    f"prompt token {largest} is outside the model's vocabulary of "
                    f"{self._vocab_size}"
                )
        return request, name

    def open(self, request: Request, name: str) -> None:
        """Keep a request that was admitted."""
        self.requests[name] = request
        self.names[request.request_id] = name

    def put(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...] | None,
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """Add an output."""
        self.outputs.append(
            RequestOutput(
                request_id=self.names[request.request_id],
                new_token_ids=token_ids,
                logprobs=logprobs,
                finished=reason is not None,
                finish_reason=reason,
                error=error,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
            )
        )

    def close(
        self,
        request: Request,
        reason: FinishReason,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...] | None,
        error: str | None,
    ) -> None:
        """Add a request's last output and forget it."""
        self.put(request, token_ids, logprobs, reason, error)
        del self.requests[self.names.pop(request.request_id)]

    def take_outputs(self) -> list[RequestOutput]:
        """What arose since the last call."""
        outputs, self.outputs = self.outputs, []
        return outputs
