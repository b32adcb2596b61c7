"""Analysis again from recorded rows alone: notebooks and site, on any CPU, without an experiment.

What is rebuilt comes either from run folders (a new report about these runs) or from a report
folder (the same notebooks with the same parameters on the rows that they cite).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.kernels import refuse_unwritable
from atom.workbook.notebooks import NOTEBOOKS, NotebookSpec, execution_order
from atom.workbook.parameters import ReportTarget
from atom.workbook.records import Run, load_run
from atom.workbook.report_manifest import cited_runs
from atom.workbook.results import load_result
from atom.workbook.run_writer import RUN_FILE
from atom.workbook.runner import RunReport, run_notebooks
from atom.workbook.tables import shown_path

_SUMMARY = "00_summary"
#: never taken over from an earlier execution: where it ran, and what it read
_OWN = ("profile", "device", "records", "results")


@dataclass(frozen=True)
class Plan:
    """What a rebuild executes.

    Attributes:
        profile: report and accepted-verdict set, a machine's slug or ``ci``.
        parameters: stem of each notebook to its parameters, ``records`` among them.
        folder: report folder that it starts from; ``None`` for run folders.
        problems: runs that cannot be used, and why.
        own_runs: the summary reads, beside its records, what the rebuild itself simulates.
    """

    profile: str
    parameters: Mapping[str, Mapping[str, Any]]
    folder: Path | None = None
    problems: tuple[str, ...] = field(default=())
    own_runs: bool = False


def make_plan(paths: Sequence[str], root: Path, profile: str | None = None) -> Plan:
    """What the paths on the command line ask for.

    Args:
        paths: run folders, parents of run folders, a file of a run; or one report folder, or
            executed notebooks or results of one.
        root: the checkout.
        profile: name of the report, if not that of the runs' machine.

    Raises:
        BadInput: nothing to rebuild from, runs of several machines, or a mixture.
    """
    given = [Path(path) for path in paths]
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        raise BadInput(f"no such file or folder: {', '.join(missing)}")
    reports = {folder for path in given if (folder := _report_of(path)) is not None}
    if not reports:
        return plan_from_runs(given, root, profile)
    if len(reports) > 1 or any(_report_of(path) is None for path in given):
        raise BadInput("give run folders, or one report folder; not both, and not two reports")
    stems = {path.stem for path in given if path.is_file()}
    return plan_from_report(reports.pop(), root, stems if not any(map(Path.is_dir, given)) else ())


def plan_from_runs(paths: Iterable[Path], root: Path, profile: str | None = None) -> Plan:
    """A report about recorded runs: each notebook that reads rows of theirs, or none at all.

    Raises:
        BadInput: no usable run, or measured runs of several machines and no ``profile``.
    """
    runs, problems = _load(paths)
    if not runs:
        raise BadInput("no recorded run to rebuild from:\n" + "\n".join(problems))
    machines = sorted(
        {r.provenance.machine for r in runs if r.provenance.evidence is Evidence.MEASURED}
    )
    if profile is None and len(machines) > 1:
        raise BadInput(
            f"runs of several machines ({', '.join(machines)}): a report is about one; "
            "give its runs alone, or name the report with --profile"
        )
    parameters: dict[str, dict[str, Any]] = {}
    present = {run.provenance.experiment for run in runs}
    for stem, spec in NOTEBOOKS.items():
        if spec.planned or (spec.experiment is not None and spec.experiment not in present):
            continue
        if spec.reads and not spec.reads & present:
            continue
        chosen = [
            _relative(run.path, root)
            for run in runs
            if stem == _SUMMARY or run.provenance.experiment in spec.reads
        ]
        parameters[stem] = {"records": chosen} if chosen else {}
    name = profile or (machines[0] if machines else "ci")
    return Plan(name, parameters, problems=tuple(problems), own_runs=True)


def plan_from_report(folder: Path, root: Path, stems: Iterable[str] = ()) -> Plan:
    """The notebooks of a report again, with their parameters, on the runs that they cite.

    Simulated rows are made again, which gives the same ones.

    Args:
        folder: report folder.
        root: the checkout; its ``data/runs`` is searched for the cited runs.
        stems: notebooks of it; all by default.

    Raises:
        BadInput: no result, results of several profiles, or measured rows that are not here.
    """
    wanted = set(stems)
    results = {
        stem: result
        for stem, spec in NOTEBOOKS.items()
        if not spec.planned and (not wanted or stem in wanted)
        if (result := load_result(folder, stem)) is not None
    }
    if not results:
        raise BadInput(f"{shown_path(folder)}: holds no result of a notebook")
    profiles = {str(result["profile"]) for result in results.values()}
    if len(profiles) > 1:
        raise BadInput(f"{shown_path(folder)}: results of several profiles: {sorted(profiles)}")
    known = _known_runs(results.values(), root)
    # what the report itself simulated is deleted when its notebook is executed again
    own_runs = (folder / "runs").resolve()
    kept_runs = {
        name: path for name, path in known.items() if not path.resolve().is_relative_to(own_runs)
    }
    parameters = {stem: _again(stem, result, kept_runs, root) for stem, result in results.items()}
    read = results.get(_SUMMARY, {"settings": {}})["settings"].get("records", ())
    # an executed notebook names its report's folder "report" where that lay outside of the checkout
    own = [name for name in read if name == "report/runs" or _same(root / name, folder / "runs")]
    kept = [name for name in read if name not in own and (root / name).exists()]
    if kept:
        parameters[_SUMMARY]["records"] = kept
    return Plan(profiles.pop(), parameters, folder, own_runs=bool(own))


def rebuild(plan: Plan, out: Path, root: Path) -> RunReport:
    """Execute a plan's notebooks into ``out``. The site is the caller's to build.

    Args:
        plan: what to execute.
        out: report folder to write.
        root: the checkout.

    Raises:
        BadInput: parameters that today's notebooks refuse.
    """
    refuse_unwritable(out, "report folder")
    # "ci" stands for the virtual device; the name of the report does not depend on it
    target = ReportTarget(option="ci", profile=plan.profile, folder=out.resolve())
    parameters = {stem: dict(values) for stem, values in plan.parameters.items()}
    if plan.own_runs and parameters.get(_SUMMARY, {}).get("records"):
        own = out.resolve() / "runs"
        own.mkdir(parents=True, exist_ok=True)
        records = parameters[_SUMMARY]["records"]
        parameters[_SUMMARY]["records"] = [*records, _relative(own, root)]
    specs = execution_order(NOTEBOOKS[stem] for stem in parameters)
    reports = [
        run_notebooks(list(group), json.loads(text), target, root, force=True)
        for text, group in groupby(specs, key=lambda spec: json.dumps(parameters[spec.stem]))
    ]
    return RunReport(
        {stem: one for report in reports for stem, one in report.executions.items()},
        tuple(stem for report in reports for stem in report.executed),
        max(report.exit_code for report in reports),
    )


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _report_of(path: Path) -> Path | None:
    """Report folder that ``path`` is or lies in; ``None`` for runs."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.stem not in NOTEBOOKS:
        return None
    return folder if any((folder / f"{stem}.json").is_file() for stem in NOTEBOOKS) else None


def _load(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    runs: dict[str, Run] = {}
    problems = []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        places = [folder] if (folder / RUN_FILE).is_file() else _run_folders(folder)
        if path.is_file() and not (folder / RUN_FILE).is_file():
            # other runs may lie below its folder, which nobody named
            places = []
            problems.append(f"{shown_path(path)}: no file of a run (no {RUN_FILE} beside it)")
        elif not places:
            problems.append(f"{shown_path(path)}: holds no run (no {RUN_FILE} in it or below it)")
        for place in places:
            try:
                run = load_run(place)
                runs.setdefault(run.provenance.run_id, run)
            except BadInput as error:
                problems.append(str(error))
    return list(runs.values()), problems


def _run_folders(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.rglob(RUN_FILE))


def _known_runs(results: Iterable[Mapping[str, Any]], root: Path) -> dict[str, Path]:
    """Run folders by id, below ``data/runs`` and whatever the results say that they read."""
    places = {root / "data" / "runs"}
    for result in results:
        for name in ("records", "measured"):
            places.update(root / place for place in result["settings"].get(name, ()))
    folders = [folder for place in places if place.is_dir() for folder in _run_folders(place)]
    return {folder.name: folder for folder in folders}


def _again(
    stem: str, result: Mapping[str, Any], known: Mapping[str, Path], root: Path
) -> dict[str, Any]:
    """Parameters of one notebook that differ from today's defaults, and its records."""
    spec: NotebookSpec = NOTEBOOKS[stem]
    defaults = json.loads(spec.settings.parse({}).model_dump_json())
    values = {
        name: value
        for name, value in result["settings"].items()
        if name not in _OWN and (name not in defaults or defaults[name] != value)
    }
    if not spec.reads:
        return values
    cited = cited_runs(result)
    lost = {
        run_id
        for verdict in result["verdicts"]
        if verdict["evidence"] == Evidence.MEASURED
        for run_id in verdict["run_ids"]
    } - set(known)
    if lost:
        raise BadInput(
            f"{stem}: its measured verdicts rest on rows that are not in data/runs: "
            f"{', '.join(sorted(lost))}"
        )
    records = [_relative(known[run_id], root) for run_id in cited if run_id in known]
    return {**values, "records": records} if records else values


def _relative(path: Path, root: Path) -> str:
    """As a notebook sees it, whose working directory is the checkout."""
    full = path.resolve()
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else str(full)
