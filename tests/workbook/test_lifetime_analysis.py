"""Tables, figures and verdict arguments of lifetime rows, from rows alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from atom.benchmarks.lifetime_check import try_mutation
from atom.benchmarks.lifetime_mutants import MUTATIONS
from atom.benchmarks.lifetime_paths import EXPOSURE, LifetimePath
from atom.benchmarks.source_lifetime import build_points
from atom.benchmarks.source_lifetime_rows import ExplorationRow, LifetimeRow, MutationRow
from atom.config import CopyProtocol, LifetimeSettings, SourceLifetimeSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import figures_lifetime, lifetime_analysis, lifetime_claims
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.lifetime_runs import record_lifetime
from atom.workbook.records import Run
from atom.workbook.tables import to_frame

_RUNS = Path(__file__).resolve().parents[2] / "data" / "runs"

TRIALS = 50


def rows(**stale: int) -> list[LifetimeRow]:
    """A row a point, as the fix says; ``stale`` overrides by ``path__protocol__arm``."""
    found = []
    for point in build_points(LifetimeSettings.parse({})):
        graph = point.path == "graph_output"
        exposure = EXPOSURE[LifetimePath.SPEC_STATUS if graph else LifetimePath(point.path)]
        expected = TRIALS if point.arm == "control" else 0
        count = stale.get(f"{point.path}__{point.protocol}__{point.arm}", expected)
        found.append(
            LifetimeRow(
                point_id=point.point_id,
                path=point.path,
                protocol=point.protocol,
                arm="control" if point.arm == "control" else "protected",
                trials=TRIALS,
                stale=count,
                address_reused=count,
                tag_caught=count,
                guard_caught=count // 2,
                parked=TRIALS,
                window=exposure.window,
                engine_drops=exposure.engine_drops,
                engine_why=exposure.why,
            )
        )
    return found


def trials(**stale: int) -> pd.DataFrame:
    return to_frame(rows(**stale), LifetimeRow)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small simulated run."""
    settings = LifetimeSettings.parse({"trials": 2, "paths": ["spec_status", "graph_output"]})
    return record_lifetime(settings, tmp_path_factory.mktemp("runs"))


def with_rows(run: Run, table: pd.DataFrame, **provenance: Any) -> Run:
    return Run(run.path, run.provenance.model_copy(update=provenance), {"trials": table})


def verdict(claim: str, arguments: dict[str, Any], evidence: Evidence = Evidence.SIMULATED) -> str:
    return str(judge(load_claims()[claim], evidence, **arguments).verdict)


# -- counts


def test_the_table_shows_both_arms() -> None:
    table = lifetime_analysis.counts_table(trials(ell_slot__hold__protected=3))
    assert list(table.columns) == ["path", *map(str, CopyProtocol)]
    assert len(table) == 7
    line = table.set_index("path").loc["ell slot"]
    assert line["hold"] == "3/50 · 50/50"
    assert line["unpatched"] == "– · 50/50"


def test_what_is_not_as_the_fix_says_is_named() -> None:
    assert lifetime_analysis.unexpected(trials()) == []
    wrong = trials(ell_slot__hold__protected=3, clean__blocking__control=49)
    assert lifetime_analysis.unexpected(wrong) == [
        "ell_slot/hold/protected: 3 of 50",
        "clean/blocking/control: 49 of 50",
    ]


def test_exposure_and_graph_and_nets() -> None:
    table = trials()
    exposure = lifetime_analysis.exposure_table(table).set_index("path")
    column = "the pre-fix engine itself drops the source"
    assert exposure.loc["draft ids", column] == "no"
    assert (exposure[column] == "yes").sum() == 6
    assert lifetime_analysis.graph_counts(table) == {"protected": (0, 50), "control": (50, 50)}
    nets = lifetime_analysis.nets_table(table).set_index("protection taken from")
    assert tuple(nets.loc["hold"]) == (350, 350, 175)


def test_published_counts_stand_beside_ours() -> None:
    table = lifetime_analysis.beside_published({"simulated": trials()})
    assert len(table) == 7
    assert set(table["holds: published"]) == set(table["holds: simulated"]) == {"0/50"}
    assert set(table["control: simulated"]) == {"50/50"}
    assert set(table["unmodified main: published"]) == {"20/20"}
    assert set(table["unmodified main: simulated"]) == {"50/50"}


def test_verdicts_are_by_the_worst_path(recorded: Run) -> None:
    fine = lifetime_claims.count_arguments(with_rows(recorded, trials()))
    assert set(fine) == {"life-01", "life-02", "life-03", "mech-03"}
    for claim, arguments in fine.items():
        assert verdict(claim, arguments) == Verdict.REPRODUCED_IN_SIMULATION
    table = trials(
        logprobs__hold__protected=1, ell_one_off__hold__control=40, clean__unpatched__control=20
    )
    wrong = lifetime_claims.count_arguments(with_rows(recorded, table))
    assert (wrong["life-01"]["stale"], wrong["life-02"]["stale"]) == (1, 40)
    for claim, arguments in wrong.items():
        assert verdict(claim, arguments) == Verdict.DIFFERS


def test_measured_rows_settle_clean_too(recorded: Run) -> None:
    measured = {"evidence": Evidence.MEASURED, "machine": "h200", "device": "NVIDIA H200"}
    found = lifetime_claims.count_arguments(with_rows(recorded, trials(), **measured))
    for claim, arguments in found.items():
        settled = judge(load_claims()[claim], Evidence.MEASURED, **arguments)
        assert settled.verdict is Verdict.REPRODUCED
        assert settled.same_hardware is False
    without_race = trials(clean__hold__control=0)
    arguments = lifetime_claims.count_arguments(with_rows(recorded, without_race, **measured))
    assert verdict("contract-10", arguments["contract-10"], Evidence.MEASURED) == Verdict.DIFFERS


def test_a_run_without_a_path_settles_nothing(recorded: Run) -> None:
    found = lifetime_claims.count_arguments(recorded)
    for claim, arguments in found.items():
        assert "leaves out sampled_ids" in arguments["reason"]
        assert verdict(claim, arguments) == Verdict.NOT_RUN


def test_another_profile_settles_no_published_count(recorded: Run) -> None:
    other = with_rows(recorded, trials(), device="H200")
    for arguments in lifetime_claims.count_arguments(other).values():
        assert "simulated on profile H200" in arguments["reason"]


def test_open_claims_belong_to_the_notebook() -> None:
    claims = load_claims()
    table = lifetime_claims.open_claims(claims, "03")
    assert len(table) == len(lifetime_claims._NEEDS)
    settled = {"life-01", "mech-03", "contract-01"}
    assert settled.isdisjoint(table["claim"])


# -- runs


def test_runs_are_recorded_or_loaded(recorded: Run, tmp_path: Path) -> None:
    given = SourceLifetimeSettings.parse({"records": [str(recorded.path)], "measured": []})
    runs = lifetime_analysis.gather_runs(given, tmp_path, tmp_path)
    assert runs.simulated.provenance.run_id == recorded.provenance.run_id
    assert (runs.measured, runs.problems) == (None, ())
    assert not list(tmp_path.iterdir())
    small = {"trials": 1, "paths": ["draft_ids"], "protocols": ["hold"], "measured": []}
    made = lifetime_analysis.gather_runs(
        SourceLifetimeSettings.parse(small), tmp_path / "new", tmp_path
    )
    assert list(made.simulated.tables["trials"]["stale"]) == [0, 1]
    missing = SourceLifetimeSettings.parse({"records": [str(tmp_path / "none")]})
    with pytest.raises(BadInput, match="no usable lifetime run"):
        lifetime_analysis.gather_runs(missing, tmp_path, tmp_path)


def test_a_run_of_another_machine_stands_beside_ours(recorded: Run, tmp_path: Path) -> None:
    ours = next(_RUNS.glob("h200/*-lifetime-*"))
    other = tmp_path / "other" / "mi300x" / f"{ours.name[:-6]}ffffff"
    shutil.copytree(ours, other)
    text = (other / "run.json").read_text().replace('"h200"', '"mi300x"')
    (other / "run.json").write_text(text.replace(ours.name, other.name))
    given = [str(recorded.path), str(other)]
    settings = SourceLifetimeSettings.parse({"records": given, "measured": [str(_RUNS)]})
    runs = lifetime_analysis.gather_runs(settings, tmp_path, tmp_path)
    assert runs.measured is not None
    assert runs.measured.path == other
    assert [run.path.name for run in runs.beside] == [ours.name]
    rows = {"a": runs.measured.tables["trials"], "b": runs.beside[0].tables["trials"]}
    table = lifetime_analysis.beside_published(rows)
    assert list(table["holds: a"]) == list(table["holds: b"]) == ["0/50"] * 7


# -- explorations and mutations


def explored(protocol: CopyProtocol, violations: str = "", complete: bool = True) -> ExplorationRow:
    return ExplorationRow(
        path="clean",
        protocol=protocol,
        depth=1,
        schedules=4,
        complete=complete,
        outcomes=1,
        longest=9,
        violations=violations,
        seconds=0,
    )


def test_only_a_full_exploration_proves() -> None:
    hold, unpatched = CopyProtocol.HOLD, CopyProtocol.UNPATCHED
    assert lifetime_analysis.proved([explored(hold)], hold)
    assert not lifetime_analysis.proved([explored(hold, complete=False)], hold)
    assert not lifetime_analysis.proved([explored(hold, "early free")], hold)
    assert not lifetime_analysis.proved([explored(hold)], unpatched)
    table = lifetime_analysis.exploration_table(
        [explored(hold), explored(unpatched, "early free, foreign bytes", False)], 1
    )
    assert table.to_dict("records") == [
        {"path": "clean()", "hold": "4: holds", "unpatched": "4+: foreign bytes"}
    ]


def test_mutations_that_change_nothing_stand_apart() -> None:
    chosen = {
        "drain without its wait (queue)",
        "popped entry keeps its source",
    }
    found: list[MutationRow] = [
        try_mutation(mutation, most_depth=1) for mutation in MUTATIONS if mutation.name in chosen
    ]
    real = lifetime_analysis.mutations_table(found)
    assert list(real["caught by"]) == ["foreign bytes"]
    assert list(real["guard alone"]) == ["none"]
    equal = lifetime_analysis.equivalents_table(found)
    assert list(equal["caught"]) == ["no"]
    assert lifetime_analysis.caught(found, "drain without its wait (queue)") is not None
    assert lifetime_analysis.caught(found, "popped entry keeps its source") is None


def test_the_same_schedule_breaks_one_and_not_the_other() -> None:
    stale, held = figures_lifetime.late_copy()
    assert (stale.foreign, held.foreign) == (True, False)
    assert held.got == "step 1's bytes"
    assert {owner for owner, _, _ in held.ownership} == {"this step's"}
    assert {owner for owner, _, _ in stale.ownership} == {"this step's", "next step's"}
    figure = figures_lifetime.schedules_figure([stale, held])
    titles = [axes.get_title("left") or axes.get_title() for axes in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["unpatched", "hold"]
    plt.close(figure)


def test_the_figure_shows_every_count() -> None:
    figure = figures_lifetime.counts_figure(trials(ell_slot__hold__protected=3), "counts")
    left, right = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert left.count("0/50") == 27
    assert left.count("3/50") == 1
    assert left.count("protects\nnothing") == 7
    assert right == ["50/50"] * 35
    plt.close(figure)


def test_code_is_shown_without_its_docstring() -> None:
    text = figures_lifetime.live_text(lifetime_analysis.words)
    assert text.startswith("def words(name: object) -> str:\n    return")
    assert "as text" not in text
