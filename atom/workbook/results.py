"""What a report folder holds: executed notebooks, their results, and how each execution went."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from atom.errors import BadInput, NotebookFailed

#: MIME type of a notebook's result, an output of its last cell
RESULT_MIME = "application/vnd.atom.result+json"
EXECUTIONS_FILE = "executions.json"

State = Literal["finished", "fell", "bad input", "failed", "skipped"]

#: verdicts from best to worst, as tables show them
VERDICT_ORDER = (
    "reproduced",
    "reproduced in simulation",
    "inconclusive",
    "source inconsistent",
    "differs",
    "not testable here",
    "not run",
)
_KERNEL_FILE = re.compile(r"[\w./\\:-]*ipykernel_\d+[/\\]+\d+\.py")


@dataclass(frozen=True)
class Execution:
    """How the latest execution of one notebook went.

    Attributes:
        state: ``finished``, ``fell`` (a claim is worse than accepted), ``bad input``, ``failed``,
            or ``skipped`` (a notebook that it reads failed).
        seconds: wall time, kernel start included.
        budget_seconds: what the registry allows under the ``ci`` profile.
        key: fingerprint; empty unless finished.
        message: why it did not finish.
    """

    state: State
    seconds: float
    budget_seconds: int
    key: str = ""
    message: str = ""


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def load_executions(folder: Path) -> dict[str, Execution]:
    """Executions by stem; empty if there are none or the file is unreadable."""
    try:
        loaded = json.loads((folder / EXECUTIONS_FILE).read_text(encoding="utf-8"))
        return {stem: Execution(**values) for stem, values in loaded.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save_executions(folder: Path, executions: Mapping[str, Execution]) -> None:
    """Replace the folder's record of executions."""
    values = {stem: asdict(execution) for stem, execution in sorted(executions.items())}
    write_atomically(folder / EXECUTIONS_FILE, json.dumps(values, indent=1) + "\n")


def extract_result(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The result that the last code cell displayed.

    Raises:
        NotebookFailed: there is none.
    """
    for cell in reversed(notebook["cells"]):
        for output in reversed(cell.get("outputs", [])):
            result = output.get("data", {}).get(RESULT_MIME)
            if result is not None:
                return dict(result)
    raise NotebookFailed("no result among its outputs; its last cell must be book.close()")


def load_result(folder: Path, stem: str) -> dict[str, Any] | None:
    """A notebook's result file, or ``None`` if it has not been executed.

    Raises:
        BadInput: the file is damaged.
    """
    path = folder / f"{stem}.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise BadInput(f"{path.name}: damaged result file ({error}); run with --force") from None


def site_is_complete(folder: Path) -> bool:
    """Whether a report has its index, its README and the page of every executed notebook."""
    from atom.workbook.notebooks import NOTEBOOKS

    stems = [stem for stem in NOTEBOOKS if (folder / f"{stem}.ipynb").is_file()]
    names = ["index.html", "README.md", *(f"{stem}.html" for stem in stems)]
    return all((folder / name).is_file() for name in names)


def count_verdicts(verdicts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Number of claims by verdict, best verdict first."""
    counts = Counter(str(verdict["verdict"]) for verdict in verdicts)
    known = {name: counts.pop(name) for name in VERDICT_ORDER if counts.get(name)}
    return {**known, **counts}


def scrub(text: str, root: Path, folder: Path) -> str:
    """``text`` without paths of this machine: the checkout, the interpreter, temporary files."""
    text = _KERNEL_FILE.sub("cell", text)
    homes = (
        (folder, "report"),
        (root, "."),
        (Path(sys.prefix), "python"),
        (Path(sys.base_prefix), "python"),
        (Path.home(), "~"),
    )
    for path, name in homes:
        if path != Path("/"):
            text = text.replace(f"{path}/", f"{name}/").replace(str(path), name)
    return text
