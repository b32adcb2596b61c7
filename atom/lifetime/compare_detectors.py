"""Runs the same programs under several detectors, each in a process of its own.

Detectors: nothing, this project's sanitizer, ``torch.cuda._sanitizer`` by its variable
``TORCH_CUDA_SANITIZER=1``, and compute-sanitizer's memcheck with PyTorch's cudaMallocAsync backend
and ``--track-stream-ordered-races all``. The programs are those of ``tests/lifetime/scenarios.py``.
"""

from __future__ import annotations

import fnmatch
import glob
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field, model_validator

from atom.config import DeviceChoice, Settings
from atom.errors import BadInput
from atom.lifetime.detector_rows import (
    NOTHING,
    NULL_ARM,
    Detector,
    DetectorRow,
    Result,
    SlowdownRow,
)

PROJECT = Path(__file__).resolve().parents[2]
SCENARIOS = PROJECT / "tests" / "lifetime" / "scenarios.py"
VIRTUAL_DETECTORS = (Detector.NOTHING, Detector.OURS)
#: options of the decode loop on a virtual device, which computes on the host
_SMALL_LOOP = ("--layers", "2", "--width", "64")
_TORCH_REPORT = "CSAN detected a possible data race"
_MEMCHECK_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_MEMCHECK_OPTIONS = (
    "--tool",
    "memcheck",
    "--track-stream-ordered-races",
    "all",
    "--check-exit-code",
    "no",
)


class DetectorSettings(Settings):
    """What to compare."""

    device: DeviceChoice = DeviceChoice.ACCELERATOR
    """accelerator (CUDA or HIP), or virtual, which only this project's sanitizer can watch."""

    detectors: tuple[Detector, ...] = Field(tuple(Detector), min_length=1)
    """Which."""

    scenarios: tuple[str, ...] = ()
    """Programs, by name or shell pattern; empty means all that the device can run."""

    jobs: int = Field(8, ge=1, le=256)
    """Processes at a time. The programs hardly load a GPU; their times are rough then."""

    timeout_seconds: float = Field(90.0, ge=1, le=3600)
    """Limit of one process."""

    steps: int = Field(40, ge=0, le=10_000)
    """Timed steps of the decode loop a process; 0 leaves the timing out."""

    repeats: int = Field(2, ge=1, le=100)
    """Processes of an arm of the timing."""

    @model_validator(mode="after")
    def _can_watch(self) -> DetectorSettings:
        if self.device is DeviceChoice.VIRTUAL:
            cannot = sorted({*self.detectors} - {*VIRTUAL_DETECTORS})
            if cannot:
                raise ValueError(f"no virtual device is watched by {', '.join(cannot)}")
        return self


def load_scenarios(path: Path = SCENARIOS) -> ModuleType:
    """The module of the programs.

    Raises:
        BadInput: there is no such file (an installation without its tests).
    """
    if not path.is_file():
        raise BadInput(f"no scenarios at {path.name}: run this in a checkout, which has its tests")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def find_compute_sanitizer() -> str | None:
    """Path of compute-sanitizer, from the search path or the usual places."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *glob.glob("/usr/local/cuda-*")]
    places += [
        place
        for folder in sys.path
        for place in glob.glob(f"{folder}/nvidia/*/") + glob.glob(f"{folder}/nvidia/*/*/")
    ]
    for place in filter(None, places):
        for tail in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            file = Path(place) / tail
            if file.is_file() and os.access(file, os.X_OK):
                return str(file)
    return None


def command_of(
    detector: Detector, program: Sequence[str], report: Path
) -> tuple[list[str], dict[str, str]] | None:
    """Command line and extra environment of a program under a detector, ``None`` if absent.

    Args:
        detector: which.
        program: script and arguments, without the interpreter.
        report: where our sanitizer writes its JSON.
    """
    if detector is Detector.OURS:
        ours = ["-m", "atom.lifetime.launcher", "run", "--json", "--output", str(report)]
        return [sys.executable, *ours, "--no-children", *program], {}
    if detector is Detector.TORCH:
        return [sys.executable, *program], {"TORCH_CUDA_SANITIZER": "1"}
    if detector is Detector.MEMCHECK:
        tool = find_compute_sanitizer()
        if tool is None:
            return None
        backend = "backend:cudaMallocAsync"
        return (
            [tool, *_MEMCHECK_OPTIONS, sys.executable, *program],
            {"PYTORCH_CUDA_ALLOC_CONF": backend, "PYTORCH_ALLOC_CONF": backend},
        )
    return [sys.executable, *program], {}


def run_process(
    command: Sequence[str], extra: dict[str, str], timeout: float
) -> tuple[int, str, float]:
    """Exit code (124 for a timeout), output and seconds of a process."""
    places = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **extra, "PYTHONPATH": places},
            timeout=timeout,
            check=False,
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, text = 124, f"did not end within {timeout:g} s"
    return code, text, time.perf_counter() - started


def named_lines(scenario: Any, text: str) -> tuple[bool | None, bool | None, bool | None]:
    """Whether ``text`` names the program's lines of the copy, of the free and of the reuse.

    Lines are told from the program's source: the free is a ``del``; the earlier use is the last
    launch or copy before it; the reuse is any fill behind it.
    """
    source, first = inspect.getsourcelines(scenario.program)
    cited = {int(line) for line in re.findall(r"scenarios\.py\D{1,12}?(\d+)", text)}
    frees = [n for n, line in enumerate(source) if line.strip().startswith("del ")]
    uses = [
        n
        for n, line in enumerate(source)
        if re.search(r"queue_copy\(|device\.copy\(|device\.launch\(", line)
        and (not frees or n < frees[-1])
    ]
    behind = [n for n, line in enumerate(source) if frees and n > frees[0] and "fill" in line]
    copy = bool(cited & {first + n for n in uses}) if uses else None
    free = bool(cited & {first + n for n in frees}) if frees else None
    reuse = bool(cited & {first + n for n in behind}) if behind else None
    return copy, free, reuse


def expected_kinds(scenario: Any) -> str:
    """Kinds that a program must give, joined, or ``nothing``."""
    return "+".join(sorted(scenario.expected)) or NOTHING


def judge(
    scenario: Any, detector: Detector, code: int, text: str, report: dict[str, Any] | None
) -> dict[str, Any]:
    """Result, counts and named lines, from what a process left."""
    expected = expected_kinds(scenario)
    findings, first, as_expected = 0, "", None
    failed = code != 0
    if detector is Detector.OURS:
        failed = report is None
        if report is not None:
            findings = len(report["findings"])
            kinds = {finding["kind"] for finding in report["findings"]}
            as_expected = kinds == set(scenario.expected)
            first = "+".join(sorted(kinds))
            text = json.dumps(report["findings"])
            text = re.sub(r'"line": (\d+)', r"scenarios.py:\1", text)
    elif detector is Detector.TORCH:
        findings = text.count(_TORCH_REPORT)
        failed = code != 0 and not findings
        first = _TORCH_REPORT if findings else ""
    elif detector is Detector.MEMCHECK:
        summary = _MEMCHECK_SUMMARY.search(text)
        failed = summary is None
        findings = int(summary[1]) if summary else 0
        first = next(
            (
                line[10:]
                for line in text.splitlines()
                if "=========" in line[:9] and line[10:].strip() and "COMPUTE-SANITIZER" not in line
            ),
            "",
        )
    if failed:
        result = Result.FAILED
        first = (text.strip().splitlines() or ["no output"])[-1]
    elif scenario.faulty:
        result = Result.CAUGHT if findings else Result.MISSED
    else:
        result = Result.FALSE_ALARM if findings else Result.SILENT
    copy, free, reuse = named_lines(scenario, text) if findings else (None, None, None)
    return {
        "faulty": scenario.faulty,
        "expected": expected,
        "result": result,
        "findings": findings,
        "as_expected": as_expected,
        "names_copy": copy,
        "names_free": free,
        "names_reuse": reuse,
        "exit_code": code,
        "text": shorten(first) or None,
    }


def shorten(text: str) -> str:
    """At most 200 characters without paths of this machine."""
    return re.sub(r"(?<!\w)/[\w./-]+/", "", text).strip()[:200]


def chosen(settings: DetectorSettings) -> dict[str, Any]:
    """The programs of the settings, by name.

    Raises:
        BadInput: no such program, or no checkout.
    """
    known = {
        name: scenario
        for name, scenario in load_scenarios().SCENARIOS.items()
        if settings.device is DeviceChoice.VIRTUAL or not scenario.virtual_only
    }
    wanted = {
        name: scenario
        for name, scenario in known.items()
        if not settings.scenarios
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.scenarios)
    }
    for pattern in settings.scenarios:
        if not fnmatch.filter(known, pattern):
            raise BadInput(
                f"no scenario {pattern} for {settings.device}; known: {', '.join(known)}"
            )
    return wanted


def compare(
    settings: DetectorSettings, done: Collection[str] = ()
) -> Generator[tuple[str, list[DetectorRow]], None, None]:
    """Run every program under every detector, several processes at a time.

    Args:
        settings: what to compare.
        done: programs to leave out.

    Yields:
        A program and its rows in the order of the detectors; programs in their order.

    Raises:
        BadInput: an unknown program, or no checkout.
    """
    left = {name: each for name, each in chosen(settings).items() if name not in done}
    pool = ThreadPoolExecutor(settings.jobs)
    try:
        waiting = {
            name: [pool.submit(_one, settings, scenario, each) for each in settings.detectors]
            for name, scenario in left.items()
        }
        for name, futures in waiting.items():
            yield name, [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def _one(settings: DetectorSettings, scenario: Any, detector: Detector) -> DetectorRow:
    name = scenario.name
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        program = [str(SCENARIOS), name, "--device", str(settings.device)]
        command = command_of(detector, program, report)
        if command is None:
            return DetectorRow(
                scenario=name,
                detector=detector,
                faulty=scenario.faulty,
                expected=expected_kinds(scenario),
                result=Result.ABSENT,
                findings=0,
                exit_code=0,
                seconds=0,
                text="compute-sanitizer was not found",
            )
        code, text, seconds = run_process(*command, settings.timeout_seconds)
        found = json.loads(report.read_text()) if report.is_file() else None
    return DetectorRow(
        scenario=name,
        detector=detector,
        seconds=round(seconds, 3),
        **judge(scenario, detector, code, text, found),
    )


def slowdown(settings: DetectorSettings, repeat: int) -> list[SlowdownRow]:
    """Time the decode loop under each detector, one process at a time, with a null arm.

    Args:
        settings: a tenth of its steps is timed under memcheck.
        repeat: which processes these are, from 0; memcheck has one only.
    """
    rows: list[SlowdownRow] = []
    base = None
    sizes = _SMALL_LOOP if settings.device is DeviceChoice.VIRTUAL else ()
    for arm, detector, words in _arms(settings.detectors):
        slow = detector is Detector.MEMCHECK
        if slow and repeat:
            continue
        count = max(2, settings.steps // 10) if slow else settings.steps
        loop = ["-m", "atom.lifetime.decode_loop", "--device", str(settings.device)]
        plain = Detector.NOTHING if detector is Detector.OURS else detector
        words = [*loop, *sizes, *words, "--steps", str(count)]
        command = command_of(plain, words, Path("unused"))
        result, text = None, "compute-sanitizer was not found"
        if command is not None:
            _, text, _ = run_process(*command, settings.timeout_seconds)
            result = _last_json(text)
        if result is None:
            last = (text.strip().splitlines() or ["no output"])[-1]
            rows.append(
                SlowdownRow(
                    arm=arm,
                    detector=detector,
                    repeat=repeat,
                    steps=0,
                    operations=0,
                    findings=text.count(_TORCH_REPORT),
                    text=shorten(last),
                )
            )
            continue
        base = base or result["median"]
        summary = _MEMCHECK_SUMMARY.search(text) if slow else None
        rows.append(
            SlowdownRow(
                arm=arm,
                detector=detector,
                repeat=repeat,
                steps=result["steps"],
                operations=result["operations"],
                step_milliseconds=result["median"],
                step_milliseconds_low=result["low"],
                step_milliseconds_high=result["high"],
                slow_down=result["median"] / base,
                findings=int(summary[1]) if summary else result["findings"],
            )
        )
    return rows


def _arms(detectors: Sequence[Detector]) -> Iterator[tuple[str, Detector, list[str]]]:
    yield "nothing", Detector.NOTHING, []
    yield NULL_ARM, Detector.NOTHING, []
    if Detector.OURS in detectors:
        yield "atom.lifetime, stopped", Detector.OURS, ["--watch", "stopped"]
        yield "atom.lifetime", Detector.OURS, ["--watch", "on"]
    for detector in (Detector.TORCH, Detector.MEMCHECK):
        if detector in detectors:
            yield str(detector), detector, []


def _last_json(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith('{"steps"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None
