"""Points of the capacity sweep: which load, pool and remedy each simulates, and how one runs.

Sizes. The nominal model has the layer plan of the public Qwen3-Next-80B-A3B. Its 12 attention
layers and an MTP layer have 2 KV heads of 256 in bf16: 13 x 2 x 2 x 256 x 2 = 26,624 bytes a token.
Its 36 gated-delta-net layers have 32 value heads of 128 x 128 in float32, and three conv rows of
8,192 channels in bf16: 36 x (2 MiB + 48 KiB) = 77.3 MB an image. The model that the published hours
served is not public, so one factor, ``byte_scale``, multiplies both.

The device. Sessions that do not wait for a first token pause or hold memory. The published hours
leave few of them: sessions less requests times TTFT over an hour, 5.5 at 64 sessions and 10.5 at 32
with 96 GiB. So the KV pool holds some ten requests, tens of GB, whatever the card has.

Ways of the published engine that ours does not have, each with a switch. The recipes of its project
(ROCm/ATOM, recipes/MiniMax-M3-Agentic-InferenceX.md) allow synchronous look-ups alone, which note
the use of KV in the pool and keep it for loads to come: ``looks_up_at_arrival``. Nothing does that
for a state. Host copies are named as what may bind: ``loads_block`` and ``load_gb_per_second``.

The load. Those recipes cap the pauses of a session at 300 s and replay sessions with subagents,
which keep several requests of one session under way; the harness's manual locks 10 s. The sessions
here have no subagents, and pauses are capped at 10 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Annotated, Any

from pydantic import Field, model_validator

from atom.benchmarks.agentic_sessions import Session, generate_sessions, load_traces
from atom.benchmarks.arms import is_wanted
from atom.benchmarks.capacity import CapacityLoad, simulate
from atom.benchmarks.capacity_machine import Machine
from atom.benchmarks.capacity_rows import CapacityRow
from atom.config import Settings
from atom.errors import BadInput
from atom.kv_transfer.pool_entry import PoolPolicy
from atom.model_engine.engine_settings import EngineSettings

_GIB = 2**30
#: a request of the recorded sessions has half a million tokens at most
_LONGEST = 1_000_000
#: of a setup: sessions, and GiB of a pool that is one
_MOST_SESSIONS, _LEAST_GIB, _MOST_GIB = 65_536, 0.001, 1_000_000


class Remedy(StrEnum):
    """What is changed about the published way of serving."""

    SHARED_LRU = "shared_lru"  #: nothing: states and KV in one LRU
    PAIRED = "paired"  #: a state lives and dies with its KV prefix
    ISOLATED = "isolated"  #: a share of the pool for states alone
    SPACING = "spacing"  #: more tokens from one place of a state to the next
    ADMISSION = "admission"  #: fewer sessions at a time; the others wait for one to end
    LATE_LOOKUP = "late_lookup"  #: KV is looked up when a request is admitted, with its state
    ASYNC_LOADS = "async_loads"  #: loads run beside the steps and do not hold them up


@dataclass(frozen=True)
class Arm:
    """A remedy and its degree.

    Attributes:
        remedy: which.
        degree: ``isolated``: share of states; ``spacing``: tokens; ``admission``: share of the
            sessions that are served at a time; else 0.
    """

    remedy: Remedy
    degree: float = 0.0

    @property
    def name(self) -> str:
        """As in ``point_id``."""
        return f"{self.remedy}-{self.degree:g}" if self.degree else str(self.remedy)


def parse_arm(text: str) -> Arm:
    """One of ``shared_lru``, ``paired``, ``late_lookup``, ``async_loads``, ``isolated-0.25``,
    ``spacing-1024``, ``admission-0.75``.

    Raises:
        BadInput: another text, or a degree out of range.
    """
    name, _, degree = text.partition("-")
    ranges = {Remedy.ISOLATED: (0.0, 1.0), Remedy.SPACING: (255, 2**16), Remedy.ADMISSION: (0, 1)}
    try:
        remedy, value = Remedy(name), float(degree or 0)
    except ValueError:
        known = (
            "shared_lru, paired, late_lookup, async_loads, isolated-SHARE, spacing-TOKENS, "
            "admission-SHARE"
        )
        raise BadInput(f"arms: expected one of {known}, got {text!r}") from None
    if remedy not in ranges:
        if degree:
            raise BadInput(f"arms: {remedy} has no degree, got {text!r}")
        return Arm(remedy)
    low, high = ranges[remedy]
    if not low < value < high or (remedy is Remedy.SPACING and value % 256):
        kind = "tokens, a multiple of 256," if remedy is Remedy.SPACING else "a share"
        raise BadInput(f"arms: {text!r}: expected {kind} between {low:g} and {high:g}")
    return Arm(remedy, value)


_Setup = Annotated[tuple[float, ...], Field(min_length=2, max_length=2)]


class CapacitySettings(Settings):
    """What ``python -m atom sweep capacity`` simulates.

    Every setup runs with every byte scale, device memory and load rate under each arm; a setup
    without a pool with every device memory, but the first of the others alone: nothing is found
    again there.
    """

    setups: tuple[_Setup, ...] = Field(
        ((32, 0), (48, 0), (64, 0), (32, 96), (32, 160), (48, 224), (64, 288)), min_length=1
    )
    """Sessions and pool in GiB of each setup; a pool of 0 is no offload."""

    arms: tuple[str, ...] = Field(("shared_lru",), min_length=1)
    """Remedies: shared_lru, paired, late_lookup, async_loads, isolated-SHARE, spacing-TOKENS,
    admission-SHARE."""

    byte_scale: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = Field((1.8,), min_length=1)
    """Bytes of a KV token and a state image over the nominal model's."""

    device_gb: tuple[Annotated[float, Field(gt=0, le=10000)], ...] = Field((60.0,), min_length=1)
    """KV pool on the device, in GB: see the module."""

    load_gb_per_second: tuple[Annotated[float, Field(gt=0, le=10000)], ...] = Field(
        (8.0,), min_length=1
    )
    """GB a second at which what the pool has of a prompt comes back to the device."""

    loads_block: bool = True
    """Whether loads hold up the steps; the arm async_loads never does."""

    looks_up_at_arrival: bool = True
    """Whether KV is looked up as soon as a request comes; the arm late_lookup never does."""

    duration_seconds: float = Field(3600.0, gt=0, le=7 * 86400)
    """Profiling window, in simulated seconds."""

    traces: str | None = None
    """Folder of recorded sessions; empty generates them."""

    like: str | None = None
    """Folder of a recorded throughput run of this engine: its points are simulated in place of all
    others, with its sessions, sizes and step times."""

    sessions: int = Field(63, ge=1, le=10000)
    """Generated sessions."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Of the generated sessions and of their order."""

    repeats: int = Field(1, ge=1, le=1000)
    """Runs of each point, each with the next seed of the order."""

    think_cap_seconds: float = Field(10.0, ge=0, le=86400)
    """Longest pause of a session between an answer and its next request."""

    # how many run at once is no part of what is simulated: not recorded, and given anew on resuming
    processes: int = Field(0, ge=0, le=1024, exclude=True)
    """Points side by side; 0: as many as there are cores."""

    only: tuple[str, ...] = ()
    """Points to run, by arm, identity, or shell pattern of either; empty runs all."""

    kv_bytes_per_token: int = Field(26_624, ge=1, le=2**30)
    """Of the nominal model: see the module."""

    state_image_bytes: int = Field(77_266_944, ge=1, le=2**40)
    """Of the nominal model: see the module."""

    prefill_token_seconds: float = Field(26e-6, gt=0, le=1)
    """Per prompt token computed: the fit's value, from the published hours without offload."""

    prefill_base_seconds: float = Field(10e-3, ge=0, le=10)
    decode_base_seconds: float = Field(8e-3, ge=0, le=10)
    decode_row_seconds: float = Field(100e-6, ge=0, le=1)
    decode_context_seconds: float = Field(2e-9, ge=0, le=1)
    """Assumed: prefill binds every published point, so that they hardly matter."""

    store_bytes_per_second: float = Field(54.9e9, gt=0, le=1e13)
    """Device to host: the rate of the link, as stores run beside the steps."""

    max_num_batched_tokens: int = Field(16384, ge=256, le=2**20)
    """Token budget of a prefill step, as published."""

    num_state_checkpoints: int = Field(8, ge=1, le=2**16)
    """States that the device keeps; few, since without offload nothing is found again."""

    @model_validator(mode="after")
    def _fits(self) -> CapacitySettings:
        for sessions, pool in self.setups:
            whole = 1 <= sessions <= _MOST_SESSIONS and sessions == int(sessions)
            if not whole or not (pool == 0 or _LEAST_GIB <= pool <= _MOST_GIB):
                raise ValueError(
                    f"setups: expected sessions, 1 to {_MOST_SESSIONS}, and GiB, 0 or "
                    f"{_LEAST_GIB:g} to {_MOST_GIB}, got {sessions:g}, {pool:g}"
                )
        for arm in self.arms:
            try:
                parse_arm(arm)
            except BadInput as error:
                raise ValueError(str(error)) from None
        return self


@dataclass(frozen=True)
class CapacityPoint:
    """One point of the sweep.

    Attributes:
        point_id: unique in a run.
        concurrency: sessions that ask.
        pool_gib: ``None``: no offload.
    """

    point_id: str
    arm: Arm
    concurrency: int
    pool_gib: float | None
    byte_scale: float
    device_gb: float
    load_gb_per_second: float
    repeat: int


def build_points(settings: CapacitySettings) -> list[CapacityPoint]:
    """All points of the settings, the longest first, so that processes end about together.

    Raises:
        BadInput: ``only`` leaves none.
    """
    points: dict[str, CapacityPoint] = {}
    for sessions, pool in settings.setups:
        arms = [parse_arm(name) for name in settings.arms] if pool else [Arm(Remedy.SHARED_LRU)]
        few = slice(None) if pool else slice(1)
        for arm in arms:
            grid = product(
                settings.byte_scale[few],
                settings.device_gb,
                settings.load_gb_per_second[few],
                range(settings.repeats),
            )
            for scale, memory, rate, repeat in grid:
                where = f"{pool:g}GiB" if pool else "none"
                sizes = f"x{scale:g}/{memory:g}GB/{rate:g}GBs"
                name = f"{arm.name}/c{sessions:g}/{where}/{sizes}/{repeat}"
                points[name] = CapacityPoint(
                    name, arm, int(sessions), pool or None, scale, memory, rate, repeat
                )
    chosen = [
        one for one in points.values() if is_wanted(settings.only, one.point_id, one.arm.name)
    ]
    if not chosen:
        raise BadInput(
            f"only: no point has such a name; the first is {next(iter(points))}, arms are "
            + ", ".join(settings.arms)
        )
    return sorted(chosen, key=lambda one: -(one.pool_gib or 0.0))


def read_sessions(settings: CapacitySettings) -> tuple[Session, ...]:
    """The sessions of the settings, recorded or generated."""
    if settings.traces is not None:
        return load_traces(settings.traces).sessions
    return generate_sessions(settings.sessions, settings.seed).sessions


def machine_of(settings: CapacitySettings, point: CapacityPoint) -> Machine:
    """Costs and sizes of a point."""
    remedy = point.arm.remedy
    return Machine(
        kv_bytes_per_token=round(settings.kv_bytes_per_token * point.byte_scale),
        state_image_bytes=round(settings.state_image_bytes * point.byte_scale),
        prefill_token_seconds=settings.prefill_token_seconds,
        prefill_base_seconds=settings.prefill_base_seconds,
        prefill_pair_seconds=0.0,
        decode_base_seconds=settings.decode_base_seconds,
        decode_row_seconds=settings.decode_row_seconds,
        decode_context_seconds=settings.decode_context_seconds,
        store_bytes_per_second=settings.store_bytes_per_second,
        load_bytes_per_second=1e9 * point.load_gb_per_second,
        loads_block=settings.loads_block and remedy is not Remedy.ASYNC_LOADS,
        looks_up_at_arrival=settings.looks_up_at_arrival and remedy is not Remedy.LATE_LOOKUP,
    )


def device_blocks(settings: CapacitySettings, point: CapacityPoint) -> int:
    """Blocks of 256 tokens that the device holds."""
    token_bytes = machine_of(settings, point).kv_bytes_per_token
    return max(int(point.device_gb * 1e9 / token_bytes / 256), 1)


def check_fits(
    settings: CapacitySettings, points: Sequence[CapacityPoint], sessions: Sequence[Session]
) -> None:
    """See that the device of each point holds the longest request, before any point is run.

    Raises:
        BadInput: one does not.
    """
    longest = max(turn.input_tokens + turn.output_tokens for one in sessions for turn in one.turns)
    for point in points:
        held = 256 * device_blocks(settings, point)
        if held < longest:
            raise BadInput(
                f"device_gb {point.device_gb:g} at byte_scale {point.byte_scale:g} holds {held:,} "
                f"tokens, and the longest request has {longest:,}; give the device more"
            )


def run_point(
    settings: CapacitySettings, sessions: Sequence[Session], point: CapacityPoint
) -> CapacityRow:
    """Simulate one point."""
    arm = point.arm
    served = point.concurrency
    if arm.remedy is Remedy.ADMISSION:
        served = max(1, round(arm.degree * served))
    machine = machine_of(settings, point)
    engine: dict[str, Any] = {
        "max_num_seqs": served,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": _LONGEST,
        "block_size": 256,
        "num_kv_blocks": device_blocks(settings, point),
        "state_checkpoint_tokens": int(arm.degree) if arm.remedy is Remedy.SPACING else 256,
        "num_state_checkpoints": settings.num_state_checkpoints,
        "offload_chunk_tokens": 256,
        "forced_acceptance_length": 2.32,
        "offload_in_flight_bytes": 2**36,
    }
    if point.pool_gib is not None:
        engine["cpu_pool_bytes"] = int(point.pool_gib * _GIB)
        policies = {Remedy.PAIRED: PoolPolicy.PAIRED, Remedy.ISOLATED: PoolPolicy.ISOLATED}
        engine["offload_policy"] = policies.get(arm.remedy, PoolPolicy.SHARED_LRU).value
        if arm.remedy is Remedy.ISOLATED:
            engine["offload_state_share"] = arm.degree
    load = CapacityLoad(
        concurrency=served,
        duration_seconds=settings.duration_seconds,
        seed=settings.seed + point.repeat,
        think_cap_seconds=settings.think_cap_seconds,
    )
    row = simulate(sessions, load, EngineSettings.parse(engine), machine)
    return row.model_copy(
        update={
            "point_id": point.point_id,
            "arm": arm.name,
            "repeat": point.repeat,
            "concurrency": point.concurrency,
            "served_sessions": served,
            "byte_scale": point.byte_scale,
            "device_gb": point.device_gb,
            "load_gb_per_second": point.load_gb_per_second,
        }
    )
