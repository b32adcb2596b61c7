"""Recorded runs and published tables, read through one validated loader.

A run folder holds ``run.json`` (provenance, with the SHA-256 of each row file) and one CSV file a
table. Every reader of rows comes through here, so that a damaged file is an error with a place and
never a quietly wrong figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pydantic import BaseModel

from atom.errors import BadInput
from atom.workbook.provenance import Provenance, collect_provenance
from atom.workbook.published_tables import load_published
from atom.workbook.run_checks import manners, row_faults
from atom.workbook.run_writer import RUN_FILE, RunWriter, read_points, read_provenance
from atom.workbook.schemas import TABLES, row_models
from atom.workbook.sweep_progress import NoProgress, SweepProgress
from atom.workbook.tables import parse_rows, sha256_of, shown_path, to_frame

__all__ = [
    "TABLES",
    "Provenance",
    "Run",
    "RunWriter",
    "check_folder",
    "collect_provenance",
    "load_published",
    "load_run",
    "load_runs",
]

#: rows that a core validates, roughly
_KIB_A_SECOND = 1000


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        path: its folder.
        provenance: where it comes from.
        tables: table name to rows; whole points only, also for a run that was killed.
    """

    path: Path
    provenance: Provenance
    tables: dict[str, pd.DataFrame]


def load_run(path: str | Path) -> Run:
    """Load and validate one run folder.

    A run that never ended (killed, or still going) gives its finished points.

    Raises:
        BadInput: all faults, one a line, as ``file:line:column: what is wrong``.
    """
    folder = Path(path)
    provenance = read_provenance(folder)
    models = row_models(provenance.experiment)
    rows: dict[str, list[BaseModel]]
    if provenance.exit_state == "running":
        points = read_points(folder, provenance.experiment)
        rows = {
            name: [row for _, tables in points for row in tables.get(name, ())] for name in models
        }
    else:
        rows = _sealed_rows(folder, provenance)
    faults = row_faults(shown_path(folder), provenance, rows)
    if faults:
        raise BadInput("\n".join(faults))
    return Run(folder, provenance, {name: to_frame(rows[name], models[name]) for name in models})


def _sealed_rows(folder: Path, provenance: Provenance) -> dict[str, list[BaseModel]]:
    models = row_models(provenance.experiment)
    shown = shown_path(folder)
    faults = [
        f"{shown}/{file.name}: not listed in {RUN_FILE}"
        for file in sorted(folder.glob("*.csv"))
        if file.name not in provenance.files
    ]
    faults += [
        f"{shown}/{RUN_FILE}:files: {name} is no table of experiment {provenance.experiment}"
        for name in provenance.files
        if name.removesuffix(".csv") not in models
    ]
    rows: dict[str, list[BaseModel]] = {}
    for name, model in models.items():
        file = folder / f"{name}.csv"
        recorded = provenance.files.get(file.name)
        if recorded is None:
            faults.append(f"{shown}/{RUN_FILE}:files: {file.name} is missing")
            continue
        try:
            content = file.read_bytes()
            rows[name] = parse_rows(content.decode("utf-8"), model, f"{shown}/{file.name}")
        except FileNotFoundError:
            faults.append(f"{shown}/{file.name}: no such file")
            continue
        except (OSError, UnicodeDecodeError):
            faults.append(f"{shown}/{file.name}: cannot be read as UTF-8 text")
            continue
        except BadInput as error:
            faults.append(str(error))
            continue
        if len(rows[name]) != recorded.rows:
            faults.append(
                f"{shown}/{file.name}: {len(rows[name])} rows, but {RUN_FILE} says {recorded.rows}"
            )
        if sha256_of(content) != recorded.sha256:
            faults.append(
                f"{shown}/{file.name}: changed since the run ended (its SHA-256 differs from "
                f"{RUN_FILE}); runs are never edited"
            )
    if faults:
        raise BadInput("\n".join(faults))
    return rows


def _run_folders(folder: Path) -> list[Path]:
    if (folder / RUN_FILE).exists():
        return [folder]
    return sorted(file.parent for file in folder.rglob(RUN_FILE))


def load_runs(folders: Sequence[str | Path], experiment: str) -> tuple[list[Run], list[str]]:
    """Load every run of ``experiment`` below ``folders``.

    Args:
        folders: run folders or parents of them.
        experiment: key of ``TABLES``.

    Returns:
        The runs, oldest first, and the problems: a damaged run is one of them and hides no other.
        Of copies of one run the one with most rows is taken: no row may count twice.
    """
    row_models(experiment)
    runs: dict[Path, Run] = {}
    problems: list[str] = []
    for given in folders:
        folder = Path(given)
        if not folder.is_dir():
            problems.append(f"{shown_path(folder)}: no such folder")
            continue
        for path in _run_folders(folder):
            if path.resolve() in runs:
                continue
            try:
                provenance = read_provenance(path)
                if provenance.experiment == experiment:
                    runs[path.resolve()] = load_run(path)
            except BadInput as error:
                problems.append(str(error))
    kept: dict[str, Run] = {}
    for run in sorted(runs.values(), key=lambda run: -sum(map(len, run.tables.values()))):
        one = kept.setdefault(run.provenance.run_id, run)
        if one is not run:
            copy, first = shown_path(run.path), shown_path(one.path)
            problems.append(f"{copy}: the same run as {first}; it counts once")
    return sorted(kept.values(), key=lambda run: run.provenance.run_id), problems


def existing(folders: Sequence[str]) -> list[str]:
    """Those that are there: where nobody has recorded anything yet there is no folder."""
    return [folder for folder in folders if Path(folder).is_dir()]


def check_folder(path: str | Path, progress: SweepProgress | None = None) -> list[str]:
    """Problems of a run folder, or of all runs below a folder; empty means none.

    Args:
        path: the folder.
        progress: told what happens, in KiB of rows; ``None`` is silent.
    """
    progress = progress or NoProgress()
    folder = Path(path)
    shown = shown_path(folder)
    if not folder.is_dir():
        return [f"{shown}: no such folder"]
    paths = _run_folders(folder)
    if not paths:
        return [f"{shown}: holds no run (no {RUN_FILE} in it or below it)"]
    problems: list[str] = []
    seen: dict[str, Path] = {}
    sizes = [sum(file.lstat().st_size for file in run.glob("*.csv")) // 1024 for run in paths]
    progress.start(sum(sizes), sum(sizes) / _KIB_A_SECOND)
    try:
        for run_path, size in zip(paths, sizes, strict=True):
            try:
                run = load_run(run_path)
            except BadInput as error:
                problems.append(str(error))
                continue
            finally:
                progress.advance(size)
            provenance = run.provenance
            problems += manners(run_path, provenance, run.tables)
            if provenance.run_id in seen:
                other = shown_path(seen[provenance.run_id])
                problems.append(f"{shown_path(run_path)}: the same run as {other}")
            seen.setdefault(provenance.run_id, run_path)
    finally:
        progress.stop()
    return problems
