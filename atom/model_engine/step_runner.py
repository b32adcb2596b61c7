"""What the engine asks of whoever runs its steps: a model on a device, or a model of its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch


@dataclass(frozen=True)
class StepStatus:
    """The status of one output step, as the host received it.

    Attributes:
        num_rejected: rejected drafts of each row.
        num_bonus: accepted drafts of each row.
        record: words of the kernels' guard record; empty where there is none.
    """

    num_rejected: Sequence[int]
    num_bonus: Sequence[int]
    record: Sequence[int] = ()


@dataclass(frozen=True)
class StepOutput:
    """Sampled tokens of one output step.

    Attributes:
        token_ids: accepted tokens of each row, 1 to 1 + draft tokens.
        logprobs: their log-probabilities, or ``None``.
        drafts_fault: how the next step's drafts were lost on the way, in words, or ``None``. The
            device verifies its own: the host only takes its copy off the queue.
    """

    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None = None
    drafts_fault: str | None = None


def sends_status(batch: ScheduledBatch, settings: EngineSettings) -> bool:
    """Whether a batch's status goes to the host: of decode steps with drafts alone.

    Without drafts every row keeps its one token, which is why an engine without speculation has no
    status that could be stale.
    """
    return batch.kind is BatchKind.DECODE and settings.draft_tokens > 0


class StepRunner(Protocol):
    """Launches steps and hands out their results in the order of the steps.

    A step is prepared while the status before is still on its way, and launched behind it.
    A batch that produces output has one output, and a status if :func:`sends_status`; the engine
    receives the status first. Nothing in :meth:`launch` waits for the device.
    """

    def prepare(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Do what a step needs that the status before does not decide.

        It is prepared again by :meth:`launch` if its rows became fewer, and may be left.
        """

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Queue a step, and if it produces output, its transfers to the host."""

    def receive_status(self) -> StepStatus:
        """Wait for the oldest status that was not received.

        Raises:
            StalePayload: the bytes that arrived are another step's. It counts as received.
        """

    def receive_output(self) -> StepOutput:
        """Wait for the oldest sampled tokens that were not received.

        Raises:
            StalePayload: the bytes that arrived are another step's. They count as received.
        """

    def resolve_ell(self) -> dict[int, int]:
        """Drafts to verify for each request (its ``seq_id``), of a fixed number of steps back."""

    def acknowledge_guard(self) -> None:
        """Clear the guard record on the device."""

    def close(self) -> None:
        """Wait for all work and give memory back."""
