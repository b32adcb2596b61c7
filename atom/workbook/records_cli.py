"""``python -m atom records check DIR``."""

from __future__ import annotations

import json
from pathlib import Path

from atom.errors import BadInput
from atom.workbook.records import check_folder
from atom.workbook.sweep_progress import TerminalProgress


def check(path: str | Path, *, as_json: bool = False) -> int:
    """Print the problems of a run folder, or of all runs below a folder.

    Args:
        path: the folder.
        as_json: as one JSON object in place of lines.

    Returns:
        Exit code: 0 if there is none, 2 otherwise.
    """
    problems = check_folder(path, TerminalProgress(name="records", unit="KiB"))
    if as_json:
        # a damaged file is one problem of several lines
        listed = [line for problem in problems for line in problem.splitlines()]
        values = {"format": 1, "folder": str(path), "valid": not listed, "problems": listed}
        print(json.dumps(values, indent=1))
        return BadInput.exit_code if problems else 0
    for problem in problems:
        print(problem)
    if problems:
        lines = sum(problem.count("\n") + 1 for problem in problems)
        print(f"{lines} problem{'s' if lines != 1 else ''} found")
        return BadInput.exit_code
    print(f"{path}: all runs are valid")
    return 0
