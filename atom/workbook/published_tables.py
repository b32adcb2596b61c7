"""The source's tables as typed rows: one CSV file each in ``data/published/``.

Columns that every table has:

``protocol``
    copy protocol that the row was measured with; blank where it cannot be told or is another one.
``tree``
    source tree as the text names it; the pull request under study is written ``this fix``.
``machine``, ``machine_basis``
    slug of the accelerator. ``stated``: the text names it beside the figures. ``inferred``: it does
    not, and this is the only accelerator named anywhere in it. Blank: not known.
"""

from __future__ import annotations

from typing import Literal, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, model_validator

from atom.config import CopyProtocol, Front
from atom.errors import BadInput
from atom.workbook.tables import DATA, read_rows, to_frame

PUBLISHED = DATA / "published"


class PublishedRow(BaseModel):
    """Columns that every published table has; see the module's text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    protocol: CopyProtocol | None
    tree: str | None
    machine: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    machine_basis: Literal["stated", "inferred"] | None

    @model_validator(mode="after")
    def _basis(self) -> Self:
        if (self.machine is None) != (self.machine_basis is None):
            raise ValueError("machine and machine_basis are given together or both blank")
        return self


class RaceMicrobenchmarkRow(PublishedRow):
    """Stale reads of the published micro-benchmark."""

    front: Front
    queued_ahead: str
    hardware_queues: int | None = Field(ge=1)
    """Where the row states it; otherwise blank."""
    batch_size_requests: int = Field(ge=1)
    stale_trials: int | None = Field(ge=0)
    trials: int | None = Field(ge=1)

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if (self.stale_trials is None) != (self.trials is None):
            raise ValueError("stale_trials and trials are given together or both blank")
        if self.stale_trials is not None and self.stale_trials > (self.trials or 0):
            raise ValueError(f"{self.stale_trials} stale of {self.trials} trials")
        return self


class AgentxRow(PublishedRow):
    """One hour of the AgentX load."""

    point: str
    """Short name of the row."""
    offload: bool
    concurrency_sessions: int = Field(ge=1)
    cpu_pool_gib: float | None = Field(gt=0)
    state_figure_no_unit: int | None = Field(ge=0)
    """Number in brackets behind the pool; the text gives no unit."""
    throughput_tok_s_per_gpu: float = Field(gt=0)
    requests: int = Field(ge=1)
    errors: int | None = Field(ge=0)
    ttft_mean_s: float | None = Field(gt=0)
    itl_p90_ms: float | None = Field(gt=0)
    crashed: bool | None
    gpus: int = Field(ge=1)
    duration_s: int = Field(ge=1)
    seed: int = Field(ge=0)
    forced_mean_length_tokens: float = Field(ge=1)

    @model_validator(mode="after")
    def _pool(self) -> Self:
        if self.offload != (self.cpu_pool_gib is not None):
            raise ValueError("a pool size is given with offload, and only then")
        return self


class CrashRow(PublishedRow):
    """One offload run (or group of runs) and whether it crashed."""

    run: str
    site: Literal["first", "second"] | None
    """The text's first machine, or the one that measured the AgentX table; blank if not told."""
    concurrency_sessions: int | None = Field(ge=1)
    cpu_pool_gib: float | None = Field(gt=0)
    runs: int = Field(ge=1)
    outcome: Literal["crashed", "caught", "completed", "not named"]
    """``caught``: the debug check saw the bad count; whether it crashed is not told."""
    minutes_low: float | None = Field(gt=0)
    minutes_high: float | None = Field(gt=0)
    minutes_basis: Literal["stated", "about", "range of all crashes", "planned"] | None
    throughput_tok_s_per_gpu_about: float | None = Field(gt=0)
    source_place: str
    note: str | None

    @model_validator(mode="after")
    def _minutes(self) -> Self:
        given = [self.minutes_low is None, self.minutes_high is None, self.minutes_basis is None]
        if len(set(given)) > 1:
            raise ValueError("minutes_low, minutes_high and minutes_basis are given together")
        if (self.minutes_low or 0) > (self.minutes_high or 0):
            raise ValueError("the range of minutes ends before it begins")
        return self


class Gsm8kRow(PublishedRow):
    """One accuracy result on the 1319 test items."""

    run: str
    offload: bool
    cpu_pool_gib: float | None = Field(gt=0)
    strict_match: float = Field(ge=0, le=1)
    strict_match_high: float | None = Field(ge=0, le=1)
    """Upper end where a range is given."""
    decimals: int = Field(ge=1, le=6)
    acceptance_percent: float | None = Field(ge=0, le=100)
    items: int | None = Field(ge=1)
    source_place: str


class StateLoadFailureRow(PublishedRow):
    """Failed loads of the state tier, as a share of loads."""

    concurrency_sessions: int = Field(ge=1)
    cpu_pool_gib: float = Field(gt=0)
    failed_percent_low: float = Field(ge=0, le=100)
    failed_percent_high: float = Field(ge=0, le=100)
    approximate: bool
    """Whether the text says "about": it does so once, ahead of the range over all points."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.failed_percent_low > self.failed_percent_high:
            raise ValueError("the range ends before it begins")
        return self


class TestCountRow(PublishedRow):
    """Outcome of a test run."""

    suite: Literal["lifetime", "related GPU files", "CPU suite"]
    revision: str
    passed: int | None = Field(ge=0)
    failed: int | None = Field(ge=0)
    skipped: int | None = Field(ge=0)
    repeats: int = Field(ge=1)
    source_place: str


class LifetimeControlRow(PublishedRow):
    """Stale trials of one path of the lifetime test."""

    path: str
    arm: Literal["holds", "control", "unmodified main"]
    stale_trials: int = Field(ge=0)
    trials: int = Field(ge=1)

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.stale_trials > self.trials:
            raise ValueError(f"{self.stale_trials} stale of {self.trials} trials")
        return self


class EnvironmentRow(PublishedRow):
    """A setting or version of the published measurements."""

    subject: str
    name: str
    value: str
    unit: str | None
    source_place: str


class CopySourceRow(PublishedRow):
    """One source on the copy stream: who keeps it, until when, and where else the text lists it."""

    source: str
    kept_by: str
    released_after: str
    own_event: bool
    """Whether its copy has an event that no other source shares."""
    in_summary: bool
    in_first_gpu_test: bool
    in_second_gpu_test: bool


class DebugLogRow(PublishedRow):
    """Values of one debug line. Lists that the text cuts short hold what it prints, by spaces."""

    line: str
    tag: str
    bonus_values: str | None
    request_ids: str | None
    row: int | None = Field(ge=0)
    request: int | None = Field(ge=0)
    num_accepted_tokens: int | None = Field(ge=0)
    num_bonus: int | None = Field(ge=0)
    state_slot: int | None = Field(ge=0)
    list_is_cut: bool


#: name -> row model of ``data/published/<name>.csv``
PUBLISHED_TABLES: dict[str, type[PublishedRow]] = {
    "race_microbenchmark": RaceMicrobenchmarkRow,
    "agentx": AgentxRow,
    "crash_history": CrashRow,
    "gsm8k": Gsm8kRow,
    "state_load_failures": StateLoadFailureRow,
    "test_counts": TestCountRow,
    "lifetime_controls": LifetimeControlRow,
    "environment": EnvironmentRow,
    "copy_sources": CopySourceRow,
    "debug_log": DebugLogRow,
}


def load_published(name: str) -> pd.DataFrame:
    """A published table, validated; a blank cell stays missing.

    Args:
        name: file name without suffix, see ``PUBLISHED_TABLES``.

    Raises:
        BadInput: no such table, or a fault, as ``file:line:column: what is wrong``.
    """
    model = PUBLISHED_TABLES.get(name)
    if model is None:
        raise BadInput(f"no published table {name!r}; known: {', '.join(PUBLISHED_TABLES)}")
    return to_frame(read_rows(PUBLISHED / f"{name}.csv", model), model)
