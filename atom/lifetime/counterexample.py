"""A schedule that breaks a property, as text that replays it and as bars of a timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.lifetime.explore import (
    Counterexample,
    NotRepeatable,
    Program,
    Step,
    ViolationKind,
    replay,
)
from atom.lifetime.explore_device import ExploredDevice
from atom.lifetime.explore_trace import HOST, overlap

FORMAT = 1

#: (lane, label, start, end, role) and (owner, start, end), as a timeline figure takes them
SpanBar = tuple[str, str, float, float, str]
OwnerBar = tuple[str, float, float]


@dataclass(frozen=True)
class Recorded:
    """A counterexample and what it is one of.

    Attributes:
        about: plain values that say how to build the program.
        example: the schedule and what it breaks.
    """

    about: dict[str, Any]
    example: Counterexample

    def to_text(self) -> str:
        """JSON, a step a line."""
        example = self.example
        head = {
            "format": FORMAT,
            **self.about,
            "violation": {"kind": example.kind.value, "text": example.text},
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        steps = ",\n".join(
            "    " + json.dumps([_lane(step.process), step.label]) for step in example.steps
        )
        return "{\n" + ",\n".join(lines) + ',\n  "schedule": [\n' + steps + "\n  ]\n}\n"

    @classmethod
    def from_text(cls, text: str, where: str = "counterexample") -> Recorded:
        """Read what :meth:`to_text` wrote.

        Raises:
            BadInput: it is something else; the message names ``where``.
        """
        try:
            values = json.loads(text)
            found = values.pop("format")
            if found != FORMAT:
                raise BadInput(f"{where}: format {found!r}; this version reads {FORMAT}")
            violation, schedule = values.pop("violation"), values.pop("schedule")
            steps = tuple(Step(_process(lane), str(label)) for lane, label in schedule)
            kind = ViolationKind(violation["kind"])
            return cls(values, Counterexample(kind, str(violation["text"]), steps))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{where}: not a recorded counterexample: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_text(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Recorded:
        """Read a file.

        Raises:
            BadInput: it cannot be read, or holds something else.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from None
        return cls.from_text(text, str(path))


def _lane(process: int) -> str:
    return "host" if process == HOST else f"stream {process}"


def _process(lane: str) -> int:
    if lane == "host":
        return HOST
    word, _, number = lane.partition(" ")
    if word != "stream":
        raise ValueError(f"{lane!r} is neither host nor a stream")
    return int(number)


def recorded(program: Program, record: Recorded) -> ExploredDevice:
    """Run ``program`` under the recorded schedule, and on to its end.

    Returns:
        The device: its events, and the violations that were found this time.

    Raises:
        NotRepeatable: the schedule does not fit the program; the message names the first step that
            differs.
    """
    device, _ = replay(program, record.example.steps)
    for place, (step, event) in enumerate(zip(record.example.steps, device.events, strict=False)):
        if step.label != event.label:
            raise NotRepeatable(
                f"step {place} of the schedule is '{step.label}' on {_lane(step.process)}; the "
                f"program does '{event.label}' there: it is not the one that was recorded"
            )
    return device


def timeline(
    device: ExploredDevice, until: int | None = None
) -> tuple[list[SpanBar], list[OwnerBar]]:
    """An execution as bars: one lane for the host and one a stream, a step one unit wide.

    Args:
        device: after a run.
        until: steps to show; by default up to the first violation.

    Returns:
        Bars of the lanes, and the owners of the block that a copy read first.
    """
    if until is None:
        places = [violation.place for violation in device.violations]
        until = min(places, default=len(device.events) - 1) + 1
    block = _disputed(device, until)
    spans: list[SpanBar] = []
    for place, event in enumerate(device.events[:until]):
        if event.process == HOST:
            role = "read" if event.label.startswith("read") else "host"
            role = "wait" if event.label.startswith("wait") else role
        else:
            role = _role(device, event.touched.writes, block, place)
            role = role if event.parts == 1 else "copy"
        label = event.label if event.parts == 1 else f"{event.label} ({event.part + 1}/2)"
        spans.append((_lane(event.process), label, float(place), place + 1.0, role))
    owners: list[OwnerBar] = []
    last = 0.0
    for number, life in enumerate(device.ownerships):
        if block is None or life.born >= until or not overlap([life.block], [block]):
            continue
        end = float(until if life.died is None else min(life.died + 1, until))
        if life.born > last:
            owners.append(("free", last, float(life.born)))
        owners.append((f"tensor {number + 1}", float(life.born), end))
        last = end
    if block is not None and last < until:
        owners.append(("free", last, float(until)))
    return spans, owners


def _disputed(device: ExploredDevice, until: int) -> tuple[str, int, int] | None:
    """The device block that a copy reads and that has the most owners."""
    best, most = None, 0
    for work in device.queued.values():
        sources = [piece for piece in work.reads if piece[0] == "device"]
        for life in device.ownerships:
            if overlap([life.block], sources):
                lives = sum(
                    overlap([other.block], [life.block]) and other.born < until
                    for other in device.ownerships
                )
                if lives > most:
                    best, most = life.block, lives
    return best


def _role(
    device: ExploredDevice,
    writes: Sequence[tuple[str, int, int]],
    block: tuple[str, int, int] | None,
    place: int,
) -> str:
    if block is None or not overlap([block], writes):
        return "producer"
    owners = [life for life in device.ownerships if overlap([life.block], [block])]
    submitted = [
        work.submitted
        for work in device.queued.values()
        if work.key == device.events[place].operation
    ]
    first = owners[0]
    ours = first.died is None or (submitted and submitted[0] <= first.died)
    return "producer" if ours else "writer"
