"""Rows of the sanitizer's runs on programs of other libraries."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Outcome(StrEnum):
    """How a program went."""

    FINISHED = "finished"
    FAILED = "failed"
    ABSENT = "not installed"
    LATE = "out of time"


class ForeignRow(BaseModel):
    """One program in a process of its own: timed without the sanitizer twice, then with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str = Field(min_length=1)
    library: str = Field(min_length=1)
    version: str | None = None
    """The library's; blank where it is not installed."""
    outcome: Outcome
    steps: int = Field(ge=0)
    """Timed steps an arm, behind one that is not timed."""
    step_milliseconds: float | None = Field(default=None, gt=0)
    """Mean wall-clock time of a step without the sanitizer; the device is waited for at the end
    of all steps only, because each wait would also hide what the sanitizer looks for."""
    step_milliseconds_again: float | None = Field(default=None, gt=0)
    """The same once more: the null arm."""
    step_milliseconds_watched: float | None = Field(default=None, gt=0)
    """Under the sanitizer."""
    slow_down: float | None = Field(default=None, gt=0)
    """Watched over the mean of the other two."""
    operations: int | None = Field(default=None, ge=0)
    """Device operations a step that the sanitizer saw."""
    findings: int | None = Field(default=None, ge=0)
    """Different findings; their rows are in the table of findings."""
    text: str | None = None
    """Why it did not finish."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        measured = (self.slow_down, self.operations, self.findings)
        if (self.outcome is Outcome.FINISHED) is any(value is None for value in measured):
            raise ValueError("a finished program has all its figures, another has none")
        if self.outcome is not Outcome.FINISHED and not self.text:
            raise ValueError("a program that did not finish says why")
        return self


class ForeignFindingRow(BaseModel):
    """One finding in a program. Places are ``file:line in function``, files as the library has
    them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str = Field(min_length=1)
    number: int = Field(ge=1)
    kind: str = Field(min_length=1)
    edge: str = Field(pattern="^[abc]$")
    times: int = Field(ge=1)
    """How often these lines were seen."""
    operation: str = Field(min_length=1)
    """The earlier use."""
    tensor: str | None = None
    stream: str = Field(min_length=1)
    place: str = Field(min_length=1)
    freed: str | None = None
    second: str | None = None
    """The later use, its stream and its place, where there is one."""
    callers: str | None = None
    """Lines that called the earlier use, nearest first."""
    fix: str = Field(min_length=1)


class BlindSpotRow(BaseModel):
    """Something that the sanitizer could not see while a program ran."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str = Field(min_length=1)
    number: int = Field(ge=1)
    text: str = Field(min_length=1)
