"""Rows that the race micro-benchmark writes: one a point (arm x process), and timeline spans."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atom.config import AllocatorBackend, CopyPath, CopyProtocol, Front, Source


class Outcome(StrEnum):
    """What the host received in one trial, told from the bytes alone."""

    CLEAN = "clean"  #: this step's bytes, all of them
    OVERWRITTEN = "overwritten"  #: the next step's bytes, all of them
    PARTIAL = "partial"  #: the next tensor's whole extent; the rest is this step's
    TORN = "torn"  #: the copy was cut inside the next tensor


STALE = (Outcome.OVERWRITTEN, Outcome.PARTIAL, Outcome.TORN)


class ProducerEdge(StrEnum):
    """When the producer's event is queued, of which the copy must wait."""

    AT_SEND = "at_send"  #: recorded and waited for inside the send, as the engine does
    RECORDED_FIRST = "recorded_first"  #: recorded before what goes in front is queued
    WAITED_FIRST = "waited_first"  #: recorded, and waited for by the copy stream, before that


#: what the parts of an arm's name behind its grid say; ``None``: no column holds it
_NAME_PARTS: dict[str, tuple[str | None, ...]] = {
    "main": ("protocol", "front", "copy_path"),
    "queue": ("queue_setting", "protocol", "front", "copy_path"),
    "batch": ("batch_size", "protocol"),
    "allocator": ("allocator", "protocol"),
    "source": ("source", "protocol"),
    "cut": (None, "protocol"),
    "edge": ("producer_edge", "queue_setting", "protocol", "copy_path"),
    "alias": ("queue_setting", "protocol", "copy_path"),
}


class RaceRow(BaseModel):
    """Counts of one point: one arm in one process (one draw of the stream-to-queue mapping).

    The four outcomes add up to ``trials``. Times are host microseconds, on the virtual clock for a
    virtual device. ``queue_setting`` is ``default`` or the value of the hardware-queue variable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<arm>@<process>``: unique within a run."""
    grid: str = Field(min_length=1)
    """Which comparison the arm belongs to: main, queue, batch, allocator, source, cut, edge,
    alias."""
    arm: str = Field(min_length=1)
    """Readable stable name, starting with the grid."""
    process: int = Field(ge=0)
    protocol: CopyProtocol
    is_null: bool
    """The unpatched arm again under another name: its difference from unpatched is noise."""
    front: Front
    copy_path: CopyPath
    source: Source
    queue_setting: str = Field(pattern=r"^(default|[1-9][0-9]*)$")
    allocator: AllocatorBackend
    producer_edge: ProducerEdge = ProducerEdge.AT_SEND
    batch_size: int = Field(ge=1)
    source_bytes: int = Field(ge=1)
    """Bytes of the status payload, tags included."""
    next_bytes: int = Field(ge=1)
    """Bytes of the tensor that the next step allocates and writes."""
    trials: int = Field(ge=1)
    clean: int = Field(ge=0)
    overwritten: int = Field(ge=0)
    partial: int = Field(ge=0)
    torn: int = Field(ge=0)
    address_reused: int = Field(ge=0)
    """Trials whose next tensor began at the source's address (static graph output: all)."""
    tag_caught: int = Field(ge=0)
    """Stale trials that the epoch tag alone gives away."""
    tag_missed: int = Field(ge=0)
    """Stale trials whose tags still name this step."""
    in_range: int = Field(ge=0)
    """Stale trials in which every count read was a legal one: no bounds guard can see those."""
    send_us_median: float = Field(ge=0)
    receive_us_median: float = Field(ge=0)
    shares_default_queue: bool | None = None
    """Whether the copy stream drew the default stream's hardware queue; blank where unknown."""
    seed: int = Field(ge=0)
    elapsed_s: float = Field(ge=0)
    """Wall-clock seconds that the point took."""

    @property
    def stale(self) -> int:
        """Trials in which the host did not receive this step's bytes."""
        return self.overwritten + self.partial + self.torn

    @model_validator(mode="after")
    def _counts_add_up(self) -> Self:
        total = self.clean + self.stale
        if total != self.trials:
            raise ValueError(f"outcomes add up to {total}, trials says {self.trials}")
        if self.tag_caught + self.tag_missed != self.stale:
            raise ValueError(
                f"tag_caught + tag_missed is {self.tag_caught + self.tag_missed}, "
                f"stale trials are {self.stale}"
            )
        for name in ("address_reused", "in_range"):
            limit = self.stale if name == "in_range" else self.trials
            if getattr(self, name) > limit:
                raise ValueError(f"{name} is {getattr(self, name)}, more than {limit}")
        if self.point_id != f"{self.arm}@{self.process}":
            raise ValueError(
                f"point_id {self.point_id!r} does not belong to process {self.process} of arm "
                f"{self.arm!r}"
            )
        return self

    @model_validator(mode="after")
    def _name_says_the_same(self) -> Self:
        grid, *parts = self.arm.split("/")
        if grid != self.grid:
            raise ValueError(f"arm {self.arm!r} is not of grid {self.grid!r}")
        columns = _NAME_PARTS.get(grid)
        if columns is None:
            return self
        if len(parts) != len(columns):
            raise ValueError(f"arm {self.arm!r} has not the {len(columns)} parts of its grid")
        for column, part in zip(columns, parts, strict=True):
            if column is None:
                continue
            value = str(getattr(self, column))
            if column == "protocol" and self.is_null:
                value = "null" if self.protocol is CopyProtocol.UNPATCHED else f"null of {value}"
            if part != value:
                raise ValueError(f"arm {self.arm!r} says {part!r}, but {column} is {value!r}")
        return self


class TimelineRow(BaseModel):
    """One span of one traced trial. Microseconds since this step's fill ended on the device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    arm: str = Field(min_length=1)
    process: int = Field(ge=0)
    trial: int = Field(ge=0)
    lane: str = Field(min_length=1)
    """Stream: ``default``, ``copy``, ``front 0`` ..., or ``queue 2`` on a virtual device."""
    label: str = Field(min_length=1)
    """What ran: ``fill``, ``front``, ``copy``, ``next write``; host events: ``free``, ``reuse``."""
    start_us: float
    end_us: float
    outcome: Outcome

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.point_id != f"{self.arm}@{self.process}":
            raise ValueError(f"point_id {self.point_id!r} is not that of its arm and process")
        if self.end_us < self.start_us:
            raise ValueError(f"end_us {self.end_us} lies before start_us {self.start_us}")
        return self
