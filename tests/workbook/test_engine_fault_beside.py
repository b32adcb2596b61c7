"""Recorded engine-fault runs beside each other: which saw the fault, and with what store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_engine_fault_analysis import row

from atom.benchmarks.engine_fault_arms import GUARD_ALONE, EngineFaultSettings
from atom.benchmarks.engine_fault_rows import EngineFaultRow
from atom.evidence import Evidence
from atom.workbook import engine_fault_analysis
from atom.workbook.engine_fault_beside import EXPOSED, beside_table, store_sentences
from atom.workbook.engine_fault_runs import record_engine_fault
from atom.workbook.records import Run
from atom.workbook.tables import to_frame


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    wanted = {
        "token_budgets": [128],
        "law_budgets": [],
        "requests": 2,
        "output_tokens": 4,
        "chunks": 2,
        "only": ["hold"],
    }
    root = tmp_path_factory.mktemp("runs")
    return record_engine_fault(EngineFaultSettings.parse(wanted), root)


def hardware(simulated: Run, store: int, stale: int, run_id: str, device: str = "H200") -> Run:
    """A run in which the first ``stale`` of the exposed arms read a stale status."""
    rows = [
        row(name, 8192, stale_statuses=int(number < stale), store_bytes=store)
        for number, name in enumerate(EXPOSED)
    ]
    rows += [row("hold", 8192)]
    if stale < len(EXPOSED):
        # the guard is among those that saw nothing
        rows[EXPOSED.index(GUARD_ALONE)] = row(
            GUARD_ALONE, 8192, stale_statuses=0, guard_value=None, guard_errors=0
        )
    known = simulated.provenance
    provenance = known.model_copy(
        update={
            "evidence": Evidence.MEASURED,
            "run_id": run_id,
            "device": device,
            "settings": known.settings | {"store_bytes": store},
        }
    )
    return Run(simulated.path, provenance, {"arms": to_frame(rows, EngineFaultRow)})


def test_each_run_has_its_rows(simulated: Run) -> None:
    long, short = (
        hardware(simulated, 2**30, 4, "t-engine_fault-aaaaaa"),
        hardware(simulated, 2**28, 1, "t-engine_fault-bbbbbb"),
    )
    table = beside_table([long, short])
    assert list(table["a store, MiB"]) == [1024, 256]
    assert list(table.iloc[:, 4]) == ["4/4", "1/4"]
    assert list(table["guard found"]) == ["8193", "–"]
    assert list(table.iloc[:, 6]) == ["0/1", "0/1"]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        # (store, stale arms, device)
        ([(2**30, 4, "A"), (2**28, 1, "A")], "1 of 4 with stores of 256 MiB, 4 of 4 with"),
        ([(2**30, 4, "A"), (2**28, 1, "A"), (2**28, 4, "A")], "5 of 8 with stores of 256 MiB"),
    ],
)
def test_a_longer_store_is_said_to_be_surer(
    simulated: Run, runs: list[tuple[int, int, str]], words: str
) -> None:
    made = [
        hardware(simulated, store, stale, f"t-engine_fault-{number:06}", device)
        for number, (store, stale, device) in enumerate(runs)
    ]
    (sentence,) = store_sentences(made)
    assert words in sentence
    assert "a longer store makes the fault surer" in sentence


@pytest.mark.parametrize(
    "runs",
    [
        [(2**30, 4, "A"), (2**28, 4, "A")],
        [(2**28, 1, "A"), (2**28, 4, "A")],
        # another device says nothing of this one's stores
        [(2**30, 4, "A"), (2**28, 1, "B")],
    ],
)
def test_nothing_is_said_of_stores_that_agree(
    simulated: Run, runs: list[tuple[int, int, str]]
) -> None:
    made: list[Any] = [
        hardware(simulated, store, stale, f"t-engine_fault-{number:06}", device)
        for number, (store, stale, device) in enumerate(runs)
    ]
    assert store_sentences(made) == []


def test_a_shorter_store_that_was_surer_gets_no_reason(simulated: Run) -> None:
    made = [
        hardware(simulated, 2**30, 1, "t-engine_fault-aaaaaa"),
        hardware(simulated, 2**28, 4, "t-engine_fault-bbbbbb"),
    ]
    (sentence,) = store_sentences(made)
    assert "surer" not in sentence


def test_no_recorded_run_is_dropped(
    simulated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        hardware(simulated, 2**28, 1, "20260101T000000Z-engine_fault-aaaaaa"),
        hardware(simulated, 2**30, 4, "20260102T000000Z-engine_fault-bbbbbb"),
    )
    # the folder that was asked for lies below the one that is shown beside it
    shown = {"asked": [simulated, new], "beside": [old, new]}
    monkeypatch.setattr(
        engine_fault_analysis, "load_runs", lambda folders, _: (shown[folders[0]], [])
    )
    monkeypatch.setattr(engine_fault_analysis, "existing", list)
    found = engine_fault_analysis.gather_runs(["asked"], ["beside"], "MI355X", 42, tmp_path)
    assert found.measured is new
    assert found.others == (old,)
