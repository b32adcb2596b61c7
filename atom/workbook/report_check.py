"""Whether a committed report still is what its sources and its recorded rows give."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.errors import NotebookFailed
from atom.evidence import Evidence
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.report_manifest import load_manifest, read_notebook, source_sha256
from atom.workbook.report_rebuild import plan_from_report, rebuild
from atom.workbook.results import extract_result, load_result


@dataclass(frozen=True)
class Check:
    """What a check found.

    Attributes:
        differences: one line each; empty means that the report stands.
        notebooks: how many notebooks were rebuilt.
        verdicts: how many verdicts were compared.
        exit_code: 0, 1 (something differs) or 3 (a notebook failed).
    """

    differences: tuple[str, ...]
    notebooks: int
    verdicts: int
    exit_code: int


def check_report(folder: Path, root: Path) -> Check:
    """Rebuild a report into a temporary folder and compare.

    Args:
        folder: committed report folder.
        root: the checkout.

    Raises:
        BadInput: the folder holds no result, or measured rows are missing.
    """
    plan = plan_from_report(folder, root)
    before = _results(folder)
    differences = compare_sources(folder, root, before)
    with tempfile.TemporaryDirectory(prefix="atom-check-") as scratch:
        out = Path(scratch) / folder.resolve().name
        report = rebuild(plan, out, root)
        after = _results(out)
    failed = 0
    for stem, execution in report.executions.items():
        if execution.state not in ("finished", "fell"):
            failed = 3
            differences.append(f"{stem}: {execution.state} when rebuilt: {execution.message}")
    differences += compare_verdicts(before, after)
    verdicts = sum(len(result["verdicts"]) for result in before.values())
    code = max(failed, 1 if differences else 0)
    return Check(tuple(differences), len(before), verdicts, code)


def compare_sources(
    folder: Path, root: Path, results: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Source notebooks that changed since they were executed, and files that do not fit.

    Args:
        folder: committed report folder.
        root: the checkout.
        results: its results by stem.
    """
    manifest = load_manifest(folder)
    listed = {} if manifest is None else manifest["notebooks"]
    lines = [] if manifest is not None else ["manifest.json is missing: build the report again"]
    for stem, spec in NOTEBOOKS.items():
        source, executed = root / "notebooks" / f"{stem}.ipynb", folder / f"{stem}.ipynb"
        if stem not in results:
            if not spec.planned and source.is_file():
                lines.append(f"{stem}: not in this report")
            continue
        if not executed.is_file():
            lines.append(f"{stem}: a result without its executed notebook")
            continue
        ran = source_sha256(executed)
        now = source_sha256(source) if source.is_file() else "missing"
        if now != ran:
            lines.append(
                f"notebooks/{stem}.ipynb: SHA-256 of its cells is {now[:12]}, the report was made "
                f"from {ran[:12]}"
            )
        notebook = read_notebook(executed)
        if complaint := stderr_of(notebook):
            lines.append(f"{stem}: its page shows what went to stderr: {complaint}")
        try:
            held = extract_result(notebook)
        except NotebookFailed as error:
            held = {"fault": str(error)}
        if held != results[stem]:
            lines.append(f"{stem}.json: not the result that {stem}.ipynb holds")
        entry = listed.get(stem, {})
        if manifest is not None and (
            entry.get("source_sha256") != ran
            or entry.get("executed_sha256") != hashlib.sha256(executed.read_bytes()).hexdigest()
        ):
            lines.append(f"{stem}: not the executed notebook that manifest.json names")
    return lines


def stderr_of(notebook: Mapping[str, Any]) -> str:
    """First line that a cell of an executed notebook wrote to stderr; empty if none did.

    A page shows it, though it speaks of the machine that executed the notebook.
    """
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream" and output["name"] == "stderr":
                return "".join(output["text"]).strip().partition("\n")[0]
    return ""


def compare_verdicts(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Verdicts that a rebuild gives otherwise than the committed results.

    What was found counts too, but for simulations: their figures may move with a library's version
    while the verdict stands.

    Args:
        before, after: results by stem.
    """
    lines = []
    for stem, result in before.items():
        if stem not in after:
            lines.append(f"{stem}: no result when rebuilt")
            continue
        old, new = _verdicts(result), _verdicts(after[stem])
        for key in old.keys() | new.keys():
            was, now = old.get(key), new.get(key)
            if was is None or now is None:
                lines.append(f"{key}: {_said(was)} in the report, {_said(now)} when rebuilt")
            elif was["verdict"] != now["verdict"]:
                lines.append(f"{key}: '{was['verdict']}' became '{now['verdict']}'")
            elif was["value"] != now["value"] and was["evidence"] != Evidence.SIMULATED:
                lines.append(f"{key}: found was '{was['value']}', is '{now['value']}'")
    return sorted(lines)


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    loaded = {stem: load_result(folder, stem) for stem in NOTEBOOKS}
    return {stem: result for stem, result in loaded.items() if result is not None}


def _verdicts(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {f"{one['claim']}/{one['evidence']}": one for one in result["verdicts"]}


def _said(verdict: Mapping[str, Any] | None) -> str:
    return "nothing" if verdict is None else f"'{verdict['verdict']}'"
