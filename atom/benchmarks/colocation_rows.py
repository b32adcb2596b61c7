"""Rows of the co-location experiment: what was observed, who was beside it, and the bandwidths."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from atom.benchmarks.colocation_settings import MemoryNode, Neighbour
from atom.benchmarks.race_rows import RaceRow
from atom.benchmarks.throughput_rows import ThroughputRow

EXPERIMENT = "colocation"


class _Beside(BaseModel):
    """Who was beside it."""

    subject: str = Field(min_length=1)
    """What was observed: ``<arm>/c<concurrency>/<pool>``, or ``race``."""
    neighbour: Neighbour
    """What the processes beside it did."""
    neighbours: int = Field(ge=0)
    """How many of them were started."""
    neighbours_at_end: int = Field(ge=0)
    """How many still worked when the observation ended: fewer spoil it."""
    shared_gpu: bool
    """Whether they used the same GPU; else each had one of its own."""
    memory_node: MemoryNode
    """Where the observed process ran."""


class ColocationRow(_Beside, ThroughputRow):
    """One engine beside its neighbours: the columns of a throughput point, and who was beside it.

    ``point_id`` is that of the co-location point. Under ``sweep`` it has a row a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    observed: int = Field(ge=0)
    """Which engine of the point: 0, and under ``sweep`` the place of its GPU."""


class ColocationRaceRow(_Beside, RaceRow):
    """One arm of the race beside neighbours, in a process of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    colocation_id: str = Field(min_length=1)
    """The co-location point; ``point_id`` is the race's own."""
    repeat: int = Field(ge=0)
    """Which round."""


class NeighbourRow(BaseModel):
    """One neighbour of one point. Rates are over the whole of its work; blank: it does no such."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    number: int = Field(ge=0)
    kind: Neighbour
    gpu_index: int | None = Field(ge=0)
    seconds: float = Field(ge=0)
    """How long it had worked when it last told; on the virtual device by that device's clock."""
    h2d_bytes_per_second: float | None = Field(ge=0)
    d2h_bytes_per_second: float | None = Field(ge=0)
    matmuls_per_second: float | None = Field(ge=0)
    tokens_per_second: float | None = Field(ge=0)
    """Prompt and output tokens, cached ones included."""


class BandwidthRow(BaseModel):
    """One sample of one bandwidth while a point was observed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    second: float = Field(ge=0)
    """From the first request of the observed engine, or the beginning of the race's process."""
    what: str = Field(pattern="^(pcie to device|pcie from device|host copy)$")
    """A GPU's PCIe counter, or a small copy of the sweep's own within host memory."""
    gpu_index: int | None = Field(ge=0)
    """Whose counter; blank: the host."""
    bytes_per_second: float = Field(ge=0)
