"""A point's process is watched to its end, whatever that is, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from fake_point import COMMAND

from atom.benchmarks.throughput_process import end_all, exit_text, host_digits, run_point


def job(does: str, limit: float = 30.0, **more: Any) -> dict[str, Any]:
    settings = {"model": does, "traces": None}
    return {"point_id": "hold/c2/none/0", "settings": settings, "limit_seconds": limit, **more}


def test_what_it_told_comes_back_with_its_end(tmp_path: Path) -> None:
    end = run_point(job("ok", environment={"CUDA_VISIBLE_DEVICES": "5"}), COMMAND)
    assert (end["exit_code"], end["timed_out"], end["gpu"]) == (0, None, "5")
    # later lines over earlier ones
    assert (end["told"]["exposure_seconds"], end["told"]["outcome"]) == (1.0, "ok")
    log = tmp_path / "logs" / "one.log"
    end = run_point(job("die 4", log=str(log)), COMMAND)
    assert (end["exit_code"], end["last_words"]) == (4, "the last words")
    # the same for all points of a host, and nothing that names it
    assert end["host"] == host_digits()
    assert end["host"] is None or len(end["host"]) == 8
    assert log.read_text() == "the last words\n"


def test_a_killed_one_keeps_what_it_had_told() -> None:
    end = run_point(job("kill"), COMMAND)
    assert end["exit_code"] == -9
    # not the line that its end cut
    assert (end["told"]["requests"], end["told"]["exposure_seconds"]) == (10, 0.5)
    assert exit_text(end["exit_code"]) == "its process was killed by SIGKILL"


def test_one_that_hangs_is_killed_at_its_limit_and_says_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    end = run_point(job("hang", limit=0.5, log=str(log)), COMMAND)
    assert "fake_point.py" in log.read_text()
    assert "most recent call first" in log.read_text()
    # what it had started went with it
    child = re.search(r"^child (\d+)$", log.read_text(), re.MULTILINE)
    assert child
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(child[1])).wait(timeout=5)
    assert end["timed_out"] == "load"
    assert 0.5 <= end["wall_seconds"] < 5
    assert end["told"]["setup_seconds"] == 0.1
    assert not children()


def test_a_slow_start_takes_nothing_from_the_load_and_has_a_limit_of_its_own() -> None:
    # longer than the limit of its load
    end = run_point(job("slow 1", limit=0.7, start_limit_seconds=30.0), COMMAND)
    assert (end["exit_code"], end["timed_out"], end["told"]["outcome"]) == (0, None, "ok")
    end = run_point(job("slow 60", start_limit_seconds=0.6), COMMAND)
    assert end["timed_out"] == "start"
    assert "setup_seconds" not in end["told"]


def test_a_point_that_is_ready_waits_for_its_gate(tmp_path: Path) -> None:
    ready, gate = tmp_path / "ready", tmp_path / "gate"
    ends: list[dict[str, Any]] = []
    gated = job("ok", ready=str(ready), gate=str(gate))
    thread = threading.Thread(target=lambda: ends.append(run_point(gated, COMMAND)))
    thread.start()
    while not ready.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    assert not ends
    gate.touch()
    thread.join()
    assert ends[0]["exit_code"] == 0


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "fake_point" in " ".join(p.cmdline())]


def test_a_sweep_ends_its_own_points_alone() -> None:
    ends: dict[str, dict[str, Any]] = {}

    def run(name: str, seconds: str) -> None:
        ends[name] = run_point(job(f"sleep {seconds}", sweep=name), COMMAND)

    threads = [threading.Thread(target=run, args=one) for one in (("a", "60"), ("b", "1"))]
    for thread in threads:
        thread.start()
    while len(children()) < 2:
        time.sleep(0.02)
    end_all("a")
    for thread in threads:
        thread.join()
    assert (ends["a"]["exit_code"], ends["b"]["exit_code"]) == (-9, 0)


def test_a_point_does_not_outlive_whoever_started_it() -> None:
    code = (
        "from atom.benchmarks.throughput_process import run_point\n"
        f"run_point({job('hang')!r}, {COMMAND!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    found: list[psutil.Process] = []
    # the point, and what it has started
    while len(found) < 2:
        found = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.02)
    assert all(process.is_running() for process in found)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert not psutil.wait_procs(found, timeout=10)[1]
