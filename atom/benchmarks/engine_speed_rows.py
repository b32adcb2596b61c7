"""Rows of the engine-speed experiment: timings, device time by category, bytes, and memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Job(StrEnum):
    """What an arm is timed at."""

    DECODE = "decode"  #: steady steps of a full batch
    PREFILL = "prefill"  #: one long prompt, from its ids on the host to its first token there


class SpeedArm(StrEnum):
    """Who does the job, and how."""

    OURS = "ours"  #: this engine without drafts
    NULL = "ours again"  #: the same engine once more: its difference from ``ours`` is noise
    MTP = "ours, MTP"  #: with drafts, verified for real
    FORCED = "ours, MTP forced"  #: with drafts and a forced acceptance length
    REPLAY = "ours, MTP, replay"  #: as ``MTP``, with one recurrent state that replays drafts
    REPLAY_FORCED = "ours, MTP forced, replay"  #: as ``FORCED``, with that
    TRANSFORMERS = "transformers"  #: its model and cache in a plain greedy loop


class Clock(StrEnum):
    """What the times of a row are good for."""

    ACCELERATOR = "accelerator"  #: wall time of a host that drives a real device
    SIMULATION = "simulation"  #: wall time of a simulation; says nothing about a device


class Category(StrEnum):
    """Kinds of device work, told apart by kernel name and place in the step."""

    LINEAR = "linear"
    CONV = "convolution"
    RECURRENT = "recurrent state"
    ATTENTION = "attention"
    ELEMENTWISE = "norms and elementwise"
    SAMPLER = "sampler"
    DRAFTS = "drafts"
    COPIES = "copies"
    OTHER = "other"
    GAPS = "gaps"  #: the device has nothing to run


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)


class SpeedRow(_Row):
    """One arm in one repeat; for an arm that was left out, one row with the reason.

    Times of a step are medians over its steps, in milliseconds; ``host_ms`` and the waits are
    means, so that they add up to the mean step. Waits, gap and the device's time are ours only.
    """

    job: Job
    arm: SpeedArm
    clock: Clock
    batch: int = Field(ge=1)
    """Requests that run at once."""
    prompt_tokens: int = Field(ge=1)
    """Of each request."""
    repeat: int | None = Field(None, ge=0)
    position: int | None = Field(None, ge=0)
    """Place of the arm in the order of this repeat."""
    steps: int | None = Field(None, ge=1)
    """Timed steps; a prefill counts as one."""
    tokens: int | None = Field(None, ge=0)
    """Tokens that the timed steps gave the host; for a prefill those of the prompt."""
    seconds: float | None = Field(None, gt=0)
    """Wall time of the timed steps."""
    tokens_per_s: float | None = Field(None, ge=0)
    step_ms: float | None = Field(None, gt=0)
    step_p99_ms: float | None = Field(None, gt=0)
    """99th percentile over the steps of this repeat; with few steps, the slowest of them."""
    host_ms: float | None = Field(None, ge=0)
    """Of a step, what the host did not spend waiting for the device."""
    staging_ms: float | None = Field(None, ge=0)
    """Of that, filling pinned slots and queueing the step's inputs."""
    status_wait_ms: float | None = Field(None, ge=0)
    """Waiting for the status of the step before."""
    output_wait_ms: float | None = Field(None, ge=0)
    """Waiting for tokens and drafts."""
    gap_ms: float | None = Field(None, ge=0)
    """Default stream: end of a step's last command to start of the next step's first."""
    device_ms: float | None = Field(None, ge=0)
    """Default stream: start of a step's first command to end of its last."""
    agreement: float | None = Field(None, ge=0, le=1)
    """Share of the first tokens of all requests that are those of ``ours`` in this repeat."""
    kernels: str | None = None
    """What transformers computes linear attention with."""
    left_out: str | None = Field(None, min_length=1)
    """Why the arm was not timed."""

    @model_validator(mode="after")
    def _timed_or_left_out(self) -> Self:
        timed = (self.repeat, self.position, self.steps, self.tokens, self.seconds, self.step_ms)
        if self.left_out is None and None in timed:
            raise ValueError("a row that was not left out has a repeat, steps and times")
        if self.left_out is not None and any(value is not None for value in timed):
            raise ValueError("a row that was left out has no time")
        return self


class DeviceTimeRow(_Row):
    """Device time of one category in a steady decode step of one arm.

    An instant in which several kernels run counts for the one that began first, so categories add
    up. ``gaps`` is the median step without a profiler, less the time in which anything ran.
    """

    arm: SpeedArm
    category: Category | None = None
    steps: int | None = Field(None, ge=1)
    """Profiled steps."""
    ms_per_step: float | None = Field(None, ge=0)
    launches_per_step: float | None = Field(None, ge=0)
    left_out: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _measured_or_left_out(self) -> Self:
        if (self.left_out is None) == (self.category is None):
            raise ValueError("a row has either a category or a reason why it was left out")
        return self


class FloorRow(_Row):
    """Bytes of one kind that a decode step has to move, and the rate at which a copy moves them."""

    arm: SpeedArm
    part: str = Field(min_length=1)
    read_bytes: int = Field(ge=0)
    written_bytes: int = Field(ge=0)
    copy_bytes_per_s: float = Field(gt=0)
    """Read plus written bytes of a large ``copy_`` in this run, divided by its time."""


class MemoryRow(_Row):
    """One quantity of device memory: as planned, and as PyTorch's allocator counted it."""

    part: str = Field(min_length=1)
    planned_bytes: int = Field(ge=0)
    measured_bytes: int | None = Field(None, ge=0)
    """``None`` where the device does not count."""
