"""Tables, verdict arguments and figures of a race, from rows alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from atom.benchmarks.race_model import Combination, ObservedRow, SimulatedRow, combinations
from atom.benchmarks.race_rows import Outcome, RaceRow, TimelineRow
from atom.benchmarks.race_timeline import picture
from atom.config import (
    AllocatorBackend,
    CopyProtocol,
    Front,
    RaceMicrobenchmarkSettings,
    RaceSettings,
    Source,
)
from atom.device.interface import CopyPath
from atom.device.profiles import BarrierScope, CopyLane, QueueMapping, QueueOrder
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import figures_race, race_analysis, race_consistency, race_margins
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.race_claims import claim_arguments
from atom.workbook.race_comparison import comparison, published_cells, runs_side_by_side
from atom.workbook.race_runs import gather_runs
from atom.workbook.records import Run
from atom.workbook.statistics import exact_interval
from atom.workbook.sweeps import run_race

ROOT = Path(__file__).resolve().parents[2]

SMALL: dict[str, Any] = {
    "trials": 10,
    "processes": 4,
    "hardware_queues": [1, 4],
    "batch_sizes": [32],
    "matmuls_per_stream": 2,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small simulated sweep with every grid."""
    return run_race(RaceSettings.parse(SMALL), tmp_path_factory.mktemp("runs"))


def row(**changed: Any) -> RaceRow:
    """One valid row."""
    values: dict[str, Any] = {
        "point_id": "main/unpatched/nothing/engine@0",
        "grid": "main",
        "arm": "main/unpatched/nothing/engine",
        "process": 0,
        "protocol": CopyProtocol.UNPATCHED,
        "is_null": False,
        "front": Front.NOTHING,
        "copy_path": CopyPath.ENGINE,
        "source": Source.ALLOCATOR,
        "queue_setting": "default",
        "allocator": AllocatorBackend.NATIVE,
        "batch_size": 32,
        "source_bytes": 272,
        "next_bytes": 272,
        "trials": 10,
        "clean": 4,
        "overwritten": 3,
        "partial": 2,
        "torn": 1,
        "address_reused": 10,
        "tag_caught": 6,
        "tag_missed": 0,
        "in_range": 3,
        "send_us_median": 1.0,
        "receive_us_median": 1.0,
        "seed": 1,
        "elapsed_s": 0.1,
        **changed,
    }
    return RaceRow(**values)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"clean": 5}, "add up to 11"),
        ({"tag_missed": 1}, "stale trials are 6"),
        ({"address_reused": 11}, "address_reused is 11"),
        ({"in_range": 7}, "in_range is 7"),
        ({"point_id": "other@0"}, "does not belong"),
        ({"queue_setting": "0"}, "queue_setting"),
    ],
)
def test_a_row_whose_counts_do_not_add_up_is_refused(changed: dict[str, Any], words: str) -> None:
    assert row().stale == 6
    with pytest.raises(ValueError, match=words):
        row(**changed)


def test_a_span_cannot_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="lies before"):
        TimelineRow(
            point_id="a@0",
            arm="a",
            process=0,
            trial=0,
            lane="copy",
            label="copy",
            start_us=2.0,
            end_us=1.0,
            outcome=Outcome.CLEAN,
        )


def frame(*rows: RaceRow) -> pd.DataFrame:
    return pd.DataFrame([one.model_dump() for one in rows])


def test_a_summary_clusters_by_process() -> None:
    clean = {"clean": 10, "overwritten": 0, "partial": 0, "torn": 0, "tag_caught": 0, "in_range": 0}
    stale = {**clean, "clean": 0, "overwritten": 10, "tag_caught": 10}
    rows = [
        row(point_id=f"main/unpatched/nothing/engine@{n}", process=n, **(stale if n else clean))
        for n in range(5)
    ]
    (summary,) = race_analysis.summarise(frame(*rows)).to_dict("records")
    assert (summary["stale"], summary["trials"], summary["processes_hit"]) == (40, 50, 4)
    # Five all-or-nothing processes say far less than fifty trials: 40/50 alone is [66%, 90%].
    assert summary["effect"] > 5
    assert summary["low"] < 0.4


def test_counts_in_sentences_have_the_interval_of_the_tables(run: Run) -> None:
    differing = [
        row(point_id=f"main/unpatched/nothing/engine@{n}", process=n, **cells)
        for n, cells in enumerate([{}, {"clean": 7, "overwritten": 0, "tag_caught": 3}])
    ]
    rows = frame(*differing)
    (summary,) = race_analysis.summarise(rows).to_dict("records")
    text = race_analysis.interval_text(*(summary[n] for n in ("stale", "trials", "low", "high")))
    assert race_analysis.count_text(rows) == text == "9/20 [0.0%, 100.0%]"
    low, high = exact_interval(9, 20)
    assert race_analysis.interval_text(9, 20, low, high) == "9/20 [23.1%, 68.5%]"


def test_notebook_02_gives_no_interval_of_independent_trials() -> None:
    notebook = json.loads((ROOT / "notebooks" / "02_race_microbenchmark.ipynb").read_text())
    code = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert re.findall(r"exact_interval\((.*)\)", code) == ["0, 100"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [("1", "1 queue"), ("4", "4 queues"), ("default", "default queues")],
)
def test_one_queue_is_singular(setting: str, words: str) -> None:
    assert race_analysis.queues_text(setting) == words


def test_rows_read_back_give_the_same_tables(run: Run) -> None:
    from_text = pd.DataFrame(
        json.loads(json.dumps(run.tables["trials"].astype(str).to_dict("records")))
    )
    for column in race_analysis.COUNTS:
        from_text[column] = from_text[column].astype(int)
    assert (
        race_analysis.with_stale(from_text)["stale"].tolist()
        == race_analysis.with_stale(run.tables["trials"])["stale"].tolist()
    )


def test_published_cells_keep_the_empty_one_empty() -> None:
    cells = published_cells()
    assert len(cells) == 8
    assert [cell["protocol"] for cell in cells if cell["stale"] is None] == ["record_stream"]
    assert sum(cell["stale"] or 0 for cell in cells) == 299


def test_side_by_side_never_pools_kinds(run: Run) -> None:
    table = comparison(run, [])
    assert set(table["evidence"]) == {Evidence.PUBLISHED, Evidence.SIMULATED}
    published = table[table["evidence"] == Evidence.PUBLISHED]
    assert len(published) == 7
    assert "hold" not in set(published["protocol"])
    assert "hold" in set(table["protocol"])
    assert not table.duplicated(["label", "protocol", "evidence"]).any()


def test_verdicts_follow_from_the_rows(run: Run) -> None:
    claims = load_claims()
    found = claim_arguments(run)
    wanted = {claim.id for claim in claims.values() if claim.notebook == "02"} - {"mech-18"}
    assert set(found) == wanted
    verdicts = {
        name: judge(claims[name], Evidence.SIMULATED, **arguments).verdict
        for name, arguments in found.items()
    }
    for name in ("mech-01", "mech-02", "mech-06", "mech-07", "micro-10"):
        assert verdicts[name] is Verdict.REPRODUCED_IN_SIMULATION, name
    # Forty clean trials cannot bound a rate by 2%.
    assert verdicts["micro-01"] is Verdict.INCONCLUSIVE


def test_a_stale_fixed_arm_contradicts_its_claim(run: Run) -> None:
    rows = run.tables["trials"].copy()
    at = rows.index[rows["arm"] == "main/record_stream/store_on_copy_stream/engine"][0]
    rows.loc[at, ["clean", "overwritten", "tag_caught"]] = [9, 1, 1]
    broken = Run(run.path, run.provenance, {**run.tables, "trials": rows})
    settled = judge(
        load_claims()["micro-04"], Evidence.SIMULATED, **claim_arguments(broken)["micro-04"]
    )
    assert settled.verdict is Verdict.DIFFERS


def test_a_clean_count_decides_nothing_where_its_contrast_is_clean_too(run: Run) -> None:
    claims, judged = load_claims(), {}
    rows = run.tables["trials"].copy()
    racing = rows["arm"].isin(["queue/4/unpatched/matmul/engine"])
    assert race_analysis.with_stale(rows[racing])["stale"].sum() > 0
    for name, table in (("racing", rows), ("clean", rows.copy())):
        if name == "clean":
            table.loc[racing, "clean"] = table.loc[racing, "trials"]
            table.loc[racing, ["overwritten", "partial", "torn", "tag_caught", "tag_missed"]] = 0
        changed = Run(run.path, run.provenance, {**run.tables, "trials": table})
        arguments = claim_arguments(changed)["micro-06"]
        judged[name] = judge(claims["micro-06"], Evidence.SIMULATED, **arguments)
    assert "nothing could have failed" in judged["clean"].detail
    assert judged["clean"].verdict is Verdict.INCONCLUSIVE
    assert "nothing could have failed" not in judged["racing"].detail


def test_an_empty_published_cell_is_not_reproduced(run: Run) -> None:
    settled = judge(
        load_claims()["micro-08"], Evidence.SIMULATED, **claim_arguments(run)["micro-08"]
    )
    assert settled.verdict is Verdict.NOT_TESTABLE_HERE
    assert "gives no value; found here: 0/" in settled.detail


def test_a_run_without_an_arm_leaves_its_claims_open(run: Run) -> None:
    rows = run.tables["trials"]
    partly = Run(run.path, run.provenance, {**run.tables, "trials": rows[rows["grid"] == "batch"]})
    arguments = claim_arguments(partly)
    settled = judge(load_claims()["micro-05"], Evidence.SIMULATED, **arguments["micro-05"])
    assert settled.verdict is Verdict.NOT_RUN
    assert "holds" in arguments["micro-10"]


def test_the_null_arm_does_not_differ(run: Run) -> None:
    table = race_analysis.null_arm_difference(run.tables["trials"])
    assert len(table) == 12
    assert (table["p"] > 0.05).all()


def test_sharing_the_default_queue_hides_the_fault(run: Run) -> None:
    rows = race_analysis.with_stale(run.tables["trials"])
    rows = rows[(rows["protocol"] == "unpatched") & (rows["front"] == "spin")]
    rows = rows[rows["grid"].isin(["main", "queue"])]
    shares = rows["shares_default_queue"].astype(bool)
    assert rows[shares]["stale"].sum() == 0
    assert rows[~shares]["stale"].sum() == rows[~shares]["trials"].sum() > 0


def test_queue_rates_are_ordered_and_whole(run: Run) -> None:
    rates = race_analysis.queue_rates(run.tables["trials"], Front.MATMUL)
    assert list(dict.fromkeys(rates["queues"])) == ["default", "1", "4"]
    assert (rates[rates["queues"] == "1"]["stale"] == 0).all()


def test_margins_say_which_copies_lost(run: Run) -> None:
    margins = race_margins.matmul_margins(run.tables["timeline"])
    lost = margins["margin_us"] > 0
    # An unpatched trial is stale exactly where its copy ended after the write.
    assert (lost == (margins["outcome"] != "clean")).all()
    table = race_margins.margin_table(margins)
    assert {"engine, 1 queue", "kernel, 4 queues"} <= set(table["copy"])
    sentences = race_margins.margin_sentences(margins, "simulated")
    assert any("by a kernel" in sentence for sentence in sentences)


def test_tags_and_side_arms(run: Run) -> None:
    coverage = race_analysis.tag_coverage(run.tables["trials"])
    assert (coverage["tag missed"] == 0).all()
    assert 0 < coverage["all counts in range"].sum() < coverage["stale"].sum()
    source = race_analysis.side_arms(run.tables["trials"], "source")
    held = source[source["protocol"] == "hold"].set_index("label")["stale"]
    assert held["graph output"] > 0
    assert held["graph output wait"] == 0
    assert race_analysis.side_arms(run.tables["trials"], "allocator").empty
    cut = race_analysis.side_arms(run.tables["trials"], "cut")
    unpatched = cut[cut["protocol"] == "unpatched"].set_index("label")
    assert unpatched["partial"]["half"] > 0
    assert unpatched["torn"]["mid copy"] > 0


def test_figures_can_be_drawn(run: Run) -> None:
    trials = run.tables["trials"]
    rates = race_analysis.queue_rates(trials, Front.MATMUL)
    late = race_margins.matmul_margins(run.tables["timeline"])
    settings = RaceSettings.parse(SMALL)
    pictures = [picture(settings, protocol) for protocol in ("unpatched", "hold")]  # type: ignore[arg-type]
    drawn = [
        figures_race.rates_figure(comparison(run, []), "rates"),
        figures_race.queue_figure({"a": (Evidence.SIMULATED, rates)}, "queues"),
        figures_race.margin_figure({"a": (Evidence.SIMULATED, late)}, "margins"),
        figures_race.pictures_figure(pictures),
        figures_race.cost_figure(race_analysis.send_costs(trials, Evidence.SIMULATED), "us"),
    ]
    for figure in drawn:
        figure.canvas.draw()
        plt.close(figure)


def test_a_picture_shows_who_owned_the_block() -> None:
    settings = RaceSettings.parse(SMALL)
    unpatched = picture(settings, CopyProtocol.UNPATCHED)
    held = picture(settings, CopyProtocol.HOLD)
    assert unpatched.outcome is Outcome.OVERWRITTEN
    assert held.outcome is Outcome.CLEAN
    owners = [owner for owner, _, _ in unpatched.ownership]
    assert owners == ["this step's verdict", "free", "next step's tensor"]
    assert [owner for owner, _, _ in held.ownership] == ["this step's verdict"]
    copy_start = next(span[2] for span in unpatched.spans if span[4] == "copy")
    write_end = next(span[3] for span in unpatched.spans if span[4] == "writer")
    assert write_end < copy_start


# -- queue models


def model(**changed: Any) -> Combination:
    values: dict[str, Any] = {
        "mapping": QueueMapping.OWN_DEFAULT,
        "copy_path": CopyPath.KERNEL,
        "lane": CopyLane.OWN,
        "order": QueueOrder.SERIAL,
        "barrier": BarrierScope.QUEUE,
        "wait_seconds": 1e-6,
        **changed,
    }
    return Combination(**values)


def test_the_study_tells_models_apart() -> None:
    settings = RaceSettings.parse({"matmuls_per_stream": 4})
    table = race_consistency.study(
        race_consistency.published_rows(),
        settings,
        draws=2,
        trials=3,
        models=[model(), model(copy_path=CopyPath.ENGINE), model(order=QueueOrder.ISSUE)],
    )
    assert table["consistent"].tolist() == [True, False, False]
    # A copy past the queues is clean behind matmuls; a queue that orders nothing is stale with one.
    assert table.loc[1, "matmul, 4 queues"] == 0
    assert table.loc[2, "matmul, 1 queue"] == 0
    decides = race_consistency.what_decides(table)
    assert decides["models"].sum() == 3 * 6


def test_every_combination_is_tried_once() -> None:
    tried = list(combinations())
    assert len(tried) == len(set(tried)) == 4 * 3 * 2 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("stale", "meets"), [(0, False), (1, False), (3, True)], ids=["none", "one", "all"]
)
def test_consistent_means_that_intervals_meet(stale: int, meets: bool) -> None:
    observed = ObservedRow("row", Front.MATMUL, 4, 99, 100, 0.9455, 0.9998)
    simulated = SimulatedRow(model(), 0, observed, stale, 3)
    assert race_consistency.is_consistent(simulated) is meets


# -- which runs are analysed


def as_measured(run: Run, root: Path, machine: str = "testcard", tail: str = "ffffff") -> Path:
    """A copy of a simulated run under another label: rows for a test, never evidence."""
    run_id = f"{run.path.name[:-6]}{tail}"
    folder = root / machine / run_id
    shutil.copytree(run.path, folder)
    provenance = json.loads((folder / "run.json").read_text())
    provenance.update(
        run_id=run_id,
        evidence="measured",
        machine=machine,
        device=f"{machine.capitalize()} X",
        profile=None,
        kind="cuda",
    )
    (folder / "run.json").write_text(json.dumps(provenance))
    return folder


def test_recorded_hardware_stands_beside_a_simulated_run(run: Run, tmp_path: Path) -> None:
    measured = as_measured(run, tmp_path / "recorded")
    settings = RaceMicrobenchmarkSettings.parse(
        {"records": [str(run.path)], "measured": [str(tmp_path / "recorded")]}
    )
    runs = gather_runs(settings, tmp_path / "new", tmp_path / "new")
    assert runs.simulated.path == run.path
    assert runs.measured is not None
    assert runs.measured.path == measured
    assert not (tmp_path / "new").exists()


def test_a_run_of_ones_own_stands_beside_the_recorded_ones(run: Run, tmp_path: Path) -> None:
    ours = as_measured(run, tmp_path / "recorded", "ours", "aaaaaa")
    again = as_measured(run, tmp_path / "recorded", "theirs", "bbbbbb")
    theirs = as_measured(run, tmp_path / "given", "theirs", "cccccc")
    settings = RaceMicrobenchmarkSettings.parse(
        {"records": [str(run.path), str(theirs)], "measured": [str(tmp_path / "recorded")]}
    )
    runs = gather_runs(settings, tmp_path / "new", tmp_path / "new")
    assert runs.measured is not None
    assert runs.measured.path == theirs
    assert {one.path for one in runs.beside} == {ours, again}
    table = runs_side_by_side([runs.measured, *runs.beside])
    assert [name[-6:] for name in table.columns[2:]] == ["cccccc", "aaaaaa", "bbbbbb"]
    line = table[(table["row"] == "store on copy stream") & (table["protocol"] == "unpatched")]
    assert re.fullmatch(r"\d+/40 \[.*%\]", str(line.iloc[0, 3]))
    assert len(table) == len(set(zip(table["row"], table["protocol"], strict=True)))
    # without runs of others there is nothing to show
    plain = settings.model_copy(update={"records": (str(run.path),)})
    plain = plain.model_copy(update={"measured": (str(theirs),)})
    assert gather_runs(plain, tmp_path / "new", tmp_path / "new").beside == ()


def test_a_damaged_recorded_run_is_a_problem_and_no_more(run: Run, tmp_path: Path) -> None:
    folder = as_measured(run, tmp_path / "recorded")
    trials = folder / "trials.csv"
    trials.write_text(trials.read_text().replace("unpatched", "unpatchd", 1))
    settings = RaceMicrobenchmarkSettings.parse(
        {"records": [str(run.path)], "measured": [str(tmp_path / "recorded")]}
    )
    runs = gather_runs(settings, tmp_path / "new", tmp_path / "new")
    assert runs.measured is None
    assert any("trials.csv" in problem for problem in runs.problems)


def test_no_recorded_hardware_is_no_error_but_no_records_is(run: Run, tmp_path: Path) -> None:
    settings = RaceMicrobenchmarkSettings.parse(
        {"records": [str(run.path)], "measured": [str(tmp_path / "nowhere")]}
    )
    assert gather_runs(settings, tmp_path, tmp_path).measured is None
    empty = settings.model_copy(update={"records": (str(tmp_path),)})
    with pytest.raises(BadInput, match="no usable run"):
        gather_runs(empty, tmp_path, tmp_path)
