"""The fault in one picture: a late copy on the virtual device, its source dropped or held."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from atom.benchmarks.status_overwrite import NEXT_STEP, THIS_STEP, overwrite_trial
from atom.device.virtual import VirtualDevice
from atom.errors import DeviceError
from atom.workbook.figures import Ownership, Span, role_handles, timeline_plot

_MARGIN_US = 4.0


@dataclass(frozen=True)
class FaultTrace:
    """One trial as it ran on the virtual device; microseconds from the start of step N's write.

    Attributes:
        spans: work, as ``timeline_plot`` takes it.
        ownership: owners of the verdict's block.
        marks: moments on the host.
        read: what the host received.
        expected: what step N wrote.
    """

    spans: list[Span]
    ownership: list[Ownership]
    marks: list[tuple[str, str, float]]
    read: list[int]
    expected: list[int]

    @property
    def stale(self) -> bool:
        """Whether the host received anything else than step N's values."""
        return self.read != self.expected


def trace_fault(
    device_profile: str, *, hold: bool, batch_size: int = 32, next_value: int = 16384
) -> FaultTrace:
    """Run one trial with a parked copy stream and read its timeline back.

    Args:
        device_profile: virtual profile.
        hold: keep the source until the copy was waited on.
        batch_size: requests of the verdict; all its values are 1.
        next_value: what the next step writes first.
    """
    device = VirtualDevice(device_profile)
    device.trace()
    verdict = np.ones(batch_size, dtype=np.int32)
    trial = overwrite_trial(
        device,
        verdict,
        np.array([next_value], dtype=np.int32),
        hold=hold,
        spin_seconds=60e-6,
        label=device.label,
    )
    timeline = device.timeline()
    start = min(work.start_seconds for work in timeline.work)

    def at(seconds: float) -> float:
        return 1e6 * (seconds - start)

    spans: list[Span] = []
    for work in sorted(timeline.work, key=lambda record: record.start_seconds):
        lane = "default stream" if work.stream_id == 0 else "copy stream"
        if work.stream_id == 0:
            first = not spans
            role = "producer" if first else "writer"
            label = "step N writes" if first else "step N+1 writes"
        else:
            role = "front" if work.kind == "spin" else "copy"
            label = "work in front of the copy" if role == "front" else "copy"
        spans.append((lane, label, at(work.start_seconds), at(work.end_seconds), role))
    end = max(span[3] for span in spans) + 2 * _MARGIN_US
    own = next((block for block in timeline.blocks if block.owner == THIS_STEP), None)
    if own is None or own.freed_seconds is None:
        raise DeviceError("the verdict's block is not in the timeline")
    ownership: list[Ownership] = [(THIS_STEP, -_MARGIN_US, at(own.freed_seconds))]
    for block in timeline.blocks:
        if block.owner == NEXT_STEP and block.offset == own.offset:
            ownership.append(("free", at(own.freed_seconds), at(block.allocated_seconds)))
            ownership.append((NEXT_STEP, at(block.allocated_seconds), end))
    if ownership[-1][2] < end:
        ownership.append(("free", ownership[-1][2], end))
    marks = [("host", "drops the source", at(own.freed_seconds))]
    read_at = max(span[3] for span in spans) + 1.0
    values = trial.read.tolist()
    shown = ", ".join(str(value) for value in values[:3])
    if hold:
        marks = [("host", "waits, then drops the source", at(own.freed_seconds))]
    spans.append(("host", f"reads [{shown}, ...]", read_at, read_at + 2.5, "read"))
    return FaultTrace(spans, ownership, marks, values, verdict.tolist())


def fault_figure(dropped: FaultTrace, held: FaultTrace) -> Figure:
    """Both trials above each other, on one time axis."""
    figure, axes = plt.subplots(2, 1, figsize=(10.5, 6.4), sharex=True)
    titles = (
        "Source dropped at once (unpatched): the block has a new owner before the copy runs",
        "Source held until the copy was waited on: the next step's tensor goes elsewhere",
    )
    for one, trace, title in zip(axes, (dropped, held), titles, strict=True):
        timeline_plot(one, trace.spans, trace.ownership, marks=trace.marks, legend=False)
        one.set_title(title)
    axes[0].set_xlabel("")
    figure.legend(
        handles=role_handles([span[4] for span in dropped.spans]),
        loc="outside upper center",
        ncols=5,
        frameon=False,
    )
    return figure
