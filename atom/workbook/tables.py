"""CSV tables with one pydantic model a row: reading, writing, and errors that name the cell.

The header is the model's field names. A blank cell is a missing value and never a zero; ``nan`` and
``inf`` are refused, so that nothing missing can pass for a number.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import tempfile
import types
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import pandas as pd
from pydantic import BaseModel, ValidationError

from atom.benchmarks.throughput_rows import ADDED_LATER
from atom.errors import BadInput

RowModel = TypeVar("RowModel", bound=BaseModel)

#: the checkout's data folder
DATA = Path(__file__).resolve().parents[2] / "data"

_NOT_A_NUMBER = frozenset(
    {"nan", "+nan", "-nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"}
)


def shown_path(path: str | Path) -> str:
    """``path`` relative to the checkout or the working folder where it lies below one of them."""
    absolute = Path(path).resolve()
    for base in (DATA.parent, Path.cwd()):
        if absolute.is_relative_to(base):
            return str(absolute.relative_to(base))
    return str(path)


def read_rows(path: str | Path, model: type[RowModel]) -> list[RowModel]:
    """Read and validate a CSV file.

    Args:
        path: the file, UTF-8, comma separated, header in line 1.
        model: row model; its field names are the header, in any order.

    Raises:
        BadInput: every fault of the file, one a line, as ``file:line:column: what is wrong``.
    """
    shown = shown_path(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{shown}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{shown}: cannot be read: {reason}") from None
    return parse_rows(text, model, shown)


def parse_rows(text: str, model: type[RowModel], shown: str) -> list[RowModel]:
    """Validate CSV text; ``shown`` names it in errors. See :func:`read_rows`."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[RowModel] = []
    faults: list[str] = []
    try:
        header = next(reader, [])
        faults += _header_faults(header, model, shown)
        if faults:
            raise BadInput("\n".join(faults))
        for cells in reader:
            place = f"{shown}:{reader.line_num}"
            if len(cells) != len(header):
                faults.append(f"{place}: {len(cells)} cells, but the header has {len(header)}")
                continue
            row = _parse_row(dict(zip(header, cells, strict=True)), model, place, faults)
            if row is not None:
                rows.append(row)
    except csv.Error as error:
        faults.append(f"{shown}:{reader.line_num}: not a CSV row: {error}")
    if faults:
        raise BadInput("\n".join(faults))
    return rows


def _header_faults(header: Sequence[str], model: type[BaseModel], shown: str) -> list[str]:
    if not header:
        return [f"{shown}:1: empty; the header must be {','.join(model.model_fields)}"]
    faults = [
        f"{shown}:1:{name}: this column is missing"
        for name, field in model.model_fields.items()
        if name not in header and field.json_schema_extra != ADDED_LATER
    ]
    faults += [
        f"{shown}:1:{name or '(no name)'}: no such column"
        for name in header
        if name not in model.model_fields
    ]
    faults += [
        f"{shown}:1:{name}: this column stands twice"
        for name in dict.fromkeys(header)
        if header.count(name) > 1
    ]
    return faults


def _parse_row(
    cells: dict[str, str], model: type[RowModel], place: str, faults: list[str]
) -> RowModel | None:
    bad = [name for name, cell in cells.items() if cell.strip().lower() in _NOT_A_NUMBER]
    if bad:
        faults += [
            f"{place}:{name}: {cells[name]!r} is no value; leave a missing cell blank"
            for name in bad
        ]
        return None
    values: dict[str, Any] = {name: _value(cell, model, name) for name, cell in cells.items()}
    try:
        row = model.model_validate(values, strict=False)
    except ValidationError as error:
        for fault in error.errors():
            column = str(fault["loc"][0]) if fault["loc"] else "(whole row)"
            if column in cells and not cells[column]:
                faults.append(f"{place}:{column}: blank, but this column needs a value")
                continue
            given = f", got {cells[column]!r}" if column in cells else ""
            message = fault["msg"].removeprefix("Value error, ")
            faults.append(f"{place}:{column}: {message[:1].lower()}{message[1:]}{given}")
        return None
    # what Python reads as a number and a table of numbers cannot hold
    unfit = [name for name, cell in cells.items() if not _fits(getattr(row, name), cell)]
    faults += [f"{place}:{name}: {cells[name][:40]!r} is no number of 64 bits" for name in unfit]
    return None if unfit else row


def _fits(value: Any, cell: str) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) and "_" not in cell
    if isinstance(value, int) and not isinstance(value, bool):
        return -(2**63) <= value < 2**63 and "_" not in cell
    return True


def _value(cell: str, model: type[BaseModel], name: str) -> str | None:
    if cell:
        return cell
    return "" if model.model_fields[name].default == "" else None


def csv_text(rows: Iterable[BaseModel], model: type[BaseModel]) -> str:
    """The rows as CSV text with ``\\n`` line ends; ``None`` becomes a blank cell."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(model.model_fields), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.model_dump(mode="json"))
    return out.getvalue()


def to_frame(rows: Sequence[BaseModel], model: type[BaseModel]) -> pd.DataFrame:
    """The rows as a data frame whose missing cells stay missing.

    Optional integers become pandas' nullable ``Int64``, optional booleans ``boolean``, so that no
    missing value turns into a number; enums become their text.
    """
    dumped = [row.model_dump(mode="json") for row in rows]
    return pd.DataFrame(
        {
            name: pd.Series([row[name] for row in dumped], dtype=_dtype(field.annotation))
            for name, field in model.model_fields.items()
        }
    )


def _dtype(annotation: Any) -> str:
    optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        optional = len(members) < len(get_args(annotation))
        annotation = members[0] if len(members) == 1 else object
    if not isinstance(annotation, type) or issubclass(annotation, Enum):
        return "object"
    if issubclass(annotation, bool):
        return "boolean" if optional else "bool"
    if issubclass(annotation, int):
        return "Int64" if optional else "int64"
    return "float64" if issubclass(annotation, float) else "object"


def sha256_of(content: bytes) -> str:
    """Hex digest of ``content``."""
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that after a kill or power cut either the old or the new content is there."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; records are meant to be shared
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
