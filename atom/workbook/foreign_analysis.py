"""What notebook 03 shows of the sanitizer on programs of other libraries, from rows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from atom.benchmarks.foreign_code import EXPERIMENT
from atom.benchmarks.foreign_rows import Outcome
from atom.evidence import Evidence
from atom.workbook.records import Run, existing, load_runs

NOTHING = "–"


def newest(folders: Sequence[str]) -> Run | None:
    """Of the finished runs on hardware with most programs that ended, the newest; or ``None``."""
    runs, _ = load_runs(existing(folders), EXPERIMENT)
    return max(
        (
            run
            for run in runs
            if run.provenance.evidence is Evidence.MEASURED
            and run.provenance.exit_state == "finished"
        ),
        key=lambda run: (ended(run), run.provenance.run_id),
        default=None,
    )


def ended(run: Run) -> int:
    """Programs that ended."""
    return int(run.tables["programs"]["slow_down"].notna().sum())


def programs_table(run: Run) -> pd.DataFrame:
    """One row a program: what was seen, found, and what the watch cost."""
    rows = []
    for row in run.tables["programs"].to_dict("records"):
        finished = str(row["outcome"]) == str(Outcome.FINISHED)
        version = "" if pd.isna(row["version"]) else f" {row['version']}"
        off, again, on = (row[f"step_milliseconds{arm}"] for arm in ("", "_again", "_watched"))
        rows.append(
            {
                "program": row["program"],
                "library": f"{row['library']}{version}",
                "outcome": str(row["outcome"]) if finished else f"{row['outcome']}: {row['text']}",
                "operations a step": int(row["operations"]) if finished else NOTHING,
                # also of a program that was stopped in the middle
                "findings": NOTHING if pd.isna(row["findings"]) else int(row["findings"]),
                "ms a step, off / again / on": (
                    f"{off:.1f} / {again:.1f} / {on:.1f}" if finished else NOTHING
                ),
                "slow-down": f"{row['slow_down']:.2f}x" if finished else NOTHING,
            }
        )
    return pd.DataFrame(rows)


def findings_table(run: Run) -> pd.DataFrame:
    """One row a finding, with the lines it names."""
    columns = {
        "program": "program",
        "kind": "kind",
        "times": "seen",
        "operation": "earlier use",
        "stream": "on",
        "place": "at",
        "freed": "freed at",
        "second": "later use",
        "fix": "smallest change",
    }
    table = run.tables["findings"][list(columns)].rename(columns=columns)
    return table.astype(object).where(table.notna(), NOTHING)


def blind_spots_table(run: Run) -> pd.DataFrame:
    """What the sanitizer said it could not see, and in which programs."""
    rows = run.tables["blind_spots"]
    number = int(rows["program"].nunique())
    return pd.DataFrame(
        [
            {
                "not seen": text,
                "in": "every program" if len(group) == number else ", ".join(group["program"]),
            }
            for text, group in rows.groupby("text", sort=False)
        ]
    )


def median_slow_down(run: Run) -> float | None:
    """Median over the programs that finished; ``None`` of none."""
    known = run.tables["programs"]["slow_down"].dropna()
    return float(known.median()) if len(known) else None
