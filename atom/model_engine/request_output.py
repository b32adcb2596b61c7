"""What the engine hands out for a request after a step."""

from __future__ import annotations

from dataclasses import dataclass


# not frozen: an engine makes one a request and step
@dataclass(slots=True)
class RequestOutput:
    """Tokens of one request that a step made known, and where the request stands.

    Attributes:
        request_id: the id that ``LLMEngine.add_request`` returned.
        new_token_ids: tokens since the previous output of this request, in order. Deferred outputs
            and accepted drafts make it any length, 0 included.
        logprobs: log probability (natural) of each new token; ``None`` when not asked for.
        finished: no output follows this one.
        finish_reason: ``None`` until ``finished``; then stop, length, abort or error.
        error: what went wrong, for a user, when ``finish_reason`` is ``error``.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens that were taken from a cache and not computed.
        num_output_tokens: tokens handed out so far, these included.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    finished: bool = False
    finish_reason: str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
