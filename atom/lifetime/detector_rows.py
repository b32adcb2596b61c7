"""Rows of the comparison of detectors: one a scenario and detector, one a timed arm."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: key of the record tables
EXPERIMENT = "detectors"
NOTHING = "nothing"
#: the timed arm that is the same as the one before
NULL_ARM = "nothing again"


class Detector(StrEnum):
    """What watches a program."""

    NOTHING = "nothing"
    OURS = "atom.lifetime"
    TORCH = "torch.cuda._sanitizer"
    MEMCHECK = "compute-sanitizer memcheck"


class Result(StrEnum):
    """How a detector did on one program."""

    CAUGHT = "caught"  #: a fault was reported
    MISSED = "missed"  #: a fault was not reported
    SILENT = "silent"  #: nothing to report, nothing reported
    FALSE_ALARM = "false alarm"  #: a correct program was reported
    FAILED = "failed"  #: the program did not end under the detector
    ABSENT = "not installed"


class DetectorRow(BaseModel):
    """One program under one detector, in a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scenario: str = Field(min_length=1)
    detector: Detector
    faulty: bool
    """Whether an order is missing in the program."""
    expected: str = Field(min_length=1)
    """Kinds of finding that the program must give, joined by ``+``; ``nothing`` for a correct
    one."""
    result: Result
    findings: int = Field(ge=0)
    """Reports that the detector made."""
    as_expected: bool | None = None
    """Ours alone: whether the kinds of finding are exactly the expected ones."""
    names_copy: bool | None = None
    """Whether the output names the line of the earlier use; blank where nothing was reported."""
    names_free: bool | None = None
    """Whether it names the line of the free; blank also where the program frees nothing."""
    names_reuse: bool | None = None
    """Whether it names a line behind the free that uses the bytes again."""
    exit_code: int
    seconds: float = Field(ge=0)
    """Wall-clock seconds of the process, start of Python included; several ran at a time."""
    text: str | None = None
    """The first line of the report, or why there is none."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.faulty is (self.expected == NOTHING):
            raise ValueError(f"faulty={self.faulty}, but expected={self.expected!r}")
        wrong = (Result.SILENT, Result.FALSE_ALARM) if self.faulty else (Result.CAUGHT,)
        if self.result in (*wrong, *(() if self.faulty else (Result.MISSED,))):
            raise ValueError(f"{self.result} does not fit faulty={self.faulty}")
        return self


class SlowdownRow(BaseModel):
    """One process's time for an eager decode loop, under one detector."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str = Field(min_length=1)
    """Detector, ``nothing again`` (the null arm) or ``atom.lifetime, stopped``."""
    detector: Detector
    repeat: int = Field(ge=0)
    steps: int = Field(ge=0)
    """Timed steps; 0 where the arm did not end or is not installed."""
    operations: int = Field(ge=0)
    """Device operations a step that our sanitizer counts; 0 under the others."""
    step_milliseconds: float | None = None
    """Median wall-clock time of a step."""
    step_milliseconds_low: float | None = None
    """Lower quartile."""
    step_milliseconds_high: float | None = None
    """Upper quartile."""
    slow_down: float | None = None
    """Median over that of ``nothing`` in the same repeat."""
    findings: int = Field(ge=0)
    """Reports on the loop, which is correct: each is a false alarm."""
    text: str | None = None
    """Why there is no time."""
