"""The published tables say what the source says, and the checks follow them and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import published_tables
from atom.workbook.claims import Settled, Verdict, judge, load_claims
from atom.workbook.published_checks import run_checks
from atom.workbook.published_derived import (
    agentx_derived,
    correct_items,
    crash_exposure,
    gsm8k_derived,
    version_matrix,
)
from atom.workbook.records import load_published

EXPECTED = {
    "micro-09": Verdict.SOURCE_INCONSISTENT,
    "acc-06": Verdict.SOURCE_INCONSISTENT,
    "acc-07": Verdict.SOURCE_INCONSISTENT,
    "count-08": Verdict.INCONCLUSIVE,
}


def settle_all() -> dict[str, Settled]:
    claims = load_claims()
    return {
        name: judge(claims[name], Evidence.ARITHMETIC, **found)
        for name, found in run_checks().items()
    }


def test_each_claim_that_notebook_00_settles_has_one_check() -> None:
    wanted = {
        claim.id
        for claim in load_claims().values()
        if Evidence.ARITHMETIC in claim.evidence and claim.notebook_for(Evidence.ARITHMETIC) == "00"
    }
    assert set(run_checks()) == wanted


def test_the_verdicts_of_the_published_tables() -> None:
    for name, settled in settle_all().items():
        assert settled.verdict is EXPECTED.get(name, Verdict.REPRODUCED), (name, settled)
        assert settled.value


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Change a published table in a copy."""
    folder = tmp_path / "published"
    shutil.copytree(published_tables.PUBLISHED, folder)
    monkeypatch.setattr(published_tables, "PUBLISHED", folder)

    def change(name: str, before: str, after: str) -> None:
        file = folder / f"{name}.csv"
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))

    return change


@pytest.mark.parametrize(
    ("table", "before", "after", "claims"),
    [
        ("race_microbenchmark", "record_stream", "hold", {"micro-11", "version-01", "version-02"}),
        ("race_microbenchmark", "32,99,100", "32,100,100", {"micro-09"}),
        ("agentx", "61901", "71901", {"thr-12", "thr-13", "thr-27"}),
        ("agentx", "30401", "25401", {"thr-11", "thr-15"}),
        ("agentx", "2277,0,92.5", "2277,0,102.5", {"thr-16"}),
        ("agentx", "repeat,True,64,288.0", "repeat,True,64,280.0", {"thr-25", "thr-26"}),
        ("agentx", "37324", "27324", {"thr-10"}),
        ("agentx", "82938", "92938", {"thr-20", "thr-10"}),
        ("agentx", ",42,", ",43,", {"env-02"}),
        ("gsm8k", "0.9788,,4", "0.9778,,4", {"acc-03", "acc-04", "acc-10"}),
        ("gsm8k", "0.9757,0.978", "0.9757,", {"acc-07"}),
        ("crash_history", "first-fifth,first,,,1,completed", "first-fifth,first,,,1,crashed",
         {"crash-01"}),
        ("crash_history", "19.0,19.0", "9.0,9.0", {"crash-03"}),
        ("crash_history", ",first,32,96.0", ",second,32,96.0", {"crash-06", "crash-05"}),
        ("state_load_failures", "8.6,8.6", "16.0,16.0", {"limit-09"}),
        ("test_counts", "111,", "112,", {"count-03"}),
        ("test_counts", "9814,", "9815,", {"count-05"}),
        ("lifetime_controls", "ell slot,holds", "ell slot,unmodified main", {"life-04"}),
    ],
)  # fmt: skip
def test_a_changed_table_changes_the_verdict(
    edit: Callable[[str, str, str], None],
    table: str,
    before: str,
    after: str,
    claims: set[str],
) -> None:
    original = settle_all()
    edit(table, before, after)
    now = settle_all()
    for name in claims:
        assert now[name].verdict is not original[name].verdict, (name, now[name])


def test_a_blank_cell_is_missing_and_never_zero() -> None:
    race = load_published("race_microbenchmark")
    gap = race[(race["hardware_queues"] == 1) & (race["protocol"] == "record_stream")]
    assert gap["stale_trials"].isna().all()
    agentx = load_published("agentx")
    bare = agentx[~agentx["offload"]]
    assert bare[["ttft_mean_s", "itl_p90_ms", "cpu_pool_gib"]].isna().all(axis=None)
    assert bare["errors"].tolist() == [0, 0, 0]


def test_a_fault_in_a_published_table_is_named(edit: Callable[[str, str, str], None]) -> None:
    edit("race_microbenchmark", "32,99,100", "32,99,")
    with pytest.raises(BadInput, match=r"race_microbenchmark\.csv:6:\(whole row\): stale_trials"):
        load_published("race_microbenchmark")
    with pytest.raises(BadInput, match="known: race_microbenchmark"):
        load_published("race")


def test_correct_items_counts_what_prints_alike() -> None:
    assert correct_items(0.978, 3, 1319) == [1290]
    assert correct_items(0.98, 2, 1319) == list(range(1287, 1300))
    assert correct_items(0.9786, 4, 1000) == []


def test_figures_that_follow_from_the_tables() -> None:
    table = agentx_derived().set_index("point")
    assert table.loc["c32-160", "tokens_per_request"] == pytest.approx(81141 * 3600 / 2786)
    assert table.loc["c64-288", "ttft_share"] == pytest.approx(92.5 * 2277 / (64 * 3600))
    assert table["gain_over_no_offload"].isna().tolist() == [False] * 6 + [True] * 3
    scores = gsm8k_derived().set_index("run")["correct_items"]
    assert scores.loc[["hold", "record_stream", "reference"]].tolist() == [1290, 1292, 1287]
    hours = crash_exposure()
    assert hours.unfixed == pytest.approx(166 / 60)
    assert hours.unfixed_low < hours.unfixed < hours.unfixed_high < hours.fixed


def test_the_matrix_leaves_the_holes_of_the_merged_version_open() -> None:
    matrix = version_matrix().set_index("experiment")
    for experiment in ("race micro-benchmark", "accuracy with offload"):
        assert matrix.loc[experiment].notna()["record_stream"]
        assert matrix.loc[experiment].isna()["hold"]
    assert matrix["hold"].notna().sum() == 4


def test_what_the_source_says_about_only_is_marked() -> None:
    failures = load_published("state_load_failures")
    assert failures["approximate"].tolist() == [True] * 4


@pytest.mark.parametrize("name", ["crash-01", "mech-09", "mech-16", "mech-19"])
def test_the_crashes_first_machine_is_not_named(name: str) -> None:
    history = load_published("crash_history")
    crashed = history[history["outcome"] == "crashed"]
    assert set(crashed["site"]) == {"first"}
    assert crashed["machine"].isna().all()
    assert load_claims()[name].machine is None
