"""What is said about neighbours, and what the claim about them gets, from made-up rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from colocation_made_up import SLOWER, record

from atom.evidence import Evidence
from atom.workbook import colocation_analysis, colocation_findings
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.records import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("colocation"))


def test_only_figures_apart_from_alone_are_named(run: Run) -> None:
    rows = colocation_analysis.observed_rows([run])
    *said, head = colocation_findings.changed_sentences(rows)
    assert "intervals of 95%" in head
    named = " ".join(said)
    assert "hold/c32/4GiB beside copy x3, over alone: throughput 0.90" in named
    assert "decode step" not in named
    once = [row for row in rows if not row["repeat"]]
    [nothing] = colocation_findings.changed_sentences(once)
    assert "nothing is shown" in nothing


def test_prefill_that_copies_lengthen_has_its_cause_left_open(run: Run) -> None:
    rows = colocation_analysis.observed_rows([run])
    assert not any("open" in text for text in colocation_findings.copy_sentences(rows))
    slowed = [
        {
            **row,
            "prefill_step_p50_ms": 15.0 if row["neighbour"] == "copy" else 10.0 + row["repeat"] / 4,
            "prefill_us_per_token": 5.0,
            "decode_step_p50_ms": 2.0,
        }
        for row in rows
    ]
    *found, why = colocation_findings.copy_sentences(slowed)
    assert len(found) == 4
    assert "is open" in why
    assert "hypothesis" in why


def test_what_follows_is_what_was_shown(run: Run, tmp_path: Path) -> None:
    rows = colocation_analysis.observed_rows([run])
    sweep, race = colocation_findings.consequence_sentences(rows, [run])
    assert sweep == "Points whose times are compared must not run side by side here."
    assert "2 rates lie higher" in race
    noisy = record(tmp_path, 0.05, neighbours=["sweep"], race=False)
    [text] = colocation_findings.consequence_sentences(
        colocation_analysis.observed_rows([noisy]), [noisy]
    )
    assert "is open" in text
    assert "not compared" in colocation_findings.node_sentences(noisy)[0]
    assert "0.927" in colocation_findings.published_sentence()


@pytest.mark.parametrize(
    ("slower", "noise", "expected"),
    [
        (0.80, 0.001, Verdict.INCONCLUSIVE),
        (0.90, 0.2, Verdict.INCONCLUSIVE),
        (0.99, 0.001, Verdict.DIFFERS),
    ],
)
def test_copies_explain_the_published_pair_never_by_size_alone(
    slower: float,
    noise: float,
    expected: Verdict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SLOWER, "copy", slower)
    one = record(tmp_path, noise, neighbours=["copy"], neighbour_counts=[1], race=False)
    given = colocation_findings.copy_arguments([one])
    found = judge(load_claims()["thr-14"], Evidence.MEASURED, **given)
    assert found.verdict is expected
    assert found.run_ids == (one.provenance.run_id,)


def test_without_a_copying_neighbour_the_claim_is_not_run(tmp_path: Path) -> None:
    one = record(tmp_path, neighbours=["compute"], race=False)
    given = colocation_findings.copy_arguments([one])
    assert judge(load_claims()["thr-14"], Evidence.MEASURED, **given).verdict is Verdict.NOT_RUN
