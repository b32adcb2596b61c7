"""One arm of the engine-fault experiment in a process of its own, which it may end.

``python -m atom.benchmarks.engine_fault_child`` reads one JSON object from standard input
(``settings``, ``arm``, ``token_budget``) and writes what it has seen, one JSON object a line, after
each step of the engine. The last whole line is what counts. Exit code 0: the arm ended well; 3: its
engine died and could still say so; anything else: the process died.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence

from atom.benchmarks.engine_fault import PARK_SECONDS, Seen, load_fault_model, run_arm
from atom.benchmarks.engine_fault_arms import ARMS, EngineFaultSettings, FaultArm
from atom.benchmarks.lifetime_paths import own_queue_stream
from atom.device import open_device
from atom.errors import BadInput
from atom.transfer.copy_protocol import UnpatchedWarning

COMMAND = (sys.executable, "-m", "atom.benchmarks.engine_fault_child")
TIMEOUT_SECONDS = 240.0
DIED = 3


def run_in_child(
    settings: EngineFaultSettings,
    arm: FaultArm,
    token_budget: int,
    *,
    command: Sequence[str] = COMMAND,
    timeout: float = TIMEOUT_SECONDS,
) -> Seen:
    """Run an arm in a process of its own. Its end, of whatever kind, is part of what was seen."""
    job = {
        "settings": settings.model_dump(mode="json"),
        "arm": arm.name,
        "token_budget": token_budget,
    }
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        seen = last_seen(text.decode(errors="replace") if isinstance(text, bytes) else text)
        # subprocess.run has killed it
        seen.crash, seen.exit_code = f"its process did not end within {timeout:.0f} s", -9
        return seen
    seen = last_seen(done.stdout)
    seen.exit_code = done.returncode
    if done.returncode and seen.crash is None:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        seen.crash = f"its process ended with code {done.returncode}" + (
            f": {words[-1].strip()}" if words else ""
        )
    return seen


def last_seen(text: str) -> Seen:
    """The last whole line of a child's output; nothing seen if there is none."""
    for line in reversed(text.splitlines()):
        try:
            return Seen.parse(json.loads(line))
        except (ValueError, TypeError, KeyError):
            continue
    return Seen()


def serve(text: str) -> Seen:
    """Run the job that ``text`` describes and write what is seen to standard output.

    Raises:
        BadInput: no such job.
    """
    try:
        job = json.loads(text)
        settings = EngineFaultSettings.parse(job["settings"], where="engine fault")
        arm = next(arm for arm in ARMS if arm.name == job["arm"])
        budget = int(job["token_budget"])
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise BadInput(f"engine fault: no usable job: {type(error).__name__}: {error}") from None

    def tell(seen: Seen) -> None:
        sys.stdout.write(json.dumps(seen.plain()) + "\n")
        sys.stdout.flush()

    device = open_device(settings.device, profile=settings.device_profile, seed=settings.seed)
    loaded = load_fault_model(settings, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnpatchedWarning)
        stream = own_queue_stream(device, PARK_SECONDS)
        seen = run_arm(device, loaded, settings, arm, budget, stream, tell)
    tell(seen)
    return seen


if __name__ == "__main__":
    code = DIED if serve(sys.stdin.read()).crash is not None else 0
    sys.stderr.flush()
    # tensors of a broken context raise while they are torn down: leave without teardown
    os._exit(code)
