"""The AgentX harness as a client: its command line, its files, its ends; and it, where it is."""

from __future__ import annotations

import json
import stat
import statistics
import sys
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from fake_engine import MODEL
from serving import serve
from tapped import Tapped, assert_same, delays

from atom.benchmarks.agentic_sessions import generate_sessions, write_traces
from atom.benchmarks.agentx_client import (
    VARIABLE,
    AgentxFailed,
    find_agentx,
    read_agentx,
    run_agentx,
)
from atom.benchmarks.load_client import LoadSettings
from atom.benchmarks.load_metrics import LoadSummary, summarise
from atom.entrypoints.loading import load
from atom.entrypoints.tokenizer import FolderTokenizer
from atom.errors import BadInput

_SETTINGS = LoadSettings(concurrency=3, duration_seconds=7.5, seed=11, start_least=0.0)
_URL = "http://user:secret@127.0.0.1:9/v1"


def record(start: float, phase: str = "profiling", **values: object) -> dict[str, Any]:
    """A request of 100 prompt and 5 output tokens: 2 s to the first, 4 s more to the last."""
    metrics = {
        "input_sequence_length": 100,
        "output_sequence_length": 5,
        "usage_prompt_cache_read_tokens": 30,
        "time_to_first_token": 2000.0,
        "request_latency": 6000.0,
    }
    return {
        "metadata": {
            "conversation_id": "trace_1",
            "turn_index": 3,
            "benchmark_phase": phase,
            "request_start_ns": int((1000 + start) * 1e9),
            "request_end_ns": int((1006 + start) * 1e9),
            "was_cancelled": False,
        },
        "metrics": {name: {"value": value, "unit": "?"} for name, value in metrics.items()},
        **values,
    }


def export(**values: object) -> dict[str, Any]:
    times = {"avg": 2000.0, "p50": 2000.0, "p90": 2000.0, "p99": 2000.0, "unit": "ms"}
    return {
        "aiperf_version": "1.0.12",
        "metadata": {"submission_valid": False},
        "run_info": {"cli_command": "aiperf profile --api-key sk-0123456789 --url http://host"},
        "request_count": {"avg": 2.0},
        "effective_total_throughput": {"avg": 26.0},
        "time_to_first_token": times,
        "inter_token_latency": dict.fromkeys(times, 1000.0),
        "total_isl": {"avg": 200.0},
        "total_osl": {"avg": 10.0},
        "benchmark_duration": {"avg": 8.0},
        **values,
    }


def write(folder: Path, records: list[dict[str, Any]], values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "profile_export_aiperf.json").write_text(json.dumps(values))
    return folder


# -- its files
def test_its_figures_and_its_rows_are_read(tmp_path: Path) -> None:
    records = [record(0, "warmup"), record(10), record(12)]
    found = read_agentx(write(tmp_path, records, export()))
    assert [row.phase for row in found.rows] == ["warmup", "profiling", "profiling"]
    row = found.rows[1]
    assert (row.session, row.turn, row.outcome) == ("trace_1", 3, "ok")
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (100, 30, 5)
    # seconds since its first request, whatever the clock
    assert (row.started, row.first_token, row.ended) == pytest.approx((10.0, 12.0, 16.0))
    assert (found.version, found.submission_valid) == ("1.0.12", False)
    assert found.summary.effective_total_throughput == 26.0
    # 2 * 104 tokens between the first start and the last end
    assert found.recomputed.effective_total_throughput == pytest.approx(208 / 8)
    assert found.summary.total_throughput == pytest.approx(210 / 8)
    assert found.summary.errors == 0
    for field in fields(LoadSummary):
        ours = getattr(found.recomputed, field.name)
        assert getattr(found.summary, field.name) == pytest.approx(ours), field.name


@pytest.mark.parametrize("cached", [101, -1])
def test_cached_tokens_that_cannot_be_are_not_reported(cached: int, tmp_path: Path) -> None:
    one = record(0)
    one["metrics"]["usage_prompt_cache_read_tokens"]["value"] = cached
    found = read_agentx(write(tmp_path, [one], export()))
    assert found.rows[0].cached_tokens is None
    assert found.recomputed.cached_share is None


def test_errors_are_counted_and_their_messages_stay_behind(tmp_path: Path) -> None:
    fault = {"code": 503, "type": "HTTPError", "message": "at http://host"}
    bad = record(11, error=fault, metrics={})
    late = record(12)
    late["metadata"]["was_cancelled"] = True
    values = export(error_request_count={"avg": 1.0}, request_count={"avg": 1.0})
    found = read_agentx(write(tmp_path, [record(10), bad, late], values))
    assert [(row.outcome, row.error) for row in found.rows] == [
        ("ok", ""),
        ("error", "HTTP 503"),
        ("cancelled", "the load ended before the answer"),
    ]
    assert found.summary.errors == found.recomputed.errors == 1
    assert "sk-0123456789" not in repr(found)
    assert "host" not in repr(found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no artifacts of agentx"):
        read_agentx(tmp_path)
    values = export()
    del values["request_count"]
    with pytest.raises(BadInput, match=r"not as agentx 1\.0\.12 writes it .*request_count"):
        read_agentx(write(tmp_path, [record(1)], values))
    with pytest.raises(AgentxFailed, match="no request of the profiling phase"):
        read_agentx(write(tmp_path, [record(1, "warmup")], export()))


# -- its program, played by one of ours
_PROGRAM = """\
#!{python}
import json, os, pathlib, subprocess, sys, time
here = pathlib.Path({folder!r})
said = dict(zip(sys.argv[1:], sys.argv[2:]))
(here / "seen.json").write_text(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))
print("the harness speaks")
{body}
"""
_WRITES = """\
out = pathlib.Path(said["--output-artifact-dir"])
for name in ("profile_export.jsonl", "profile_export_aiperf.json"):
    (out / name).write_text((here / "ready" / name).read_text())
"""
_HANGS = """\
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(here / "child").write_text(str(child.pid))
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "agentx"
    (tmp_path / "traces").mkdir()
    (tmp_path / "tokenizer").mkdir()
    write(tmp_path / "ready", [record(10), record(12)], export())
    return path


def play(program: Path, body: str) -> None:
    text = _PROGRAM.format(python=sys.executable, folder=str(program.parent), body=body)
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def run(program: Path, settings: LoadSettings = _SETTINGS, **options: Any) -> Any:
    folder = program.parent
    return run_agentx(
        _URL,
        "a model",
        folder / "traces",
        folder / "tokenizer",
        settings,
        log=folder / "log",
        program=program,
        **options,
    )


def test_it_is_told_the_load_and_leaves_nothing_behind(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOAD_KEY", "sk-0123456789")
    play(program, _WRITES)
    found = run(program, api_key_env="LOAD_KEY")
    assert found.summary.requests == 2
    assert 0 < found.client_cpu_seconds < 30
    as_ours = found.as_load()
    assert (as_ours.rows, as_ours.summary) == (found.rows, found.summary)
    # its rows begin with its first request, 2 s apart
    assert as_ours.window == pytest.approx((0.0, 8.0))
    assert "the harness speaks" in (program.parent / "log").read_text()
    words, environment, folder = json.loads((program.parent / "seen.json").read_text())
    told = dict(pairwise(words))
    assert told["--url"] == "http://user:secret@127.0.0.1:9"
    assert told["--model"] == "a model"
    assert (told["--concurrency"], told["--benchmark-duration"]) == ("3", "7.5")
    assert (told["--random-seed"], told["--warmup-requests-per-lane"]) == ("11", "1")
    assert told["--trajectory-start-max-ratio"] == "0.75"
    assert told["--trace-idle-gap-cap-seconds"] == "1.0"
    assert told["--api-key"] == "sk-0123456789"
    assert {"--unsafe-override", "--streaming", "--use-server-token-count"} <= set(words)
    # with it a tokenizer's path would be taken for a name
    assert "HF_HUB_OFFLINE" not in environment
    assert environment["AIPERF_DATASET_MMAP_CACHE_ENABLED"] == "false"
    assert not Path(folder).exists()


def test_an_end_without_a_result_says_where_to_look(program: Path) -> None:
    play(program, "sys.exit(7)")
    with pytest.raises(AgentxFailed, match=r"exit code 7 and without a result; .*log"):
        run(program)


def test_one_that_hangs_is_ended_with_its_workers(program: Path) -> None:
    play(program, _HANGS)
    with pytest.raises(AgentxFailed, match=r"ended after 2 s and without a result"):
        run(program, seconds=2.0)
    child = int((program.parent / "child").read_text())
    end = time.monotonic() + 5
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_it_cannot_do_is_refused_before_it_starts(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(program.parent / "nothing"))
    with pytest.raises(BadInput, match="pip install agentx-harness"):
        find_agentx()
    with pytest.raises(BadInput, match="no program"):
        run(program)
    play(program, "sys.exit(0)")
    monkeypatch.setenv(VARIABLE, str(program))
    assert find_agentx() == program
    with pytest.raises(BadInput, match="output_tokens"):
        run(program, _SETTINGS.model_copy(update={"output_tokens": 5}))
    with pytest.raises(BadInput, match="LOAD_KEY"):
        run(program, api_key_env="LOAD_KEY")
    (program.parent / "tokenizer").rmdir()
    with pytest.raises(BadInput, match=r"tokenizer: .* is no folder"):
        run(program)
    assert not (program.parent / "seen.json").exists()


# -- the harness itself
def write_tokenizer(folder: Path) -> None:
    """A small tokenizer whose every token has text, learned from this repository's own words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(__file__).resolve().parents[2]
    words = Tokenizer(models.BPE(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(0x20, 0x7F)]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["[UNK]"], initial_alphabet=alphabet, show_progress=False
    )
    words.train([str(root / "README.md")], trainer)
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.timeout(600)
def test_the_harness_measures_what_happens_at_the_engine(tmp_path: Path) -> None:
    try:
        harness = find_agentx()
    except BadInput as missing:
        pytest.skip(str(missing))
    write_tokenizer(tmp_path / "tokenizer")
    sessions = generate_sessions(
        12, 1, max_context_tokens=1500, turns_median=8, turns_sigma=0.3, first_input_median=200,
        first_input_sigma=0.3, resumed_share=0.0, growth_median=40, growth_least=10,
        output_median=6, output_least=8, rewrite_share=0.0, think_median=0.3, away_share=0.0,
    )  # fmt: skip
    write_traces(sessions, tmp_path / "traces")
    tiny = load("preset:tiny", "virtual", {"max_num_seqs": 4, "num_kv_blocks": 1024})
    with serve(
        tiny.engine,
        tokenizer=FolderTokenizer(tmp_path / "tokenizer"),
        vocab_size=512,
        logprobs=False,
        longest=4096,
    ) as running:
        tapped = Tapped(running)
        found = run_agentx(
            running.url,
            MODEL,
            tmp_path / "traces",
            tmp_path / "tokenizer",
            LoadSettings(concurrency=3, duration_seconds=15, seed=42),
            log=tmp_path / "log",
            program=harness,
        )
    # its aggregates are what our definitions make of its own rows
    for field in fields(LoadSummary):
        ours = pytest.approx(getattr(found.recomputed, field.name), rel=0.01)
        assert getattr(found.summary, field.name) == ours, field.name
    # and its rows are what a client in the server's process sees of the same requests
    assert {row.outcome for row in found.rows} == {"ok"}
    shift = min(one.started for one in tapped.exchanges)
    seen = tapped.rows(found.rows, shift)
    late = delays(found.rows, seen)
    assert statistics.median(late) < 0.1
    first = min(row.started for row in found.rows if row.phase == "profiling")
    window = (first, max(row.ended for row in found.rows))
    assert_same(
        summarise(found.rows, window), summarise(seen, window), max(map(abs, late)), fewest_tokens=8
    )
