"""Settings, arms and points of the accuracy experiment."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from atom.benchmarks.arms import is_wanted
from atom.benchmarks.gsm8k_task import TaskSettings
from atom.config import CopyProtocol, DeviceChoice, GuardMode, Names
from atom.errors import BadInput
from atom.model_engine.engine_settings import EngineSettings, StatusCheck

GIB = 2**30
#: the arm whose answers without drafts, pool and pressure all others are compared with
HOLD = "hold"
TWIN = "hold, again"
UNPATCHED = "unpatched"
#: the model that lies in the repository, or the seeded one until it does
SHIPPED = "shipped"
#: an address or a folder may name hosts and users: no record has them
UNRECORDED = ("base_url", "gsm8k")


#: MiB, and every how many steps
Pressure = tuple[Annotated[float, Field(gt=0, le=4096)], Annotated[int, Field(ge=1, le=10**6)]]


class AccuracySettings(TaskSettings):
    """Settings of the accuracy experiment; see ``accuracy_point``."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("H200", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    model: str = Field(SHIPPED, min_length=1)
    """A checkpoint folder with a tokenizer; shipped takes data/models/words8, or where that folder
    is not there a small one with random weights, whose answers are noise."""

    protocol: Annotated[tuple[CopyProtocol, ...], Field(min_length=1)] = (
        CopyProtocol.HOLD,
        CopyProtocol.RECORD_STREAM,
        CopyProtocol.ZERO_COPY,
        CopyProtocol.UNPATCHED,
    )
    """Copy protocols. unpatched believes what it receives: its tags are only counted."""

    twin: bool = True
    """Whether hold runs twice: what differs between the two is the floor of all comparisons."""

    offload: bool = True
    """Whether each arm also runs with a CPU pool."""

    speculation: bool = True
    """Whether each arm also runs with drafts, which are verified for real."""

    pressure: tuple[Pressure, ...] = ((2.0, 1), (8.0, 32), (8.0, 16), (8.0, 4))
    """MiB stored on other streams, and ahead of every how many steps: a point of unpatched each
    (with drafts, no pool). hold runs under the strongest."""

    pressure_streams: int = Field(2, ge=1, le=16)
    """Streams that they are stored on."""

    concurrency: int = Field(64, ge=1, le=1024)
    """Requests that are open at once."""

    draft_tokens: int = Field(3, ge=1, le=7)
    """Draft tokens a step of points that draft."""

    pool_gib: float = Field(0.002, gt=0, le=8192)
    """The CPU pool."""

    max_model_len: int = Field(2048, ge=16, le=2**20)
    """Longest request; at most what the model was made for."""

    max_num_batched_tokens: int = Field(2048, ge=1, le=2**20)
    """Token budget of a prefill step."""

    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of a KV block."""

    num_kv_blocks: int = Field(1024, ge=1, le=2**24)
    """KV blocks on the device: bounded, so that prefixes leave it."""

    state_checkpoint_tokens: int = Field(64, ge=1, le=2**16)
    """Tokens from one state checkpoint to the next, and of a KV entry of the pool."""

    num_state_checkpoints: int = Field(32, ge=1, le=2**16)
    """State checkpoints on the device."""

    texts: int = Field(8, ge=0, le=1000)
    """Answers of word problems that a point keeps as texts, of those that are wrong or differ from
    the reference's; the reference keeps all. GSM8K's are kept as hashes alone."""

    only: Names = ()
    """Points to run, by arm, identity, or shell pattern of either; empty runs all."""

    client: Literal["engine", "http", "lm-eval"] = "engine"
    """Who asks: this process the engine itself, or over HTTP this package or lm-eval a server."""

    base_url: str | None = Field(None, min_length=1, exclude=True)
    """A server that runs already, e.g. http://HOST:PORT. Not recorded."""

    server_label: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,_+-]{0,63}$")
    """What serves there, in words for the record, e.g. vllm 0.12."""

    server_model: str = Field("default", min_length=1, max_length=256)
    """Name of the model there."""

    api_key_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Variable that holds the server's key; the key itself is never recorded."""

    request_seconds: float = Field(600.0, gt=0, le=86400)
    """Longest time of one request."""

    point_seconds: float = Field(600.0, gt=0, le=86400)
    """After so long a point's items without an answer count as failed: a damaged request may never
    find its end."""

    time_limit_seconds: float | None = Field(None, gt=0, le=14 * 86400)
    """After that a point counts as hung and is killed; empty: two minutes more than
    point_seconds."""

    # where and how long it runs is no part of what is measured: not recorded, and given anew when
    # a run goes on
    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field((), exclude=True)
    """GPUs of this host, a point on each side by side; empty: the first one. A GPU that stands
    twice has two points at a time; only points whose timing decides nothing, see
    :attr:`AccuracyPoint.needs_gpu_alone`."""

    budget_seconds: float | None = Field(None, gt=0, exclude=True)
    """No point starts that would not end within it; what is left can be resumed."""

    logs: str | None = Field(None, min_length=1, exclude=True)
    """Folder of the points' logs; empty keeps none."""

    @property
    def serves(self) -> bool:
        """Whether a server that is not this process's answers."""
        return self.server_label is not None

    @model_validator(mode="after")
    def _fits_together(self) -> AccuracySettings:
        if self.base_url is not None and not self.serves:
            raise ValueError(
                "server_label: say in a few words what serves (its name and version): the record "
                "has not the address"
            )
        if self.serves and self.client == "engine":
            raise ValueError("client: a server is asked over http, or by lm-eval")
        if len(set(self.pressure)) != len(self.pressure):
            raise ValueError("pressure: a value stands twice")
        if len(set(self.protocol)) != len(self.protocol):
            raise ValueError("protocol: a value stands twice")
        if not self.serves:
            for offload in (False, True):
                engine_settings(self, AccuracyPoint(HOLD, CopyProtocol.HOLD, offload, True))
        return self


@dataclass(frozen=True)
class AccuracyPoint:
    """All items put to one engine.

    Attributes:
        arm: what is compared.
        protocol: of its copies; ``None``: a server that is not ours.
        offload: whether it has a CPU pool.
        drafts: whether it drafts.
        pressure_mib: stored on other streams.
        pressure_every: ahead of every how many steps.
        order: place in the plan.
    """

    arm: str
    protocol: CopyProtocol | None
    offload: bool = False
    drafts: bool = False
    pressure_mib: float = 0.0
    pressure_every: int = 1
    order: int = 0

    @property
    def point_id(self) -> str:
        """``<arm>/<pool or no-pool>/<mtp or plain>``, and the pressure if there is one."""
        if self.protocol is None:
            return self.arm
        words = [self.arm, "pool" if self.offload else "no-pool", "mtp" if self.drafts else "plain"]
        if self.pressure_mib:
            words.append(f"{self.pressure_mib:g}MiB-every-{self.pressure_every}")
        return "/".join(words)

    @property
    def believes(self) -> bool:
        """Whether it takes what it receives, whatever the tag says: the engine before the fix."""
        return self.protocol is CopyProtocol.UNPATCHED

    @property
    def needs_gpu_alone(self) -> bool:
        """Whether other work on its GPU would change what it shows: a race is one of timing."""
        return self.believes or self.pressure_mib > 0

    @property
    def is_reference(self) -> bool:
        """Whether its answers are the reference."""
        return self.arm == HOLD and not (self.offload or self.drafts or self.pressure_mib)


def engine_settings(settings: AccuracySettings, point: AccuracyPoint) -> EngineSettings:
    """The engine of a point.

    Raises:
        BadInput: sizes that do not fit together.
    """
    protocol = point.protocol or CopyProtocol.HOLD
    values: dict[str, object] = {
        "copy_protocol": protocol.value,
        "guard": GuardMode.REPORT.value,
        "status_check": (StatusCheck.NONE if point.believes else StatusCheck.RAISE).value,
        "draft_tokens": settings.draft_tokens if point.drafts else 0,
        "max_num_seqs": settings.concurrency,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": settings.max_model_len,
        "max_waiting": max(1024, settings.concurrency),
        "block_size": settings.block_size,
        "num_kv_blocks": settings.num_kv_blocks,
        "state_checkpoint_tokens": settings.state_checkpoint_tokens,
        "num_state_checkpoints": settings.num_state_checkpoints,
        "seed": settings.seed,
    }
    if point.offload:
        values |= {
            "cpu_pool_bytes": int(settings.pool_gib * GIB),
            "offload_chunk_tokens": settings.state_checkpoint_tokens,
        }
    return EngineSettings.parse(values, where=f"sweep accuracy, {point.point_id}")


def build_points(settings: AccuracySettings) -> list[AccuracyPoint]:
    """All points in the order in which they run: the reference, the grid, then the pressure.

    Within each part the order is drawn, so that no arm has all the early or late places.

    Raises:
        BadInput: ``only`` fits no point.
    """
    if settings.serves:
        return [AccuracyPoint(str(settings.server_label), None)]
    generator = random.Random(settings.seed)
    arms = [(protocol.value, protocol) for protocol in settings.protocol]
    if settings.twin and CopyProtocol.HOLD in settings.protocol:
        arms.append((TWIN, CopyProtocol.HOLD))
    drafts = (False, True) if settings.speculation else (False,)
    pools = (False, True) if settings.offload else (False,)
    grid = [AccuracyPoint(*arm, pool, draft) for arm, pool, draft in product(arms, pools, drafts)]
    generator.shuffle(grid)
    grid.sort(key=lambda point: not point.is_reference)
    ladder = _ladder(settings)
    generator.shuffle(ladder)
    points = [*grid, *ladder]
    chosen = [p for p in points if is_wanted(settings.only, p.arm, p.point_id)]
    for pattern in settings.only:
        if not any(is_wanted((pattern,), point.arm, point.point_id) for point in chosen):
            raise BadInput(f"only: {pattern!r} fits no point; they look like {points[0].point_id}")
    return [replace(point, order=order) for order, point in enumerate(chosen)]


def _ladder(settings: AccuracySettings) -> list[AccuracyPoint]:
    drafts = settings.speculation
    found = []
    if CopyProtocol.UNPATCHED in settings.protocol:
        bare = CopyProtocol.UNPATCHED
        found += [AccuracyPoint(bare.value, bare, False, drafts, *one) for one in settings.pressure]
    if CopyProtocol.HOLD in settings.protocol and settings.pressure:
        most = max(settings.pressure, key=lambda one: (one[0], -one[1]))
        found.append(AccuracyPoint(HOLD, CopyProtocol.HOLD, False, drafts, *most))
    return found
