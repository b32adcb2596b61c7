"""Rows of the throughput experiment: one a point, its requests, and what the CPU tier could not do.

A point that crashed, hung or ran out of memory has a row like any other: its outcome, and what had
been counted by then. Blank means that it was not measured, never zero.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from atom.config import CopyProtocol, GuardMode
from atom.kv_transfer.pool_entry import EntryKind, OffloadBackend, PoolPolicy
from atom.model_engine.engine_settings import StatusCheck

EXPERIMENT = "throughput"
#: ``json_schema_extra`` of a column that records of before lack: its default says what it is there
ADDED_LATER: dict[str, JsonValue] = {"added_later": True}


class Outcome(StrEnum):
    """How a point ended."""

    OK = "ok"  #: the load ran to its end
    CRASH = "crash"  #: the process died, or its engine did and could still say so
    HANG = "hang"  #: its load ran past its time limit and it was killed
    GUARD_ERROR = "guard error"  #: the kernels' guard reported a count or slot out of range
    OUT_OF_MEMORY = "out of memory"  #: of the device, or of pinned host memory
    START_FAILED = "start failed"  #: no load was put on it: nothing is said about the protocol
    LOAD_FAILED = "load failed"  #: the engine lived, but the load broke off or nothing succeeded


class ThroughputRow(BaseModel):
    """One point: an engine in a process of its own, under one load.

    Load figures are of the profiling window (see ``load_metrics``). Counters and step times are of
    the engine's whole life, warm-up included. Seconds are wall time on the host.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """``<arm>/c<concurrency>/<pool>/<repeat>``: unique within a run."""
    arm: str = Field(min_length=1)
    """Name of what is compared: protocol, nets and the offload's settings."""
    system: str = Field(min_length=1)
    """What served: ``atom`` in process, or the label of a server."""
    repeat: int = Field(ge=0)
    order: int = Field(ge=0)
    """Place of the point in the planned order of the run."""

    concurrency: int = Field(ge=1)
    """Live sessions."""
    pool_gib: float | None = Field(ge=0)
    """CPU pool in GiB; blank: no offload."""
    protocol: CopyProtocol | None
    """Blank: a server that is not ours."""
    offload_policy: PoolPolicy | None
    chunk_tokens: int | None = Field(ge=1)
    """Tokens of a KV entry of the CPU pool: what one store moves."""
    mtp: bool | None
    """Whether it drafts (MTP)."""
    draft_tokens: int | None = Field(ge=0)
    forced_acceptance_length: float | None = Field(ge=1)
    """Mean tokens a request and decode step, forced; blank: verified for real."""
    guard: GuardMode | None
    status_check: StatusCheck | None
    epoch_tag: bool | None

    outcome: Outcome
    outcome_detail: str | None
    """First line of what it died of."""
    exit_code: int | None
    """Of the point's process; negative: by that signal."""
    wall_seconds: float = Field(ge=0)
    """From the start of the process to its end."""
    setup_seconds: float | None = Field(ge=0)
    """From the start of the process to the first request."""
    exposure_seconds: float | None = Field(ge=0)
    """How long it was under load, warm-up included, until its end of whatever kind."""

    requests: int | None = Field(ge=0)
    """Requests that ended well within the profiling window."""
    errors: int | None = Field(ge=0)
    window_seconds: float | None = Field(ge=0)
    effective_total_throughput: float | None = Field(ge=0)
    """Tokens a second, by the time that each request prefills and decodes."""
    total_throughput: float | None = Field(ge=0)
    """Prompt and output tokens a second between the first start and the last end."""
    output_throughput: float | None = Field(ge=0)
    ttft_mean_seconds: float | None = Field(ge=0)
    ttft_p50_seconds: float | None = Field(ge=0)
    ttft_p90_seconds: float | None = Field(ge=0)
    ttft_p99_seconds: float | None = Field(ge=0)
    itl_mean_seconds: float | None = Field(ge=0)
    itl_p50_seconds: float | None = Field(ge=0)
    itl_p90_seconds: float | None = Field(ge=0)
    itl_p99_seconds: float | None = Field(ge=0)
    tokens_per_request: float | None = Field(ge=0)
    """Prompt and output tokens of a request, mean."""
    cached_share: float | None = Field(ge=0, le=1)
    """Prompt tokens that were cached over all; blank: not reported."""
    client_cpu_seconds: float | None = Field(ge=0)
    cold_start: str = Field(min_length=1)
    """How the point began without a warm prefix cache: process, engine, reset and salt, or salt."""
    traces: int | None = Field(ge=0)
    """Sessions that the load drew from."""
    traces_dropped: int | None = Field(ge=0)
    """Recorded sessions that were left out, e.g. for their length."""

    lookup_tokens: int | None = Field(ge=0)
    """Prompt tokens of admitted requests."""
    hit_tokens: int | None = Field(ge=0)
    """Of those, tokens whose KV and state were found, in whichever tier."""
    pool_hit_tokens: int | None = Field(ge=0)
    """Tokens whose KV was brought from the CPU pool. More than the hits where what was brought
    could not be used: it was given up again, or had no state behind it."""
    kv_chunks_stored: int | None = Field(ge=0)
    kv_chunks_loaded: int | None = Field(ge=0)
    states_stored: int | None = Field(ge=0)
    states_loaded: int | None = Field(ge=0)
    pool_loads: int | None = Field(ge=0)
    """Requests for which something was loaded from the CPU pool."""
    stored_bytes: int | None = Field(ge=0)
    """Of all stores that were queued; chunks and states are of those that had ended."""
    loaded_bytes: int | None = Field(ge=0)
    pool_bytes_used: int | None = Field(ge=0)
    """Of the CPU pool, when the load ended."""
    kv_evicted: int | None = Field(ge=0)
    states_evicted: int | None = Field(ge=0)
    """Entries that the CPU pool gave up to make room."""
    kv_load_failures: int | None = Field(ge=0)
    state_load_failures: int | None = Field(ge=0)
    """Loads that could not be, by kind; the causes are in table ``causes``."""
    kv_stores_dropped: int | None = Field(ge=0)
    state_stores_dropped: int | None = Field(ge=0)
    pin_waits: int | None = Field(ge=0)
    preemptions: int | None = Field(ge=0)
    stale_statuses: int | None = Field(ge=0)
    """Transfers with another step's tag, and statuses that no step can have."""
    guard_errors: int | None = Field(ge=0)
    guard_value: int | None
    """``num_accepted_tokens`` in the latest guard record."""
    failed_requests: int | None = Field(ge=0)
    """Requests that the engine ended with an error."""

    statuses: int | None = Field(ge=0)
    status_latency_p50_us: float | None = Field(ge=0)
    status_latency_p99_us: float | None = Field(ge=0)
    status_latency_max_us: float | None = Field(ge=0)
    """Of a decode step's status, from its last kernel to its landing, by the device's clock."""
    status_wait_p50_us: float | None = Field(ge=0)
    status_wait_p99_us: float | None = Field(ge=0)
    """How long the host was blocked for a decode step's status, compute included (virtual device:
    by its own clock, as the latencies)."""
    decode_steps: int | None = Field(ge=0)
    prefill_steps: int | None = Field(ge=0)
    middle_chunks: int | None = Field(ge=0)
    """Prefill steps that produce no output: each is one window of the fault."""
    prompt_tokens_computed: int | None = Field(ge=0)
    generated_tokens: int | None = Field(ge=0)
    drafted_tokens: int | None = Field(ge=0)
    accepted_tokens: int | None = Field(ge=0)
    decode_batch_mean: float | None = Field(ge=0)
    """Requests of a decode step, mean."""
    decode_step_p50_ms: float | None = Field(ge=0)
    decode_step_p99_ms: float | None = Field(ge=0)
    prefill_step_p50_ms: float | None = Field(ge=0)
    """From the launch of such a step to the launch of the next of any kind."""
    decode_seconds: float | None = Field(ge=0)
    prefill_seconds: float | None = Field(ge=0)
    """Sums of those times."""
    idle_seconds: float | None = Field(ge=0)
    """Time under load in which no step was launched: the engine had nothing to do."""

    kv_bytes_per_token: int | None = Field(ge=1)
    state_image_bytes: int | None = Field(ge=0)
    """One recurrent-state image with its conv rows, as the CPU pool holds it."""
    hbm_kv_bytes: int | None = Field(ge=0)
    """KV pool on the device."""
    hbm_checkpoint_bytes: int | None = Field(ge=0)
    """State checkpoints on the device."""
    working_set_bytes: int | None = Field(ge=0)
    """KV of the live sessions at their longest: the mean session's, times the concurrency."""
    device_peak_bytes: int | None = Field(ge=0)
    """Most memory that the process had allocated on the device."""
    host_peak_bytes: int | None = Field(ge=0)
    """Most resident memory of the process."""
    gpu_index: int | None = Field(ge=0)
    """Which GPU of its host."""
    worker: str = ""
    """Dask worker that ran it, numbered; empty: the sweep's own process."""

    offload_backend: OffloadBackend | None = Field(
        OffloadBackend.HOST_POOL, json_schema_extra=ADDED_LATER
    )
    """Who keeps what the CPU pool holds; blank: no offload, or a server that is not ours."""
    limit_seconds: float | None = Field(None, gt=0, json_schema_extra=ADDED_LATER)
    """Time limit of the load, from the first request. Blank in records of before, whose limit began
    with the process and cut some loads short."""
    host: str | None = Field(None, pattern=r"^[0-9a-f]{8}$", json_schema_extra=ADDED_LATER)
    """Tells the hosts of a run apart that was resumed elsewhere or ran on a cluster: digits of a
    hash that is another after each boot. Blank in records of before, and where it is not known."""


class ThroughputRequestRow(BaseModel):
    """One request of a point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    number: int = Field(ge=0)
    """Place in the order of ends."""
    session: str = Field(min_length=1)
    turn: int = Field(ge=0)
    phase: str = Field(pattern="^(warmup|profiling)$")
    outcome: str = Field(pattern="^(ok|error|refused|cancelled)$")
    prompt_tokens: int = Field(ge=0)
    cached_tokens: int | None = Field(ge=0)
    output_tokens: int = Field(ge=0)
    started_seconds: float = Field(ge=0)
    """From the first start of the point."""
    ttft_seconds: float | None = Field(ge=0)
    """Blank: no token came."""
    latency_seconds: float = Field(ge=0)


class TierCauseRow(BaseModel):
    """How often the CPU tier of a point could not load or store, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    what: str = Field(pattern="^(load|store)$")
    kind: EntryKind
    cause: str = Field(min_length=1)
    """A value of ``atom.kv_transfer.tier_counts.Cause``."""
    count: int = Field(ge=1)
