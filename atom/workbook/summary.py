"""What the first page needs: which version was measured where, and the ledger of all claims."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pandas import DataFrame
from pydantic import ValidationError

from atom.config import CopyProtocol
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.claims import Claim, Predicate, Settled, Verdict, judge, unsettled
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.published_checks import run_checks
from atom.workbook.records import Run
from atom.workbook.results import VERDICT_ORDER, count_verdicts, load_result
from atom.workbook.throughput_analysis import is_ok, rows_of, shows_fault

#: row of the coverage that the race micro-benchmark's runs fill
RACE_EXPERIMENT = "race micro-benchmark"
LIFETIME_EXPERIMENT = "lifetime test, trials"
#: rows that throughput runs fill: without offload, with offload, and how the latter ended
THROUGHPUT_EXPERIMENTS = ("AgentX throughput without offload", "AgentX throughput with offload")
CRASHES = "offload hours, crash or not"


@dataclass
class Coverage:
    """What exists for one experiment and one protocol, by kind of evidence. Kinds stay apart."""

    published: str | None = None
    measured: list[str] = field(default_factory=list)
    simulated: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """One of the keys of ``figures_summary.COVERAGE_STYLE``."""
        if self.published and self.measured:
            return "published and measured here"
        if self.measured:
            return "measured here alone"
        if self.published and self.simulated:
            return "published and simulated here"
        if self.simulated:
            return "simulated here alone"
        return "published alone" if self.published else "nothing"

    @property
    def lines(self) -> list[str]:
        """What stands in the cell: published first, then ours."""
        said = [f"published: {self.published}"] if self.published else []
        said += [f"measured: {text}" for text in self.measured]
        return said + [f"simulated: {text}" for text in self.simulated]


CoverageMatrix = dict[str, dict[str, Coverage]]


def coverage_matrix(
    published: DataFrame, values: Mapping[tuple[str, str], str], runs: Iterable[Run]
) -> CoverageMatrix:
    """Experiment by protocol: what the source published and what recorded runs add.

    Args:
        published: ``published_derived.version_matrix()``: which figures exist at all.
        values: ``published_cells.published_cells()``: what they say.
        runs: recorded runs of the race, of the lifetime paths and of throughput, of any evidence.
    """
    protocols = [str(protocol) for protocol in CopyProtocol]
    matrix: CoverageMatrix = {}
    for line in published.to_dict("records"):
        experiment = str(line["experiment"])
        matrix[experiment] = {}
        for protocol in protocols:
            count = line.get(protocol)
            known = values.get((experiment, protocol), count) if isinstance(count, str) else None
            matrix[experiment][protocol] = Coverage(known)
    for run in runs:
        kind = run.provenance.evidence
        for experiment, counts in _counts(run).items():
            for protocol, text in counts.items():
                cell = matrix[experiment][protocol]
                kept = cell.measured if kind is Evidence.MEASURED else None
                kept = cell.simulated if kind is Evidence.SIMULATED else kept
                if kept is not None:
                    kept.append(text)
    return matrix


def _counts(run: Run) -> dict[str, dict[str, str]]:
    """What one run adds: words by row of the matrix and protocol."""
    if run.provenance.experiment == "lifetime":
        return {LIFETIME_EXPERIMENT: _lifetime_counts(run)}
    if run.provenance.experiment == "throughput":
        return _throughput_counts(run)
    return {RACE_EXPERIMENT: _race_counts(run)}


def _race_counts(run: Run) -> dict[str, str]:
    """Trials by protocol of one run, the null arm left out."""
    tables = [table for table in run.tables.values() if {"trials", "arm"} <= set(table.columns)]
    counts: dict[str, str] = {}
    for table in tables:
        rows = table[~table["is_null"].astype(bool)]
        for protocol, group in rows.groupby(rows["protocol"].astype(str)):
            trials = int(group["trials"].sum())
            counts[str(protocol)] = (
                f"{run.provenance.device}, {trials:,} trials, {group['arm'].nunique()} arms"
            )
    return counts


def _lifetime_counts(run: Run) -> dict[str, str]:
    """Stale trials a path by protocol: with the protocol in force; unpatched has none to take."""
    rows = run.tables["trials"]
    protocols = rows["protocol"].astype(str)
    arm = ["control" if protocol == "unpatched" else "protected" for protocol in protocols]
    rows = rows[(rows["arm"].astype(str) == arm) & (rows["path"].astype(str) != "graph_output")]
    counts = {}
    for protocol, group in rows.groupby(rows["protocol"].astype(str)):
        pairs = sorted({(int(r["stale"]), int(r["trials"])) for r in group.to_dict("records")})
        stale = ", ".join(f"{stale}/{trials}" for stale, trials in pairs)
        counts[str(protocol)] = (
            f"{run.provenance.device}, {stale} stale on {group['path'].nunique()} paths"
        )
    return counts


def _throughput_counts(run: Run) -> dict[str, dict[str, str]]:
    """Points by protocol without and with offload, and how many of the latter showed the fault."""
    rows = [row for row in rows_of([run]) if row["protocol"] and row["exposure_seconds"]]
    found: dict[str, dict[str, str]] = {name: {} for name in (*THROUGHPUT_EXPERIMENTS, CRASHES)}
    for protocol in dict.fromkeys(str(row["protocol"]) for row in rows):
        for experiment, offload in zip(THROUGHPUT_EXPERIMENTS, (False, True), strict=True):
            own = [row for row in rows if row["protocol"] == protocol]
            own = [row for row in own if (row["pool_gib"] is not None) is offload]
            served = sum(is_ok(row) for row in own)
            if served:
                points = "point" if served == 1 else "points"
                found[experiment][protocol] = f"{run.provenance.device}, {served} {points}"
            if own and offload:
                seconds = sum(row["exposure_seconds"] for row in own)
                time = f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
                faulty = sum(shows_fault(row) for row in own)
                found[CRASHES][protocol] = (
                    f"{run.provenance.device}, {faulty} of {len(own)} points faulty in {time}"
                )
    return found


def coverage_table(matrix: CoverageMatrix) -> DataFrame:
    """The matrix as text, one column a protocol."""
    return DataFrame(
        [
            {
                "experiment": experiment,
                **{
                    protocol: "; ".join(cell.lines) or "no figure" for protocol, cell in row.items()
                },
            }
            for experiment, row in matrix.items()
        ]
    )


@dataclass(frozen=True)
class Results:
    """Result files of the other notebooks.

    Attributes:
        settled: their verdicts.
        found: stems that have a result file.
        missing: stems that are written but not executed in this report.
        damaged: stems whose file cannot be used.
        problems: why, one line each.
    """

    settled: list[Settled]
    found: list[str]
    missing: list[str]
    damaged: list[str]
    problems: list[str]


def load_results(folder: Path) -> Results:
    """Read every other notebook's ``<stem>.json``. A damaged file hides no other."""
    settled: dict[str, Settled] = {}
    found: list[str] = []
    missing: list[str] = []
    damaged: list[str] = []
    problems: list[str] = []
    for stem, spec in NOTEBOOKS.items():
        if stem == "00_summary" or spec.planned:
            continue
        try:
            result = load_result(folder, stem)
            if result is None:
                missing.append(stem)
                continue
            verdicts = [
                Settled.model_validate_json(json.dumps(verdict)) for verdict in result["verdicts"]
            ]
        except (BadInput, ValidationError, KeyError, TypeError) as error:
            damaged.append(stem)
            problems.append(f"{stem}.json cannot be used: {error}")
            continue
        settled.update({one.key: one for one in verdicts})
        found.append(stem)
    return Results(list(settled.values()), found, missing, damaged, problems)


def run_folders(records: Sequence[str], report_folder: Path) -> list[Path]:
    """Where recorded runs lie: the given folders, or the committed ones and this report's own."""
    folders = [Path(folder) for folder in records] or [Path("data/runs"), report_folder / "runs"]
    return [folder for folder in folders if folder.is_dir() or records]


def state_sentences(
    results: Results, runs: Sequence[Run], run_problems: Sequence[str], folder: Path
) -> list[str]:
    """What this page found to read, and what it did not."""
    lines = [
        f"Result files read from {folder.name}: {', '.join(results.found) or 'none'}.",
        f"Not run in this report: {', '.join(results.missing) or 'none'}.",
        f"Recorded race runs: {len(runs)}"
        + "".join(
            f"; {run.provenance.device} ({run.provenance.evidence}), {run.provenance.exit_state}"
            for run in runs
        )
        + ".",
    ]
    lines += [f"PROBLEM: {problem}" for problem in [*results.problems, *run_problems]]
    return lines


def written_notebooks() -> set[str]:
    """Numbers of the notebooks that this version has."""
    return {spec.number for spec in NOTEBOOKS.values() if not spec.planned}


def not_run_reasons() -> DataFrame:
    """Each notebook that is only planned, with what waits for it."""
    return DataFrame(
        [
            {"notebook": spec.stem, "title": spec.title, "why": "planned, not written yet"}
            for spec in NOTEBOOKS.values()
            if spec.planned
        ],
        columns=["notebook", "title", "why"],
    )


def complete(
    claims: Mapping[str, Claim], settled: Sequence[Settled], missing: Collection[str]
) -> list[Settled]:
    """All verdicts, with one that says why for each claim that has none, in the claims' order."""
    everything = [*settled, *unsettled(claims.values(), settled, written_notebooks())]
    absent = {stem[:2] for stem in missing}
    order = {identity: number for number, identity in enumerate(claims)}
    result = []
    for one in everything:
        number = claims[one.claim].notebook_for(one.evidence)
        if one.verdict is Verdict.NOT_RUN and number in absent:
            one = one.model_copy(update={"detail": f"notebook {number} was not run in this report"})
        result.append(one)
    return sorted(result, key=lambda one: (order[one.claim], one.evidence))


def ledger(claims: Mapping[str, Claim], settled: Iterable[Settled]) -> DataFrame:
    """Every claim with every verdict, one line each."""
    return DataFrame(
        [
            {
                "claim": one.claim,
                "what is claimed": claims[one.claim].claim,
                "published": claims[one.claim].published_value or "no figure",
                "measured with": claims[one.claim].subject_version,
                "verdict": str(one.verdict),
                "evidence": str(one.evidence),
                "found": one.value or "–",
                "why": one.detail or "–",
                "where": _where(one),
                "notebook": claims[one.claim].notebook_for(one.evidence),
            }
            for one in settled
        ]
    )


def _where(one: Settled) -> str:
    if one.machine is None:
        return "–"
    if one.same_hardware is None:
        return one.machine
    return f"{one.machine} ({'same' if one.same_hardware else 'other'} hardware)"


def counts_by_group(claims: Mapping[str, Claim], settled: Iterable[Settled]) -> DataFrame:
    """Number of verdicts: one row a group of claims, one column a verdict, best first."""
    lines: dict[str, dict[str, int]] = {}
    for one in settled:
        row = lines.setdefault(claims[one.claim].group, dict.fromkeys(VERDICT_ORDER, 0))
        row[str(one.verdict)] += 1
    return DataFrame([{"group": group, **row} for group, row in lines.items()])


def with_verdict(table: DataFrame, *verdicts: str) -> DataFrame:
    """Lines of the ledger with one of these verdicts."""
    return table[table["verdict"].isin(verdicts)]


def without_counterpart(claims: Mapping[str, Claim], settled: Iterable[Settled]) -> DataFrame:
    """Published figures that nothing here tests: no verdict but ``not testable`` or ``not run``."""
    best: dict[str, list[Settled]] = {}
    for one in settled:
        best.setdefault(one.claim, []).append(one)
    silent = (Verdict.NOT_TESTABLE_HERE, Verdict.NOT_RUN)
    table = DataFrame(
        [
            {
                "claim": identity,
                "figure": claims[identity].claim,
                "published": claims[identity].published_value,
                "for ever": "yes" if claims[identity].predicate is Predicate.RECORDED else "no",
                "why": "; ".join(dict.fromkeys(one.detail for one in verdicts)),
            }
            for identity, verdicts in best.items()
            if claims[identity].published_value and all(one.verdict in silent for one in verdicts)
        ],
        columns=["claim", "figure", "published", "for ever", "why"],
    )
    return table.sort_values("for ever", ascending=False, kind="stable")


def waiting_claims(claims: Mapping[str, Claim], settled: Iterable[Settled]) -> DataFrame:
    """Verdicts that were not run, by reason."""
    reasons: dict[str, list[str]] = {}
    for one in settled:
        if one.verdict is Verdict.NOT_RUN:
            reasons.setdefault(one.detail, []).append(f"{one.claim} ({one.evidence})")
    return DataFrame(
        [
            {"reason": reason, "verdicts": len(keys), "claims": ", ".join(keys)}
            for reason, keys in reasons.items()
        ],
        columns=["reason", "verdicts", "claims"],
    )


def ledger_sentences(claims: Mapping[str, Claim], settled: Sequence[Settled]) -> list[str]:
    """How many verdicts of each kind there are, and on what hardware measurements were made."""
    counts = count_verdicts([{"verdict": one.verdict} for one in settled])
    said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    measured = [one for one in settled if one.same_hardware is not None]
    other = sum(not one.same_hardware for one in measured)
    return [
        f"{len(claims)} claims have {len(settled)} verdicts: {said}.",
        f"Of {len(measured)} measured verdicts whose claim names its hardware, {other} come from "
        "other hardware than the source's."
        if measured
        else "No measured verdict is of a claim that names its hardware.",
    ]


def coverage_label(runs: Sequence[Run]) -> str:
    """Words for the stamp of the coverage matrix, which names its own cells' kinds."""
    kinds = sorted({str(run.provenance.evidence) for run in runs} - {"published"})
    return "the source's tables" + (f"; {' and '.join(kinds)} cells say so" if kinds else "")


def coverage_sentences(matrix: CoverageMatrix) -> list[str]:
    """Which holes the merged version has in the source, and which of them runs fill."""
    hold, first = str(CopyProtocol.HOLD), str(CopyProtocol.RECORD_STREAM)
    holes = [name for name, row in matrix.items() if not row[hold].published]
    only_first = [name for name in holes if matrix[name][first].published]
    measured = [name for name in holes if matrix[name][hold].measured]
    simulated = [name for name in holes if matrix[name][hold].simulated]
    return [
        f"Published for {first} and not for the merged version {hold}: {_words(only_first)}.",
        f"Published for neither version of the fix: "
        f"{_words([name for name in holes if name not in only_first])}.",
        f"Holes of {hold} that recorded runs fill, measured: {_words(measured)}; "
        f"simulated: {_words(simulated)}.",
    ]


def own_verdicts(claims: Mapping[str, Claim]) -> list[Settled]:
    """What the published tables settle, and what is only kept for the record, for the ledger.

    The notebook settles the same findings again, one by one, where they can be read.
    """
    settled = [judge(claims[claim], Evidence.ARITHMETIC, **f) for claim, f in run_checks().items()]
    return settled + [
        judge(claim, Evidence.PUBLISHED, testable=False, reason=claim.note or "")
        for claim in recorded_claims(claims)
    ]


def recorded_claims(claims: Mapping[str, Claim]) -> list[Claim]:
    """Claims of this page that nothing here can test."""
    return [
        claim
        for claim in claims.values()
        if claim.notebook == "00" and claim.predicate is Predicate.RECORDED
    ]


def _words(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
