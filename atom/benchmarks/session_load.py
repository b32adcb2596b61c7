"""Sessions as a closed load, whoever serves it: how many, for how long, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import Self

from pydantic import Field, model_validator

from atom.benchmarks.session_model import Session
from atom.config import Settings


class SessionLoad(Settings):
    """A fixed number of lanes, each with one live session."""

    concurrency: int = Field(ge=1, le=65536)
    """Live sessions at a time."""

    duration_seconds: float = Field(gt=0, le=7 * 86400)
    """Length of the profiling window."""

    warmup_requests_per_lane: int = Field(1, ge=0, le=1000)
    """Requests of each lane before the window starts."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of the sessions and of the places where lanes start."""

    think_cap_seconds: float = Field(1.0, ge=0, le=86400)
    """Longest pause before a request."""

    start_least: float = Field(0.25, ge=0, le=1)
    """Earliest place in its first session at which a lane starts, as a share of the requests."""

    start_most: float = Field(0.75, ge=0, le=1)
    """Latest such place; the defaults are the AgentX load's."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.start_least > self.start_most:
            raise ValueError(
                f"start_least {self.start_least} is more than start_most {self.start_most}"
            )
        return self


def endless(sessions: Sequence[Session], order: Random | None) -> Iterator[tuple[str, Session]]:
    """Sessions over and over, each with a suffix of its name that tells the pass.

    Args:
        sessions: at least one.
        order: draws their order when the first is asked for; ``None`` takes them as they are.
    """
    drawn = list(sessions)
    if order is not None:
        order.shuffle(drawn)
    for number in count():
        suffix = f"#{number + 1}" if number else ""
        for session in drawn:
            yield suffix, session


def first_turn(session: Session, share: float) -> int:
    """The request at which a lane starts that begins at this share of the session."""
    return min(int(share * len(session.turns)), len(session.turns) - 1)
