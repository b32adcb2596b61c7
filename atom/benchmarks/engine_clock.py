"""A runner that knows where a step's time went: host work, waits for the device, idle device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from torch import Tensor

from atom.device.interface import Device, Event
from atom.model_engine.input_staging import InputStaging, StagedInput
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.scheduled_batch import ScheduledBatch
from atom.model_engine.step_runner import StepOutput, StepStatus


@dataclass
class HostSeconds:
    """Seconds of the host since the last reset.

    Attributes:
        status_wait: until the status of a step had landed.
        output_wait: until tokens and drafts had landed.
        staging: taking pinned slots and queueing the copies of inputs.
    """

    status_wait: float = 0.0
    output_wait: float = 0.0
    staging: float = 0.0


class _TimedStaging(InputStaging):
    def __init__(self, device: Device, clock: HostSeconds) -> None:
        super().__init__(device)
        self._clock = clock

    def open(self, target: Tensor) -> StagedInput:
        began = perf_counter()
        staged = super().open(target)
        self._clock.staging += perf_counter() - began
        return staged

    def queue(self, staged: StagedInput) -> None:
        began = perf_counter()
        super().queue(staged)
        self._clock.staging += perf_counter() - began


class TimedRunner(ModelRunner):
    """A :class:`ModelRunner` with clocks. They cost a few reads of the host's clock a step.

    Attributes:
        clock: sums since the last reset.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.clock = HostSeconds()
        self._staging = _TimedStaging(self.device, self.clock)
        self._marks: list[tuple[Event, Event]] | None = None

    def launch(self, batch: ScheduledBatch, forced_bonus: Sequence[int] | None) -> None:
        """See :class:`ModelRunner`."""
        if self._marks is None:
            super().launch(batch, forced_bonus)
            return
        start, end = (self.device.new_event(timing=True) for _ in range(2))
        start.record(self.device.default_stream)
        super().launch(batch, forced_bonus)
        end.record(self.device.default_stream)
        self._marks.append((start, end))

    def receive_status(self) -> StepStatus:
        """See :class:`ModelRunner`. The wait is timed, the host's work behind it is not."""
        began = perf_counter()
        self.processor.spec_status._wait_oldest()
        self.clock.status_wait += perf_counter() - began
        return super().receive_status()

    def receive_output(self) -> StepOutput:
        """See :class:`ModelRunner`. The wait is timed, the host's work behind it is not."""
        began = perf_counter()
        self.processor.cpu_tensor_handle[0].copy_done.synchronize()
        if self.settings.draft_tokens:
            self.processor.draft_ids._wait_oldest()
        self.clock.output_wait += perf_counter() - began
        return super().receive_output()

    def mark_steps(self) -> None:
        """Record events around the steps from now on."""
        self._marks = []

    def marked_milliseconds(self) -> tuple[list[float], list[float]]:
        """Stop marking. Returns each step's time on the device, and the gaps between steps."""
        marks, self._marks = self._marks or [], None
        self.device.synchronize()
        inside = [start.elapsed_time(end) for start, end in marks]
        return inside, [end.elapsed_time(start) for (_, end), (start, _) in pairwise(marks)]
