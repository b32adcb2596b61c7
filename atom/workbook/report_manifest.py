"""What an executed report was made from: source notebooks, parameters, recorded runs, by hash.

An executed notebook holds the cells of its source. Their hash is therefore taken from what was
executed, and a manifest cannot claim another source than the one that ran.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.workbook.endings import ERROR_CELL_TAG
from atom.workbook.results import write_atomically

MANIFEST_FILE = "manifest.json"
_ADDED = {"injected-parameters", ERROR_CELL_TAG}


def source_sha256(path: Path) -> str:
    """SHA-256 of the cells that somebody wrote, the same for a source and its executed copy.

    Counted are type, text and tags of each cell; outputs, execution counts and the cells that
    papermill adds are not.

    Args:
        path: a source notebook or an executed one.

    Raises:
        BadInput: not a notebook.
    """
    cells = [
        [cell["cell_type"], _joined(cell["source"]), sorted(cell["metadata"].get("tags", ()))]
        for cell in read_notebook(path)["cells"]
        if not _ADDED.intersection(cell["metadata"].get("tags", ()))
    ]
    return hashlib.sha256(json.dumps(cells, ensure_ascii=False).encode()).hexdigest()


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook as plain JSON values.

    Raises:
        BadInput: unreadable, or not a notebook.
    """
    try:
        notebook = dict(json.loads(path.read_text(encoding="utf-8")))
        for cell in notebook["cells"]:
            cell["cell_type"], cell["source"], cell["metadata"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path.name}: not a readable notebook ({error!r})") from None
    return notebook


def cited_runs(result: Mapping[str, Any]) -> list[str]:
    """Ids of the recorded runs that a result's verdicts and figures rest on, in order of use."""
    lists = [*result.get("verdicts", ()), *result.get("figures", ())]
    return list(dict.fromkeys(name for one in lists for name in one.get("run_ids") or ()))


def build_manifest(
    folder: Path, profile: str, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Source hash, executed hash, parameters and recorded runs of each notebook.

    Args:
        folder: report folder.
        profile: of the report.
        results: results by stem.

    Raises:
        BadInput: an executed notebook that cannot be read.
    """
    notebooks = {}
    for stem, result in results.items():
        executed = folder / f"{stem}.ipynb"
        notebooks[stem] = {
            "source_sha256": source_sha256(executed),
            "executed_sha256": hashlib.sha256(executed.read_bytes()).hexdigest(),
            "settings": result.get("settings", {}),
            "run_ids": cited_runs(result),
        }
    return {"format": 1, "profile": profile, "notebooks": notebooks}


def write_manifest(folder: Path, profile: str, results: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write ``manifest.json`` of a report folder and return its path."""
    path = folder / MANIFEST_FILE
    content = json.dumps(build_manifest(folder, profile, results), indent=1, sort_keys=True)
    write_atomically(path, content + "\n")
    return path


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or ``None`` if the report has none.

    Raises:
        BadInput: it is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = dict(json.loads(path.read_text(encoding="utf-8")))
        manifest["notebooks"].items()
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path.name}: damaged ({error!r}); build the report again") from None
    return manifest


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
