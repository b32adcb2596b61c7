"""Rows of the source-lifetime experiment, of the exploration and of the mutation table."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atom.config import CopyProtocol

#: arms: a path under its protocol, and the same without its protection
PROTECTED, CONTROL = "protected", "control"

Alone = Literal["every", "some", "none", "nothing to catch"]


class Window(StrEnum):
    """When a source's block can be written while its copy is still queued."""

    EVERY_STEP = "every step"  #: step N+1 is launched before N's values are read
    MIDDLE_PREFILL = "middle prefill chunk"  #: the status is read at the top of each other step
    CLEAN = "clean()"  #: all handles are dropped at once


class LifetimeRow(BaseModel):
    """Counts of one path under one protocol in one arm.

    ``protected`` is the protocol as it is; ``control`` takes its protection away (for ``clean``:
    the wait). ``unpatched`` protects nothing, so it has a control only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<path>/<protocol>/<arm>``: unique within a run."""
    path: str = Field(min_length=1)
    """One of the seven paths, or ``graph_output``."""
    protocol: CopyProtocol
    arm: Literal["protected", "control"]
    trials: int = Field(ge=1)
    stale: int = Field(ge=0)
    """Trials in which the host did not get the step's values."""
    address_reused: int = Field(ge=0)
    """Trials in which the next step's tensor began at the source's address."""
    tag_caught: int = Field(ge=0)
    """Stale trials that the epoch tag gives away."""
    guard_caught: int = Field(ge=0)
    """Stale trials with a value outside 0..3, which a bounds guard would stop."""
    parked: int = Field(ge=0)
    """Trials in which the copy was still parked when the next step had written."""
    window: Window
    """When the race is open in the engine."""
    engine_drops: bool
    """Whether the engine before the fix itself drops the source in that window."""
    engine_why: str = Field(min_length=1)
    """What drops it, or what keeps it by accident."""

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        for name in ("stale", "address_reused", "parked"):
            if getattr(self, name) > self.trials:
                raise ValueError(f"{name} is {getattr(self, name)} of {self.trials} trials")
        for name in ("tag_caught", "guard_caught"):
            if getattr(self, name) > self.stale:
                raise ValueError(f"{name} is {getattr(self, name)} of {self.stale} stale trials")
        return self


class ExplorationRow(BaseModel):
    """What the exploration of one program found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(min_length=1)
    protocol: CopyProtocol
    depth: int = Field(ge=1)
    """Steps in flight."""
    schedules: int = Field(ge=1)
    """Executions: one of each set of schedules that differ in independent steps only."""
    complete: bool
    """Whether every schedule is covered; a search for a violation ends at the first."""
    outcomes: int = Field(ge=1)
    """Different things that the host got."""
    longest: int = Field(ge=1)
    """Steps of the longest execution."""
    violations: str
    """Kinds of violations, blank if the protocol holds."""
    shortest: int | None = None
    """Steps of the shortest schedule to the violation that says most."""
    seconds: float = Field(ge=0)


class MutationRow(BaseModel):
    """What became of one fault that was put into the code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mutation: str = Field(min_length=1)
    edge: str = Field(min_length=1)
    """Edge or rule that it breaks."""
    what: str = Field(min_length=1)
    caught: bool
    equivalent: bool
    """Whether it changes nothing that can be seen."""
    path: str | None = None
    """Path of the program that kills it."""
    protocol: CopyProtocol | None = None
    depth: int | None = None
    """Least steps in flight with which it is caught."""
    killed_by: str | None = None
    """Property that fails first."""
    steps: int | None = None
    """Steps of the shortest schedule that shows it."""
    foreign_depth: int | None = None
    """Least steps in flight with which the host gets foreign bytes; blank if it never does."""
    foreign_reads: int = Field(ge=0)
    """Transfers of which the host got foreign bytes, over the schedules explored there."""
    tag_caught: int = Field(ge=0)
    guard_caught: int = Field(ge=0)
    tag_alone: Alone
    """Of the foreign reads, what the epoch tag alone gives away."""
    guard_alone: Alone
    """The same for a guard that stops values outside 0..3."""
    schedules: int = Field(ge=0)
    argument: str = ""
    """Why an equivalent one changes nothing."""
