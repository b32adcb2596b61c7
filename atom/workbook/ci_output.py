"""What a CI system reads of a run: ``claims.json``, annotations, a table in the job's summary.

Annotations and summary are written where GitHub Actions runs the command: its variables
``GITHUB_ACTIONS`` and ``GITHUB_STEP_SUMMARY`` say so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.results import Execution, count_verdicts, load_result, write_atomically

CLAIMS_FILE = "claims.json"


def settled_claims(folder: Path) -> list[dict[str, Any]]:
    """Every verdict in a report folder, with the notebook that settled it, in notebook order."""
    found = []
    for stem in NOTEBOOKS:
        result = load_result(folder, stem)
        for verdict in result["verdicts"] if result else ():
            key = f"{verdict['claim']}/{verdict['evidence']}"
            found.append({"key": key, "notebook": stem, **verdict})
    return found


def write_claims(folder: Path, profile: str) -> Path:
    """Write ``claims.json`` into a report folder: one object a verdict, and the counts."""
    claims = settled_claims(folder)
    values = {
        "format": 1,
        "profile": profile,
        "counts": count_verdicts(claims),
        "claims": claims,
    }
    path = folder / CLAIMS_FILE
    write_atomically(path, json.dumps(values, indent=1) + "\n")
    return path


def error_lines(executions: Mapping[str, Execution]) -> list[str]:
    """Workflow commands: an error for each claim that fell and each notebook that failed."""
    lines = []
    for stem, execution in executions.items():
        if execution.state in ("finished", "skipped"):
            continue
        file = f"notebooks/{stem}.ipynb"
        fallen = [line.strip() for line in execution.message.splitlines() if _names_a_claim(line)]
        if execution.state == "fell" and fallen:
            lines += [_command(file, f"claim fell: {line.split(':')[0]}", line) for line in fallen]
        else:
            title = f"{stem}: {execution.state}"
            lines.append(_command(file, title, execution.message or execution.state))
    return lines


def summary(executions: Mapping[str, Execution], folder: Path, profile: str) -> str:
    """The job summary in Markdown: notebooks, counts, and the table of claims."""
    claims = settled_claims(folder)
    counts = ", ".join(f"{n} {name}" for name, n in count_verdicts(claims).items()) or "none"
    lines = [f"## Workbook, profile {profile}", "", f"Claims by verdict: {counts}.", ""]
    lines += ["| notebook | state | seconds | budget |", "|---|---|---:|---:|"]
    lines += [
        f"| {stem} | {one.state} | {one.seconds:.1f} | {one.budget_seconds} |"
        for stem, one in sorted(executions.items())
    ]
    lines += ["", "| claim | evidence | verdict | found | notebook |", "|---|---|---|---|---|"]
    lines += [
        "| "
        + " | ".join(
            _cell(one[name]) for name in ("claim", "evidence", "verdict", "value", "notebook")
        )
        + " |"
        for one in claims
    ]
    return "\n".join(lines) + "\n"


def tell(
    executions: Mapping[str, Execution],
    folder: Path,
    profile: str,
    stream: TextIO | None = None,
) -> None:
    """Write ``claims.json``, and on GitHub Actions the annotations and the job's summary.

    Args:
        executions: of the run.
        folder: report folder.
        profile: of the report.
        stream: where annotations go; standard error by default, which Actions reads as well.
    """
    write_claims(folder, profile)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in error_lines(executions):
            print(line, file=stream or sys.stderr, flush=True)
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with open(target, "a", encoding="utf-8") as file:
            file.write(summary(executions, folder, profile))


def _names_a_claim(line: str) -> bool:
    # as session.Book.close lists them: indented, key first
    return line.startswith("  ") and "/" in line.split(":")[0] and ":" in line


def _command(file: str, title: str, message: str) -> str:
    return f"::error file={_property(file)},title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(value: Any) -> str:
    return str("" if value is None else value).replace("|", "\\|").replace("\n", " ")
