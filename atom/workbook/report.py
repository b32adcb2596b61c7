"""The command ``report``: a site or an analysis again, a check, an acceptance."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from atom.errors import BadInput
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.parameters import resolve_target
from atom.workbook.results import load_result
from atom.workbook.sweep_progress import TerminalProgress

if TYPE_CHECKING:
    from atom.workbook.report_check import Check


def report(options: Namespace, root: Path) -> int:
    """Do what the options ask for.

    Args:
        options: parsed command line of ``python -m atom report``.
        root: the checkout.

    Returns:
        Exit code: 0, 1 (a claim fell, a report differs), 2 (bad input) or 3 (a notebook failed).

    Raises:
        BadInput: options that do not go together, nothing to build from.
    """
    if (options.accept is None) != (options.reason is None):
        raise BadInput("--accept CLAIM and --reason TEXT go together")
    if options.paths and options.accept is not None:
        raise BadInput("--accept goes with --profile or --out, not with records")
    if options.profile == "gpu":
        raise BadInput("--profile gpu: name the machine, as its folder in reports/ is called")
    if options.check:
        if not options.paths:
            raise BadInput("--check needs the report folder, e.g. --check reports/h200")
        if options.out is not None or options.profile is not None:
            raise BadInput("--check compares with the folder given; it takes no --out or --profile")
        return _check([Path(path) for path in options.paths], root, as_json=options.json)
    if options.paths:
        return _rebuild(options, root)
    return _build(options, root)


def _build(options: Namespace, root: Path) -> int:
    """Build the site from executed notebooks, after accepting verdicts if asked."""
    from atom.workbook.notebooks import NOTEBOOKS
    from atom.workbook.site import build_site, collect_settled

    target = resolve_target(options.profile or "ci", options.out, root)
    results = {stem: load_result(target.folder, stem) for stem in NOTEBOOKS}
    found = {stem: result for stem, result in results.items() if result is not None}
    if not found:
        raise BadInput(
            f"{_shown(target.folder, root)} holds no results; "
            f"first: python -m atom run --profile {target.profile}"
        )
    if options.accept is not None:
        from atom.workbook.claims import accept

        settled = [one for _, one in collect_settled(found).values()]
        accepted = accept(target.profile, options.accept, options.reason, settled)
    else:
        accepted = []
    refuse_unwritable(target.folder, "report folder")
    pages = TerminalProgress(name="site", unit="pages")
    index = _shown(build_site(target.folder, target.profile, pages), root)
    if options.json:
        print(json.dumps({"format": 1, "accepted": accepted, "site": index}, indent=1))
        return 0
    verdicts = {one.key: one.verdict for _, one in collect_settled(found).values()}
    for key in accepted:
        how = f"as '{verdicts[key]}'" if key in verdicts else "withdrawn: it is settled no more"
        print(f"accepted: {key} {how}")
    print(index)
    return 0


def _rebuild(options: Namespace, root: Path) -> int:
    """Execute the notebooks on recorded rows and build their site."""
    from atom.workbook.ci_output import tell
    from atom.workbook.commands import run_json, run_table
    from atom.workbook.report_rebuild import make_plan, rebuild
    from atom.workbook.site import build_site

    plan = make_plan(options.paths, root, options.profile)
    for problem in plan.problems:
        print(f"left out: {problem}", file=sys.stderr)
    out = plan.folder or root / "reports" / plan.profile
    if options.out is not None:
        out = Path(options.out)
    report = rebuild(plan, out, root)
    for stem, execution in report.executions.items():
        if execution.message:
            print(f"\n{stem}: {execution.state}\n{execution.message}", file=sys.stderr)
    out = out.resolve()
    index = build_site(out, plan.profile, TerminalProgress(name="site", unit="pages"))
    tell(report.executions, out, plan.profile)
    if options.json:
        print(run_json(report, out, plan.profile, root))
        return report.exit_code
    print(run_table(report, out))
    print(_shown(index, root))
    return report.exit_code


def _check(folders: Sequence[Path], root: Path, *, as_json: bool) -> int:
    """Compare reports with what their sources and rows give."""
    from atom.workbook.report_check import check_report

    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise BadInput(f"report --check: no such folder: {', '.join(missing)}")
    checks = {_shown(folder.resolve(), root): check_report(folder, root) for folder in folders}
    if as_json:
        values = {name: asdict(one) for name, one in checks.items()}
        print(json.dumps({"format": 1, "reports": values}, indent=1))
    for name, check in checks.items():
        if not as_json:
            _tell_check(name, check)
    return max(check.exit_code for check in checks.values())


def _tell_check(name: str, check: Check) -> None:
    if not check.differences:
        print(f"{name}: {check.notebooks} notebooks and {check.verdicts} verdicts as committed")
    else:
        for line in check.differences:
            print(f"{name}: {line}", file=sys.stderr)
        print(
            f"{name} is not what its sources and rows give. If the change is meant:\n"
            f"  python -m atom report {name}\nthen look at it and commit it.",
            file=sys.stderr,
        )


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
