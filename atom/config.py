"""Settings of engines, experiments and notebooks: frozen, and validated by name, type and range.

Every setting is checked before any work starts. An error names the parameter, what was given, what
is allowed, and for an unknown name the nearest known one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from atom.errors import BadInput


class CopyProtocol(StrEnum):
    """What happens to the source of a device-to-host copy between its queuing and its end."""

    UNPATCHED = "unpatched"  #: dropped once the copy is queued (the fault; experiments only)
    RECORD_STREAM = "record_stream"  #: dropped, and the allocator is told of the copy stream
    HOLD = "hold"  #: kept beside the copy's own event, dropped after that event was waited on
    BLOCKING = "blocking"  #: the host waits for the copy before it goes on
    ZERO_COPY = "zero_copy"  #: the producer writes a pinned slot itself; there is no copy


class CopyPath(StrEnum):
    """Who moves the bytes of a copy."""

    ENGINE = "engine"  #: a DMA copy engine (``cudaMemcpyAsync``, SDMA)
    KERNEL = "kernel"  #: a small kernel on the stream (a blit copy)


class GuardMode(StrEnum):
    """What the conv-state and recurrent kernels do about a count or slot that is out of range."""

    NONE = "none"  #: nothing, as upstream: the row is read wherever it lies
    TRAP = "trap"  #: a device assert; ends the process, and only where Triton compiles it in
    REPORT = "report"  #: the row is not read; the first bad one goes to the host with the status


class RecurrentStates(StrEnum):
    """How a request keeps its recurrent state until it is known which drafts stand."""

    PER_DRAFT = "per_draft"  #: a state behind each token of the step: read one, write one a token
    REPLAY = "replay"  #: one state, and the step's tokens: the next applies those that stood


_Item = TypeVar("_Item")


def _no_item_twice(items: tuple[_Item, ...]) -> tuple[_Item, ...]:
    twice = [item for number, item in enumerate(items) if item in items[:number]]
    if twice:
        raise ValueError(f"{str(twice[0])!r} stands twice")
    return items


#: a list of names, patterns or folders: none of them blank, none twice
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, pattern=r"\S")], ...], AfterValidator(_no_item_twice)
]


class Settings(BaseModel):
    """Base of all settings. Frozen; unknown names are refused; no silent type conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    #: names that a caller may pass beside the fields (papermill's two path names)
    ignored_names: ClassVar[frozenset[str]] = frozenset(
        {"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, where: str = "parameters") -> Self:
        """Validate plain values (numbers, text, lists) as they come from YAML or a command line.

        Args:
            values: name to value. JSON types only; text for an enum field.
            where: what is being parsed, for the error, e.g. ``notebook 02_race_microbenchmark``.

        Raises:
            BadInput: one line a fault, all faults at once.
        """
        given = {name: value for name, value in values.items() if name not in cls.ignored_names}
        try:
            text = json.dumps(given, allow_nan=True)
        except TypeError as error:
            raise BadInput(f"{where}: only numbers, text, true/false and lists: {error}") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = "\n".join(f"  {cls._describe(fault)}" for fault in error.errors())
            raise BadInput(f"{where}:\n{faults}") from None

    def with_defaults(self, values: Mapping[str, Any]) -> Self:
        """These settings with ``values`` in place of defaults; what was given stays."""
        given = self.model_fields_set
        return self.model_copy(update={k: v for k, v in values.items() if k not in given})

    @classmethod
    def _describe(cls, fault: Any) -> str:
        path = [str(part) for part in fault["loc"]]
        name = path[0] if path else "(all)"
        shown = ".".join(path) or name
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, cls.model_fields, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(cls.model_fields)
            return f"{shown}: no such parameter; {hint}"
        value = fault["input"]
        if fault["type"] in ("tuple_type", "list_type"):
            return (
                f"{shown}: expected a list, such as [a, b], got {value!r} (papermill's own -p "
                f"passes plain values alone: give it -y '{name}: [a, b]' or a -f FILE.yaml)"
            )
        if not path:
            return fault["msg"].removeprefix("Value error, ")
        message = fault["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        field = cls.model_fields.get(name)
        about = f" ({field.description})" if field is not None and field.description else ""
        return f"{shown}: {message}, got {value!r}{about}"


class NotebookSettings(Settings):
    """Parameters that every notebook has."""

    profile: str = Field("ci", pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    """Report and accepted-verdict set that this run belongs to: ci, or a machine such as h200."""

    records: Names = ()
    """Run folders to rebuild the analysis from; empty runs the experiment now."""


class FaultArithmeticSettings(NotebookSettings):
    """Parameters of notebook 01. Defaults are the published case."""

    faulting_row: int = Field(16487, ge=0, le=2**40)
    """Row of the conv-state pool that the faulting access named."""

    bonus: int = Field(16384, ge=0, le=2**40)
    """Stale bonus count that the host read."""

    conv_width: int = Field(4, ge=2, le=64)
    """Width of the causal convolution in tokens; width - 1 history taps are read."""

    draft_tokens: int = Field(3, ge=0, le=64)
    """Draft tokens a step (MTP-3: 3)."""

    slots: int = Field(64, ge=1, le=2**16)
    """Conv-state slots in one layer's pool (not published)."""

    layers: int = Field(4, ge=1, le=1024)
    """GDN layers whose pools lie one behind the other (not published)."""

    slots_per_request: int = Field(4, ge=1, le=65)
    """Slots in a request's group in the grouped layout (1 + draft tokens in the seed's engine)."""

    token_budget: int = Field(16384, ge=1, le=2**30)
    """Token budget of a prefill step."""

    batch_size: int = Field(32, ge=1, le=65536)
    """Requests in a decode batch."""

    conv_dim: int = Field(8192, ge=1, le=2**20)
    """Channels of a conv-state row."""

    element_bytes: int = Field(2, ge=1, le=8)
    """Bytes an element of the conv state."""

    logged_slot: int = Field(5, ge=0, le=2**16)
    """State slot that the debug log printed beside the stale count."""

    forced_mean_length: float = Field(2.32, ge=1, le=65)
    """Mean accepted tokens a step that the load forced, the token that is always kept included."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.slots_per_request > self.slots:
            raise ValueError(
                f"slots_per_request {self.slots_per_request} is more than slots {self.slots}: no "
                f"request fits into the pool; raise slots"
            )
        if self.logged_slot >= self.slots:
            raise ValueError(
                f"logged_slot {self.logged_slot} is not in a pool of {self.slots} slots; raise "
                f"slots to {self.logged_slot + 1} or more"
            )
        taps = self.conv_width - 1
        highest_bonus = max(self.bonus, self.token_budget, self.draft_tokens)
        highest = (self.slots - 1) * (taps + self.draft_tokens) + highest_bonus + taps - 1
        if self.faulting_row > highest:
            raise ValueError(
                f"faulting_row {self.faulting_row} cannot be reached: the last of {self.slots} "
                f"slots, with a bonus of {highest_bonus} and the last of {taps} taps, reads row "
                f"{highest}; raise slots or bonus, or lower faulting_row"
            )
        return self


class Front(StrEnum):
    """Work queued ahead of the status copy."""

    NOTHING = "nothing"
    STORE_ON_COPY_STREAM = "store_on_copy_stream"  #: one bulk D2H on the copy stream itself
    STORE_ON_OTHER_STREAMS = "store_on_other_streams"  #: bulk D2H on two other streams
    MATMUL = "matmul"  #: 16 streams x 10 square matmuls
    PACK_AND_STORE = "pack_and_store"  #: a pack kernel and its store, on another stream
    SPIN = "spin"  #: a spin kernel on the copy stream


class Source(StrEnum):
    """Where the copied tensor lives."""

    ALLOCATOR = "allocator"  #: a fresh block every step
    GRAPH_OUTPUT = "graph_output"  #: a graph's static output, replayed at once
    GRAPH_OUTPUT_WAIT = "graph_output_wait"  #: the default stream waits on the copy, then replays


class AllocatorBackend(StrEnum):
    """PyTorch's allocator backend of a worker process."""

    NATIVE = "native"
    EXPANDABLE_SEGMENTS = "expandable_segments"
    CUDA_MALLOC_ASYNC = "cuda_malloc_async"


class DeviceChoice(StrEnum):
    """Which device an experiment runs on."""

    VIRTUAL = "virtual"
    ACCELERATOR = "accelerator"


class RaceSettings(Settings):
    """Settings of the race micro-benchmark. One point = arm x process; see ``benchmarks.race``."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    trials: int = Field(40, ge=1, le=100_000)
    """Trials of an arm in one process."""

    processes: int = Field(5, ge=1, le=100)
    """Processes an arm: the stream-to-queue mapping is drawn once a process."""

    batch_size: int = Field(32, ge=1, le=65536)
    """Requests in the decode batch of the main arms."""

    batch_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65536)], ...],
        Field(min_length=1),
        AfterValidator(_no_item_twice),
    ] = (1, 8, 32, 61, 62, 128, 512)
    """Batch sizes of the batch arms. With its tags, a status of 62 requests fills 512 bytes."""

    hardware_queues: Annotated[
        tuple[Annotated[int, Field(ge=1, le=128)], ...],
        Field(min_length=1),
        AfterValidator(_no_item_twice),
    ] = (1, 2, 4, 8, 32)
    """Values of the hardware-queue variable, beside its default."""

    store_bytes: int = Field(256 * 2**20, ge=4096, le=2**36)
    """Bytes of a bulk store."""

    matmul_size: int = Field(4096, ge=16, le=65536)
    """Rows and columns of the square matmuls."""

    matmul_streams: int = Field(16, ge=1, le=32)
    """Streams that run matmuls."""

    matmuls_per_stream: int = Field(10, ge=1, le=1000)
    """Matmuls on each of those streams."""

    spin_seconds: float = Field(0.002, gt=0, le=10)
    """Length of the spin kernel."""

    only: Names = ()
    """Arms to run, by name or shell pattern; empty runs all."""

    seed: int = Field(42, ge=0, le=2**32 - 1)
    """Seed of the order of arms and of the virtual device's jitter."""


class RaceMicrobenchmarkSettings(NotebookSettings, RaceSettings):
    """Parameters of notebook 02: the race settings, and which recorded runs stand beside them."""

    processes: int = Field(6, ge=1, le=100)
    """Processes an arm. In one of the first four a copy stream shares the default's queue."""

    model_draws: int = Field(4, ge=1, le=64)
    """Draws of the stream-to-queue mapping that each queue model is tried on."""

    model_trials: int = Field(3, ge=1, le=1000)
    """Trials of each row, queue model and draw."""

    measured: Names = ("data/runs",)
    """Recorded hardware runs (run folders or parents of them) to show beside this run."""

    def race(self, device: DeviceChoice) -> RaceSettings:
        """The race settings in these parameters, for that device."""
        values = {name: getattr(self, name) for name in RaceSettings.model_fields}
        return RaceSettings(**{**values, "device": device})


class LifetimeSettings(Settings):
    """Settings of the source-lifetime experiment; see ``benchmarks.source_lifetime``."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    trials: int = Field(50, ge=1, le=100_000)
    """Trials of each path, protocol and arm."""

    park_seconds: float = Field(0.01, gt=0, le=1)
    """Length of the spin kernel that parks the copy stream; longer than a trial's host calls."""

    paths: Names = ()
    """Paths to run, by name; empty runs all seven and the graph-output arm."""

    protocols: Annotated[tuple[CopyProtocol, ...], AfterValidator(_no_item_twice)] = ()
    """Protocols to run; empty runs all five."""

    seed: int = Field(42, ge=0, le=2**32 - 1)
    """Seed of the virtual device's jitter."""


class SourceLifetimeSettings(NotebookSettings, LifetimeSettings):
    """Parameters of notebook 03: the lifetime settings, and how much of the rest is done."""

    explore_depth: int = Field(2, ge=1, le=4)
    """Most steps in flight of the programs that are explored under every schedule."""

    mutation_depth: int = Field(3, ge=1, le=4)
    """Most steps in flight with which a mutation may be caught; two need 3."""

    measured: Names = ("data/runs",)
    """Recorded hardware runs (run folders or parents of them) to show beside this run."""

    def lifetime(self, device: DeviceChoice) -> LifetimeSettings:
        """The lifetime settings in these parameters, for that device."""
        values = {name: getattr(self, name) for name in LifetimeSettings.model_fields}
        return LifetimeSettings(**{**values, "device": device})


class ProtocolCostSettings(NotebookSettings):
    """Parameters of notebook 06: what is counted now, and where recorded runs lie."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device on which a step's calls are counted."""

    batch: int = Field(4, ge=1, le=64)
    """Requests of the counted decode steps."""

    steps: int = Field(8, ge=1, le=1000)
    """Counted decode steps of each arm."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights and prompts, and of the bootstrap."""

    measured: Names = ("data/runs",)
    """Recorded hardware runs (run folders or parents of them) to show."""


class ThroughputNotebookSettings(NotebookSettings):
    """Parameters of notebook 05: the small sweep that it simulates, and where runs lie."""

    device_profile: str = Field("H200", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device."""

    link_slowdown: float = Field(1000.0, ge=1, le=1e6)
    """How many times slower its host link is: a tiny model stores that many bytes less."""

    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...],
        Field(min_length=1),
        AfterValidator(_no_item_twice),
    ] = (2, 4)
    """Live sessions of the simulated points."""

    pool_gib: Annotated[
        tuple[Annotated[float, Field(gt=0, le=64)], ...],
        Field(min_length=1),
        AfterValidator(_no_item_twice),
    ] = (0.0004, 0.002)
    """Host pools of the simulated points, in GiB."""

    duration_seconds: float = Field(0.8, gt=0, le=3600)
    """Profiling window of a simulated point."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights, sessions, and the order of points."""

    measured: Names = ("data/runs",)
    """Recorded hardware runs (run folders or parents of them) to show."""


class OffloadCapacitySettings(NotebookSettings):
    """Parameters of notebook 07: the what-if panel, and where recorded runs lie."""

    concurrency: int = Field(16, ge=1, le=1024)
    """Live sessions of the panel."""

    pool_gib: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = Field((48, 60, 80), min_length=1)
    """Its pools in GiB; one more point has none."""

    remedies: Names = ("shared_lru", "paired")
    """Its remedies: arms of ``python -m atom sweep capacity``."""

    byte_scale: float = Field(1.8, gt=0, le=1000)
    """Its bytes of a KV token and a state image over those of an 80B hybrid model."""

    device_gb: float = Field(30.0, gt=0, le=10000)
    load_gb_per_second: float = Field(8.0, gt=0, le=10000)
    """Its KV pool on the device in GB, and the rate of loads from its host pool in GB/s."""

    duration_seconds: float = Field(60.0, gt=0, le=7 * 86400)
    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Its profiling window in simulated seconds; seed of its sessions and of their order."""

    recorded: Names = ("data/runs",)
    """Recorded runs (run folders or parents of them): sweeps of this model, and measured load."""


class SummarySettings(NotebookSettings):
    """Parameters of notebook 00."""

    results: str = ""
    """Folder with the other notebooks' result files; empty means the profile's report folder."""
