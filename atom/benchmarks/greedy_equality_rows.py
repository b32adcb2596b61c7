"""Settings, arms and rows of the greedy-equality experiment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atom.benchmarks.arms import choose_arms
from atom.config import DeviceChoice, RecurrentStates, Settings

EXPERIMENT = "greedy_equality"
REFERENCE = "no drafts"
AGAIN = "no drafts, again"
NULL = "no drafts, other batches"
MTP = "MTP-3"
REPLAY = "MTP-3, replay"
CONTROL = "MTP-3, count of another step"

#: what ``--quick`` takes
QUICK: dict[str, Any] = {"requests": 8, "output_tokens": 16}


class Precision(StrEnum):
    """Dtype of weights, KV and hidden states."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class GreedyEqualitySettings(Settings):
    """Settings of the greedy-equality experiment; see the module of that name."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    model: str = Field("preset:tiny", min_length=1)
    """A checkpoint folder, or preset:NAME for random weights."""

    precision: Precision = Precision.FLOAT32
    """float32, where equal means equal, or bfloat16."""

    requests: int = Field(32, ge=2, le=1024)
    """Requests of each arm, all at once but in the null arm."""

    prompt_tokens: int = Field(96, ge=4, le=16384)
    """Longest prompt; the others have a quarter of it or more."""

    output_tokens: int = Field(64, ge=4, le=4096)
    """Tokens that each of them generates."""

    only: tuple[str, ...] = ()
    """Arms to run, by name; empty runs all. The reference runs in any case."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights and prompts."""


def quick(settings: GreedyEqualitySettings) -> GreedyEqualitySettings:
    """A small version of the experiment; values that were given stay."""
    return settings.with_defaults(QUICK)


@dataclass(frozen=True)
class EqualityArm:
    """How an arm makes the tokens.

    Attributes:
        name: of the arm.
        draft_tokens: drafts a step.
        graphs: whether decode steps run in device graphs (an accelerator's alone do).
        chunks: whether a small token budget cuts the prompts.
        dspark: whether confidence sizes the verification.
        recurrent_states: how they are kept.
        other_batches: half the rows at once, and the requests in the opposite order.
        wrong_count: each decode step is told that no draft of the step before was accepted.
    """

    name: str
    draft_tokens: int = 3
    graphs: bool = True
    chunks: bool = False
    dspark: bool = False
    recurrent_states: RecurrentStates = RecurrentStates.PER_DRAFT
    other_batches: bool = False
    wrong_count: bool = False


#: the reference first, the control last
ARMS = (
    EqualityArm(REFERENCE, 0),
    EqualityArm(AGAIN, 0),
    EqualityArm(NULL, 0, other_batches=True),
    EqualityArm(MTP),
    EqualityArm(REPLAY, recurrent_states=RecurrentStates.REPLAY),
    EqualityArm("MTP-3, eager", graphs=False),
    EqualityArm("MTP-3, chunks", chunks=True),
    EqualityArm("MTP-3, sized by confidence", dspark=True),
    EqualityArm("MTP-3, other batches", other_batches=True),
    EqualityArm(CONTROL, wrong_count=True),
)


def build_arms(settings: GreedyEqualitySettings) -> list[EqualityArm]:
    """The arms of the settings, the reference among them, in the order in which they run.

    Raises:
        BadInput: an unknown arm.
    """
    return choose_arms(ARMS, settings.only, REFERENCE)


class GreedyEqualityRow(BaseModel):
    """One arm's greedy tokens beside the reference's.

    Of a request the tokens up to and including the first that differs are compared: behind it the
    two have different prefixes. A shortfall is a float32 logit difference: from the likeliest token
    of a place to the less likely one of the two that the arms took there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point_id: str = Field(min_length=1)
    """The arm: unique within a run."""
    arm: str = Field(min_length=1)
    control: bool
    """Whether the arm is wrong on purpose: it must differ by more than rounding."""
    precision: Precision
    requests: int = Field(ge=1)
    tokens_compared: int = Field(ge=1)
    drafted_tokens: int = Field(ge=0)
    accepted_tokens: int = Field(ge=0)
    first_differences: int = Field(ge=0)
    """Requests with a token that differs."""
    above_bound: int = Field(ge=0)
    """Of those, the ones whose shortfall is above the bound."""
    largest_shortfall: float | None = Field(ge=0)
    """Of the first differences; ``None`` without any."""
    bound: float = Field(ge=0)
    """Measured rounding error: the largest change of the gap between the two likeliest tokens that
    the precision makes beside float32, over all places of the reference; 0 in float32."""
    median_margin: float = Field(ge=0)
    """Median gap between the two likeliest tokens, in float32."""
    places_above_bound: float = Field(ge=0, le=1)
    """Share of the reference's places whose gap is above the bound: there rounding cannot make the
    tokens differ, so a fault would show."""
