"""Rows of the engine-fault experiment."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from atom.config import CopyProtocol, GuardMode
from atom.model_engine.engine_settings import StatusCheck


class EngineFaultRow(BaseModel):
    """One arm: an engine that decodes while a long prompt's chunks and a store come between.

    ``statuses`` counts the statuses that the host received; a stale one is a status that no step
    can have, or one with another step's tag.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<arm>/<token budget>``: unique within a run."""
    arm: str = Field(min_length=1)
    protocol: CopyProtocol
    guard: GuardMode
    status_check: StatusCheck
    epoch_tag: bool
    token_budget: int = Field(ge=1)
    """``max_num_batched_tokens`` of the arm: tokens of a full prefill chunk."""
    requests: int = Field(ge=1)
    """Requests that decode while the long prompt is computed."""
    draft_tokens: int = Field(ge=0)
    """Draft tokens a step; 0: no speculation, and no status."""
    store_bytes: int = Field(ge=0)
    """Bytes queued ahead of the status copy of each decode step, on the copy stream."""
    middle_chunks: int = Field(ge=0)
    """Prefill chunks that ended before their prompt did: each is one window."""
    statuses: int = Field(ge=0)
    stale_statuses: int = Field(ge=0)
    largest_bonus: int
    """Largest ``num_bonus`` that the host believed to have received; -1 if there was none."""
    budget_statuses: int = Field(ge=0)
    """Statuses with a ``num_bonus`` equal to the token budget."""
    status_lines: int = Field(ge=0)
    """``[L1DBG-MTP-STATUS]`` lines of the debug checks."""
    out_of_bounds_lines: int = Field(ge=0)
    """``[L1DBG-GDN-OOB]`` lines of the debug checks."""
    first_out_of_bounds_line: str | None
    stale_payloads: int = Field(ge=0)
    """Transfers that the epoch tag gave away: statuses, and ids or drafts."""
    guard_errors: int = Field(ge=0)
    guard_value: int | None
    """``num_accepted_tokens`` in the first guard record."""
    failed_requests: int = Field(ge=0)
    """Requests that ended with an error."""
    changed_requests: int = Field(ge=0)
    """Requests that ended well with other tokens than under ``hold`` in the same run."""
    compared_requests: int = Field(ge=0)
    """Requests that ended well here and under ``hold``."""
    first_wrong_status: str | None
    """Head of the first ``num_bonus`` list that differs from the reference's of the same step."""
    first_wrong_rows: int | None = Field(ge=1)
    """Rows of that list that differ."""
    first_wrong_rows_in_range: int | None = Field(ge=0)
    """Of those rows, the ones with a legal count, which no bounds check can tell."""
    crashed: bool
    """The engine or its process died."""
    exit_code: int | None
    """How the process ended that ran this arm alone; negative: by that signal. ``None``: no such
    process."""
    error: str | None
    """First line of what it died of, or of the first request's error."""
