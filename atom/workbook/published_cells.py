"""The published figures of one experiment and one version, as the words of one cell."""

from __future__ import annotations

from collections.abc import Callable

from pandas import DataFrame

from atom.workbook.published_tables import load_published

Cells = dict[tuple[str, str], str]


def published_cells() -> Cells:
    """Text by (experiment, protocol), with the experiments of ``version_matrix``.

    Only what the tables hold: a pair that is missing has no published figure.
    """
    race = load_published("race_microbenchmark").dropna(subset=["trials"])
    controls = load_published("lifetime_controls")
    tests, scores = load_published("test_counts"), load_published("gsm8k")
    points, crashes = load_published("agentx"), load_published("crash_history")
    suites = tests[(tests["suite"] != "lifetime") & tests["passed"].notna()]
    hours = crashes[crashes["outcome"] != "caught"]
    scores = scores[scores["source_place"].str.contains("table")]
    parts: list[tuple[str, DataFrame, Callable[[DataFrame], str]]] = [
        ("race micro-benchmark", race, _stale_list),
        ("lifetime test, trials", controls[controls["arm"] != "control"], _paths),
        ("lifetime test, passes", tests[tests["suite"] == "lifetime"], _passes),
        ("unit test files", suites, _suites),
        ("accuracy without offload", scores[~scores["offload"]], _scores),
        ("accuracy with offload", scores[scores["offload"]], _scores),
        ("AgentX throughput without offload", points[~points["offload"]], _points),
        ("AgentX throughput with offload", points[points["offload"]], _points),
        ("offload hours, crash or not", hours, _hours),
        ("debug build with host-side checks", crashes[crashes["outcome"] == "caught"], _caught),
    ]
    return {
        (experiment, str(protocol)): words(rows)
        for experiment, table, words in parts
        for protocol, rows in table.groupby(table["protocol"].dropna().astype(str))
    }


def _stale_list(rows: DataFrame) -> str:
    cells = zip(rows["stale_trials"], rows["trials"], strict=True)
    return ", ".join(f"{int(stale)}/{int(trials)}" for stale, trials in cells) + " stale"


def _paths(rows: DataFrame) -> str:
    cells = {(int(r["stale_trials"]), int(r["trials"])) for r in rows.to_dict("records")}
    rates = ", ".join(f"{stale}/{trials}" for stale, trials in sorted(cells))
    return f"{rates} stale on {rows['path'].nunique()} paths"


def _passes(rows: DataFrame) -> str:
    return f"{int(rows['repeats'].sum())} passes"


def _suites(rows: DataFrame) -> str:
    return "; ".join(f"{int(passed):,}" for passed in rows["passed"]) + " passed"


def _scores(rows: DataFrame) -> str:
    return ", ".join(
        f"{score:.{int(digits)}f}"
        for score, digits in zip(rows["strict_match"], rows["decimals"], strict=True)
    )


def _points(rows: DataFrame) -> str:
    rate = rows["throughput_tok_s_per_gpu"]
    return f"{len(rows)} points, {rate.min() / 1000:.1f}k to {rate.max() / 1000:.1f}k tok/s"


def _hours(rows: DataFrame) -> str:
    crashed = int(rows.loc[rows["outcome"] == "crashed", "runs"].sum())
    return f"{crashed} of {int(rows['runs'].sum())} crashed"


def _caught(rows: DataFrame) -> str:
    minutes = ", ".join(f"{minute:g}" for minute in rows["minutes_low"])
    return f"caught after {minutes} min"
