"""Settings of one engine: validated by name, type and range before anything is allocated."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, ValidationInfo, field_validator, model_validator

from atom.config import CopyPath, CopyProtocol, GuardMode, RecurrentStates, Settings
from atom.kv_transfer.pool_entry import ALIGNMENT_BYTES, OffloadBackend, PoolPolicy
from atom.model_engine.scheduled_batch import SchedulerConfig


class StatusCheck(StrEnum):
    """What the host does with a status before it believes it."""

    NONE = "none"  #: takes it as it came, as the pre-fix engine did
    DEBUG = "debug"  #: the seed's debug checks: logs impossible counts, then takes them
    RAISE = "raise"  #: an impossible count fails its request before the count is used


class EngineSettings(Settings):
    """Settings of an engine."""

    copy_protocol: CopyProtocol = CopyProtocol.HOLD
    """What protects the sources of host-bound copies; unpatched is for experiments only."""

    copy_path: CopyPath = CopyPath.ENGINE
    """Who moves the bytes of those copies: the copy engine, or a small kernel."""

    epoch_tag: bool = True
    """Whether host-bound payloads carry the step that made them; a wrong one raises."""

    guard: GuardMode = GuardMode.REPORT
    """What the state kernels do about a count or slot out of range; trap needs TRITON_DEBUG=1."""

    status_check: StatusCheck = StatusCheck.RAISE
    """What the host does about a status that no step can have."""

    draft_tokens: int = Field(3, ge=0, le=7)
    """Draft tokens a step (MTP-3: 3); 0 switches speculation off."""

    forced_acceptance_length: float | None = Field(None, ge=1, le=8)
    """Mean tokens a request and decode step, forced; empty verifies for real."""

    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT
    """A recurrent state behind each draft, or one that replays the drafts that stood."""

    dspark: bool = False
    """Whether the drafts' confidence sizes each request's next verification."""

    dspark_threshold: float = Field(0.3, gt=0, lt=1)
    """Least probability that a draft is still reached, for it to be verified."""

    max_num_seqs: int = Field(32, ge=1, le=1024)
    """Requests that run at once."""

    max_num_batched_tokens: int = Field(16384, ge=1, le=2**20)
    """Tokens of a prefill step (its token budget); longer prompts are computed in chunks."""

    max_model_len: int = Field(32768, ge=2, le=2**22)
    """Longest request in tokens, prompt and output together."""

    max_waiting: int = Field(1024, ge=1, le=2**20)
    """Requests that may wait; one more is refused."""

    block_size: int = Field(16, ge=1, le=1024)
    """Tokens of a KV block."""

    num_kv_blocks: int | None = Field(None, ge=1, le=2**24)
    """KV blocks; empty sizes the pool from free memory."""

    memory_utilization: float = Field(0.85, gt=0, le=0.98)
    """Share of the device's memory that weights, pools and working space may fill."""

    prefix_caching: bool = True
    """Whether computed prefixes are kept and found again."""

    state_checkpoint_tokens: int = Field(256, ge=1, le=2**16)
    """Tokens from one state checkpoint to the next; a multiple of the block size."""

    num_state_checkpoints: int = Field(64, ge=0, le=2**16)
    """State checkpoints on the device, for prefixes to resume from."""

    cpu_pool_bytes: int | None = Field(None, ge=ALIGNMENT_BYTES, le=2**43)
    """Pinned host memory for prefixes that leave the device; empty runs without offload."""

    offload_backend: OffloadBackend = OffloadBackend.HOST_POOL
    """Who keeps what the CPU pool holds: host_pool, or lmcache (optional; under its own LRU)."""

    offload_policy: PoolPolicy = PoolPolicy.SHARED_LRU
    """Who goes when the CPU pool is full: shared_lru, paired or isolated."""

    offload_chunk_tokens: int = Field(256, ge=1, le=2**16)
    """Tokens of a KV entry of the CPU pool: a multiple of the block size."""

    offload_state_share: float = Field(0.25, gt=0, lt=1)
    """isolated: share of the CPU pool that state images have for themselves."""

    offload_in_flight_bytes: int = Field(512 * 2**20, ge=ALIGNMENT_BYTES, le=2**38)
    """Bytes of stores under way, beyond which more are dropped; as much again for loads."""

    graphs: bool = True
    """Whether decode steps run in device graphs."""

    logprobs: bool = False
    """Whether logprobs of the sampled tokens are computed and sent each step."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of requests that bring none."""

    @field_validator(
        *(
            "copy_protocol",
            "copy_path",
            "guard",
            "status_check",
            "recurrent_states",
            "offload_backend",
        ),
        mode="before",
    )
    @classmethod
    def _by_name(cls, value: object, info: ValidationInfo) -> object:
        """Take the names that the command line takes."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, StrEnum):
            allowed = [choice.value for choice in kind]
            if value not in allowed:
                raise ValueError(f"allowed: {', '.join(allowed)}")
            return kind(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> EngineSettings:
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than one block of "
                f"{self.block_size} tokens: no chunk could end at a block's border; raise it"
            )
        if self.prefix_caching and self.state_checkpoint_tokens % self.block_size:
            raise ValueError(
                f"state_checkpoint_tokens {self.state_checkpoint_tokens} is no multiple of "
                f"block_size {self.block_size}"
            )
        if self.cpu_pool_bytes is not None:
            self._offload_fits()
        if self.forced_acceptance_length is not None:
            most = self.draft_tokens + 1
            if self.forced_acceptance_length > most:
                raise ValueError(
                    f"forced_acceptance_length {self.forced_acceptance_length} is more than the "
                    f"{most} tokens that {self.draft_tokens} drafts can give; raise draft_tokens"
                )
        if self.dspark and self.draft_tokens == 0:
            raise ValueError("dspark sizes the verification of drafts; draft_tokens is 0")
        return self

    def _offload_fits(self) -> None:
        lmcache = self.offload_backend is OffloadBackend.LMCACHE
        if lmcache and self.offload_policy is not PoolPolicy.SHARED_LRU:
            raise ValueError(
                f"offload_policy {self.offload_policy}: LMCache keeps states and KV in one LRU of "
                "its own; set offload_policy to shared_lru, or offload_backend to host_pool"
            )
        if not self.prefix_caching or not self.num_state_checkpoints:
            raise ValueError(
                "cpu_pool_bytes: what the CPU pool gives back is found by the prefix cache; switch "
                "prefix_caching on, with num_state_checkpoints of 1 or more"
            )
        if self.offload_chunk_tokens % self.block_size:
            raise ValueError(
                f"offload_chunk_tokens {self.offload_chunk_tokens} is no multiple of block_size "
                f"{self.block_size}"
            )
        if self.state_checkpoint_tokens % self.offload_chunk_tokens:
            raise ValueError(
                f"state_checkpoint_tokens {self.state_checkpoint_tokens} is no multiple of "
                f"offload_chunk_tokens {self.offload_chunk_tokens}: no state would stand behind a "
                "whole chunk"
            )

    @property
    def query_tokens(self) -> int:
        """Tokens of a decode row: the last accepted one, and the drafts."""
        return 1 + self.draft_tokens


def scheduler_config(
    settings: EngineSettings, eos_token_ids: tuple[int, ...] = ()
) -> SchedulerConfig:
    """The scheduler's limits under these settings.

    Raises:
        BadInput: a decode step of all requests exceeds the token budget.
    """
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_drafts=settings.draft_tokens,
        max_queue=settings.max_waiting,
        eos_token_ids=eos_token_ids,
    )
