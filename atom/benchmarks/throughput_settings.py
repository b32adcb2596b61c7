"""Settings, arms and points of the throughput experiment, and the order in which points run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Annotated, Any

from pydantic import Field, model_validator

from atom.benchmarks.arms import is_wanted
from atom.benchmarks.place_settings import Once, PlaceSettings
from atom.benchmarks.server_settings import ServerSettings
from atom.config import CopyProtocol, DeviceChoice, GuardMode, Names
from atom.errors import BadInput
from atom.kv_transfer.pool_entry import OffloadBackend, PoolPolicy
from atom.model_engine.engine_settings import EngineSettings, StatusCheck

GIB = 2**30
#: settings that say which points there are, and nothing of how one runs
GRID_FIELDS = (
    *("concurrency", "pool_gib", "no_offload", "protocol", "offload_policy", "chunk_tokens"),
    *("special", "central_concurrency", "crash_points", "heavy_points", "other_chunk_tokens"),
)
HOLD = "hold"
UNPATCHED = "unpatched"


class Special(StrEnum):
    """Arms beside the grid."""

    REPEATS = "repeats"  #: the central points again
    UNPATCHED = "unpatched"  #: without any net, where the source crashed
    GUARD = "guard"  #: unpatched with the kernels' guard alone, at the same points
    FACTORIAL = "factorial"  #: unpatched, {offload, none} x {drafts, none}
    ZERO_COPY = "zero_copy"  #: at the points with most offload
    CHUNKS = "chunks"  #: other sizes of a store, at the same points
    POLICIES = "policies"  #: the other offload policies, at the same points
    BACKENDS = "backends"  #: LMCache in place of our own pool (where installed), at the same points


Concurrency = Annotated[int, Field(ge=1, le=1024)]
PoolGib = Annotated[float, Field(gt=0, le=8192)]


class ThroughputSettings(ServerSettings, PlaceSettings):
    """Settings of the throughput experiment; see ``throughput_point``."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    model: str = Field("preset:tiny", min_length=1)
    """A checkpoint folder, or preset:NAME for random weights."""

    traces: str | None = Field(None, min_length=1)
    """Folder of recorded sessions; empty generates sessions like them."""

    sessions: int = Field(64, ge=1, le=100_000)
    """Sessions to generate where there are no traces."""

    block_tokens: int | None = Field(1, ge=1, le=4096)
    """Tokens that a prefix hash stands for, which scales all lengths; empty takes the record's."""

    max_context_tokens: int = Field(1024, ge=16, le=2**22)
    """Longest request, prompt and output together; sessions end before a longer one."""

    think_cap_seconds: float = Field(0.2, ge=0, le=3600)
    """Longest pause between an answer and the next request of a session."""

    output_tokens: int | None = Field(None, ge=1, le=2**20)
    """Most tokens to generate a request; empty takes the session's own."""

    duration_seconds: float = Field(2.0, gt=0, le=7 * 86400)
    """Length of the profiling window of a point."""

    warmup_requests: int = Field(1, ge=0, le=1000)
    """Requests of each session lane before the window starts."""

    concurrency: Annotated[tuple[Concurrency, ...], Field(min_length=1), Once] = (2, 4)
    """Live sessions."""

    pool_gib: Annotated[tuple[PoolGib, ...], Once] = (0.0005, 0.002)
    """Sizes of the CPU pool in GiB."""

    no_offload: bool = True
    """Whether the grid has a column without a CPU pool."""

    protocol: Annotated[tuple[CopyProtocol, ...], Field(min_length=1), Once] = (CopyProtocol.HOLD,)
    """Copy protocols of the grid. unpatched runs there without any net."""

    offload_policy: Annotated[tuple[PoolPolicy, ...], Field(min_length=1), Once] = (
        PoolPolicy.SHARED_LRU,
    )
    """Offload policies of the grid; the first is that of all special arms."""

    chunk_tokens: Annotated[tuple[int, ...], Field(min_length=1), Once] = (64,)
    """Tokens of a KV entry of the CPU pool in the grid; the first is that of all special arms."""

    repeats: int = Field(1, ge=1, le=100)
    """How often each point of the grid runs."""

    special: Annotated[tuple[Special, ...], Once] = ()
    """Arms beside the grid; each runs after it."""

    central_concurrency: Annotated[tuple[Concurrency, ...], Once] = ()
    """Concurrencies whose points of the grid are repeated; empty: the middle one."""

    central_repeats: int = Field(2, ge=2, le=100)
    """How often those run in all."""

    crash_points: tuple[tuple[Concurrency, PoolGib], ...] = ()
    """Concurrency and pool of the unpatched arms; empty: the middle and the highest concurrency,
    each with the largest pool."""

    heavy_points: tuple[tuple[Concurrency, PoolGib], ...] = ()
    """Concurrency and pool of zero_copy and the offload's arms; empty: the two highest
    concurrencies with the largest pool."""

    other_chunk_tokens: Annotated[tuple[int, ...], Once] = (16, 256)
    """Sizes of a store beside the grid's."""

    only: Names = ()
    """Points to run, by arm, identity, or shell pattern of either; empty runs all."""

    forced_acceptance_length: float | None = Field(2.32, ge=1, le=8)
    """Mean tokens a request and decode step, forced as in the source; empty verifies for real."""

    draft_tokens: int = Field(3, ge=1, le=7)
    """Draft tokens a step of arms that draft."""

    max_num_seqs: int | None = Field(None, ge=1, le=1024)
    """Requests that run at once; empty: as many as there are sessions."""

    max_num_batched_tokens: int = Field(256, ge=1, le=2**20)
    """Token budget of a prefill step."""

    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of a KV block."""

    num_kv_blocks: int | None = Field(256, ge=1, le=2**24)
    """KV blocks on the device: bounded, so that prefixes leave it. Empty: what fits."""

    state_checkpoint_tokens: int = Field(64, ge=1, le=2**16)
    """Tokens from one state checkpoint to the next."""

    num_state_checkpoints: int = Field(32, ge=1, le=2**16)
    """State checkpoints on the device."""

    offload_in_flight_bytes: int = Field(512 * 2**20, ge=2**12, le=2**38)
    """Bytes of stores under way, beyond which more are dropped; as much again for loads."""

    time_limit_seconds: float | None = Field(None, gt=0, le=14 * 86400)
    """So long after its first request a point counts as hung and is killed; empty: two minutes
    beyond its load."""

    start_limit_seconds: float | None = Field(None, gt=0, le=14 * 86400)
    """After that a point that has had no request is killed as one that did not start; empty: two
    minutes beyond what a start takes."""

    warm_up: bool = False
    """Whether a point on each GPU comes first that is not recorded: it compiles the kernels."""

    setup_seconds: float | None = Field(None, ge=0, le=3600)
    """Start of a point's process until its load, for the plan; empty: an estimate."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Of weights, sessions and the order of points."""

    @model_validator(mode="after")
    def _fits_together(self) -> ThroughputSettings:
        if not self.pool_gib and not self.no_offload:
            raise ValueError("no point is left: name a pool size, or set no_offload")
        if unknown := set(self.central_concurrency) - set(self.concurrency):
            raise ValueError(f"central_concurrency: {min(unknown)} is none of concurrency")
        if self.serves:
            self.refuse_for_server(bool(self.special), len(self.pool_gib) + self.no_offload)
            return self
        longest = self.max_context_tokens
        blocks = self.num_kv_blocks
        if blocks is not None and blocks * self.block_size < longest + 8 * self.block_size:
            raise ValueError(
                f"num_kv_blocks {blocks} of {self.block_size} tokens do not hold one request of "
                f"max_context_tokens {longest}; raise the one or lower the other"
            )
        if self.gpus and self.scheduler is not None:
            raise ValueError("gpus are those of this host: leave them out beside a scheduler")
        for arm in (*grid_arms(self), *_special_arms(self)):
            # what an engine would refuse is refused here, before any point has started
            engine_settings(self, arm, self.concurrency[0], max(self.pool_gib, default=None))
        return self


@dataclass(frozen=True)
class PointArm:
    """A protocol with its nets, and the offload's settings; of a server its name alone says."""

    name: str
    protocol: CopyProtocol
    policy: PoolPolicy
    chunk_tokens: int
    mtp: bool = True
    backend: OffloadBackend = OffloadBackend.HOST_POOL
    guard: GuardMode = GuardMode.REPORT
    status_check: StatusCheck = StatusCheck.RAISE
    epoch_tag: bool = True


@dataclass(frozen=True)
class ThroughputPoint:
    """An arm at a concurrency and a pool size.

    Attributes:
        arm: what is compared.
        concurrency: live sessions.
        pool_gib: CPU pool; ``None``: no offload.
        repeat: which time, from 0.
        order: place in the plan.
    """

    arm: PointArm
    concurrency: int
    pool_gib: float | None
    repeat: int = 0
    order: int = 0

    @property
    def point_id(self) -> str:
        """``<arm>/c<concurrency>/<pool>/<repeat>``."""
        pool = "no-pool" if self.pool_gib is None else f"{self.pool_gib:g}GiB"
        return f"{self.arm.name}/c{self.concurrency}/{pool}/{self.repeat}"

    @property
    def key(self) -> tuple[str, int, float | None, int]:
        """What makes it another point."""
        return self.arm.name, self.concurrency, self.pool_gib, self.repeat


def _arm(
    settings: ThroughputSettings,
    protocol: CopyProtocol = CopyProtocol.HOLD,
    *,
    policy: PoolPolicy | None = None,
    chunk: int | None = None,
    guard: GuardMode = GuardMode.NONE,
    mtp: bool = True,
    backend: OffloadBackend = OffloadBackend.HOST_POOL,
) -> PointArm:
    """An arm and its name. Under ``unpatched`` the guard is the only net, if it is one."""
    policy = policy or settings.offload_policy[0]
    chunk = chunk or settings.chunk_tokens[0]
    bare = protocol is CopyProtocol.UNPATCHED
    words = [protocol.value]
    words += ["guard"] * (bare and guard is not GuardMode.NONE) + ["no MTP"] * (not mtp)
    words += [policy.value] * (policy is not settings.offload_policy[0])
    words += [f"chunk {chunk}"] * (chunk != settings.chunk_tokens[0])
    words += [backend.value] * (backend is not OffloadBackend.HOST_POOL)
    return PointArm(
        ", ".join(words),
        protocol,
        policy,
        chunk,
        mtp,
        backend,
        guard if bare else GuardMode.REPORT,
        StatusCheck.DEBUG if bare else StatusCheck.RAISE,
        not bare,
    )


def grid_arms(settings: ThroughputSettings) -> list[PointArm]:
    """Arms of the grid; a server is one."""
    if settings.server_label is not None:
        return [replace(_arm(settings), name=settings.server_label)]
    axes = product(settings.protocol, settings.offload_policy, settings.chunk_tokens)
    return [_arm(settings, name, policy=policy, chunk=chunk) for name, policy, chunk in axes]


def _special_arms(settings: ThroughputSettings) -> list[PointArm]:
    """Arms that a special may add and that an engine may refuse."""
    arms = []
    if Special.CHUNKS in settings.special:
        arms += [_arm(settings, chunk=chunk) for chunk in settings.other_chunk_tokens]
    if Special.BACKENDS in settings.special:
        # the only order in which LMCache gives entries up
        policy = PoolPolicy.SHARED_LRU
        arms.append(_arm(settings, policy=policy, backend=OffloadBackend.LMCACHE))
    return arms


def engine_settings(
    settings: ThroughputSettings, arm: PointArm, concurrency: int, pool_gib: float | None
) -> EngineSettings:
    """The engine of a point.

    Raises:
        BadInput: the offload's sizes do not fit together.
    """
    drafts = settings.draft_tokens if arm.mtp else 0
    # a state is stored behind a whole chunk: larger chunks need checkpoints further apart
    spacing = max(settings.state_checkpoint_tokens, arm.chunk_tokens)
    values: dict[str, Any] = {
        "copy_protocol": arm.protocol.value,
        "epoch_tag": arm.epoch_tag,
        "guard": arm.guard.value,
        "status_check": arm.status_check.value,
        "draft_tokens": drafts,
        "forced_acceptance_length": settings.forced_acceptance_length if drafts else None,
        "max_num_seqs": settings.max_num_seqs or concurrency,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        # the last drafts may reach beyond the last token
        "max_model_len": settings.max_context_tokens + 8,
        "max_waiting": max(1024, concurrency),
        "block_size": settings.block_size,
        "num_kv_blocks": settings.num_kv_blocks,
        "state_checkpoint_tokens": spacing,
        "num_state_checkpoints": settings.num_state_checkpoints,
        "seed": settings.seed,
    }
    if pool_gib is not None:
        values |= {
            "cpu_pool_bytes": int(pool_gib * GIB),
            "offload_backend": arm.backend.value,
            "offload_policy": arm.policy.value,
            "offload_chunk_tokens": arm.chunk_tokens,
            "offload_in_flight_bytes": settings.offload_in_flight_bytes,
        }
    return EngineSettings.parse(values, where=f"sweep throughput, arm {arm.name}")


def central_concurrency(settings: ThroughputSettings) -> tuple[int, ...]:
    """Concurrencies whose points are repeated."""
    values = sorted(settings.concurrency)
    return settings.central_concurrency or (values[len(values) // 2],)


def crash_points(settings: ThroughputSettings) -> tuple[tuple[int, float], ...]:
    """Concurrency and pool of the unpatched arms."""
    if settings.crash_points or not settings.pool_gib:
        return settings.crash_points
    values = sorted(settings.concurrency)
    chosen = dict.fromkeys((values[len(values) // 2], values[-1]))
    return tuple((value, max(settings.pool_gib)) for value in chosen)


def heavy_points(settings: ThroughputSettings) -> tuple[tuple[int, float], ...]:
    """Concurrency and pool of the points with most offload."""
    if settings.heavy_points or not settings.pool_gib:
        return settings.heavy_points
    values = sorted(settings.concurrency)[-2:]
    return tuple((value, max(settings.pool_gib)) for value in reversed(values))


def build_points(settings: ThroughputSettings) -> list[ThroughputPoint]:
    """All points in the order in which they run: the grid, its repeats, then the other arms.

    Within each part the order is drawn, so that no arm has all the early or late places; a part
    comes before the next, so that a sweep that ends early has the whole grid.

    Raises:
        BadInput: ``only`` fits no point.
    """
    generator = random.Random(settings.seed)
    points: dict[tuple[str, int, float | None, int], ThroughputPoint] = {}
    for part in _parts(settings):
        drawn = list(part)
        generator.shuffle(drawn)
        for point in drawn:
            points.setdefault(point.key, point)
    chosen = [point for point in points.values() if _wanted(settings.only, point)]
    for pattern in settings.only:
        if not any(_wanted((pattern,), point) for point in chosen):
            arms = ", ".join(dict.fromkeys(point.arm.name for point in points.values()))
            raise BadInput(
                f"only: {pattern!r} fits no point; arms: {arms}; points look like "
                f"{next(iter(points.values())).point_id}"
            )
    return [replace(point, order=order) for order, point in enumerate(chosen)]


def _wanted(only: Sequence[str], point: ThroughputPoint) -> bool:
    return is_wanted(only, point.arm.name, point.point_id)


def _parts(settings: ThroughputSettings) -> Iterator[list[ThroughputPoint]]:
    pools = (*settings.pool_gib, *([None] if settings.no_offload else []))
    special = settings.special
    central = central_concurrency(settings)
    rounds = settings.repeats
    if Special.REPEATS in special:
        rounds = max(rounds, settings.central_repeats)
    for repeat in range(rounds):
        yield [
            ThroughputPoint(arm, concurrency, pool, repeat)
            for arm in grid_arms(settings)
            for concurrency, pool in product(settings.concurrency, pools)
            if repeat < settings.repeats or concurrency in central
            # without a pool its policy and chunks are all the same
            if pool is not None or arm in _pool_free_arms(settings)
        ]
    yield _unpatched_points(settings)
    others: list[PointArm] = []
    if Special.ZERO_COPY in special:
        others.append(_arm(settings, CopyProtocol.ZERO_COPY))
    others += _special_arms(settings)
    if Special.POLICIES in special:
        others += [_arm(settings, policy=policy) for policy in PoolPolicy]
    yield [
        ThroughputPoint(arm, concurrency, pool)
        for arm in others
        for concurrency, pool in heavy_points(settings)
    ]


def _pool_free_arms(settings: ThroughputSettings) -> list[PointArm]:
    if settings.serves:
        return grid_arms(settings)
    return [_arm(settings, protocol) for protocol in settings.protocol]


def _unpatched_points(settings: ThroughputSettings) -> list[ThroughputPoint]:
    bare = CopyProtocol.UNPATCHED
    places: Sequence[tuple[int, float]] = crash_points(settings)
    points: list[ThroughputPoint] = []
    if Special.UNPATCHED in settings.special:
        points += [ThroughputPoint(_arm(settings, bare), *place) for place in places]
    if Special.GUARD in settings.special:
        guarded = _arm(settings, bare, guard=GuardMode.REPORT)
        points += [ThroughputPoint(guarded, *place) for place in places]
    if Special.FACTORIAL in settings.special and places:
        concurrency, pool = places[0]
        points += [
            ThroughputPoint(_arm(settings, bare, mtp=mtp), concurrency, size)
            for mtp, size in product((True, False), (pool, None))
        ]
    return points
