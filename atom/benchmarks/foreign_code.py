"""The sanitizer on programs of other libraries: what it finds, what it is blind to, what it costs.

Each program runs in a process of its own (``python -m atom.benchmarks.foreign_code PROGRAM``), so
that one that hangs or dies takes nothing with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.foreign_programs import PROGRAMS, Program, programs_for
from atom.benchmarks.foreign_rows import BlindSpotRow, ForeignFindingRow, ForeignRow, Outcome
from atom.errors import BadInput
from atom.lifetime.findings import Finding, Site, Use
from atom.lifetime.sanitizer import sanitizer

EXPERIMENT = "foreign"
PROJECT = Path(__file__).resolve().parents[2]
#: seconds that a process may take
PROCESS_SECONDS = 45.0


def measure(program: Program, place: str, steps: int) -> dict[str, Any]:
    """Time a program twice without the sanitizer and once with it, in this process.

    Args:
        program: which.
        place: ``cuda`` or ``cpu``.
        steps: timed steps an arm.

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
        "findings": [finding.as_json() for finding in report.findings],
        "cannot_see": report.cannot_see,
    }


def run_all(
    names: Sequence[str],
    place: str,
    seconds: float,
    steps: int | None = None,
    tell: Callable[[ForeignRow], None] = lambda row: None,
) -> tuple[list[ForeignRow], list[ForeignFindingRow], list[BlindSpotRow]]:
    """Run programs one after another within a time limit.

    Args:
        names: programs; empty means all that mean something on ``place``.
        place: ``cuda`` or ``cpu``.
        seconds: for all of them; what is left over is marked out of time.
        steps: timed steps an arm; ``None`` for each program's own.
        tell: called with each row.

    Raises:
        BadInput: an unknown program.
    """
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        raise BadInput(f"no program {', '.join(unknown)}; known: {'; '.join(PROGRAMS)}")
    chosen = [PROGRAMS[name] for name in names] or list(programs_for(place))
    end = time.monotonic() + seconds
    rows: list[ForeignRow] = []
    findings: list[ForeignFindingRow] = []
    blind: list[BlindSpotRow] = []
    for program in chosen:
        row, found, spots = _run_one(program, place, steps or program.steps, end)
        rows.append(row)
        findings += found
        blind += spots
        tell(row)
    return rows, findings, blind


def _run_one(
    program: Program, place: str, steps: int, end: float
) -> tuple[ForeignRow, list[ForeignFindingRow], list[BlindSpotRow]]:
    version = program.version()
    plain: dict[str, Any] = {
        "program": program.name,
        "library": program.library,
        "version": version,
        "steps": 0,
    }
    if version is None:
        text = f"{program.library} is not installed here"
        return ForeignRow(**plain, outcome=Outcome.ABSENT, text=text), [], []
    left = min(PROCESS_SECONDS, end - time.monotonic())
    if left < 5:
        text = "the time limit of the whole run was reached"
        return ForeignRow(**plain, outcome=Outcome.LATE, text=text), [], []
    measured, outcome, text = _in_process(program, place, steps, left)
    if measured is None:
        return ForeignRow(**plain, outcome=outcome, text=text), [], []
    off, again, on = (1e3 * measured[arm] for arm in ("off", "again", "on"))
    found = [Finding.from_json(values) for values in measured["findings"]]
    row = ForeignRow(
        **{**plain, "steps": steps},
        outcome=Outcome.FINISHED,
        step_milliseconds=off,
        step_milliseconds_again=again,
        step_milliseconds_watched=on,
        slow_down=2 * on / (off + again),
        operations=measured["operations"],
        findings=len(found),
    )
    spots = [
        BlindSpotRow(program=program.name, number=number, text=without_paths(text))
        for number, text in enumerate(measured["cannot_see"], 1)
    ]
    return row, [_finding_row(program.name, *each) for each in enumerate(found, 1)], spots


def _in_process(
    program: Program, place: str, steps: int, seconds: float
) -> tuple[dict[str, Any] | None, Outcome, str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        words = [program.name, "--place", place, "--steps", str(steps), "--out", str(out)]
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
            return measured, Outcome.FINISHED, ""
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
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    measured = measure(PROGRAMS[options.program], options.place, options.steps)
    options.out.write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
