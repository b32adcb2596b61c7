"""The first page: coverage by version, and a ledger that works with missing and damaged results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import throughput_points_made_up

from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook import figures_summary, summary
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.published_cells import published_cells
from atom.workbook.published_derived import version_matrix

matplotlib.use("Agg")
CLAIMS = load_claims()


def _write(folder: Path, stem: str, *settled: object) -> None:
    verdicts = [json.loads(one.model_dump_json()) for one in settled]  # type: ignore[attr-defined]
    (folder / f"{stem}.json").write_text(json.dumps({"verdicts": verdicts}), encoding="utf-8")


def test_every_published_cell_has_words_and_every_hole_has_none() -> None:
    words, counts = published_cells(), version_matrix().set_index("experiment")
    for experiment, row in counts.iterrows():
        for protocol, count in row.items():
            assert ((experiment, protocol) in words) == isinstance(count, str), experiment
    assert set(words) <= {(e, p) for e in counts.index for p in counts.columns}
    assert words["race micro-benchmark", "unpatched"] == "0/200, 200/200, 99/100, 0/100 stale"
    assert words["offload hours, crash or not", "unpatched"] == "4 of 5 crashed"


def test_without_runs_the_merged_version_has_its_holes() -> None:
    matrix = summary.coverage_matrix(version_matrix(), published_cells(), [])
    assert matrix["race micro-benchmark"]["hold"].state == "nothing"
    assert matrix["race micro-benchmark"]["record_stream"].state == "published alone"
    first, _, last = summary.coverage_sentences(matrix)
    assert "race micro-benchmark" in first
    assert "measured: none" in last
    figures_summary.coverage_figure(matrix)
    plt.close("all")


@pytest.mark.parametrize("kind", [Evidence.MEASURED, Evidence.SIMULATED])
def test_a_run_fills_a_hole_under_its_own_kind_without_the_null_arm(kind: Evidence) -> None:
    trials = pd.DataFrame(
        {
            "arm": ["main/hold", "main/hold", "main/null"],
            "protocol": [CopyProtocol.HOLD, CopyProtocol.HOLD, CopyProtocol.UNPATCHED],
            "is_null": [False, False, True],
            "trials": [40, 40, 40],
        }
    )
    run: Any = SimpleNamespace(
        tables={"trials": trials, "timeline": pd.DataFrame({"arm": ["main/hold"]})},
        provenance=SimpleNamespace(evidence=kind, device="A card", experiment="race"),
    )
    matrix = summary.coverage_matrix(version_matrix(), published_cells(), [run])
    row = matrix[summary.RACE_EXPERIMENT]
    measured = kind is Evidence.MEASURED
    assert row["hold"].state == f"{'measured' if measured else 'simulated'} here alone"
    assert row["hold"].lines == [f"{kind}: A card, 80 trials, 1 arms"]
    assert row["unpatched"].state == "published alone"
    assert f"{kind}: race micro-benchmark" in summary.coverage_sentences(matrix)[-1]


def test_lifetime_trials_fill_their_row_and_leave_the_graph_output_out() -> None:
    trials = pd.DataFrame(
        {
            "path": ["spec_status", "logprobs", "spec_status", "spec_status", "graph_output"],
            "protocol": ["hold", "hold", "hold", "unpatched", "hold"],
            "arm": ["protected", "protected", "control", "control", "protected"],
            "trials": [50, 50, 50, 50, 50],
            "stale": [0, 1, 50, 50, 50],
        }
    )
    provenance = SimpleNamespace(evidence=Evidence.MEASURED, device="A card", experiment="lifetime")
    run: Any = SimpleNamespace(tables={"trials": trials}, provenance=provenance)
    matrix = summary.coverage_matrix(version_matrix(), published_cells(), [run])
    row = matrix[summary.LIFETIME_EXPERIMENT]
    assert row["hold"].measured == ["A card, 0/50, 1/50 stale on 2 paths"]
    assert row["unpatched"].measured == ["A card, 50/50 stale on 1 paths"]
    assert row["zero_copy"].state == "nothing"


def test_throughput_points_fill_the_holes_of_hold(tmp_path: Path) -> None:
    run = throughput_points_made_up.record(tmp_path)
    matrix = summary.coverage_matrix(version_matrix(), published_cells(), [run])
    with_offload = matrix["AgentX throughput with offload"]
    assert with_offload["hold"].state == "measured here alone"
    # two of the grid's pools at two numbers of sessions, twice, and two other chunks of a store
    assert with_offload["hold"].measured == ["NVIDIA H200, 12 points"]
    # without a protection the point without drafts alone lives
    assert with_offload["unpatched"].measured == ["NVIDIA H200, 1 point"]
    crashes = matrix["offload hours, crash or not"]
    assert crashes["unpatched"].measured == ["NVIDIA H200, 4 of 5 points faulty in 5.8 min"]
    assert crashes["hold"].measured[0].startswith("NVIDIA H200, 0 of 12 points faulty")


def test_kinds_of_evidence_never_share_a_line() -> None:
    cell = summary.Coverage("0/200 stale", ["NVIDIA H200, 10 trials"], ["MI355X, 20 trials"])
    assert cell.lines == [
        "published: 0/200 stale",
        "measured: NVIDIA H200, 10 trials",
        "simulated: MI355X, 20 trials",
    ]
    assert cell.state == "published and measured here"


def test_missing_and_damaged_results_are_named_and_hide_nothing(tmp_path: Path) -> None:
    one = judge(CLAIMS["arith-02"], Evidence.ARITHMETIC, value=5)
    _write(tmp_path, "01_fault_arithmetic", one)
    (tmp_path / "02_race_microbenchmark.json").write_text('{"verdicts": [', encoding="utf-8")
    results = summary.load_results(tmp_path)
    assert results.found == ["01_fault_arithmetic"]
    assert [settled.key for settled in results.settled] == ["arith-02/arithmetic"]
    assert results.damaged == ["02_race_microbenchmark"]
    said = " ".join(summary.state_sentences(results, [], [], tmp_path))
    assert "PROBLEM: 02_race_microbenchmark.json" in said

    empty = summary.load_results(tmp_path / "nowhere")
    assert empty.found == []
    assert "02_race_microbenchmark" in empty.missing


def test_the_ledger_has_a_line_for_every_claim_and_evidence() -> None:
    own = summary.own_verdicts(CLAIMS)
    everything = summary.complete(CLAIMS, own, ["02_race_microbenchmark"])
    keys = [one.key for one in everything]
    assert sorted(keys) == sorted(
        f"{claim.id}/{kind}" for claim in CLAIMS.values() for kind in claim.evidence
    )
    waiting = [one for one in everything if one.verdict is Verdict.NOT_RUN]
    reasons = {one.detail for one in waiting if CLAIMS[one.claim].notebook == "02"}
    assert "notebook 02 was not run in this report" in reasons
    table = summary.ledger(CLAIMS, everything)
    assert len(table) == len(everything)
    counts = summary.counts_by_group(CLAIMS, everything)
    assert int(counts.drop(columns="group").to_numpy().sum()) == len(everything)
    assert int(summary.waiting_claims(CLAIMS, everything)["verdicts"].sum()) == len(waiting)
    figures_summary.ledger_figure(counts)
    plt.close("all")


def test_the_share_of_other_hardware_is_one_sentence() -> None:
    (_, none) = summary.ledger_sentences(CLAIMS, [])
    assert none == "No measured verdict is of a claim that names its hardware."
    one = SimpleNamespace(verdict=Verdict.REPRODUCED, same_hardware=False)
    (_, said) = summary.ledger_sentences(CLAIMS, [one])  # type: ignore[list-item]
    assert said == (
        "Of 1 measured verdicts whose claim names its hardware, 1 come from other hardware than "
        "the source's."
    )


def test_a_figure_with_one_tested_verdict_has_a_counterpart() -> None:
    everything = summary.complete(CLAIMS, summary.own_verdicts(CLAIMS), [])
    lonely = set(summary.without_counterpart(CLAIMS, everything)["claim"])
    assert "count-01" in lonely
    assert "acc-01" not in lonely
