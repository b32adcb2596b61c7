"""The command ``report``: a site or an analysis again, a check, an acceptance."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from atom.errors import BadInput
from atom.workbook.parameters import resolve_target
from atom.workbook.results import load_result


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
        return max(_check(Path(path), root) for path in options.paths)
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
        for key in accept(target.profile, options.accept, options.reason, settled):
            print(f"accepted: {key}")
    print(_shown(build_site(target.folder, target.profile), root))
    return 0


def _rebuild(options: Namespace, root: Path) -> int:
    """Execute the notebooks on recorded rows and build their site."""
    from atom.workbook.commands import run_table
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
    index = build_site(out.resolve(), plan.profile)
    print(run_table(report, out))
    print(_shown(index, root))
    return report.exit_code


def _check(folder: Path, root: Path) -> int:
    """Compare one report with what its sources and rows give."""
    from atom.workbook.report_check import check_report

    name = _shown(folder.resolve(), root)
    if not folder.exists():
        print(f"skipped: {name} does not exist, so there is nothing to check")
        return 0
    check = check_report(folder, root)
    if not check.differences:
        print(f"{name}: {check.notebooks} notebooks and {check.verdicts} verdicts as committed")
        return check.exit_code
    for line in check.differences:
        print(f"{name}: {line}", file=sys.stderr)
    print(
        f"{name} is not what its sources and rows give. If the change is meant:\n"
        f"  python -m atom report {name}\nthen look at it and commit it.",
        file=sys.stderr,
    )
    return check.exit_code


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
