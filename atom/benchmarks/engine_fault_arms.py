"""Settings and arms of the engine-fault experiment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atom.benchmarks.arms import choose_arms
from atom.config import CopyProtocol, DeviceChoice, GuardMode, Settings
from atom.errors import BadInput
from atom.model_engine.engine_settings import StatusCheck

REFERENCE = "hold"
NULL = "hold, again"
GUARD_ALONE = "unpatched, guard"
TAG_ALONE = "unpatched, epoch tag"
CHECK_ALONE = "unpatched, host check"
NO_STORE = "unpatched, no store"
NO_MIDDLE_CHUNK = "unpatched, no middle chunk"
NO_DRAFTS = "unpatched, no drafts"
NO_NET = "unpatched, no net"

#: what ``--quick`` and the notebook take: enough for one window, and a few steps behind it
QUICK: dict[str, Any] = {
    "token_budgets": (128,),
    "law_budgets": (256, 512),
    "requests": 7,
    "output_tokens": 10,
    "chunks": 2,
}


#: arms that say whether the stale value is the token budget, and that it is not without the fault
LAW_ARMS = (REFERENCE, GUARD_ALONE)


def _no_budget_twice(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) != len(values):
        raise ValueError("a token budget stands twice")
    return values


Budget = Annotated[int, Field(ge=64, le=2**20)]


class EngineFaultSettings(Settings):
    """Settings of the engine-fault experiment; see ``engine_fault``."""

    device: DeviceChoice = DeviceChoice.VIRTUAL
    """virtual (no GPU needed) or accelerator (CUDA or HIP)."""

    device_profile: str = Field("MI355X", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device; ignored on an accelerator."""

    model: str = Field("preset:tiny", min_length=1)
    """A checkpoint folder, or preset:NAME for random weights."""

    token_budgets: Annotated[
        tuple[Budget, ...], Field(min_length=1), AfterValidator(_no_budget_twice)
    ] = (512, 1024, 2048)
    """Token budgets of a prefill step; a stale bonus should show the budget."""

    law_budgets: Annotated[tuple[Budget, ...], AfterValidator(_no_budget_twice)] = ()
    """More budgets, with the reference and the arm that has the guard alone."""

    requests: int = Field(31, ge=1, le=511)
    """Requests that decode; one more brings the long prompt."""

    prompt_tokens: int = Field(12, ge=1, le=4096)
    """Tokens of their prompts."""

    # a row with a stale count must be launched again: four chunks and every draft accepted end 24
    # tokens in front of that
    output_tokens: int = Field(48, ge=4, le=4096)
    """Tokens that each of them generates."""

    chunks: int = Field(4, ge=2, le=64)
    """Full chunks of the long prompt."""

    store_bytes: int = Field(256 * 2**20, ge=0, le=2**36)
    """Bytes of the store ahead of each decode step, on the copy stream."""

    only: tuple[str, ...] = ()
    """Arms to run, by name; empty runs all. The reference runs in any case."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of weights and prompts."""


def quick(settings: EngineFaultSettings) -> EngineFaultSettings:
    """A small version of the experiment; values that were given stay."""
    return settings.with_defaults(QUICK)


@dataclass(frozen=True)
class FaultArm:
    """A protocol, the nets below it, and which of the fault's two conditions is there."""

    name: str
    protocol: CopyProtocol
    epoch_tag: bool = True
    status_check: StatusCheck = StatusCheck.RAISE
    guard: GuardMode = GuardMode.REPORT
    store: bool = True
    middle_chunks: bool = True
    drafts: bool = True

    @property
    def may_end_process(self) -> bool:
        """Whether a bad count may reach an address that is not mapped."""
        return self.protocol is CopyProtocol.UNPATCHED and self.guard is not GuardMode.REPORT


_DEBUG = StatusCheck.DEBUG
_UNPATCHED = CopyProtocol.UNPATCHED

#: the reference first; the arm that may end its process last
ARMS = (
    FaultArm(REFERENCE, CopyProtocol.HOLD),
    FaultArm(NULL, CopyProtocol.HOLD),
    FaultArm("hold, no net", CopyProtocol.HOLD, False, _DEBUG, GuardMode.NONE),
    FaultArm("record_stream", CopyProtocol.RECORD_STREAM),
    FaultArm("blocking", CopyProtocol.BLOCKING),
    FaultArm("zero_copy", CopyProtocol.ZERO_COPY),
    FaultArm(NO_STORE, _UNPATCHED, False, _DEBUG, store=False),
    FaultArm(NO_MIDDLE_CHUNK, _UNPATCHED, False, _DEBUG, middle_chunks=False),
    FaultArm(NO_DRAFTS, _UNPATCHED, drafts=False),
    FaultArm(TAG_ALONE, _UNPATCHED),
    FaultArm(CHECK_ALONE, _UNPATCHED, False, StatusCheck.RAISE),
    FaultArm(GUARD_ALONE, _UNPATCHED, False, _DEBUG),
    FaultArm(NO_NET, _UNPATCHED, False, _DEBUG, GuardMode.NONE),
)


def build_arms(settings: EngineFaultSettings) -> list[FaultArm]:
    """The arms of the settings, the reference among them, in the order in which they run.

    Raises:
        BadInput: an unknown arm.
    """
    return choose_arms(ARMS, settings.only, REFERENCE)


def build_points(settings: EngineFaultSettings) -> list[tuple[int, FaultArm]]:
    """Token budget and arm of every engine, in the order in which they run.

    Raises:
        BadInput: an unknown arm, or a budget in both lists.
    """
    arms = build_arms(settings)
    twice = set(settings.token_budgets) & set(settings.law_budgets)
    if twice:
        raise BadInput(f"law_budgets: {min(twice)} stands in token_budgets too")
    points = [(budget, arm) for budget in settings.token_budgets for arm in arms]
    few = [arm for arm in arms if arm.name in LAW_ARMS]
    return points + [(budget, arm) for budget in settings.law_budgets for arm in few]


def point_id(arm: FaultArm, token_budget: int) -> str:
    """``<arm>/<token budget>``."""
    return f"{arm.name}/{token_budget}"
