"""``python -m atom sweep foreign``: the sanitizer on programs of other libraries; recorded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from atom.benchmarks.foreign_code import EXPERIMENT, ForeignSettings, chosen, run_program
from atom.benchmarks.foreign_rows import Outcome
from atom.device import Device
from atom.workbook.foreign_analysis import programs_table
from atom.workbook.point_sweep import Measured, PlannedPoint, PointSweep
from atom.workbook.records import Run

QUICK: dict[str, Any] = {"programs": ("offload hooks", "training loop"), "steps": 1}
#: seconds of a program's process, imports included, for the estimate
_PROCESS_SECONDS = 20.0


class ForeignSweep(PointSweep[ForeignSettings]):
    """A program a point, timed without the sanitizer twice and with it once."""

    command = "foreign"
    experiment = EXPERIMENT
    settings = ForeignSettings
    row_a_point = True
    table = "programs"
    why_not = "a program runs once in a process; see -p steps N"
    only = "programs"

    def parse(self, given: dict[str, Any], quick: bool) -> ForeignSettings:
        """See :class:`PointSweep`."""
        settings = ForeignSettings.parse(given, where="sweep foreign")
        if quick:
            names = {program.name for program in chosen(ForeignSettings(device=settings.device))}
            few = tuple(name for name in QUICK["programs"] if name in names)
            settings = settings.with_defaults({**QUICK, "programs": few})
        return settings

    def plan(self, settings: ForeignSettings) -> list[PlannedPoint]:
        """See :class:`PointSweep`."""
        return [
            PlannedPoint(
                program.name,
                f"{program.name} ({program.library}): {settings.steps or program.steps} steps an "
                f"arm, at most {settings.seconds:.0f} s",
                min(_PROCESS_SECONDS, settings.seconds),
            )
            for program in chosen(settings)
        ]

    def measure(
        self, settings: ForeignSettings, device: Device, ready: Any, done: Collection[str]
    ) -> Measured:
        """See :class:`PointSweep`."""
        for program in chosen(settings):
            if program.name not in done:
                rows = run_program(program, settings)
                yield (
                    program.name,
                    {
                        "programs": [rows.row],
                        "findings": rows.findings,
                        "blind_spots": rows.blind_spots,
                    },
                )

    def text(self, run: Run) -> str:
        """See :class:`PointSweep`."""
        return programs_table(run).to_string(index=False)

    def unexpected(self, run: Run) -> list[str]:
        """See :class:`PointSweep`."""
        return [
            f"{row.program}: {row.outcome}: {row.text}"
            for row in run.tables["programs"].itertuples()
            if str(row.outcome) in (str(Outcome.FAILED), str(Outcome.LATE))
        ]


SWEEP = ForeignSweep()
