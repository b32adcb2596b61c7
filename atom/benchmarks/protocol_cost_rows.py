"""Rows of the protocol-cost experiment: windows of steps, the limits beside them, and memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atom.benchmarks.engine_speed_rows import Clock as Clock
from atom.config import CopyProtocol, GuardMode


class Loop(StrEnum):
    """Around what a transfer is timed."""

    BARE = "bare"  #: one kernel and one status a step, and nothing else
    ENGINE = "engine"  #: the engine's decode steps, in device graphs: status, ids and drafts


class Pressure(StrEnum):
    """What else the copy stream has to do."""

    IDLE = "idle"  #: nothing
    STORE = "store"  #: an offload store in front of every step's copies
    STUCK = "stuck"  #: now and then a kernel that holds it up for some milliseconds


class CostArm(StrEnum):
    """What is compared. The guard's arms run under ``hold``, in the engine alone."""

    UNPATCHED = "unpatched"
    NULL = "unpatched again"  #: the same once more: its difference is noise
    HOLD = "hold"  #: in the engine, with all nets: reporting guard and epoch tag
    RECORD_STREAM = "record_stream"
    BLOCKING = "blocking"
    ZERO_COPY = "zero_copy"
    PLAIN = "to cpu"  #: ``.to("cpu", non_blocking=True)`` with fresh events, without protection
    NO_GUARD = "no guard"
    NO_GUARD_AGAIN = "no guard again"  #: the null twin of the guard's arms
    TRAP = "trap"
    NO_TAG = "no epoch tag"
    HOST_CHECK = "host check"  #: the host reads the counts back and looks at them: a sync a step


#: arm to protocol, of those that go through the engine's own queues
PROTOCOLS: dict[CostArm, CopyProtocol] = {
    CostArm.UNPATCHED: CopyProtocol.UNPATCHED,
    CostArm.NULL: CopyProtocol.UNPATCHED,
    CostArm.HOLD: CopyProtocol.HOLD,
    CostArm.RECORD_STREAM: CopyProtocol.RECORD_STREAM,
    CostArm.BLOCKING: CopyProtocol.BLOCKING,
    CostArm.ZERO_COPY: CopyProtocol.ZERO_COPY,
}
#: guard's arms to the guard that their kernels are compiled with
GUARDS: dict[CostArm, GuardMode] = {
    CostArm.NO_GUARD: GuardMode.NONE,
    CostArm.NO_GUARD_AGAIN: GuardMode.NONE,
    CostArm.TRAP: GuardMode.TRAP,
    CostArm.NO_TAG: GuardMode.REPORT,
    CostArm.HOST_CHECK: GuardMode.NONE,
}
BARE_ARMS = (*PROTOCOLS, CostArm.PLAIN)
ENGINE_ARMS = tuple(PROTOCOLS)
GUARD_ARMS = tuple(GUARDS)


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """Where: ``bare-b<batch>-l<lead>-<pressure>``, ``engine-b<batch>-<pressure>``, ``memory-...``,
    or ``limits``."""
    clock: Clock
    """Whose times they are; a simulation's are those of the virtual device's clock."""


class CostRow(_Row):
    """One arm in one repeat: a window of steps, then a second one whose memory is watched.

    Times are of the host, in microseconds. For an arm that was left out, one row with the reason.
    """

    loop: Loop
    arm: CostArm
    batch: int = Field(ge=1)
    """Requests."""
    lead: int = Field(ge=0)
    """Steps that the host is ahead of what it receives. The engine's is 1, of its own."""
    pressure: Pressure
    repeat: int = Field(ge=0)
    position: int | None = Field(None, ge=0)
    """Place of the arm in the order of this repeat."""
    steps: int | None = Field(None, ge=2)
    step_us: float | None = Field(None, gt=0)
    """Median step, from return to return."""
    step_p99_us: float | None = Field(None, gt=0)
    make_us: float | None = Field(None, ge=0)
    """Median of making the payload: an allocation, or a pinned slot. The bare loop's only."""
    send_us: float | None = Field(None, ge=0)
    """Median of the send, or in the engine of a step's sends together."""
    send_p99_us: float | None = Field(None, ge=0)
    wait_us: float | None = Field(None, ge=0)
    """Mean wait a step until what is received has landed."""
    receive_us: float | None = Field(None, ge=0)
    """Median of a receive once it has landed, or of a step's receives together."""
    receive_p99_us: float | None = Field(None, ge=0)
    stale: int | None = Field(None, ge=0)
    """Received payloads of another step. Only unprotected arms may have any."""
    events_created: int | None = Field(None, ge=0)
    """Events made in ``counted_steps`` steps of a warm loop."""
    counted_steps: int | None = Field(None, ge=1)
    held_peak_bytes: int | None = None
    """Most active device memory of the watched steps, beyond what was active before them."""
    held_steady_bytes: float | None = None
    """Its median over their second half."""
    kept_us: float | None = None
    """Mean time from the drop of a payload until the allocator has its block again: blocks that
    are out, integrated over time, a send. The bare loop's only."""
    new_segments: int | None = None
    """Segments that the watched steps took from the driver, less those given back."""
    retries: int | None = Field(None, ge=0)
    """Allocations in the watched steps that first had to give cached segments back."""
    agreement: float | None = Field(None, ge=0, le=1)
    """The engine's: share of tokens that are those of ``unpatched``, request by request."""
    left_out: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _timed_or_left_out(self) -> Self:
        timed = (self.position, self.steps, self.step_us, self.send_us, self.receive_us)
        if self.left_out is None and None in timed:
            raise ValueError("a row that was not left out has a place, steps and times")
        if self.left_out is not None and any(value is not None for value in timed):
            raise ValueError("a row that was left out has no time")
        return self


class LimitRow(_Row):
    """One thing that a transfer cannot do without, by itself: host times of many calls."""

    limit: str = Field(min_length=1)
    repeat: int = Field(ge=0)
    calls: int = Field(ge=1)
    median_us: float = Field(ge=0)
    p99_us: float = Field(ge=0)


class HeldRow(_Row):
    """The allocator after one step of a loop with a deep lead."""

    arm: CostArm
    lead: int = Field(ge=1)
    step: int = Field(ge=0)
    at_us: float = Field(ge=0)
    """Host time since the first step."""
    stuck: bool
    """Whether the copy stream was held up with this step."""
    held_bytes: int
    """Active memory beyond what was active before the first step."""
    reserved_bytes: int = Field(ge=0)
    segments: int = Field(ge=0)
