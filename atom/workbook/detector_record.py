"""Records the comparison of detectors: ``python -m atom.workbook.detector_record``.

Writes ``data/runs/<machine>/<id>/`` with the tables ``detectors`` and ``slowdown``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from atom.device import open_device
from atom.errors import AtomError
from atom.lifetime.compare_detectors import Settings, compare, find_compute_sanitizer, slowdown
from atom.lifetime.detector_rows import Detector
from atom.workbook.provenance import collect_provenance
from atom.workbook.run_writer import RunWriter
from atom.workbook.tables import shown_path

EXPERIMENT = "detectors"


def record(
    settings: Settings,
    root: str | Path = "data/runs",
    *,
    steps: int = 40,
    repeats: int = 2,
    sizes: Sequence[str] = (),
) -> Path:
    """Run the comparison and record its rows.

    Args:
        settings: what to compare.
        root: folder of all runs.
        steps: timed steps of the decode loop a process; 0 leaves the timing out.
        repeats: processes of an arm.
        sizes: further options of the decode loop.

    Returns:
        The run's folder.

    Raises:
        BadInput, DeviceError: no checkout, no such scenario, no accelerator.
    """
    properties = open_device(settings.device).properties
    plain = {
        "device": settings.device,
        "detectors": [str(detector) for detector in settings.detectors],
        "scenarios": list(settings.scenarios),
        "jobs": settings.jobs,
        "steps": steps,
        "repeats": repeats,
    }
    facts = {"compute_sanitizer": find_compute_sanitizer() is not None}
    provenance = collect_provenance(properties, EXPERIMENT, plain, facts)
    writer = RunWriter(root, properties.machine, EXPERIMENT, provenance)
    try:
        rows = compare(settings, lambda row: print(f"{row.scenario}: {row.detector} {row.result}"))
        times = []
        if steps:
            times = slowdown(
                device=settings.device,
                steps=steps,
                repeats=repeats,
                detectors=settings.detectors,
                sizes=sizes,
            )
        writer.write_point("all", {"detectors": rows, "slowdown": times})
    except BaseException as error:
        writer.finish("failed", f"{type(error).__name__}: {error}")
        raise
    writer.finish("finished")
    return writer.path


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="accelerator", choices=["virtual", "accelerator"])
    parser.add_argument("--root", default="data/runs", help="folder of all runs")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--steps", type=int, default=40, help="timed decode steps; 0: no timing")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("scenarios", nargs="*", help="default: all that the device can run")
    options = parser.parse_args(arguments)
    virtual = options.device == "virtual"
    settings = Settings(
        options.device,
        (Detector.NOTHING, Detector.OURS) if virtual else tuple(Detector),
        tuple(options.scenarios),
        options.jobs,
    )
    sizes = ["--layers", "2", "--width", "64"] if virtual else []
    try:
        path = record(
            settings, options.root, steps=options.steps, repeats=options.repeats, sizes=sizes
        )
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(shown_path(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
