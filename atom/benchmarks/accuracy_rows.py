"""Rows of the accuracy experiment: one a point, its items, and answers of word problems.

Blank means that it was not measured, never zero.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from atom.benchmarks.throughput_rows import Outcome
from atom.config import CopyProtocol

EXPERIMENT = "accuracy"


class AccuracyRow(BaseModel):
    """One point: all items put to one engine or server. Counters are of its whole life."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<arm>/<pool or no-pool>/<mtp or plain>`` and the pressure: unique within a run."""
    arm: str = Field(min_length=1)
    system: str = Field(min_length=1)
    """What served: ``atom``, or the label of a server."""
    client: str = Field(min_length=1)
    """Who asked: ``engine`` (in process), ``http`` or ``lm-eval``."""
    order: int = Field(ge=0)
    """Place of the point in the planned order of the run."""
    model: str = Field(min_length=1)
    """Name of the model; ``seeded words1``: random weights, its answers are noise."""
    dataset: str = Field(min_length=1)
    """``words`` (word problems) or ``gsm8k``."""
    task_hash: str = Field(min_length=16, max_length=16)
    """Of all prompts: points with the same were asked the same."""
    protocol: CopyProtocol | None
    """Blank: a server that is not ours."""
    believes: bool | None
    """Whether stale payloads were only counted and taken as they came."""
    pool_gib: float | None = Field(ge=0)
    """CPU pool in GiB; blank: no offload."""
    draft_tokens: int | None = Field(ge=0)
    pressure_mib: float | None = Field(ge=0)
    """MiB stored on other streams ahead of a step; 0: none."""
    pressure_every: int | None = Field(ge=1)
    """Ahead of every how many steps."""
    concurrency: int = Field(ge=1)
    shots: int = Field(ge=0)

    outcome: Outcome
    outcome_detail: str | None
    """First line of what it died of."""
    exit_code: int | None
    wall_seconds: float = Field(ge=0)
    """From the start of the process to its end."""
    setup_seconds: float | None = Field(ge=0)
    """From the start of the process to the first request."""
    seconds: float | None = Field(ge=0)
    """From the first request to the last answer."""
    worker: str | None
    """Of a cluster."""
    beside: int = Field(ge=0)
    """Most other points that had its GPU at the same time; see ``needs_gpu_alone``."""

    items: int = Field(ge=1)
    """Items that were to be asked."""
    answered: int | None = Field(ge=0)
    failed_requests: int | None = Field(ge=0)
    """Items without an answer: their request ended with an error."""
    strict: int | None = Field(ge=0)
    """Items right by lm-eval's strict-match."""
    flexible: int | None = Field(ge=0)
    """Items right by its flexible-extract."""

    stale_statuses: int | None = Field(ge=0)
    """Statuses that carried another step's tag."""
    stale_tokens: int | None = Field(ge=0)
    """Transfers of sampled ids that did."""
    stale_drafts: int | None = Field(ge=0)
    """Transfers of draft ids that did; the host does not use them."""
    impossible_statuses: int | None = Field(ge=0)
    """Rows whose status no step can have."""
    guard_errors: int | None = Field(ge=0)
    decode_steps: int | None = Field(ge=0)
    generated_tokens: int | None = Field(ge=0)
    prompt_tokens_computed: int | None = Field(ge=0)
    hit_tokens: int | None = Field(ge=0)
    """Prompt tokens found in a cache, of the device or the pool."""
    drafted_tokens: int | None = Field(ge=0)
    accepted_tokens: int | None = Field(ge=0)
    stored_bytes: int | None = Field(ge=0)
    """Into the CPU pool."""
    loaded_bytes: int | None = Field(ge=0)
    """From it."""


class AccuracyItemRow(BaseModel):
    """One item's answer at one point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    item: int = Field(ge=0)
    outcome: str = Field(pattern=r"^(ok|error)$")
    """error: its request failed."""
    strict: bool
    flexible: bool
    output_tokens: int | None = Field(ge=0)
    """As far as is known."""
    steps: int | None = Field(ge=0)
    """Steps that brought tokens."""
    prompt_hash: str = Field(min_length=16, max_length=16)
    """First 64 bits of SHA-256 of the chat, in hexadecimal."""
    answer_hash: str = Field(min_length=16, max_length=16)
    """Likewise of the answer up to a stop string."""


class AccuracyTextRow(BaseModel):
    """An answer to a word problem, as text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    item: int = Field(ge=0)
    text: str = Field(min_length=2)
    """As a JSON string: a damaged answer may hold any character."""
