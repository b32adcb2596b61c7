"""Settings and points of the protocol-cost experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from atom.benchmarks.arms import is_wanted, refuse_unknown
from atom.benchmarks.protocol_cost_rows import CostArm, Loop, Pressure
from atom.config import DeviceChoice, Names, Settings
from atom.model_engine.engine_settings import EngineSettings
from atom.models.presets import PresetName

EXPERIMENT = "protocol_cost"
_BLOCK = 16
_QUICK: dict[str, Any] = {
    "batch_sizes": (32,),
    "leads": (1, 4),
    "repeats": 3,
    "steps": 100,
    "engine_repeats": 3,
    "engine_steps": 32,
}
#: sizes that a CPU gets through in seconds
VIRTUAL_SIZES: dict[str, Any] = {
    "preset": "tiny",
    "batch_sizes": (4,),
    "engine_batch_sizes": (4,),
    "engine_pressures": (Pressure.IDLE.value, Pressure.STUCK.value),
    "leads": (1, 4),
    "repeats": 2,
    "steps": 24,
    "watched_steps": 12,
    "counted_steps": 4,
    "engine_steps": 4,
    "engine_repeats": 2,
    "engine_watched_steps": 3,
    "engine_warmup_steps": 2,
    "memory_steps": 48,
    "deep_lead": 16,
    "limit_calls": 20,
    "stuck_every": 8,
}


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) != len(values):
        raise ValueError("a value stands twice")
    return values


Batches = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1024)], ...],
    Field(min_length=1),
    AfterValidator(_distinct),
]


class ProtocolSweepSettings(Settings):
    """Settings of the protocol-cost experiment; see the module of that name."""

    device: DeviceChoice = DeviceChoice.ACCELERATOR
    """accelerator, or virtual: the same code on the virtual device's clock."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    loops: Annotated[tuple[Loop, ...], Field(min_length=1), AfterValidator(_distinct)] = tuple(Loop)
    """Loops to run. The limits and the memory story come with the bare one."""

    batch_sizes: Batches = (1, 32, 128, 512)
    """Requests of a status in the bare loop."""

    engine_batch_sizes: Batches = (1, 32, 128, 512)
    """Requests of the engine's decode batch."""

    leads: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...],
        Field(min_length=1),
        AfterValidator(_distinct),
    ] = (1, 2, 4)
    """Steps that the bare loop's host is ahead of what it receives."""

    pressures: Annotated[tuple[Pressure, ...], Field(min_length=1), AfterValidator(_distinct)] = (
        tuple(Pressure)
    )
    """What else the copy stream has to do, in the bare loop."""

    engine_pressures: Annotated[
        tuple[Pressure, ...], Field(min_length=1), AfterValidator(_distinct)
    ] = tuple(Pressure)
    """The same in the engine. Its guards are timed with an idle one alone."""

    store_bytes: int = Field(2**24, ge=1, le=2**32)
    """Size of a step's store, in front of its copies."""

    stuck_seconds: float = Field(5e-3, gt=0, le=1)
    """How long the copy stream is held up at a time."""

    stuck_every: int = Field(40, ge=1, le=10_000)
    """Steps from one time to the next."""

    repeats: int = Field(5, ge=2, le=1000)
    """Repeats, each with a new order of arms."""

    warmup_steps: int = Field(20, ge=1, le=10_000)
    """Steps of the bare loop before the timed ones, in every repeat."""

    steps: int = Field(200, ge=4, le=100_000)
    """Timed steps of the bare loop."""

    watched_steps: int = Field(60, ge=4, le=10_000)
    """Steps behind them whose memory is watched."""

    counted_steps: int = Field(20, ge=1, le=10_000)
    """Steps in which events are counted, in the first repeat."""

    deep_lead: int = Field(64, ge=2, le=1024)
    """Lead of the memory story."""

    memory_steps: int = Field(256, ge=4, le=10_000)
    """Steps of the memory story; the copy stream is stuck once, in their middle."""

    limit_calls: int = Field(400, ge=4, le=100_000)
    """Calls of each limit in a repeat."""

    preset: PresetName = "m395"
    """Size of the engine's model, whose weights are random."""

    draft_tokens: int = Field(3, ge=1, le=7)
    """Drafts a step: without any, no status travels."""

    prompt_tokens: int = Field(16, ge=2, le=4096)
    """Prompt of each request of the engine."""

    engine_repeats: int = Field(5, ge=1, le=1000)
    """Repeats of the engine's arms."""

    engine_warmup_steps: int = Field(6, ge=1, le=1000)
    """Decode steps before the timed ones, in every repeat."""

    engine_steps: int = Field(64, ge=2, le=10_000)
    """Timed decode steps up to 64 requests; above, fewer in proportion, and a quarter at least."""

    engine_watched_steps: int = Field(8, ge=2, le=1000)
    """Steps behind them whose memory is watched."""

    guards: bool = True
    """Whether the guard's arms are timed in the engine."""

    only: Names = ()
    """Arms to time, by name or shell pattern; empty times all. ``unpatched`` is timed in any
    case."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights, prompts and the order of arms."""

    @model_validator(mode="after")
    def _fits(self) -> ProtocolSweepSettings:
        refuse_unknown(self.only, [*CostArm])
        if self.deep_lead >= self.memory_steps:
            raise ValueError(
                f"deep_lead {self.deep_lead} is not reached in {self.memory_steps} memory_steps; "
                "raise memory_steps"
            )
        if max(self.leads) >= self.steps:
            raise ValueError(
                f"leads {max(self.leads)} is not reached in {self.steps} steps; raise steps"
            )
        return self

    def wants(self, arm: CostArm) -> bool:
        """Whether an arm is timed."""
        return is_wanted(self.only, arm) or arm is CostArm.UNPATCHED

    def steps_of(self, batch: int) -> int:
        """Timed decode steps of a batch of that many requests."""
        return max(
            2, self.engine_steps // 4, min(self.engine_steps, self.engine_steps * 64 // batch)
        )


def sized(given: Mapping[str, Any], *, quick: bool) -> ProtocolSweepSettings:
    """Settings from plain values, with smaller ones for ``--quick`` and for a virtual device.

    Args:
        given: name to value; these stay.
        quick: whether the rest is to take about a minute.

    Raises:
        BadInput: unknown names or wrong values.
    """
    smaller = {**_QUICK, "engine_batch_sizes": (32,)} if quick else {}
    if given.get("device") == DeviceChoice.VIRTUAL:
        smaller |= VIRTUAL_SIZES
    return ProtocolSweepSettings.parse({**smaller, **given}, where="sweep protocol-cost")


class PointKind(StrEnum):
    """What a point measures."""

    LIMITS = "limits"
    BARE = "bare"
    MEMORY = "memory"
    ENGINE = "engine"


@dataclass(frozen=True)
class CostPoint:
    """One measurement.

    Attributes:
        kind: what it measures.
        batch: requests.
        lead: of the host, in steps; the engine's is 1.
        pressure: what else the copy stream has to do.
        behind: memory story: whether the copy stream is held up behind the copy, before the
            payload is dropped; else in front of it.
    """

    kind: PointKind
    batch: int = 1
    lead: int = 1
    pressure: Pressure = Pressure.IDLE
    behind: bool = False

    @property
    def point_id(self) -> str:
        """See ``point_id`` of the rows."""
        match self.kind:
            case PointKind.LIMITS:
                return "limits"
            case PointKind.BARE:
                return f"bare-b{self.batch}-l{self.lead}-{self.pressure}"
            case PointKind.MEMORY:
                place = "behind" if self.behind else "ahead"
                return f"memory-b{self.batch}-l{self.lead}-{self.pressure}-{place}"
            case PointKind.ENGINE:
                return f"engine-b{self.batch}-{self.pressure}"


def build_points(settings: ProtocolSweepSettings) -> list[CostPoint]:
    """The points in the order in which they run; those of one engine batch stand together."""
    points = []
    if Loop.BARE in settings.loops:
        points.append(CostPoint(PointKind.LIMITS))
        points += [
            CostPoint(PointKind.BARE, batch, lead, pressure)
            for batch in settings.batch_sizes
            for lead in settings.leads
            for pressure in settings.pressures
        ]
        largest = max(settings.batch_sizes)
        points += [
            CostPoint(PointKind.MEMORY, largest, settings.deep_lead, Pressure.STUCK, behind)
            for behind in (False, True)
        ]
    if Loop.ENGINE in settings.loops:
        points += [
            CostPoint(PointKind.ENGINE, batch, 1, pressure)
            for batch in settings.engine_batch_sizes
            for pressure in settings.engine_pressures
        ]
    return points


def engine_settings(settings: ProtocolSweepSettings, batch: int, **changes: Any) -> EngineSettings:
    """The engine of a batch. What is not named here is as an engine has it by default."""
    query = 1 + settings.draft_tokens
    longest = settings.prompt_tokens + query * (most_steps(settings) + 4)
    blocks = -(-longest // _BLOCK) + 1
    return EngineSettings(
        draft_tokens=settings.draft_tokens,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch * settings.prompt_tokens, batch * query, _BLOCK),
        max_model_len=longest,
        block_size=_BLOCK,
        num_kv_blocks=batch * blocks,
        # a prompt that was computed before must be computed again
        prefix_caching=False,
        seed=settings.seed,
        **changes,
    )


def most_steps(settings: ProtocolSweepSettings) -> int:
    """Decode steps of a request, at most."""
    steps = settings.engine_warmup_steps + settings.engine_steps + settings.engine_watched_steps
    return steps + settings.counted_steps
