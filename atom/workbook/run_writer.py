"""Writes one recorded run so that a kill at any moment loses no finished point.

A point (one arm in one process, say) is one file under ``.partial/`` that appears by rename, whole
or not at all. ``finish`` merges the points, in the order in which they were written, into one CSV
a table. After ``finish("finished")`` the run never changes again; an interrupted or failed run
keeps its points and can be resumed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from pydantic import BaseModel, ValidationError

from atom.errors import BadInput
from atom.workbook.provenance import (
    ExitState,
    Provenance,
    RecordedFile,
    changed_software,
    redact,
    utc_now,
)
from atom.workbook.schemas import row_models
from atom.workbook.tables import csv_text, sha256_of, shown_path, write_atomically

PARTIAL = ".partial"
RUN_FILE = "run.json"


def read_provenance(path: Path) -> Provenance:
    """The provenance of the run folder ``path``.

    Raises:
        BadInput: naming the file and each field that is wrong.
    """
    file = path / RUN_FILE
    shown = shown_path(file)
    try:
        return Provenance.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{shown}: no such file; a run folder has one") from None
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise BadInput(
            "\n".join(
                f"{shown}:{'.'.join(map(str, fault['loc'])) or '(whole file)'}: {fault['msg']}"
                for fault in error.errors()
            )
        ) from None


def read_points(path: Path, experiment: str) -> list[tuple[str, dict[str, list[BaseModel]]]]:
    """The finished points of an unfinished run, in the order in which they were written."""
    models = row_models(experiment)
    points = []
    for file in sorted((path / PARTIAL).glob("*.json")):
        shown = shown_path(file)
        try:
            content = json.loads(file.read_bytes())
            tables = {
                name: [models[name].model_validate_json(json.dumps(row)) for row in rows]
                for name, rows in content["tables"].items()
            }
            points.append((str(content["point"]), tables))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{shown}: damaged point: {error}; delete it to run it again") from None
    return points


class RunWriter:
    """Writes ``root/<machine>/<run id>/``.

    Args:
        root: folder of all runs, e.g. ``data/runs``.
        machine: slug, equal to the provenance's.
        experiment: key of ``records.TABLES``, equal to the provenance's.
        provenance: of a run that has not ended.

    Raises:
        BadInput: the folder exists, or names disagree.
    """

    def __init__(
        self, root: str | Path, machine: str, experiment: str, provenance: Provenance
    ) -> None:
        if (machine, experiment) != (provenance.machine, provenance.experiment):
            raise BadInput(
                f"run of {experiment} on {machine}, but its provenance says "
                f"{provenance.experiment} on {provenance.machine}"
            )
        if provenance.exit_state != "running" or provenance.files:
            raise BadInput("a new run starts with exit state 'running' and no files")
        self.path = Path(root) / machine / provenance.run_id
        self.provenance = provenance
        self._models = row_models(experiment)
        try:
            (self.path / PARTIAL).mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise BadInput(f"{shown_path(self.path)} exists; a run is never overwritten") from None
        self._points: list[str] = []
        self._next = 0
        self._lock = _lock(self.path)
        self._write_provenance(provenance)

    @classmethod
    def resume(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> Self:
        """Continue a run that was killed, interrupted or failed.

        Args:
            path: its folder.
            settings: settings of the caller; they must equal the recorded ones.

        Raises:
            BadInput: finished, damaged, being written by another process, other settings, or other
                software than it was started with (its points would not belong together).
        """
        folder = Path(path)
        shown = shown_path(folder)
        provenance = read_provenance(folder)
        if provenance.exit_state == "finished":
            raise BadInput(f"{shown} is finished and never changes; start a new run")
        if not (folder / PARTIAL).is_dir():
            raise BadInput(f"{shown} has no {PARTIAL} folder with its points: start a new run")
        if settings is not None:
            _refuse_other_settings(shown, provenance.settings, redact(dict(settings)))
        changed = changed_software(provenance)
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise BadInput(f"{shown} was started with other software; start a new run:\n{lines}")
        writer = cls.__new__(cls)
        writer.path = folder
        writer._lock = _lock(folder)
        for leftover in (folder / PARTIAL).glob(".writing-*"):
            leftover.unlink()
        writer._models = row_models(provenance.experiment)
        writer._points = [name for name, _ in read_points(folder, provenance.experiment)]
        numbers = [int(file.stem) for file in (folder / PARTIAL).glob("*.json")]
        writer._next = max(numbers, default=-1) + 1
        writer._write_provenance(
            provenance.model_copy(
                update={"exit_state": "running", "ended": None, "error": None, "files": {}}
            )
        )
        return writer

    @staticmethod
    def finished_points(path: str | Path) -> frozenset[str]:
        """Points of a run that could be resumed. Nothing is changed.

        Raises:
            BadInput: there is no such run, it is damaged, or it is finished.
        """
        folder = Path(path)
        provenance = read_provenance(folder)
        if provenance.exit_state == "finished":
            raise BadInput(f"{shown_path(folder)} is finished: nothing of it is left to run")
        return frozenset(name for name, _ in read_points(folder, provenance.experiment))

    @property
    def points(self) -> tuple[str, ...]:
        """Identities of the finished points, in the order in which they were written."""
        return tuple(self._points)

    def has(self, point_id: str) -> bool:
        """Whether this point is finished."""
        return point_id in self._points

    def write_point(self, point_id: str, tables: Mapping[str, Sequence[BaseModel]]) -> None:
        """Store the rows of one finished point, all tables at once or none.

        Args:
            point_id: any text, unique within the run.
            tables: table name to rows of the model registered for it.

        Raises:
            BadInput: the run has ended, the point is there, or rows are of another model.
        """
        if self.provenance.exit_state != "running":
            raise BadInput(f"{shown_path(self.path)} has ended; nothing can be added to it")
        if self.has(point_id):
            raise BadInput(f"point {point_id!r} is already in {shown_path(self.path)}")
        rows_of: dict[str, list[BaseModel]] = {}
        for name, rows in tables.items():
            model = self._models.get(name)
            if model is None:
                raise BadInput(f"no table {name!r}; this experiment has {', '.join(self._models)}")
            if not all(isinstance(row, model) for row in rows):
                raise BadInput(f"table {name!r} takes rows of {model.__name__} only")
            rows_of[name] = list(rows)
        content = {
            "point": point_id,
            "tables": {
                name: [row.model_dump(mode="json") for row in rows]
                for name, rows in rows_of.items()
            },
        }
        try:
            text = json.dumps(content, allow_nan=False)
        except ValueError:
            raise BadInput(f"point {point_id!r} holds a NaN or an infinity; use None") from None
        write_atomically(self.path / PARTIAL / f"{self._next:06d}.json", text.encode())
        self._next += 1
        self._points.append(point_id)

    def add_fact(self, group: str, name: str, value: Any) -> None:
        """Record a fact that shows itself while the run goes on, as ``facts[group][name]``.

        What stands there already stays: a resumed run keeps what it saw first.

        Raises:
            BadInput: the run has ended.
        """
        if self.provenance.exit_state != "running":
            raise BadInput(f"{shown_path(self.path)} has ended; nothing can be added to it")
        known = self.provenance.facts.get(group, {})
        if name not in known:
            facts = {**self.provenance.facts, group: {**known, name: redact(value)}}
            self._write_provenance(self.provenance.model_copy(update={"facts": facts}))

    def finish(self, exit_state: ExitState, error: str | None = None) -> Provenance:
        """Merge the points into CSV files and seal ``run.json`` with their SHA-256.

        Args:
            exit_state: ``finished`` makes the run immutable; ``interrupted`` and ``failed`` keep
                the points so that :meth:`resume` can go on.
            error: what went wrong; paths and the host name are cut out.

        Raises:
            BadInput: the run has ended, or lacks rows that it planned and is to be ``finished``.
        """
        if self.provenance.exit_state != "running":
            raise BadInput(f"{shown_path(self.path)} has ended already")
        if exit_state == "running":
            raise BadInput("a run ends as finished, interrupted or failed")
        # from the disk: Ctrl-C may have come between a point's rename and its entry in the list
        points = read_points(self.path, self.provenance.experiment)
        rows_of = {
            name: [row for _, tables in points for row in tables.get(name, ())]
            for name in self._models
        }
        if exit_state == "finished":
            self._refuse_unplanned({name: len(rows) for name, rows in rows_of.items()})
        files = {}
        for name, model in self._models.items():
            rows = rows_of[name]
            content = csv_text(rows, model).encode()
            write_atomically(self.path / f"{name}.csv", content)
            files[f"{name}.csv"] = RecordedFile(sha256=sha256_of(content), rows=len(rows))
        self._write_provenance(
            self.provenance.model_copy(
                update={
                    "exit_state": exit_state,
                    "ended": utc_now(),
                    "error": None if error is None else redact(error),
                    "files": files,
                }
            )
        )
        # behind the seal: a kill before it leaves a resumable run, one after it mere leftovers
        if exit_state == "finished":
            shutil.rmtree(self.path / PARTIAL)
        self._lock.close()
        return self.provenance

    def _refuse_unplanned(self, found: Mapping[str, int]) -> None:
        for name, planned in (self.provenance.planned_rows or {}).items():
            if found.get(name, 0) != planned:
                raise BadInput(
                    f"{shown_path(self.path)} is not finished: {found.get(name, 0)} rows of "
                    f"{name}, {planned} were planned"
                )

    def _write_provenance(self, provenance: Provenance) -> None:
        text = provenance.model_dump_json(indent=2) + "\n"
        write_atomically(self.path / RUN_FILE, text.encode())
        self.provenance = provenance


def _refuse_other_settings(
    shown: str, recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    different = sorted(
        name
        for name in {*recorded, *given}
        if json.dumps(recorded.get(name)) != json.dumps(given.get(name))
    )
    if different:
        lines = "\n".join(
            f"  {name}: recorded {recorded.get(name)!r}, now {given.get(name)!r}"
            for name in different
        )
        raise BadInput(f"{shown} was started with other settings:\n{lines}")


def _lock(path: Path) -> IO[bytes]:
    """Hold the run for this process; the system drops the lock when the process dies."""
    file = open(path / PARTIAL / ".lock", "wb")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise BadInput(
            f"{shown_path(path)} is being written by another process (this one is {os.getpid()})"
        ) from None
    return file
