"""Rows of the kernel-speed experiment: one timed graph replay each, or why an arm was left out."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Operator(StrEnum):
    """What is timed."""

    CONV_UPDATE = "conv_update"
    RECURRENT_UPDATE = "recurrent_update"


class Question(StrEnum):
    """Why it is timed."""

    SPEED = "speed"  #: beside other implementations and a copy of the same bytes
    GUARD = "guard"  #: guard modes beside each other, over a long graph


class CacheState(StrEnum):
    """What the L2 cache holds of an operator's data when it is launched."""

    COLD = "cold"  #: launches go round buffers that together are several times the cache
    WARM = "warm"  #: every launch uses the same buffers


class KernelArm(StrEnum):
    """An implementation, or a reference for it."""

    REPORT = "report"  #: ours, as the engine launches it
    NONE = "none"  #: ours, unguarded
    NULL = "none again"  #: the same once more: its difference from ``none`` is noise
    TRAP = "trap"  #: ours; an assert only where Triton compiles it in
    UNPACKED = "unpacked weights"  #: ours, weights as a checkpoint has them
    FLA = "flash-linear-attention"
    TRANSFORMERS = "transformers"
    COPY = "copy_"  #: a ``copy_`` that moves the operator's bytes
    COPY_KERNEL = "copy by kernel"  #: the same by an elementwise kernel


class KernelRow(BaseModel):
    """One replay of one arm's graph; for an arm that was left out, one row with the reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<operator>-<question>-b<batch>-c<channels>-q<queries>-<cache>``."""
    operator: Operator
    question: Question
    arm: KernelArm
    batch: int = Field(ge=1)
    """Rows of the decode batch."""
    channels: int = Field(ge=1)
    """Channels of the convolution, or value heads x value size."""
    queries: int = Field(ge=1)
    """Tokens a row."""
    cache: CacheState
    bytes_moved: int = Field(ge=1)
    """Bytes that one launch of ours must read and write; weights and metadata are not counted."""
    launches: int | None = Field(None, ge=1)
    """Launches in the graph."""
    buffers: int | None = Field(None, ge=1)
    """Sets of buffers that the launches go round."""
    repeat: int | None = Field(None, ge=0)
    position: int | None = Field(None, ge=0)
    """Place of the arm in the order of this repeat."""
    microseconds: float | None = Field(None, gt=0)
    """Device time of one launch: of the graph, divided by its launches."""
    left_out: str | None = Field(None, min_length=1)
    """Why the arm was not timed."""

    @property
    def name(self) -> str:
        """The ``point_id`` that the columns say."""
        return (
            f"{self.operator}-{self.question}-b{self.batch}-c{self.channels}-q{self.queries}"
            f"-{self.cache}"
        )

    @model_validator(mode="after")
    def _timed_or_left_out(self) -> Self:
        timed = (self.launches, self.buffers, self.repeat, self.position, self.microseconds)
        if self.left_out is None and None in timed:
            raise ValueError("a row that was not left out has a time, launches and a repeat")
        if self.left_out is not None and any(value is not None for value in timed):
            raise ValueError("a row that was left out has no time")
        if self.point_id != self.name:
            raise ValueError(f"point_id {self.point_id!r}, but the columns say {self.name!r}")
        return self
