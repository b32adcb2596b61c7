"""Runs the AgentX harness itself against a server, and reads what it measured into our figures.

The harness (``agentx-harness`` on PyPI, Apache-2.0) is an optional program of its own: install it
into an environment of its own, since it brings many packages, and never install ``aiperf`` beside
it. It is looked for on the ``PATH``, or where :data:`VARIABLE` says.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atom.benchmarks.load_client import LoadResult, LoadSettings
from atom.benchmarks.load_http import key_of
from atom.benchmarks.load_metrics import LoadSummary, Phase, RequestRow, summarise
from atom.errors import AtomError, BadInput

#: environment variable with the path of the ``agentx`` program
VARIABLE = "ATOM_AGENTX"
INSTALL = "python -m venv DIR && DIR/bin/pip install agentx-harness==1.0.12"
#: seconds beyond the load itself that the harness may take to start, warm up and write
_BESIDES = 600.0
_EXPORT = "profile_export_aiperf.json"
_RECORDS = "profile_export.jsonl"


class AgentxFailed(AtomError):
    """The harness ended without a result."""


@dataclass(frozen=True, slots=True)
class AgentxResult:
    """What the harness measured.

    Attributes:
        rows: a row a request, warm-up included; times in seconds since the first of them.
        summary: the harness's own aggregates. It has none for InferenceX's throughputs and the
            cached share: those are of its rows.
        recomputed: the same figures by our definitions from its rows, as a check of both.
        version: of the harness.
        submission_valid: whether the harness would take the run as a submission; short runs and
            local traces are none.
        client_cpu_seconds: processor time of the harness, its start and its warm-up included.
    """

    rows: tuple[RequestRow, ...]
    summary: LoadSummary
    recomputed: LoadSummary
    version: str
    submission_valid: bool
    client_cpu_seconds: float = 0.0

    def as_load(self) -> LoadResult:
        """The same as the result of a load of our own, on the clock of the harness's rows."""
        own = [row for row in self.rows if row.phase == "profiling"]
        start = min(row.started for row in own)
        window = (start, start + self.summary.window_seconds)
        return LoadResult(self.rows, self.summary, window, self.client_cpu_seconds)


def find_agentx(program: str | Path | None = None) -> Path:
    """Where the harness is.

    Args:
        program: its path; ``None`` takes :data:`VARIABLE`, then the ``PATH``.

    Raises:
        BadInput: it is not there; the message says how to install it.
    """
    given = str(program or os.environ.get(VARIABLE, "") or "agentx")
    found = shutil.which(given)
    if found is None:
        raise BadInput(
            f"agentx: no program {given!r} here; install it with `{INSTALL}` and set {VARIABLE} to "
            "DIR/bin/agentx"
        )
    return Path(found)


def run_agentx(
    base_url: str,
    model: str,
    traces: str | Path,
    tokenizer: str | Path,
    settings: LoadSettings,
    *,
    log: str | Path,
    api_key_env: str | None = None,
    program: str | Path | None = None,
    seconds: float | None = None,
) -> AgentxResult:
    """Run the harness once.

    Its requests are made greedy, as those of our own clients are, and lanes start where
    ``settings`` say. Its artifacts hold the server's address, so they are read and removed.

    Args:
        base_url: of the server.
        model: name of the model there.
        traces: folder of trace files; generated sessions become one with ``write_traces``.
        tokenizer: folder of the model's tokenizer.
        settings: concurrency, duration, warm-up requests, seed, longest pause and start; its other
            fields have no counterpart.
        log: file for what the harness says.
        api_key_env: environment variable with the server's key. The harness takes a key on its
            command line alone, where other users of the machine can see it while it runs.
        program: path of the harness, see :func:`find_agentx`.
        seconds: longest time; by default the load and 10 minutes.

    Raises:
        BadInput: the harness, the traces or the tokenizer are not there.
        AgentxFailed: it ended without a result, or took too long.
    """
    for name, folder in (("traces", traces), ("tokenizer", tokenizer)):
        if not Path(folder).is_dir():
            raise BadInput(f"{name}: {folder} is no folder")
    if settings.output_tokens is not None:
        raise BadInput("output_tokens: the harness takes the traces' lengths; leave it empty")
    key = None if api_key_env is None else key_of(api_key_env)
    executable = find_agentx(program)
    longest = seconds or settings.duration_seconds + settings.grace_seconds + _BESIDES
    with tempfile.TemporaryDirectory(prefix="agentx-") as artifacts:
        arguments = [
            str(executable),
            *_arguments(base_url, model, Path(traces), Path(tokenizer), settings),
            *(("--api-key", key) if key else ()),
            *("--output-artifact-dir", artifacts),
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = _run(arguments, Path(artifacts), Path(log), longest)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not (Path(artifacts) / _EXPORT).is_file():
            how = f"after {longest:g} s" if code is None else f"with exit code {code}"
            raise AgentxFailed(f"agentx ended {how} and without a result; it said why in {log}")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return replace(read_agentx(artifacts), client_cpu_seconds=used)


def read_agentx(folder: str | Path) -> AgentxResult:
    """Read the artifacts of a run of the harness.

    Raises:
        BadInput: a file is missing or damaged; it names file and field.
    """
    export = Path(folder) / _EXPORT
    try:
        values = json.loads(export.read_text(encoding="utf-8"))
        lines = (Path(folder) / _RECORDS).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder}: no artifacts of agentx: {error}") from None
    try:
        rows = _rows(records)
        own = [row for row in rows if row.phase == "profiling" and row.outcome == "ok"]
        if not own:
            raise AgentxFailed("agentx: no request of the profiling phase was answered")
        start = min(row.started for row in own)
        ours = summarise(rows, (start, max(row.ended for row in own)))
        return AgentxResult(
            rows=tuple(rows),
            summary=_aggregates(values, ours),
            recomputed=ours,
            version=str(values.get("aiperf_version", "unknown")),
            submission_valid=bool(values.get("metadata", {}).get("submission_valid", False)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{folder}: not as agentx 1.0.12 writes it ({type(error).__name__}: {error})"
        ) from None


def _arguments(
    base_url: str, model: str, traces: Path, tokenizer: Path, settings: LoadSettings
) -> Sequence[str]:
    options: dict[str, object] = {
        "--scenario": "inferencex-agentx-mvp",
        "--url": base_url.rstrip("/").removesuffix("/v1"),
        "--endpoint": "/v1/chat/completions",
        "--endpoint-type": "chat",
        "--model": model,
        "--tokenizer": tokenizer.resolve(),
        "--concurrency": settings.concurrency,
        "--benchmark-duration": settings.duration_seconds,
        "--benchmark-grace-period": settings.grace_seconds,
        "--random-seed": settings.seed,
        "--trajectory-start-min-ratio": settings.start_least,
        "--trajectory-start-max-ratio": settings.start_most,
        "--custom-dataset-type": "weka-trace",
        "--input-file": traces.resolve(),
        "--trace-idle-gap-cap-seconds": settings.think_cap_seconds,
        "--connection-reuse-strategy": "never",
        "--extra-inputs": "temperature:0",
        "--ui": "none",
    }
    if settings.warmup_requests_per_lane:
        options["--warmup-requests-per-lane"] = settings.warmup_requests_per_lane
    flags = ("--unsafe-override", "--streaming", "--use-server-token-count", "--no-gpu-telemetry")
    pairs = (str(word) for pair in options.items() for word in pair)
    return ("profile", *flags, *pairs)


def _run(arguments: Sequence[str], folder: Path, log: Path, seconds: float) -> int | None:
    """Run to the end, or end the whole group; the exit code, ``None`` if it took too long."""
    # packages of ours must not stand before the harness's own
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # with it the harness takes a tokenizer's path for a name to be looked up
    environment.pop("HF_HUB_OFFLINE", None)
    # its cache of prompts does not notice that the files of a tokenizer have changed
    environment["AIPERF_DATASET_MMAP_CACHE_ENABLED"] = "false"
    with log.open("ab") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the program and the workers that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        end = time.monotonic() + 5.0
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    process.wait()


def _rows(records: Sequence[Mapping[str, Any]]) -> list[RequestRow]:
    begin = min((record["metadata"]["request_start_ns"] for record in records), default=0)
    return [_row(record, begin) for record in records]


def _row(record: Mapping[str, Any], begin: int) -> RequestRow:
    about = record["metadata"]
    metrics = {name: metric["value"] for name, metric in record.get("metrics", {}).items()}
    phase: Phase = "warmup" if about["benchmark_phase"] == "warmup" else "profiling"
    started = (about["request_start_ns"] - begin) / 1e9
    prompt = int(metrics.get("input_sequence_length", 0))
    cached = metrics.get("usage_prompt_cache_read_tokens")
    row = RequestRow(
        session=about["conversation_id"],
        turn=about["turn_index"],
        phase=phase,
        outcome="ok",
        error="",
        prompt_tokens=prompt,
        # more than there are is no report
        cached_tokens=cached if cached is not None and 0 <= cached <= prompt else None,
        output_tokens=int(metrics.get("output_sequence_length", 0)),
        started=started,
        first_token=None,
        ended=(about["request_end_ns"] - begin) / 1e9,
    )
    if about.get("was_cancelled"):
        return replace(row, outcome="cancelled", error="the load ended before the answer")
    if record.get("error") or "time_to_first_token" not in metrics:
        fault = record.get("error")
        code = fault.get("code") if isinstance(fault, dict) else None
        # its message may name the server
        said = f"HTTP {code}" if type(code) is int else "no answer"
        return replace(row, outcome="error", error=said)
    return replace(
        row,
        first_token=started + metrics["time_to_first_token"] / 1e3,
        ended=started + metrics["request_latency"] / 1e3,
    )


def _aggregates(values: Mapping[str, Any], ours: LoadSummary) -> LoadSummary:
    """The harness's own aggregates, in our names and units."""

    def seconds(metric: str, statistic: str) -> float:
        return float(values[metric][statistic]) / 1e3

    # absent when it is 0
    errors = values.get("error_request_count", {"avg": 0})
    tokens = values["total_isl"]["avg"] + values["total_osl"]["avg"]
    requests = int(values["request_count"]["avg"])
    ttft, itl = "time_to_first_token", "inter_token_latency"
    return replace(
        ours,
        requests=requests,
        errors=int(errors["avg"]),
        effective_total_throughput=float(values["effective_total_throughput"]["avg"]),
        ttft_mean_seconds=seconds(ttft, "avg"),
        ttft_p50_seconds=seconds(ttft, "p50"),
        ttft_p90_seconds=seconds(ttft, "p90"),
        ttft_p99_seconds=seconds(ttft, "p99"),
        itl_mean_seconds=seconds(itl, "avg"),
        itl_p50_seconds=seconds(itl, "p50"),
        itl_p90_seconds=seconds(itl, "p90"),
        itl_p99_seconds=seconds(itl, "p99"),
        tokens_per_request=tokens / requests,
        window_seconds=float(values["benchmark_duration"]["avg"]),
    )
