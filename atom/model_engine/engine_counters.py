"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineCounters:
    """What an engine has done so far.

    Attributes:
        steps, prefill_steps, middle_chunks, decode_steps: steps launched.
        prompt_tokens, generated_tokens: tokens computed and emitted.
        drafted_tokens, accepted_tokens: drafts verified, and those that held.
        stale_payloads: transfers that carried another step's tag.
        impossible_statuses: rows whose status no step can have.
        guard_errors: guard records that arrived.
        finished, failed, aborted: requests by their end.
    """

    steps: int = 0
    prefill_steps: int = 0
    middle_chunks: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    stale_payloads: int = 0
    impossible_statuses: int = 0
    guard_errors: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
