"""Neighbours start, work as long as something is observed, and end with it; so do bandwidths."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from fake_point import COMMAND

from atom.benchmarks import colocation_point
from atom.benchmarks.colocation_bandwidth import HOST, TO_DEVICE, Bandwidths, why_none
from atom.benchmarks.colocation_neighbour import COMMAND as WORKING
from atom.benchmarks.colocation_neighbour import Work
from atom.benchmarks.colocation_point import (
    NeighbourFailed,
    NeighbourJob,
    neighbour_rows,
    observe,
    observe_engine,
    race_settings,
    run_race,
)
from atom.benchmarks.colocation_settings import (
    ColocationPoint,
    ColocationSettings,
    MemoryNode,
    Neighbour,
    build_colocation,
)
from atom.benchmarks.throughput_process import end_all
from atom.config import CopyProtocol
from atom.device import Device
from atom.device.interface import DeviceKind
from atom.errors import BadInput

QUICK: dict[str, Any] = {"neighbours": ["copy", "serve"], "pool_gib": [0.002], "concurrency": [4]}


def settings(**values: Any) -> ColocationSettings:
    return ColocationSettings.parse({**QUICK, **values})


def bandwidths() -> Bandwidths:
    return Bandwidths(DeviceKind.VIRTUAL, {0: "0"}, 0.05)


def neighbour(does: str, kind: Neighbour = Neighbour.COPY) -> NeighbourJob:
    job = {"neighbour": str(kind), "does": does, "limit_seconds": 60.0}
    return NeighbourJob(kind, job, COMMAND, 0)


def observed(does: str) -> dict[str, Any]:
    return {"point_id": "one", "does": does, "limit_seconds": 60.0}


def processes() -> list[psutil.Process]:
    names = ("fake_point", "colocation_neighbour")
    found = psutil.Process().children()
    return [p for p in found if any(name in " ".join(p.cmdline()) for name in names)]


# -- the plan


def test_each_round_has_each_point_once_in_an_order_of_its_own() -> None:
    points = build_colocation(settings(neighbour_counts=[1, 3], memory_nodes=["near", "far"]))
    conditions = {point.condition for point in points}
    assert conditions == {"alone", "copy x1", "copy x3", "serve x1", "serve x3"}
    # an engine with and without a pool, and the race
    one = [point for point in points if point.repeat == 0]
    assert len(points) == 2 * len(one) == 2 * 3 * 5 * 2
    assert len({point.point_id for point in points}) == len(points)
    orders = [
        [point.point_id.rpartition("/")[0] for point in points if point.repeat == repeat]
        for repeat in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    again = build_colocation(settings(neighbour_counts=[1, 3], memory_nodes=["near", "far"]))
    assert points == again


def test_a_sweep_at_once_takes_all_gpus_and_pins_nothing() -> None:
    values = {"neighbours": ["sweep"], "neighbour_counts": [1, 3], "shared_gpu": False}
    points = build_colocation(settings(**values, memory_nodes=["any", "far"], repeats=1))
    at_once = [point for point in points if point.neighbour is Neighbour.SWEEP]
    assert {(point.count, point.node) for point in at_once} == {(3, MemoryNode.ANY)}
    assert all(point.engine is not None for point in at_once)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"special": ["repeats"]}, "leave out special"),
        ({"neighbours": ["alone"]}, "alone is always run"),
        ({"neighbours": ["sweep"]}, "name several with --gpus"),
        ({"neighbours": ["copy", "copy"]}, "stands twice"),
        ({"neighbour_counts": [0]}, "neighbour_counts"),
    ],
)
def test_what_cannot_be_observed_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        settings(**values)
    with pytest.raises(BadInput, match="fits no point; conditions: alone, "):
        build_colocation(settings(only=["nobody"]))


# -- neighbours


def test_the_load_begins_when_all_are_at_work_and_they_end_with_it() -> None:
    began = time.monotonic()
    beside = [neighbour("slow 0.6"), neighbour("")]
    seen = observe_engine(observed("ok"), beside, bandwidths(), command=COMMAND)
    # it was ready at once, and waited for the slow one
    assert time.monotonic() - began > 0.6
    assert (seen.found["exit_code"], seen.alive) == (0, 2)
    assert [end["exit_code"] for end in seen.neighbours] == [-9, -9]
    assert {one.what for one in seen.samples} == {HOST}
    assert not processes()


def test_a_neighbour_that_does_not_last_is_counted_and_one_that_does_not_start_refused() -> None:
    beside = [neighbour("brief 0.8"), neighbour("")]
    seen = observe_engine(observed("sleep 1.3"), beside, bandwidths(), command=COMMAND)
    assert (seen.found["told"]["outcome"], seen.alive) == ("ok", 1)
    with pytest.raises(NeighbourFailed, match=r"a neighbour \(copy\) .* the last words"):
        observe_engine(observed("ok"), [neighbour("die first")], bandwidths(), command=COMMAND)
    assert not processes()


def test_an_interrupt_leaves_nobody_behind() -> None:
    def interrupted() -> None:
        assert len(processes()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(interrupted, [neighbour(""), neighbour("")], bandwidths())
    assert not processes()


def test_neither_an_impatient_user_nor_a_slow_death_leaves_a_neighbour_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = [subprocess.TimeoutExpired("neighbour", 10), KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(name: str) -> None:
        if faults:
            raise faults.pop(0)
        end_all(name)

    monkeypatch.setattr(colocation_point, "end_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        observe(lambda: None, [neighbour("")], bandwidths())
    assert not faults
    assert not processes()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: nowhere to move to")
def test_what_is_observed_runs_where_it_is_put() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({max(before)})
    found = observe(lambda: os.sched_getaffinity(0), [], bandwidths(), one).found
    assert found == one
    assert os.sched_getaffinity(0) == before


def test_a_real_neighbour_copies_until_it_is_killed() -> None:
    values = {"device": "virtual", "device_profile": "H200", "copy_bytes": 2**20}
    job = {**values, "neighbour": "copy", "matmul_size": 64, "limit_seconds": 60.0}
    one = NeighbourJob(Neighbour.COPY, job, WORKING, 3)
    [end] = observe(lambda: time.sleep(0.6), [one], bandwidths()).neighbours
    assert end["exit_code"] == -9, end["last_words"]
    point = ColocationPoint(None, Neighbour.COPY, 1, MemoryNode.ANY, 0)
    [row] = neighbour_rows(point, [one], [end])
    assert row.h2d_bytes_per_second == row.d2h_bytes_per_second
    # the profile's link in each direction
    assert 1e9 < (row.h2d_bytes_per_second or 0) < 1e11
    assert (row.matmuls_per_second, row.tokens_per_second, row.gpu_index) == (None, None, 3)


@pytest.mark.parametrize("device", ["virtual"], indirect=True)
def test_work_counts_what_has_ended(device: Device) -> None:
    for kind, name in ((Neighbour.COPY, "h2d_bytes"), (Neighbour.COMPUTE, "matmuls")):
        work = Work(device, kind, 4096, 64)
        for _ in range(10):
            work.step()
        # three are on their way
        assert work.done(1.0)[name] == 7 * (4096 if kind is Neighbour.COPY else 1)


def test_the_race_beside_neighbours_has_a_control_that_is_stale_and_one_that_is_not() -> None:
    found = run_race(race_settings(settings(race_trials=2), 1), {})
    stale = {row.arm: row.trials - row.clean for row in found}
    assert stale["main/unpatched/store_on_copy_stream/engine"] == 2
    assert stale["main/hold/store_on_copy_stream/engine"] == 0
    assert {row.protocol for row in found} == {CopyProtocol.UNPATCHED, CopyProtocol.HOLD}


# -- bandwidths


def test_counters_are_read_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NVML; this device is virtual" in str(why_none(DeviceKind.VIRTUAL, ["0"]))

    class NVMLError(Exception):
        pass

    def throughput(handle: str, counter: int) -> int:
        if handle == "GPU-x":
            raise NVMLError("Not Supported")
        return 1000 * counter

    library = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_PCIE_UTIL_TX_BYTES=1,
        NVML_PCIE_UTIL_RX_BYTES=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetHandleByUUID=bytes.decode,
        nvmlDeviceGetPcieThroughput=throughput,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert why_none(DeviceKind.CUDA, ["0"]) is None
    assert "Not Supported" in str(why_none(DeviceKind.CUDA, ["0", "GPU-x"]))
    with Bandwidths(DeviceKind.CUDA, {4: "0", 5: "GPU-x"}, 0.05) as sampler:
        threading.Event().wait(0.2)
    into = [one for one in sampler.samples if one.what == TO_DEVICE]
    # kilobytes a second, of the one that can be read; what cannot be read is left out
    assert {(one.gpu_index, one.bytes_per_second) for one in into} == {(4, 2e6)}
    assert [one.second for one in into] == sorted(one.second for one in into)
    assert any(one.what == HOST for one in sampler.samples)


def test_without_the_library_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "NVML: ModuleNotFoundError" in str(why_none(DeviceKind.CUDA, ["0"]))
