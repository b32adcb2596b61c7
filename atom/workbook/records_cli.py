"""``python -m atom records check DIR``."""

from __future__ import annotations

from pathlib import Path

from atom.errors import BadInput
from atom.workbook.records import check_folder


def check(path: str | Path) -> int:
    """Print the problems of a run folder, or of all runs below a folder.

    Returns:
        Exit code: 0 if there is none, 2 otherwise.
    """
    problems = check_folder(path)
    for problem in problems:
        print(problem)
    if problems:
        lines = sum(problem.count("\n") + 1 for problem in problems)
        print(f"{lines} problem{'s' if lines != 1 else ''} found")
        return BadInput.exit_code
    print(f"{path}: all runs are valid")
    return 0
