"""The sanitizer on programs of other libraries: what it finds, what it is blind to, what it costs.

Each program runs in a process of its own (``python -m atom.benchmarks.foreign_code PROGRAM``), so
that one that hangs or dies takes nothing with it. A process that comes near its limit hands over
what the sanitizer has seen by then, and ends.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from atom.benchmarks.arms import is_wanted
from atom.benchmarks.foreign_programs import PROGRAMS, Program, programs_for
from atom.benchmarks.foreign_rows import BlindSpotRow, ForeignFindingRow, ForeignRow, Outcome
from atom.config import DeviceChoice, Settings
from atom.errors import BadInput
from atom.lifetime.findings import Finding, Report, Site, Use
from atom.lifetime.sanitizer import sanitizer

EXPERIMENT = "foreign"
PROJECT = Path(__file__).resolve().parents[2]
#: a process hands over what it saw so long before its limit
_HAND_OVER_SECONDS = 3.0


class ForeignSettings(Settings):
    """Which programs run, where, and for how long."""

    device: DeviceChoice = DeviceChoice.ACCELERATOR
    """accelerator (CUDA or HIP), or virtual: the CPU, for programs that mean something there."""

    programs: tuple[str, ...] = ()
    """Programs, by name or shell pattern; empty means all that mean something on the device."""

    seconds: float = Field(60.0, ge=5, le=3600)
    """Limit of each program's process, start of Python and imports included."""

    steps: int | None = Field(None, ge=1, le=10_000)
    """Timed steps an arm; none takes each program's own."""

    @property
    def place(self) -> str:
        """torch's name of the device."""
        return "cpu" if self.device is DeviceChoice.VIRTUAL else "cuda"


def chosen(settings: ForeignSettings) -> list[Program]:
    """The programs of the settings, in their order.

    Raises:
        BadInput: no such program.
    """
    known = {program.name: program for program in programs_for(settings.place)}
    for pattern in settings.programs:
        if not fnmatch.filter(known, pattern):
            raise BadInput(
                f"no program {pattern!r} for {settings.device}; known: {'; '.join(known)}"
            )
    return [program for name, program in known.items() if is_wanted(settings.programs, name)]


def measure(
    program: Program,
    place: str,
    steps: int,
    watched: Callable[[Report], None] = lambda report: None,
) -> dict[str, Any]:
    """Time a program twice without the sanitizer and once with it, in this process.

    Args:
        program: which.
        place: ``cuda`` or ``cpu``.
        steps: timed steps an arm.
        watched: called with the sanitizer's report when it starts.

    Returns:
        Seconds a step of the three arms, operations a step, the findings and the blind spots.
    """

    def wait() -> None:
        if place == "cuda":
            torch.cuda.synchronize()

    def timed(step: Callable[[], None]) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return (time.perf_counter() - started) / steps

    step = program.make(place)
    step()
    off, again = timed(step), timed(step)
    del step
    with sanitizer() as report:
        watched(report)
        step = program.make(place)
        step()
        wait()
        before = report.operations
        on = timed(step)
        operations = (report.operations - before) // steps
        del step
        wait()
    return {
        "off": off,
        "again": again,
        "on": on,
        "operations": operations,
        **_seen(report),
    }


def _seen(report: Report) -> dict[str, Any]:
    return {
        "findings": [finding.as_json() for finding in list(report.findings)],
        "cannot_see": list(report.cannot_see),
    }


@dataclass
class ProgramRows:
    """What one program leaves in the record."""

    row: ForeignRow
    findings: list[ForeignFindingRow] = field(default_factory=list)
    blind_spots: list[BlindSpotRow] = field(default_factory=list)


def run_program(program: Program, settings: ForeignSettings) -> ProgramRows:
    """Run one program in a process of its own, within its limit."""
    steps = settings.steps or program.steps
    version = program.version()
    plain: dict[str, Any] = {
        "program": program.name,
        "library": program.library,
        "version": version,
        "steps": 0,
    }
    if version is None:
        text = f"{program.library} is not installed here"
        return ProgramRows(ForeignRow(**plain, outcome=Outcome.ABSENT, text=text))
    measured, outcome, text = _in_process(program, settings.place, steps, settings.seconds)
    if measured is None:
        return ProgramRows(ForeignRow(**plain, outcome=outcome, text=text))
    found = [Finding.from_json(values) for values in measured["findings"]]
    if outcome is Outcome.FINISHED:
        off, again, on = (1e3 * measured[arm] for arm in ("off", "again", "on"))
        row = ForeignRow(
            **{**plain, "steps": steps},
            outcome=outcome,
            step_milliseconds=off,
            step_milliseconds_again=again,
            step_milliseconds_watched=on,
            slow_down=2 * on / (off + again),
            operations=measured["operations"],
            findings=len(found),
        )
    else:
        row = ForeignRow(**plain, outcome=outcome, findings=len(found), text=text)
    spots = [
        BlindSpotRow(program=program.name, number=number, text=without_paths(text))
        for number, text in enumerate(measured["cannot_see"], 1)
    ]
    return ProgramRows(
        row, [_finding_row(program.name, *each) for each in enumerate(found, 1)], spots
    )


def _in_process(
    program: Program, place: str, steps: int, seconds: float
) -> tuple[dict[str, Any] | None, Outcome, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        words = [program.name, "--place", place, "--steps", str(steps), "--out", str(out)]
        words += ["--seconds", str(seconds)]
        places = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "atom.benchmarks.foreign_code", *words],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
                env={
                    **os.environ,
                    "PYTHONPATH": places,
                    "HF_HUB_OFFLINE": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
        except subprocess.TimeoutExpired:
            return None, Outcome.LATE, f"did not end within {seconds:.0f} s"
        if out.is_file():
            measured: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            if "on" in measured:
                return measured, Outcome.FINISHED, ""
            text = (
                f"did not end within {seconds:.0f} s; the sanitizer had watched it for "
                f"{measured['watched_seconds']:.0f} s and seen {measured['operations']} operations"
            )
            return measured, Outcome.LATE, text
        print(done.stderr, file=sys.stderr)
    last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
    return None, Outcome.FAILED, without_paths(last)[:300]


def without_paths(text: str) -> str:
    """``text`` with the files of a machine shortened to what their library calls them."""
    text = re.sub(r"(?<!\w)/\S*?/(?:site|dist)-packages/", "", text)
    text = text.replace(f"{PROJECT}{os.sep}", "")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


def _place(site: Site) -> str:
    if not site.file:
        return "outside Python"
    return f"{without_paths(site.file)}:{site.line} in {site.function}"


def _second(use: Use) -> str:
    return f"{use.operation} of {use.tensor or 'bytes'} on {_stream(use.stream)} at " + _place(
        use.site
    )


def _stream(text: str) -> str:
    # the handle of a stream says nothing outside its process
    return re.sub(r" \(0x[0-9a-f]+\)", "", text)


def _finding_row(program: str, number: int, finding: Finding) -> ForeignFindingRow:
    first = finding.first
    callers = [f"{without_paths(file)}:{line}" for file, line in first.site.callers]
    return ForeignFindingRow(
        program=program,
        number=number,
        kind=str(finding.kind),
        edge=str(finding.edge),
        times=finding.count,
        operation=first.operation,
        tensor=first.tensor or None,
        stream=_stream(first.stream),
        place=_place(first.site),
        freed=_place(finding.freed) if finding.freed is not None else None,
        second=_second(finding.second) if finding.second is not None else None,
        callers=", ".join(callers) or None,
        fix=_stream(without_paths(finding.fix)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one program and write what came out as JSON."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=list(PROGRAMS))
    parser.add_argument("--place", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of this process")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    over = HandOver(options.out, options.seconds)
    over.timer.start()
    measured = measure(PROGRAMS[options.program], options.place, options.steps, over.watched)
    over.timer.cancel()
    options.out.write_text(json.dumps(measured), encoding="utf-8")
    return 0


class HandOver:
    """Ends this process ahead of its limit, and leaves what the sanitizer has seen by then.

    Args:
        out: where to leave it.
        seconds: limit of the process.
    """

    def __init__(self, out: Path, seconds: float) -> None:
        self._out = out
        self._report: Report | None = None
        self._since = time.monotonic()
        self.timer = threading.Timer(max(1.0, seconds - _HAND_OVER_SECONDS), self.give_up)
        self.timer.daemon = True

    def watched(self, report: Report) -> None:
        """The watch has begun."""
        self._report, self._since = report, time.monotonic()

    def give_up(self) -> None:
        """Write, and end the process at once: whatever it waits for may never come."""
        if self._report is not None:
            measured = {
                "operations": self._report.operations,
                "watched_seconds": time.monotonic() - self._since,
                **_seen(self._report),
            }
            self._out.write_text(json.dumps(measured), encoding="utf-8")
        else:
            print("out of time before the sanitizer was started", file=sys.stderr)
        os._exit(4)


if __name__ == "__main__":
    sys.exit(main())
