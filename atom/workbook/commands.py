"""The commands ``run`` and ``devices``: what they do and what they print."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.workbook.ci_output import CLAIMS_FILE, tell
from atom.workbook.parameters import read_given, resolve_target
from atom.workbook.results import count_verdicts, load_result
from atom.workbook.runner import RunReport, run_notebooks, select


def run(options: Namespace, root: Path) -> int:
    """Execute notebooks, build the site, print a table of what was found.

    Args:
        options: parsed command line of ``python -m atom run``.
        root: the checkout.

    Returns:
        Exit code: 0, 1 (a claim fell), 2 (bad input) or 3 (a notebook failed).
    """
    given = read_given(options.parameters, options.file)
    specs = select(options.notebooks, root)
    target = resolve_target(options.profile, options.out, root)
    # two notebooks on one GPU would delay each other's copies
    jobs = options.jobs if options.jobs is not None else (1 if target.option == "gpu" else 2)
    report = run_notebooks(
        specs,
        given,
        target,
        root,
        jobs=jobs,
        force=options.force,
        time_limit=options.time_limit,
    )
    for stem, execution in report.executions.items():
        if execution.message:
            print(f"\n{stem}: {execution.state}\n{execution.message}", file=sys.stderr)
    index = _build(target.folder, target.profile, fresh=not report.executed)
    tell(report.executions, target.folder, target.profile)
    if options.json:
        print(run_json(report, target.folder, target.profile, root))
        return report.exit_code
    if not report.executed:
        print("nothing changed, nothing executed (--force executes all)")
    print(run_table(report, target.folder))
    print(_shown(index, root))
    return report.exit_code


def run_json(report: RunReport, folder: Path, profile: str, root: Path) -> str:
    """What a run did, as JSON: exit code, notebooks with their states, paths of what it wrote.

    Args:
        report: of the run.
        folder: report folder.
        profile: of the report.
        root: the checkout; paths below it are relative to it.
    """
    notebooks = {}
    for stem, execution in sorted(report.executions.items()):
        result = load_result(folder, stem) if execution.state in ("finished", "fell") else None
        failed = folder / f"{stem}.failed.ipynb"
        notebooks[stem] = {
            "state": execution.state,
            "executed": stem in report.executed,
            "seconds": execution.seconds,
            "budget_seconds": execution.budget_seconds,
            "message": execution.message,
            "claims": count_verdicts(result["verdicts"] if result else ()),
            "partial": _shown(failed, root) if failed.is_file() else None,
        }
    values: dict[str, Any] = {
        "format": 1,
        "exit_code": report.exit_code,
        "profile": profile,
        "site": _shown(folder / "index.html", root),
        "claims": _shown(folder / CLAIMS_FILE, root),
        "notebooks": notebooks,
    }
    return json.dumps(values, indent=1)


def _build(folder: Path, profile: str, *, fresh: bool) -> Path:
    """Build the site unless nothing was executed and it is complete."""
    # the site's modules take time to load, and a run without changes answers at once
    from atom.workbook.results import site_is_complete

    if fresh and site_is_complete(folder):
        return folder / "index.html"
    from atom.workbook.site import build_site
    from atom.workbook.sweep_progress import TerminalProgress

    return build_site(folder, profile, TerminalProgress(name="site", unit="pages"))


def run_table(report: RunReport, folder: Path) -> str:
    """Notebook, seconds, budget and claims by verdict, as aligned text.

    Args:
        report: of the run.
        folder: report folder, for the results.
    """
    rows = [("notebook", "seconds", "budget", "claims by verdict")]
    for stem, execution in sorted(report.executions.items()):
        result = load_result(folder, stem) if execution.state in ("finished", "fell") else None
        counts = count_verdicts(result["verdicts"] if result else ())
        claims = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none"
        if execution.state != "finished":
            claims = f"{execution.state.upper()}; {claims}"
        if stem not in report.executed and execution.state == "finished":
            claims += " (unchanged)"
        over = "!" if execution.seconds > execution.budget_seconds else ""
        seconds = f"{execution.seconds:.1f}{over}"
        rows.append((stem, seconds, str(execution.budget_seconds), claims))
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as columns; all but the first and the last to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [text.rjust(width) for text, width in zip(row[1:-1], widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def devices(*, as_json: bool = False) -> int:
    """Print what this machine can run on.

    Args:
        as_json: as JSON in place of a table.
    """
    from atom.device import describe_devices

    inventory = describe_devices()
    listed = [*inventory.accelerators, *inventory.profiles]
    if as_json:
        values = {
            "format": 1,
            "torch": inventory.torch,
            "no_accelerator": inventory.reason,
            "devices": [
                {
                    "name": properties.name,
                    "kind": properties.kind.value,
                    "evidence": str(properties.evidence),
                    "machine": properties.machine,
                    "memory_bytes": properties.memory_bytes,
                    "hardware_queues": properties.hardware_queues,
                    "driver": properties.driver,
                    "runtime": properties.runtime,
                }
                for properties in listed
            ],
        }
        print(json.dumps(values, indent=1))
        return 0
    rows = [("device", "kind", "memory GiB", "queues", "driver", "runtime")]
    for properties in listed:
        queues = properties.hardware_queues
        rows.append(
            (
                properties.name,
                properties.kind.value,
                f"{properties.memory_bytes / 2**30:.0f}",
                "?" if queues is None else str(queues),
                properties.driver or "-",
                properties.runtime,
            )
        )
    print(align(rows))
    print(f"torch {inventory.torch}")
    if inventory.reason is not None:
        print(f"no accelerator: {inventory.reason}")
    return 0


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
