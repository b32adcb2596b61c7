"""One throughput point on the virtual device: what it tells, and each of its ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from atom.benchmarks import throughput_point
from atom.benchmarks.agentic_sessions import Traces
from atom.benchmarks.throughput_engine import TimedRunner
from atom.benchmarks.throughput_point import read_sessions, run_point
from atom.benchmarks.throughput_process import run_point as run_process
from atom.benchmarks.throughput_rows import Outcome, ThroughputRow
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points
from atom.device import open_device
from atom.device.virtual import VirtualDevice
from atom.model_engine.engine_builder import load_model
from atom.model_engine.step_runner import StepStatus
from atom.models.weights import LoadedModel

POOL = 0.002
SMALL: dict[str, Any] = {
    "concurrency": [4],
    "pool_gib": [POOL],
    "special": ["unpatched", "guard", "zero_copy"],
    "sessions": 24,
    "max_context_tokens": 512,
    "num_kv_blocks": 56,
    "output_tokens": 4,
    "duration_seconds": 1.0,
    "think_cap_seconds": 0.02,
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("preset:tiny", open_device("virtual"), seed=42, max_positions=1024)


@pytest.fixture(scope="module")
def traces() -> Traces:
    return read_sessions(ThroughputSettings.parse(SMALL))


class Teller:
    """Keeps what a point tells, and that its names are those of a row."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.exposures: list[float] = []

    def __call__(self, values: dict[str, Any]) -> None:
        names = set(values) - {"requests_table", "causes_table"}
        assert names <= set(ThroughputRow.model_fields)
        self.told.update(values)
        self.exposures.append(self.told.get("exposure_seconds", 0.0))


def run(name: str, model: LoadedModel, traces: Traces, **values: Any) -> dict[str, Any]:
    settings = ThroughputSettings.parse({**SMALL, **values})
    point = next(p for p in build_points(settings) if p.point_id == name)
    teller = Teller()
    outcome = run_point(settings, point, teller, model=model, traces=traces)
    assert teller.told["outcome"] == outcome
    # counters of the load were told while it ran
    assert teller.exposures == sorted(teller.exposures)
    return teller.told


def test_a_point_with_a_pool_tells_its_load_and_its_tier(
    model: LoadedModel, traces: Traces
) -> None:
    told = run(f"hold/c4/{POOL}GiB/0", model, traces)
    assert told["outcome"] == Outcome.OK
    assert told["requests"] >= 4
    assert told["errors"] == told["stale_statuses"] == told["guard_errors"] == 0
    assert told["effective_total_throughput"] > 0
    # the device's pool holds less than the sessions: prefixes left it and came back
    assert told["hbm_kv_bytes"] < told["working_set_bytes"]
    assert told["pool_hit_tokens"] > 0
    assert 0 < told["hit_tokens"] < told["lookup_tokens"]
    assert told["loaded_bytes"] >= told["pool_hit_tokens"] * told["kv_bytes_per_token"]
    chunk = 64 * told["kv_bytes_per_token"]
    ended = told["kv_chunks_stored"] * chunk + told["states_stored"] * told["state_image_bytes"]
    # bytes are counted when a store is queued: the last ones may be under way
    under_way = told["stored_bytes"] - ended
    assert 0 <= under_way <= 0.2 * ended
    assert under_way == 0 or under_way >= min(chunk, told["state_image_bytes"])
    rows = told["requests_table"]
    done = [row for row in rows if row["phase"] == "profiling" and row["outcome"] == "ok"]
    assert len(done) == told["requests"]
    assert [row["number"] for row in rows] == list(range(len(rows)))
    assert told["statuses"] == told["decode_steps"] > 0
    assert 0 < told["status_latency_p50_us"] <= told["status_latency_p99_us"]
    # forced as in the source: mean tokens a request and decode step
    accepted = 1 + 3 * told["accepted_tokens"] / told["drafted_tokens"]
    assert accepted == pytest.approx(2.32, abs=0.2)
    busy = told["decode_seconds"] + told["prefill_seconds"]
    assert busy + told["idle_seconds"] == pytest.approx(told["exposure_seconds"], rel=0.35)


def test_without_a_pool_nothing_of_one_is_told(model: LoadedModel, traces: Traces) -> None:
    told = run("hold/c4/no-pool/0", model, traces, duration_seconds=0.3)
    assert told["outcome"] == Outcome.OK
    assert {"pool_hit_tokens", "stored_bytes", "pin_waits"}.isdisjoint(told)
    assert told["lookup_tokens"] > 0


def test_zero_copy_has_no_copy_to_wait_for(model: LoadedModel, traces: Traces) -> None:
    copied = run(f"hold/c4/{POOL}GiB/0", model, traces, duration_seconds=0.3)
    told = run(f"zero_copy/c4/{POOL}GiB/0", model, traces, duration_seconds=0.3)
    assert told["outcome"] == Outcome.OK
    assert told["status_latency_p50_us"] < copied["status_latency_p50_us"] / 2


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """One status of a decode step says what no step can have accepted."""
    original = TimedRunner.receive_status
    seen: list[int] = []

    def receive(self: TimedRunner) -> StepStatus:
        status = original(self)
        seen.append(1)
        if len(seen) != 5:
            return status
        return StepStatus(status.num_rejected, [16384] * len(status.num_bonus), status.record)

    monkeypatch.setattr(TimedRunner, "receive_status", receive)


@pytest.mark.usefixtures("stale")
def test_a_guard_error_is_an_outcome(model: LoadedModel, traces: Traces) -> None:
    told = run(f"unpatched, guard/c4/{POOL}GiB/0", model, traces, duration_seconds=0.3)
    assert told["outcome"] == Outcome.GUARD_ERROR
    assert told["guard_errors"] >= 1
    assert told["guard_value"] == 16385
    assert told["stale_statuses"] >= 1
    assert "num_accepted_tokens 16385" in told["outcome_detail"]


@pytest.mark.usefixtures("stale")
def test_a_crash_in_mid_load_is_an_outcome_with_its_counters(
    model: LoadedModel, traces: Traces
) -> None:
    began = time.monotonic()
    told = run(f"unpatched/c4/{POOL}GiB/0", model, traces, duration_seconds=60.0)
    # nobody waits for the rest of the load
    assert time.monotonic() - began < 20
    assert told["outcome"] == Outcome.CRASH
    assert "IllegalAccess" in told["outcome_detail"]
    assert told["decode_steps"] >= 1
    assert told["exposure_seconds"] < 20


def test_full_memory_and_a_wrong_model_are_outcomes(
    model: LoadedModel, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ThroughputSettings.parse(SMALL | {"model": "preset:none"})
    point = next(p for p in build_points(settings) if p.pool_gib)
    teller = Teller()
    assert run_point(settings, point, teller, traces=traces) is Outcome.START_FAILED
    assert "no model size is named 'none'" in teller.told["outcome_detail"]

    def pinned(self: VirtualDevice, shape: Any, dtype: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(VirtualDevice, "pinned", pinned)
    outcome = run_point(settings, point, teller, model=model, traces=traces)
    assert outcome is Outcome.OUT_OF_MEMORY


def test_a_load_without_an_answer_is_an_outcome(
    model: LoadedModel, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput_point, "EngineClient", RefusingClient)
    told = run("hold/c4/no-pool/0", model, traces, duration_seconds=0.2)
    assert told["outcome"] == Outcome.LOAD_FAILED
    assert "first error: the client failed (OSError)" in told["outcome_detail"]


class RefusingClient:
    """A client whose every request fails."""

    def __init__(self, engine: Any, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    async def send(self, exchange: Any) -> None:
        raise OSError("no")

    async def close(self) -> None:
        pass


def test_two_points_at_once_share_nothing_and_each_end_is_a_row(tmp_path: Path) -> None:
    """Two engines in processes of their own; one is killed, the other runs beyond its limit."""
    settings = ThroughputSettings.parse(SMALL | {"duration_seconds": 120.0})
    ends: dict[str, dict[str, Any]] = {}
    killed, hung = f"hold/c4/{POOL}GiB/0", "hold/c4/no-pool/0"
    logs = {name: tmp_path / name.replace("/", "-") for name in (killed, hung)}
    gate = tmp_path / "gate"

    def start(name: str, limit: float) -> threading.Thread:
        job = {
            "point_id": name,
            "settings": settings.model_dump(mode="json"),
            "start_limit_seconds": 300.0,
            "limit_seconds": limit,
            "gate": str(gate),
            "log": str(logs[name]),
        }
        thread = threading.Thread(target=lambda: ends.update({name: run_process(job)}))
        thread.start()
        return thread

    def started(name: str) -> bool:
        return logs[name].exists() and "has started" in logs[name].read_text()

    before = set(os.listdir("/dev/shm"))
    threads = {killed: start(killed, 120.0), hung: start(hung, 4.0)}
    while not (started(killed) and started(hung)):
        time.sleep(0.05)
        assert all(thread.is_alive() for thread in threads.values()), logs[killed].read_text()
    # both loads begin now, however long either took to start
    gate.touch()
    time.sleep(1.5)
    points = [p for p in psutil.Process().children() if "throughput_point" in str(p.cmdline())]
    files = [{file.path: file.mode for file in point.open_files()} for point in points]
    links = [link for point in points for link in point.net_connections("all")]
    os.kill(
        next(p.pid for p, f in zip(points, files, strict=True) if str(logs[killed]) in f),
        signal.SIGKILL,
    )
    shared_memory = set(os.listdir("/dev/shm"))
    for thread in threads.values():
        thread.join()
    assert len(points) == 2
    # nothing that has a name: an event loop's own pair of sockets has none
    assert not [link for link in links if link.laddr or link.raddr]
    written = [{path for path, mode in opened.items() if "w" in mode} for opened in files]
    assert not written[0] & written[1]
    assert shared_memory <= before
    assert (ends[killed]["exit_code"], ends[killed]["timed_out"]) == (-9, None)
    assert ends[hung]["timed_out"] == "load"
    for end in ends.values():
        # what it had counted until then
        assert end["told"]["exposure_seconds"] > 0.4
        assert end["told"]["lookup_tokens"] > 0
        assert "outcome" not in end["told"]
