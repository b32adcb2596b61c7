"""Runs the same programs under several detectors, each in a process of its own.

``python -m atom.lifetime.compare_detectors --device accelerator --out FILE.json``

Detectors: nothing, this project's sanitizer, ``torch.cuda._sanitizer`` by its variable
``TORCH_CUDA_SANITIZER=1``, and compute-sanitizer's memcheck with PyTorch's cudaMallocAsync backend
and ``--track-stream-ordered-races all``. The programs are those of ``tests/lifetime/scenarios.py``.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from atom.errors import BadInput
from atom.lifetime.detector_rows import NOTHING, Detector, DetectorRow, Result, SlowdownRow

PROJECT = Path(__file__).resolve().parents[2]
SCENARIOS = PROJECT / "tests" / "lifetime" / "scenarios.py"
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


@dataclass(frozen=True)
class Settings:
    """What to compare.

    Attributes:
        device: ``accelerator``, or ``virtual`` (which only nothing and ours can watch).
        detectors: which.
        scenarios: names; empty means all that the device can run.
        jobs: processes at a time. The programs hardly load a GPU; their times are rough then.
        timeout_seconds: of one process.
    """

    device: str = "accelerator"
    detectors: tuple[Detector, ...] = tuple(Detector)
    scenarios: tuple[str, ...] = ()
    jobs: int = 8
    timeout_seconds: float = 90.0


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


def compare(
    settings: Settings, tell: Callable[[DetectorRow], None] = lambda row: None
) -> list[DetectorRow]:
    """Run every program under every detector.

    Args:
        settings: what to compare.
        tell: called with each row, in no special order.

    Returns:
        Rows in the order of the programs, then of the detectors.

    Raises:
        BadInput: an unknown scenario, or no checkout.
    """
    module = load_scenarios()
    known = {
        name: scenario
        for name, scenario in module.SCENARIOS.items()
        if settings.device == "virtual" or not scenario.virtual_only
    }
    names = settings.scenarios or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadInput(f"no scenario {', '.join(unknown)} for {settings.device}")

    def one(name: str, detector: Detector) -> DetectorRow:
        scenario = known[name]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            program = [str(SCENARIOS), name, "--device", settings.device]
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
        row = DetectorRow(
            scenario=name,
            detector=detector,
            seconds=round(seconds, 3),
            **judge(scenario, detector, code, text, found),
        )
        tell(row)
        return row

    pairs = [(name, detector) for name in names for detector in settings.detectors]
    with ThreadPoolExecutor(settings.jobs) as pool:
        return list(pool.map(lambda pair: one(*pair), pairs))


def slowdown(
    *,
    device: str = "accelerator",
    steps: int = 40,
    repeats: int = 2,
    detectors: Sequence[Detector] = tuple(Detector),
    sizes: Sequence[str] = (),
    timeout: float = 120.0,
) -> list[SlowdownRow]:
    """Time the decode loop under each detector, one process at a time, with a null arm.

    Args:
        device: ``accelerator`` or ``virtual``.
        steps: timed steps a process (a tenth of them under memcheck).
        repeats: processes an arm (one under memcheck).
        detectors: which.
        sizes: further options of ``atom.lifetime.decode_loop``.
        timeout: seconds of one process.
    """
    rows: list[SlowdownRow] = []
    for repeat in range(repeats):
        base = None
        for arm, detector, words in _arms(detectors):
            slow = detector is Detector.MEMCHECK
            if slow and repeat:
                continue
            count = max(2, steps // 10) if slow else steps
            loop = ["-m", "atom.lifetime.decode_loop", "--device", device, *sizes, *words]
            plain = Detector.NOTHING if detector is Detector.OURS else detector
            command = command_of(plain, [*loop, "--steps", str(count)], Path("unused"))
            result, text = None, "compute-sanitizer was not found"
            if command is not None:
                _, text, _ = run_process(*command, timeout)
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
    yield "nothing again", Detector.NOTHING, []
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="accelerator", choices=["virtual", "accelerator"])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="0: no timing")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the rows there, as JSON")
    parser.add_argument("scenarios", nargs="*")
    options = parser.parse_args(arguments)
    virtual = options.device == "virtual"
    detectors = (Detector.NOTHING, Detector.OURS) if virtual else tuple(Detector)
    settings = Settings(options.device, detectors, tuple(options.scenarios), options.jobs)
    rows = compare(settings, lambda row: print(f"{row.scenario} / {row.detector}: {row.result}"))
    times = []
    if options.steps:
        small = ["--layers", "2", "--width", "64"] if virtual else []
        times = slowdown(
            device=options.device,
            steps=options.steps,
            repeats=options.repeats,
            detectors=detectors,
            sizes=small,
        )
    for time_row in times:
        print(f"{time_row.arm}: {time_row.step_milliseconds} ms a step, x{time_row.slow_down}")
    if options.out:
        plain = {
            "detectors": [row.model_dump(mode="json") for row in rows],
            "slowdown": [row.model_dump(mode="json") for row in times],
        }
        options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
