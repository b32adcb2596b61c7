"""One check for each claim that the published tables alone settle.

Each computes its finding from the CSV files and returns what ``judge`` takes. Notebook 00 runs all:
``for claim, found in run_checks().items(): book.settle(claim, "arithmetic", **found)``.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pandas as pd

from atom.workbook.finding import Check, Checks, Finding
from atom.workbook.published_derived import (
    agentx_derived,
    environment_value,
    gsm8k_derived,
    version_matrix,
)
from atom.workbook.published_load_checks import CHECKS as LOAD_CHECKS
from atom.workbook.published_tables import load_published
from atom.workbook.statistics import exact_interval, fisher_exact

CHECKS = Checks()


def run_checks() -> dict[str, Finding]:
    """Findings by claim, each as keyword arguments of ``judge``."""
    return {claim: check() for claim, check in {**CHECKS, **LOAD_CHECKS}.items()}


# -- which version was measured


def _fixed_cells() -> pd.DataFrame:
    race = load_published("race_microbenchmark").dropna(subset=["trials"])
    return race[race["protocol"] != "unpatched"]


@CHECKS.of("micro-11")
def _micro_11() -> Finding:
    versions = sorted(_fixed_cells()["protocol"].unique())
    return {
        "holds": versions == ["record_stream"],
        "value": f"{len(_fixed_cells())} fixed cells, all {' and '.join(versions)}",
    }


@CHECKS.of("version-01")
def _version_01() -> Finding:
    scores = load_published("gsm8k")
    parts = {
        "fixed micro-benchmark cells": _fixed_cells(),
        "AgentX hours": load_published("agentx"),
        "accuracy results with offload": scores[scores["offload"]],
    }
    found = {name: sorted(set(rows["protocol"].dropna())) for name, rows in parts.items()}
    return {
        "holds": all(versions == ["record_stream"] for versions in found.values()),
        "value": "; ".join(f"{name}: {', '.join(v)}" for name, v in found.items()),
    }


@CHECKS.of("version-02")
def _version_02() -> Finding:
    has = set(version_matrix().dropna(subset=["hold"])["experiment"])
    return {
        "holds": has
        == {
            "lifetime test, trials",
            "lifetime test, passes",
            "unit test files",
            "accuracy without offload",
        },
        "value": "hold was measured in: " + ", ".join(sorted(has)),
    }


@CHECKS.of("micro-09")
def _micro_09() -> Finding:
    race = load_published("race_microbenchmark").dropna(subset=["trials"])
    racing = race[race["stale_trials"] > 0]
    every = bool((racing["stale_trials"] == racing["trials"]).all())
    rows = [f"{row.stale_trials}/{row.trials}" for row in racing.itertuples()]
    low, high = exact_interval(int(racing["stale_trials"].min()), int(racing["trials"].min()))
    return {
        "holds": every,
        "value": ", ".join(rows),
        "detail": f"the lower row's rate lies in [{low:.1%}, {high:.2%}]",
    }


# -- the contract and its tests


@CHECKS.of("contract-01")
def _contract_01() -> Finding:
    table = load_published("copy_sources")
    return {
        "value": len(table),
        "detail": f"{table['in_summary'].sum()} in the summary, "
        f"{table['in_first_gpu_test'].sum()} in the first GPU test",
    }


@CHECKS.of("life-04")
def _life_04() -> Finding:
    controls = load_published("lifetime_controls")
    own = controls[controls["arm"].isin(["holds", "control"])]
    tests = load_published("test_counts")
    printed = tests[(tests["suite"] == "lifetime") & (tests["protocol"] == "hold")]["passed"]
    agree = bool((printed == len(own)).all())
    return {
        "value": len(own),
        "detail": f"paths times arms {'agree' if agree else 'disagree'} with the printed count",
    }


def _passed(suite: str, revision: str, column: str = "passed") -> int:
    table = load_published("test_counts")
    row = table[(table["suite"] == suite) & (table["revision"] == revision)]
    return int(row[column].iloc[0])


@CHECKS.of("count-03")
def _count_03() -> Finding:
    suite = "related GPU files"
    return {"value": _passed(suite, "hold") - _passed(suite, "hold's base")}


@CHECKS.of("count-05")
def _count_05() -> Finding:
    suite = "CPU suite"
    more = _passed(suite, "hold") - _passed(suite, "hold's base")
    skipped = _passed(suite, "hold", "skipped") - _passed(suite, "hold's base", "skipped")
    told = environment_value("tests", "extra CPU tests against main")
    gpu = _passed("related GPU files", "hold") - _passed("related GPU files", "hold's base")
    return {
        "holds": more == told and skipped == 1,
        "value": f"{more:+d} passed, {skipped:+d} skipped",
        "detail": f"{gpu - more} of the {gpu} on the GPU machine would have to be missing here",
    }


@CHECKS.of("count-06")
def _count_06() -> Finding:
    table = load_published("test_counts")
    failed = set(table[table["suite"] == "CPU suite"]["failed"])
    names = load_published("environment")
    named = names[names["name"].str.startswith("failures named")]["value"].astype(int).sum()
    same = failed == {named}
    return {
        "value": int(named),
        "detail": f"the suite's runs report {'the same' if same else 'other'} numbers of failures",
    }


@CHECKS.of("count-08")
def _count_08() -> Finding:
    suite = "related GPU files"
    early = _passed(suite, "record_stream") - _passed(suite, "record_stream's base")
    late = _passed(suite, "hold") - _passed(suite, "hold's base")
    table = load_published("environment")
    paths = table[table["name"] == "lifetime paths"].set_index("protocol")["value"].astype(int)
    # one test a path and arm: the later revision's own count is 14 for 7 paths
    lifetime = 2 * int(paths["record_stream"])
    if early != late or early != lifetime:
        return {"holds": False, "value": f"{early} and {late}"}
    return {
        "undecided": f"the earlier {early} are used up by its {lifetime} lifetime tests, the later "
        f"{late} hold none; equal by chance or by oversight, which the text does not tell",
        "value": f"{early} and {late}",
    }


# -- accuracy


def _score(run: str) -> Any:
    table = gsm8k_derived().set_index("run")
    return table.loc[run]


def _items_of(run: str) -> Check:
    def check() -> Finding:
        row = _score(run)
        if pd.isna(row["correct_items"]):
            return {"holds": False, "value": "no single count prints as this score"}
        return {
            "value": int(row["correct_items"]),
            "detail": f"Wilson interval [{row['wilson_low']:.4f}, {row['wilson_high']:.4f}]",
        }

    return check


for _number, _run in enumerate(("hold", "record_stream", "control", "offload", "reference"), 1):
    CHECKS.of(f"acc-{_number:02}")(_items_of(_run))


@CHECKS.of("acc-06")
def _acc_06() -> Finding:
    table, again = _score("offload"), _score("offload-restated")
    rounded = f"{table['strict_match']:.{again['decimals']}f}"
    same = rounded == f"{again['strict_match']:.{again['decimals']}f}"
    acceptance = table["acceptance_percent"], again["acceptance_percent"]
    return {
        "holds": bool(same and acceptance[0] == acceptance[1]),
        "value": f"{table['strict_match']} and {again['strict_match']} "
        f"({table['correct_items']} and {again['correct_items']} items); "
        f"acceptance {acceptance[0]}% and {acceptance[1]}%",
        "detail": f"the table's score prints as {rounded} at that length",
    }


@CHECKS.of("acc-07")
def _acc_07() -> Finding:
    table, again, own = _score("reference"), _score("reference-restated"), _score("hold")
    high = again["strict_match_high"]
    tested = " (the score under test)" if high == own["strict_match"] else ""
    return {
        "holds": bool(pd.isna(high) and table["strict_match"] == again["strict_match"]),
        "value": f"{table['strict_match']}, then {again['strict_match']} to {high}{tested}",
    }


@CHECKS.of("acc-08")
def _acc_08() -> Finding:
    table = gsm8k_derived().dropna(subset=["correct_items"])
    items = int(environment_value("gsm8k", "items"))
    counts = [int(count) for count in table["correct_items"]]
    smallest = min(fisher_exact(a, items, b, items) for a, b in combinations(counts, 2))
    apart = max(counts) - min(counts)
    visible = float(table["detectable"].min())
    return {
        "holds": smallest > 0.05 and apart < visible * items,
        "value": f"at most {apart} of {items} items apart",
        "detail": f"smallest Fisher p of any pair {smallest:.2f}; a loss below "
        f"{visible:.1%} ({visible * items:.0f} items) would not have shown (80% power, unpaired)",
    }


@CHECKS.of("acc-10")
def _acc_10() -> Finding:
    table = gsm8k_derived()
    single = table[table["strict_match_high"].isna()]
    fits = single["correct_items"].notna()
    return {
        "holds": bool(fits.all()),
        "value": f"{fits.sum()} of {len(single)} scores are one whole count at their digits",
    }


@CHECKS.of("acc-13")
def _acc_13() -> Finding:
    drafts = environment_value("gsm8k", "draft tokens")
    forced = float(agentx_derived()["forced_mean_length_tokens"].iloc[0])
    merged = 1 + drafts * float(_score("hold")["acceptance_percent"]) / 100
    return {
        "holds": merged > forced,
        "value": f"{merged:.2f} against {forced} tokens a step",
        "detail": f"the forced length is an acceptance of {(forced - 1) / drafts:.0%}",
    }
