"""The simulated sweep of notebook 05: one point of it for real, and the link that is slowed."""

from __future__ import annotations

from pathlib import Path

from atom.benchmarks.throughput_rows import Outcome
from atom.config import ThroughputNotebookSettings
from atom.evidence import Evidence
from atom.workbook.point_sweep import record_points
from atom.workbook.throughput_analysis import load_set
from atom.workbook.throughput_bounds import profile_copy_rate
from atom.workbook.throughput_simulation import SWEEP, simulated_settings


def test_a_simulated_point_is_recorded_with_its_slow_link(tmp_path: Path) -> None:
    given = ThroughputNotebookSettings(concurrency=(2,), pool_gib=(0.003,), duration_seconds=0.2)
    settings = simulated_settings(given).model_copy(update={"only": ("hold/c2/0.003GiB/0",)})
    run = record_points(SWEEP, settings, tmp_path)
    assert run.provenance.exit_state == "finished"
    assert run.provenance.evidence is Evidence.SIMULATED
    assert run.provenance.device == "H200, host link at 1/1000"
    assert run.provenance.settings["link_slowdown"] == 1000
    assert profile_copy_rate(run).bytes_per_s == 54.9e6
    (row,) = load_set(Evidence.SIMULATED, "H200", [run]).main
    assert (row["outcome"], row["cold_start"]) == (Outcome.OK, "engine")
    assert row["statuses"] > 0
    assert row["stale_statuses"] == 0
    # a status waits behind stores that a link at full speed would have hidden
    assert row["status_latency_max_us"] > 100
