"""Runs scheduled steps as times: a step runner without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atom.benchmarks.capacity_clock import SimulatedClock
from atom.benchmarks.capacity_machine import Machine
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch
from atom.model_engine.step_runner import StepOutput, StepStatus, sends_status

#: what every sampled token is
TOKEN = 1


class TimedRunner:
    """Gives each step its time, and as many tokens as are forced.

    Args:
        machine: the costs.
        clock: the engine's.
        settings: the engine's.

    Attributes:
        prefill_seconds, decode_seconds: device time of the steps so far.
    """

    def __init__(self, machine: Machine, clock: SimulatedClock, settings: EngineSettings) -> None:
        self.machine = machine
        self.clock = clock
        self.settings = settings
        self.statuses: deque[tuple[float, StepStatus]] = deque()
        self.outputs: deque[tuple[float, StepOutput]] = deque()
        self.prefill_seconds = self.decode_seconds = 0.0

    def prepare(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """There are no inputs."""

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """Queue a step. See :class:`StepRunner`."""
        self.clock.now += self.machine.host_seconds
        seconds = self.machine.step_seconds(batch)
        end = self.clock.launch(seconds)
        if batch.kind is BatchKind.DECODE:
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds
        if not batch.produces_output:
            return
        bonus = [0] * len(batch.rows) if forced_bonus is None else list(forced_bonus)
        self.expect(end, bonus, status=sends_status(batch, self.settings))

    def expect(self, end: float, bonus: Sequence[int], *, status: bool) -> None:
        """Results of an output step that ends at ``end``."""
        drafts = self.settings.draft_tokens
        if status:
            rejected = [drafts - accepted for accepted in bonus]
            self.statuses.append((end, StepStatus(rejected, bonus)))
        self.outputs.append((end, StepOutput([[TOKEN] * (1 + accepted) for accepted in bonus])))

    def receive_status(self) -> StepStatus:
        """See :class:`StepRunner`."""
        end, status = self.statuses.popleft()
        self.clock.wait_until(end)
        return status

    def receive_output(self) -> StepOutput:
        """See :class:`StepRunner`."""
        end, output = self.outputs.popleft()
        self.clock.wait_until(end)
        return output

    def resolve_ell(self) -> dict[int, int]:
        """No request is sized: see :class:`StepRunner`."""
        return {}

    def acknowledge_guard(self) -> None:
        """There is no guard."""

    def close(self) -> None:
        """Nothing to give back."""
