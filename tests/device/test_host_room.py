"""Free host memory and near processors, read from a made-up system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atom.device.host_room import (
    check_host_room,
    free_host_bytes,
    on_processors,
    processors_apart,
    processors_near,
)
from atom.errors import DeviceOutOfMemory

GIB = 2**30


def system(root: Path, **groups: str) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 999 kB\nMemAvailable:  104857600 kB\n")
    for name, text in groups.items():
        folder = root / "sys/fs/cgroup"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("_", ".")).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({}, 100),
        ({"memory_max": "max\n", "memory_current": "5"}, 100),
        ({"memory_max": str(64 * GIB), "memory_current": str(24 * GIB)}, 40),
        (
            {
                "memory_max": str(64 * GIB),
                "memory_current": str(24 * GIB),
                "memory_stat": f"anon 7\ninactive_file {20 * GIB}\n",
            },
            60,
        ),
        ({"memory_max": str(GIB), "memory_current": str(2 * GIB)}, 0),
    ],
)
def test_the_container_counts_as_well_as_the_host(
    tmp_path: Path, groups: dict[str, str], free: int
) -> None:
    assert free_host_bytes(system(tmp_path, **groups)) == free * GIB


def test_too_much_is_refused_before_it_is_pinned(tmp_path: Path) -> None:
    root = system(tmp_path)
    check_host_room(99 * GIB, "cpu_pool_bytes", root)
    with pytest.raises(DeviceOutOfMemory, match=r"cpu_pool_bytes: 99\.5 GiB .* 100\.0 GiB are"):
        check_host_room(int(99.5 * GIB), "cpu_pool_bytes", root)


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    check_host_room(2**60, "cpu_pool_bytes", tmp_path)


@pytest.mark.parametrize(
    ("node", "expected"), [("1\n", {4, 5, 6, 7, 12}), ("-1\n", set()), (None, set())]
)
def test_processors_of_a_gpus_node(tmp_path: Path, node: str | None, expected: set[int]) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:9b:00.0"
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(node)
    listed = tmp_path / "sys/devices/system/node/node1"
    listed.mkdir(parents=True)
    (listed / "cpulist").write_text("4-7,12\n")
    assert processors_near("0000:9b:00.0", tmp_path) == expected


def test_a_thread_moves_and_comes_back() -> None:
    before = os.sched_getaffinity(0)
    with on_processors(frozenset({10_000})) as moved:
        assert not moved
    with on_processors(frozenset(before)) as moved:
        assert not moved
    if len(before) < 2:
        pytest.skip("this machine lends one processor: there is nowhere to move to")
    one = min(before)
    with on_processors(frozenset({one, 10_000})) as moved:
        assert moved
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before


def test_processors_of_the_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:9b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    listed = tmp_path / "sys/devices/system/node/node1"
    listed.mkdir(parents=True)
    (listed / "cpulist").write_text("4-7\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    assert processors_apart("0000:9b:00.0", tmp_path) == ({4, 5}, {0, 1})
    # this process may use none of the near ones, so nothing is far either
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert processors_apart("0000:9b:00.0", tmp_path) == (set(), set())
