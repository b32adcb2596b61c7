"""``python -m atom compare``: what may be compared, with which intervals, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom import __main__ as command_line
from atom.config import RaceSettings
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import compare as module
from atom.workbook.compare import PUBLISHED, Result, as_json, as_markdown, compare
from atom.workbook.compare_model import Rate
from atom.workbook.records import Run, load_run
from atom.workbook.statistics import difference_interval, exact_interval, wilson_interval
from atom.workbook.sweeps import run_race

_ONLY = ["main/*/nothing/engine", "main/*/store_on_copy_stream/engine", "main/*/matmul/engine"]
_SMALL = {"trials": 4, "processes": 2, "only": _ONLY, "hardware_queues": [1]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Small runs on the virtual device: one, one like it, and others by what differs."""
    root = tmp_path_factory.mktemp("runs")
    varied: dict[str, dict[str, Any]] = {
        "one": {},
        "like": {},
        "seed": {"seed": 7},
        "load": {"store_bytes": 4096, "batch_size": 8},
        "amount": {"processes": 3},
        "h200": {"device_profile": "H200"},
    }
    return {
        name: run_race(RaceSettings.parse({**_SMALL, **change}), root)
        for name, change in varied.items()
    }


def of(runs: dict[str, Run], a: str, b: str, *allowed: str) -> Result:
    paths = [name if name == PUBLISHED else str(runs[name].path) for name in (a, b)]
    return compare(paths[0], paths[1], allowed)


def test_a_run_beside_its_like(runs: dict[str, Run]) -> None:
    result = of(runs, "one", "like")
    assert result.same_gpu
    line = next(x for x in result.rates if x.cell == "main/unpatched/store_on_copy_stream/engine")
    assert (line.a.stale, line.a.trials, line.a.processes) == (8, 8, 2)
    assert line.finding == "no difference seen"
    assert line.low < 0 < line.high
    assert {one.unit for one in result.ratios} == {"us", "x its own null arm"}


def test_a_difference_stands_out(runs: dict[str, Run]) -> None:
    # the store is so small that nothing is late any more
    result = of(runs, "one", "load", "load")
    line = next(x for x in result.rates if x.cell == "main/unpatched/store_on_copy_stream/engine")
    assert line.b.stale == 0
    assert line.finding == "B lower"
    assert line.difference == -1
    assert "store_bytes is 268435456 in A, 4096 in B" in as_markdown(result)


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        ("seed", "seed", "seed: seed is 42 in A, 7 in B"),
        ("load", "load", "load: batch_size is 32 in A, 8 in B"),
        ("amount", "settings", "settings: processes is 2 in A, 3 in B"),
    ],
)
def test_another_condition_is_refused_unless_told(
    runs: dict[str, Run], other: str, kind: str, text: str
) -> None:
    with pytest.raises(BadInput) as caught:
        of(runs, "one", other)
    assert text in str(caught.value)
    assert f"--allow-different {kind}" in str(caught.value)
    wrong = "seed" if kind != "seed" else "load"
    with pytest.raises(BadInput):
        of(runs, "one", other, wrong)
    assert text in of(runs, "one", other, kind).allowed


def test_across_machines_no_time_is_compared(runs: dict[str, Run]) -> None:
    result = of(runs, "one", "h200")
    assert not result.same_gpu
    assert {one.unit for one in result.ratios} == {"x its own null arm"}
    assert "times are left out" in as_markdown(result)


def test_with_the_published_figures(runs: dict[str, Run]) -> None:
    result = of(runs, PUBLISHED, "one")
    assert result.a.evidence is Evidence.PUBLISHED
    assert not result.same_gpu
    assert result.ratios == ()
    cell = next(x for x in result.rates if x.cell == "store on copy stream / unpatched")
    assert (cell.a.stale, cell.a.trials, cell.a.processes) == (200, 200, None)
    assert cell.a.interval == exact_interval(200, 200)
    # the run has no arm with a queue setting
    assert all("queue" in name for name in result.only_a)
    assert result.only_a
    with pytest.raises(BadInput, match="load: store_bytes is 268435456 in A, 4096 in B"):
        of(runs, PUBLISHED, "load")
    with pytest.raises(BadInput, match="one side must be a run"):
        compare(PUBLISHED, PUBLISHED)
    with pytest.raises(BadInput, match=r"A has nothing / unpatched; .* and 4 more, B has none"):
        module._result("race", result.a, replace(result.b, rates={}), ())


def test_only_finished_runs_of_one_experiment(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = runs["one"]
    with pytest.raises(BadInput, match="no such folder"):
        compare("nowhere", str(one.path))
    with pytest.raises(BadInput, match=r"is no run folder; runs below it:\n.*-race-"):
        compare(str(one.path.parents[1]), str(one.path))

    def other(path: Any, **changes: Any) -> Run:
        return replace(one, provenance=one.provenance.model_copy(update=changes))

    monkeypatch.setattr(module, "load_run", lambda path: other(path, exit_state="interrupted"))
    with pytest.raises(BadInput, match="is interrupted, not finished"):
        compare(PUBLISHED, str(one.path))
    # one that stopped where it was told to is whole as far as it goes
    facts = {"exit_state": "failed", "facts": {"stopped_early": {"not_run": {"p": "no time"}}}}
    monkeypatch.setattr(module, "load_run", lambda path: other(path, **facts))
    notes = compare(PUBLISHED, str(one.path), ("load",)).notes
    assert "stopped as it was told to: 1 points did not run" in notes[-1]
    # and one that was gone on with left nothing out
    whole = {**facts, "exit_state": "finished"}
    monkeypatch.setattr(module, "load_run", lambda path: other(path, **whole))
    assert not any("stopped" in note for note in compare(PUBLISHED, str(one.path), ("load",)).notes)
    monkeypatch.setattr(module, "load_run", lambda path: other(path, experiment="capacity"))
    with pytest.raises(BadInput, match="runs of capacity cannot be compared"):
        compare(PUBLISHED, str(one.path))
    monkeypatch.setattr(
        module,
        "load_run",
        lambda path: load_run(path) if path == one.path else other(path, experiment="capacity"),
    )
    with pytest.raises(BadInput, match="different experiments: capacity, race"):
        compare(str(one.path), str(runs["like"].path))


def test_output_for_people_and_for_scripts(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", PUBLISHED, str(runs["one"].path)]
    assert command_line.main(words) == 0
    text = capsys.readouterr().out
    assert "- **A** (published): the published micro-benchmark" in text
    assert "- **B** (simulated): MI355X" in text
    assert "| store on copy stream / unpatched | 200/200 |" in text
    assert command_line.main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["experiment"] == "race"
    assert values["a"]["evidence"] == "published"
    assert {"cell", "a", "b", "difference", "low", "high", "finding"} == set(values["rates"][0])
    assert values == json.loads(as_json(of(runs, PUBLISHED, "one")))
    assert command_line.main(["compare", PUBLISHED, "nowhere"]) == 2


# -- the interval


def test_newcombes_own_example() -> None:
    # table II (a) of the paper: 56/70 against 48/80, method 10
    low, high = difference_interval(
        48 / 80, wilson_interval(48, 80), 56 / 70, wilson_interval(56, 70)
    )
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(1, 40))
def test_the_interval_holds_the_difference_and_turns_with_the_sides(
    a: int, n: int, b: int, m: int
) -> None:
    a, b = min(a, n), min(b, m)
    first, second = (a / n, exact_interval(a, n)), (b / m, exact_interval(b, m))
    low, high = difference_interval(*first, *second)
    assert -1 <= low <= b / m - a / n <= high <= 1
    assert difference_interval(*second, *first) == pytest.approx((-high, -low))


def test_coverage_of_the_difference_by_enumeration() -> None:
    from scipy import stats

    n, p, q = 12, 0.1, 0.6
    held = 0.0
    for a in range(n + 1):
        for b in range(n + 1):
            low, high = difference_interval(
                a / n, exact_interval(a, n), b / n, exact_interval(b, n)
            )
            if low <= q - p <= high:
                held += stats.binom.pmf(a, n, p) * stats.binom.pmf(b, n, q)
    assert 0.95 <= held < 1


def test_a_rate_outside_its_interval_is_no_rate() -> None:
    with pytest.raises(ValueError, match="needs an interval around it"):
        difference_interval(0.5, (0.6, 0.7), 0.1, (0.0, 0.2))


def test_trials_of_few_processes_say_less() -> None:
    spread, even = Rate((20, 0), (20, 20)), Rate((10, 10), (20, 20))
    assert spread.interval[1] - spread.interval[0] > even.interval[1] - even.interval[0]


def test_records_are_compared_and_checked_without_loading_torch() -> None:
    modules = "atom.workbook.compare, atom.workbook.records_cli"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
