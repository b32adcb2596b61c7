"""One trial in pictures: who ran when on the virtual device, and who owned the source's block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from atom.benchmarks.race_plan import Arm
from atom.benchmarks.race_rows import Outcome
from atom.benchmarks.race_trial import TrialBench
from atom.config import CopyPath, CopyProtocol, Front, RaceSettings
from atom.device.timeline import Timeline, WorkRecord
from atom.device.virtual import VirtualDevice
from atom.errors import DeviceError

#: small enough for the picture's other spans to be seen beside it
PICTURE_STORE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class TrialPicture:
    """A trial as a timeline plot takes it. Microseconds since the fill was queued.

    Attributes:
        protocol: of the trial.
        outcome: what the host received.
        spans: (lane, label, start, end, role).
        ownership: (owner, start, end) of the block that held the source.
        marks: (lane, label, time) of moments on the host.
        queue_of: lane to hardware queue.
    """

    protocol: CopyProtocol
    outcome: Outcome
    spans: tuple[tuple[str, str, float, float, str], ...]
    ownership: tuple[tuple[str, float, float], ...]
    marks: tuple[tuple[str, str, float], ...]
    queue_of: dict[str, int | None]


def picture(
    settings: RaceSettings, protocol: CopyProtocol, front: Front = Front.STORE_ON_COPY_STREAM
) -> TrialPicture:
    """Trace one trial of ``protocol`` behind a small store on the virtual device.

    Args:
        settings: gives the profile and the batch size.
        protocol: what protects the source.
        front: what goes ahead of the copy.
    """
    small = settings.model_copy(
        update={"store_bytes": PICTURE_STORE_BYTES, "spin_seconds": 4e-5, "matmuls_per_stream": 1}
    )
    device = VirtualDevice(settings.device_profile, seed=settings.seed)
    bench = TrialBench(device, small, settings.seed)
    arm = Arm(
        "picture",
        "picture",
        protocol,
        False,
        front,
        CopyPath.ENGINE,
        1,
        batch_size=settings.batch_size,
    )
    bench.warm_up(arm)
    device.trace(True)
    trial = bench.run(arm)
    return _picture(device.timeline(), protocol, trial.outcome)


_LABELS = {
    "fill": ("this step's verdict", "producer"),
    "stamp_epoch_tag": ("tags", "producer"),
    "next_write": ("next step's write", "writer"),
}


def _picture(timeline: Timeline, protocol: CopyProtocol, outcome: Outcome) -> TrialPicture:
    begin = next((work.submitted_seconds for work in timeline.work if work.name == "fill"), None)
    copy = next((work for work in timeline.work if _is_status_copy(work)), None)
    if begin is None or copy is None:
        raise DeviceError("the trial's fill or copy is not in the timeline")

    def at(seconds: float) -> float:
        return round((seconds - begin) * 1e6, 3)

    spans = []
    queued: tuple[str, float] | None = None
    queue_of: dict[str, int | None] = {}
    for work in timeline.work:
        if work.submitted_seconds < begin:
            continue
        lane = "default stream" if work.stream_id == 0 else f"stream {work.stream_id}"
        if work.stream_id == copy.stream_id:
            lane = "copy stream"
        label, role = _LABELS.get(work.name, ("work in front", "front"))
        if work is copy:
            label, role = "status copy", "copy"
            queued = (lane, at(work.submitted_seconds))
        elif work.kind == "wait":
            continue
        if work.hardware_queue is not None:
            queue_of[lane] = work.hardware_queue
        spans.append((lane, label, at(work.start_seconds), at(work.end_seconds), role))
    spans.sort(key=lambda span: (span[0] != "default stream", span[0], span[2]))
    last = max(span[3] for span in spans)
    offset = copy.reads[0][1]
    owners = []
    for block in timeline.blocks:
        if block.offset <= offset < block.offset + block.nbytes:
            freed = last if block.freed_seconds is None else at(block.freed_seconds)
            owners.append((at(block.allocated_seconds), min(freed, last)))
    owners.sort()
    names = ["this step's verdict", "next step's tensor"]
    ownership = []
    previous = None
    for name, (start, end) in zip(names, owners, strict=False):
        if previous is not None and start > previous:
            ownership.append(("free", previous, start))
        ownership.append((name, start, end))
        previous = end
    marks = [(queued[0], "copy queued", queued[1])] if queued is not None else []
    if len(owners) > 1:
        marks.append(("default stream", "block reused", owners[1][0]))
    return TrialPicture(protocol, outcome, tuple(spans), tuple(ownership), tuple(marks), queue_of)


def _is_status_copy(work: WorkRecord) -> bool:
    return bool(
        work.kind in ("kernel_copy", "engine_copy")
        and work.reads
        and work.writes
        and work.reads[0][0] == "device"
        and work.writes[0][0] == "pinned"
    )


def lanes(arm_picture: TrialPicture) -> TrialPicture:
    """The same picture with each lane's hardware queue in its name."""

    def named(lane: str) -> str:
        queue = arm_picture.queue_of.get(lane)
        return lane if queue is None else f"{lane} (queue {queue})"

    return dataclasses.replace(
        arm_picture,
        spans=tuple((named(span[0]), *span[1:]) for span in arm_picture.spans),
        marks=tuple((named(mark[0]), *mark[1:]) for mark in arm_picture.marks),
    )
