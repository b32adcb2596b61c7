"""Rows of the capacity model: one a simulated point."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from atom.benchmarks.load_metrics import LoadSummary
from atom.kv_transfer.pool_entry import EntryKind, PoolPolicy
from atom.kv_transfer.tier_counts import Cause, count_name

if TYPE_CHECKING:
    from atom.benchmarks.capacity import CapacityLoad
    from atom.benchmarks.capacity_engine import CapacityEngine
    from atom.benchmarks.capacity_machine import Machine
    from atom.model_engine.engine_settings import EngineSettings

EXPERIMENT = "capacity"


class CapacityRow(BaseModel):
    """One simulated point. Seconds are simulated ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = ""
    """``<arm>/c<sessions>/<pool>/x<byte scale>/<device memory>/<load rate>/<repeat>``, unique."""
    arm: str = ""
    """What is changed about the published way of serving."""
    repeat: int = Field(0, ge=0)
    byte_scale: float | None = Field(None, gt=0)
    """Bytes of a KV token and a state image over the nominal model's."""
    device_gb: float | None = Field(None, gt=0)
    """KV pool on the device in GB."""
    load_gb_per_second: float | None = Field(None, gt=0)
    """Rate at which loads come back."""

    concurrency: int = Field(ge=1)
    """Live sessions that ask."""
    served_sessions: int | None = Field(None, ge=1)
    """Of those, served at a time: fewer under admission control."""
    pool_gib: float | None = Field(ge=0)
    """CPU pool in GiB; blank: no offload."""
    offload_policy: PoolPolicy | None
    state_share: float | None = Field(ge=0, le=1)
    """isolated: share of the pool that states have."""
    state_checkpoint_tokens: int = Field(ge=1)
    """Tokens from one place of a state image to the next."""
    seed: int = Field(ge=0)

    requests: int = Field(ge=0)
    window_seconds: float = Field(ge=0)
    total_throughput: float = Field(ge=0)
    """Prompt and output tokens a second."""
    effective_total_throughput: float = Field(ge=0)
    output_throughput: float = Field(ge=0)
    ttft_mean_seconds: float | None = Field(ge=0)
    ttft_p90_seconds: float | None = Field(ge=0)
    itl_mean_seconds: float | None = Field(ge=0)
    itl_p90_seconds: float | None = Field(ge=0)
    tokens_per_request: float | None = Field(ge=0)
    cached_share: float | None = Field(ge=0, le=1)

    lookup_tokens: int = Field(ge=0)
    hit_tokens: int = Field(ge=0)
    state_loads: int = Field(ge=0)
    """State images that the pool gave back."""
    state_load_failures: int = Field(ge=0)
    """State images that it had given up when their KV was still there."""
    state_pairs: int = Field(ge=0)
    """Requests whose KV reached a place at which the pool has, or had evicted, a state."""
    state_pairs_failed: int = Field(ge=0)
    """Of those, requests whose last such state it had evicted: the KV half succeeds, the pair
    fails."""
    kv_loads: int = Field(ge=0)
    kv_load_failures: int = Field(ge=0)
    states_evicted: int = Field(ge=0)
    kv_evicted: int = Field(ge=0)
    stored_bytes: int = Field(ge=0)
    loaded_bytes: int = Field(ge=0)
    preemptions: int = Field(ge=0)

    decode_steps: int = Field(ge=0)
    prefill_steps: int = Field(ge=0)
    decode_seconds: float = Field(ge=0)
    prefill_seconds: float = Field(ge=0)
    """Device time of those steps."""
    simulated_seconds: float = Field(ge=0)
    """Warm-up included."""

    @property
    def state_failure_rate(self) -> float | None:
        """Share of the requests that asked the pool for a state, and whose state it had evicted."""
        return self.state_pairs_failed / self.state_pairs if self.state_pairs else None


def row_of(
    load: CapacityLoad,
    settings: EngineSettings,
    machine: Machine,
    engine: CapacityEngine,
    summary: LoadSummary,
    end: float,
) -> CapacityRow:
    """The row of a point that has run to its end."""
    stats = engine.stats()
    offload = settings.cpu_pool_bytes is not None
    figures = {
        name: value if value is None or value == value else None
        for name, value in asdict(summary).items()
        if name in CapacityRow.model_fields
    }

    def count(name: str) -> int:
        return int(stats.get(name, 0))

    return CapacityRow(
        concurrency=load.concurrency,
        pool_gib=None if settings.cpu_pool_bytes is None else settings.cpu_pool_bytes / 2**30,
        offload_policy=settings.offload_policy if offload else None,
        state_share=settings.offload_state_share
        if offload and settings.offload_policy is PoolPolicy.ISOLATED
        else None,
        state_checkpoint_tokens=settings.state_checkpoint_tokens,
        seed=load.seed,
        lookup_tokens=count("lookup_tokens"),
        hit_tokens=count("hit_tokens"),
        state_loads=count("offload_loaded_states"),
        state_load_failures=count(count_name("failed", EntryKind.STATE, Cause.EVICTED)),
        state_pairs=count("offload_state_pairs"),
        state_pairs_failed=count("offload_state_pairs_failed"),
        kv_loads=count("offload_loaded_chunks"),
        kv_load_failures=count(count_name("failed", EntryKind.KV, Cause.EVICTED)),
        states_evicted=count(f"pool_{EntryKind.STATE}_evicted"),
        kv_evicted=count(f"pool_{EntryKind.KV}_evicted"),
        stored_bytes=count("offload_stored_bytes"),
        loaded_bytes=count("offload_loaded_bytes"),
        preemptions=count("preemptions"),
        decode_steps=count("decode_steps"),
        prefill_steps=count("prefill_steps"),
        decode_seconds=engine.runner.decode_seconds,
        prefill_seconds=engine.runner.prefill_seconds,
        simulated_seconds=end,
        **figures,
    )
