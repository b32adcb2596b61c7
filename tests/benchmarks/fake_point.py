"""Stands for a throughput point's process: does at once what a test wants, without an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from atom.benchmarks.throughput_process import pass_gate, prepare_for_end

COMMAND = (sys.executable, str(Path(__file__)))


def told_by_a_good_point(number: int) -> dict[str, Any]:
    return {
        "setup_seconds": 0.1,
        "exposure_seconds": 1.0,
        "requests": 10 + number,
        "errors": 0,
        "effective_total_throughput": 1000.0 + number,
        "stale_statuses": 0,
    }


def main() -> None:
    job = json.loads(sys.stdin.readline())
    prepare_for_end()
    # what it does stands in the model's name: "ok", "sleep 1", "hang", "kill", "die 4", "stale",
    # "slow 1" (to start), "brief" (a neighbour that ends by itself), "die first" (before its load)
    settings = job.get("settings", {})
    word, _, argument = job.get("does", settings.get("model", "")).partition(" ")
    folder = settings.get("traces")
    # a neighbour of the co-location sweep works until it is killed
    beside = "neighbour" in job or settings.get("duration_seconds", 0) > 1e5
    if folder is not None and job.get("marks"):
        mark = f"{job['point_id'].replace('/', '-')}.{os.getpid()}.{os.getppid()}"
        (Path(folder) / mark).touch()

    def tell(values: dict[str, Any]) -> None:
        with open(job["told"], "a") as file:
            file.write(json.dumps(values) + "\n")

    if word == "die" and argument == "first":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(5)
    if word == "slow":
        time.sleep(float(argument))
        argument = "0"
    pass_gate(job)
    tell(told_by_a_good_point(0) | {"exposure_seconds": 0.5})
    if word == "hang" or (beside and word != "brief"):
        child = subprocess.Popen(["sleep", "600"])
        print(f"child {child.pid}", flush=True)
        time.sleep(600)
    if word == "kill":
        with open(job["told"], "a") as file:
            file.write('{"requests": 99, "err')
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(int(argument))
    time.sleep(float(argument or 0))
    stale = {"stale_statuses": 1} if word == "stale" else {}
    tell(told_by_a_good_point(1) | stale | {"outcome": "ok", "outcome_detail": None})
    os._exit(0)


if __name__ == "__main__":
    main()
