"""What rows and provenance of one run must satisfy together, and what keeps a run private.

A row that was copied or dropped leaves every single row valid, and whoever edits a file can also
write its new sum: the rows of a run are therefore held against each other and against its plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from atom.machines import DeviceKind, machine_slug
from atom.workbook.provenance import Provenance, redact, relevant_environment
from atom.workbook.run_writer import RUN_FILE
from atom.workbook.schemas import KEYS
from atom.workbook.tables import shown_path

_VERSION = re.compile(r"\d[\w.+-]*")
_RUNTIME = re.compile(r"virtual|[A-Za-z]+ \d[\w.+-]*")


def row_faults(shown: str, provenance: Provenance, rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """Rows that stand twice, and rows that a finished run should have and has not.

    Args:
        shown: the run's folder, for messages.
        provenance: of the run.
        rows: table name to its rows, each valid on its own.
    """
    faults = []
    for name, key in KEYS.get(provenance.experiment, {}).items():
        faults += _rows_twice(f"{shown}/{name}.csv", key, rows.get(name, ()))
    if provenance.exit_state != "finished":
        return faults
    for name, planned in (provenance.planned_rows or {}).items():
        found = len(rows.get(name, ()))
        if found != planned:
            faults.append(f"{shown}/{name}.csv: {found} rows, but the run planned {planned}")
    if provenance.experiment == "race":
        faults += _missing_processes(shown, provenance, rows.get("trials", ()))
        faults += _spans_without_point(shown, rows)
    return faults


def _rows_twice(file: str, key: tuple[str, ...], rows: Sequence[Any]) -> list[str]:
    faults = []
    first: dict[tuple[Any, ...], int] = {}
    for line, row in enumerate(rows, start=2):
        values = tuple(getattr(row, column) for column in key)
        before = first.setdefault(values, line)
        if before != line:
            named = ", ".join(str(value) for value in values)
            faults.append(f"{file}:{line}:{key[0]}: {named} stands in line {before} already")
    return faults


def _missing_processes(shown: str, provenance: Provenance, rows: Sequence[Any]) -> list[str]:
    """An arm runs in every process of its sweep."""
    processes = provenance.settings.get("processes")
    if not isinstance(processes, int):
        return []
    found: dict[str, set[int]] = {}
    for row in rows:
        found.setdefault(row.arm, set()).add(row.process)
    wanted = set(range(processes))
    faults = []
    for arm, seen in found.items():
        if seen != wanted:
            odd = ", ".join(str(number) for number in sorted(seen ^ wanted))
            faults.append(
                f"{shown}/trials.csv: {arm} is to have one row for each of {processes} "
                f"processes; missing or too many: process {odd}"
            )
    return faults


def _spans_without_point(shown: str, rows: Mapping[str, Sequence[Any]]) -> list[str]:
    points = {row.point_id for row in rows.get("trials", ())}
    strays = dict.fromkeys(
        point for row in rows.get("timeline", ()) if (point := row.point_id) not in points
    )
    return [f"{shown}/timeline.csv: {point} has no row in trials.csv" for point in strays]


def manners(path: Path, provenance: Provenance, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """What a run must also satisfy before it is shared: its place, its end, nobody's names."""
    file = f"{shown_path(path)}/{RUN_FILE}"
    problems = []
    resolved = path.resolve()
    if resolved.name != provenance.run_id:
        problems.append(f"{file}:run_id: {provenance.run_id}, but its folder is {resolved.name}")
    if resolved.parent.name != provenance.machine:
        problems.append(
            f"{file}:machine: {provenance.machine}, but the folder above is {resolved.parent.name}"
        )
    # a run that stopped where it was told to names what it left out
    if provenance.exit_state != "finished" and not provenance.facts.get("stopped_early"):
        problems.append(
            f"{file}:exit_state: {provenance.exit_state}; resume the sweep so that it finishes"
        )
    return problems + _private(file, provenance) + _private_cells(path, tables)


def _private(file: str, provenance: Provenance) -> list[str]:
    """Texts that name, or may name, a person, a host or a folder."""
    problems = []
    for name in ("device", "settings", "environment", "facts", "error"):
        value = getattr(provenance, name)
        if redact(value) != value:
            problems.append(f"{file}:{name}: holds a path, user or host name; remove it")
    # A free text is bound to something known: a host's name looks like any other word.
    slug = machine_slug(provenance.device)
    if provenance.kind is not DeviceKind.VIRTUAL and slug != provenance.machine:
        problems.append(
            f"{file}:device: {provenance.device!r} is a device of machine {slug}, not "
            f"{provenance.machine}; only its marketing name belongs there"
        )
    if relevant_environment(provenance.environment) != dict(sorted(provenance.environment.items())):
        problems.append(f"{file}:environment: holds a variable or value that is never recorded")
    for name in ("driver", "torch", "triton", "python", "numpy"):
        value = getattr(provenance, name)
        if value not in (None, "unknown") and not _VERSION.fullmatch(value):
            problems.append(f"{file}:{name}: {value!r} is no version")
    unknown = provenance.kind is DeviceKind.UNKNOWN and provenance.runtime == "unknown"
    if not unknown and not _RUNTIME.fullmatch(provenance.runtime):
        problems.append(f"{file}:runtime: {provenance.runtime!r} is no name with a version")
    if provenance.commit is not None and not re.fullmatch(r"[0-9a-f]{7,64}", provenance.commit):
        problems.append(f"{file}:commit: {provenance.commit!r} is no hash")
    return problems


def _as_read(cell: str) -> str:
    """A cell's text: one in JSON's quotes has a backslash for each line break, which is no path."""
    if not cell.startswith('"'):
        return cell
    try:
        return str(json.loads(cell))
    except ValueError:
        return cell


def _private_cells(path: Path, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    problems = []
    for name, table in tables.items():
        for column in table.select_dtypes("object"):
            texts = table[column].dropna().unique()
            if any(redact(text) != text for text in map(_as_read, texts)):
                problems.append(
                    f"{shown_path(path)}/{name}.csv:{column}: holds a path, user or host name"
                )
    return problems
