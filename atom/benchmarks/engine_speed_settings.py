"""Settings and points of the engine-speed experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from atom.benchmarks.arms import is_wanted, refuse_unknown
from atom.benchmarks.engine_speed_rows import SpeedArm
from atom.config import DeviceChoice, Names, RecurrentStates, Settings
from atom.model_engine.engine_settings import EngineSettings
from atom.models.presets import PresetName

EXPERIMENT = "engine_speed"
_BLOCK = 16
_QUICK: dict[str, Any] = {
    "batch_sizes": (32,),
    "repeats": 3,
    "memory": False,
    "steps": 100,
    "profile_steps": 10,
}
#: sizes that a CPU gets through in seconds
VIRTUAL_SIZES: dict[str, Any] = {
    "preset": "tiny",
    "batch_sizes": (2,),
    "prompt_tokens": 12,
    "prefill_tokens": 48,
    "max_model_len": 160,
    "warmup_steps": 2,
    "steps": 6,
    "marked_steps": 3,
    "profile_steps": 2,
    "peer_steps": 4,
    "peer_warmup_steps": 1,
    "repeats": 2,
    "copy_bytes": 2**20,
}
_REPLAY = (SpeedArm.REPLAY, SpeedArm.REPLAY_FORCED)
#: arms of a forced acceptance length: wrong drafts stand there
FORCED_ARMS = (SpeedArm.FORCED, SpeedArm.REPLAY_FORCED)
OUR_DECODE = (SpeedArm.OURS, SpeedArm.NULL, SpeedArm.MTP, SpeedArm.FORCED, *_REPLAY)


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) != len(values):
        raise ValueError("a value stands twice")
    return values


class EngineSpeedSettings(Settings):
    """Settings of the engine-speed experiment; see the module of that name."""

    device: DeviceChoice = DeviceChoice.ACCELERATOR
    """accelerator, or virtual: the same code, but no time that says anything."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    preset: PresetName = "m395"
    """Size of the model, whose weights are random."""

    batch_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...],
        Field(min_length=1),
        AfterValidator(_distinct),
    ] = (32, 64)
    """Requests of a decode batch. Goals are set for the first."""

    draft_tokens: int = Field(3, ge=1, le=7)
    """Drafts of the arms that make any."""

    forced_acceptance_length: float = Field(2.32, ge=1, le=8)
    """Mean tokens a row and step of the forced arm."""

    prompt_tokens: int = Field(128, ge=2, le=32768)
    """Prompt of each decoded request."""

    prefill_tokens: int = Field(16384, ge=16, le=32768)
    """Length of the prefilled prompt, computed in one chunk."""

    max_model_len: int = Field(2048, ge=64, le=32768)
    """Longest request of the decoding engines."""

    warmup_steps: int = Field(10, ge=1, le=1000)
    """Steps before the timed ones, in every repeat."""

    steps: int = Field(200, ge=2, le=10_000)
    """Timed decode steps of each of our arms, in every repeat."""

    marked_steps: int = Field(40, ge=2, le=1000)
    """Steps behind the timed ones whose device times and gaps are read from events."""

    profile_steps: int = Field(20, ge=1, le=200)
    """Profiled steps of each of our arms, once."""

    peer_steps: int = Field(20, ge=2, le=1000)
    """Timed decode steps of transformers, in every repeat."""

    peer_warmup_steps: int = Field(3, ge=1, le=100)
    """Its steps before those."""

    repeats: int = Field(5, ge=2, le=1000)
    """Repeats, with new prompts and a new order of arms."""

    copy_bytes: int = Field(2**30, ge=2**16, le=2**34)
    """Size of the copy that the floor takes its rate from."""

    memory: bool = True
    """Whether planned memory is compared with what is used, before anything is timed."""

    only: Names = ()
    """Arms to time, by name or shell pattern; empty times all. ``ours`` is timed in any case.
    With any, the memory is left out."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights, prompts and the order of arms."""

    @model_validator(mode="after")
    def _fits(self) -> EngineSpeedSettings:
        refuse_unknown(self.only, [*SpeedArm])
        if self.forced_acceptance_length > 1 + self.draft_tokens:
            raise ValueError(
                f"forced_acceptance_length {self.forced_acceptance_length} is more than "
                f"{1 + self.draft_tokens}, what {self.draft_tokens} drafts can give"
            )
        need = self.prompt_tokens + self.most_new_tokens + 1 + self.draft_tokens
        if need > self.max_model_len:
            raise ValueError(
                f"a request may grow to {need} tokens in the steps asked for; max_model_len is "
                f"{self.max_model_len}: raise it, or lower steps or marked_steps"
            )
        return self

    def wants(self, arm: SpeedArm) -> bool:
        """Whether an arm is timed."""
        return is_wanted(self.only, arm) or arm is SpeedArm.OURS

    @property
    def most_new_tokens(self) -> int:
        """Tokens that a request gets at most before it is dropped."""
        longest = self.warmup_steps + max(self.steps + self.marked_steps, self.profile_steps)
        return (longest + 4) * (1 + self.draft_tokens)


def sized(given: Mapping[str, Any], *, quick: bool) -> EngineSpeedSettings:
    """Settings from plain values, with smaller ones for ``--quick`` and for a virtual device.

    Args:
        given: name to value; these stay.
        quick: whether the rest is to take less than a minute.

    Raises:
        BadInput: unknown names or wrong values.
    """
    smaller = dict(_QUICK) if quick else {}
    if given.get("device") == DeviceChoice.VIRTUAL:
        smaller |= VIRTUAL_SIZES
    return EngineSpeedSettings.parse({**smaller, **given}, where="sweep engine-speed")


class PointKind(StrEnum):
    """What a point measures."""

    MEMORY = "memory"
    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class SpeedPoint:
    """One measurement with its own engines."""

    kind: PointKind
    batch: int
    prompt_tokens: int

    @property
    def point_id(self) -> str:
        """``<kind>-b<requests>-t<prompt tokens>``."""
        return f"{self.kind}-b{self.batch}-t{self.prompt_tokens}"


def build_points(settings: EngineSpeedSettings) -> list[SpeedPoint]:
    """The points, in the order in which they run: memory first, while nothing else is there."""
    decode = [
        SpeedPoint(PointKind.DECODE, batch, settings.prompt_tokens)
        for batch in settings.batch_sizes
    ]
    memory = SpeedPoint(PointKind.MEMORY, max(settings.batch_sizes), settings.prefill_tokens)
    return [
        *([memory] if settings.memory and not settings.only else []),
        *decode,
        SpeedPoint(PointKind.PREFILL, 1, settings.prefill_tokens),
    ]


def recurrent_states(arm: SpeedArm) -> RecurrentStates:
    """How an arm keeps them."""
    return RecurrentStates.REPLAY if arm in _REPLAY else RecurrentStates.PER_DRAFT


def engine_settings(
    settings: EngineSpeedSettings, point: SpeedPoint, arm: SpeedArm
) -> EngineSettings:
    """The engine of an arm. Everything that is not named here is as an engine has it by default."""
    drafts = 0 if arm in (SpeedArm.OURS, SpeedArm.NULL) else settings.draft_tokens
    length, budget = settings.max_model_len, point.batch * point.prompt_tokens
    if point.kind is PointKind.PREFILL:
        length = point.prompt_tokens + _BLOCK
    elif point.kind is PointKind.MEMORY:
        length = max(length, point.prompt_tokens + settings.most_new_tokens)
        budget = point.prompt_tokens
    blocks = -(-length // _BLOCK)
    return EngineSettings(
        draft_tokens=drafts,
        forced_acceptance_length=(
            settings.forced_acceptance_length if arm in FORCED_ARMS else None
        ),
        recurrent_states=recurrent_states(arm),
        max_num_seqs=point.batch,
        max_num_batched_tokens=max(budget, point.batch * (1 + drafts), _BLOCK),
        max_model_len=length,
        block_size=_BLOCK,
        num_kv_blocks=point.batch * blocks,
        # a prompt that was computed before must be computed again
        prefix_caching=point.kind is PointKind.MEMORY,
        seed=settings.seed,
    )
