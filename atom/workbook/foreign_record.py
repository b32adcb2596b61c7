"""Records the sanitizer on programs of other libraries: ``python -m atom.workbook.foreign_record``.

Writes ``data/runs/<machine>/<id>/`` with the tables ``programs``, ``findings`` and ``blind_spots``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from atom.benchmarks.foreign_code import EXPERIMENT, run_all
from atom.benchmarks.foreign_programs import PROGRAMS
from atom.benchmarks.foreign_rows import ForeignRow
from atom.device import open_device
from atom.errors import AtomError
from atom.workbook.provenance import collect_provenance
from atom.workbook.run_writer import RunWriter
from atom.workbook.tables import shown_path


def shown(row: ForeignRow) -> str:
    """A row in words."""
    if row.slow_down is None:
        return f"{row.program}: {row.outcome}: {row.text}"
    return (
        f"{row.program} ({row.library} {row.version}): {row.findings} findings, "
        f"{row.operations} operations a step, x{row.slow_down:.2f}"
    )


def record(
    names: Sequence[str] = (),
    root: str | Path = "data/runs",
    *,
    device: str = "accelerator",
    seconds: float = 115.0,
    steps: int | None = None,
) -> Path:
    """Run programs under the sanitizer and record what it says.

    Args:
        names: programs; empty means all.
        root: folder of all runs.
        device: ``accelerator``, or ``virtual`` for those that mean something on a CPU.
        seconds: limit for all of them.
        steps: timed steps an arm.

    Returns:
        The run's folder.

    Raises:
        BadInput, DeviceError: an unknown program, no accelerator.
    """
    properties = open_device(device).properties
    settings = {"device": device, "programs": list(names), "seconds": seconds, "steps": steps}
    provenance = collect_provenance(properties, EXPERIMENT, settings, {})
    writer = RunWriter(root, properties.machine, EXPERIMENT, provenance)
    place = "cuda" if device == "accelerator" else "cpu"
    try:
        rows, findings, blind = run_all(
            names, place, seconds, steps, lambda row: print(shown(row), flush=True)
        )
        tables: dict[str, Sequence[BaseModel]] = {
            "programs": rows,
            "findings": findings,
            "blind_spots": blind,
        }
        writer.write_point("all", tables)
    except BaseException as error:
        writer.finish("failed", f"{type(error).__name__}: {error}")
        raise
    writer.finish("finished")
    return writer.path


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="programs: " + "; ".join(PROGRAMS))
    parser.add_argument("--device", default="accelerator", choices=["virtual", "accelerator"])
    parser.add_argument("--root", default="data/runs", help="folder of all runs")
    parser.add_argument("--seconds", type=float, default=115.0, help="limit for all programs")
    parser.add_argument("--steps", type=int, help="timed steps an arm")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    options = parser.parse_args(arguments)
    try:
        path = record(
            options.programs,
            options.root,
            device=options.device,
            seconds=options.seconds,
            steps=options.steps,
        )
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(shown_path(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
