"""``python -m atom serve``: what it refuses before it loads anything, and how options map."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atom import __main__ as command_line
from atom.config import CopyProtocol, GuardMode
from atom.entrypoints import serve
from atom.errors import BadInput
from atom.model_engine.engine_settings import EngineSettings
from atom.models.presets import PRESETS

_TINY = ["serve", "--model", "preset:tiny", "--device", "virtual", "--port", "0"]


def parsed(*words: str) -> EngineSettings:
    options = command_line.build_parser().parse_args([*_TINY, *words])
    return EngineSettings.parse(serve.engine_values(options))


def test_a_pool_is_given_in_gibibytes() -> None:
    assert parsed("--cpu-pool-gib", "1.5").cpu_pool_bytes == 3 * 2**29
    # what a template of the throughput sweep writes for no offload
    assert parsed("--cpu-pool-gib", "0").cpu_pool_bytes is None
    with pytest.raises(BadInput, match="--cpu-pool-gib -1: expected 0"):
        parsed("--cpu-pool-gib", "-1")


def test_options_reach_their_settings() -> None:
    settings = parsed(
        *("--protocol", "zero_copy", "--guard", "none", "--max-num-seqs", "7"),
        *("--max-num-batched-tokens", "512", "--max-model-len", "99", "--draft-tokens", "2"),
        *("--forced-acceptance-length", "1.5", "--gpu-memory-utilization", "0.5", "--dspark"),
        *("--num-kv-blocks", "11", "--no-prefix-caching", "--seed", "3", "--no-logprobs"),
        *("-p", "block_size", "64", "-p", "epoch_tag", "false"),
    )
    assert settings.copy_protocol is CopyProtocol.ZERO_COPY
    assert settings.guard is GuardMode.NONE
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (7, 512)
    assert (settings.max_model_len, settings.draft_tokens) == (99, 2)
    assert (settings.forced_acceptance_length, settings.memory_utilization) == (1.5, 0.5)
    assert (settings.dspark, settings.num_kv_blocks, settings.seed) == (True, 11, 3)
    assert (settings.prefix_caching, settings.logprobs) == (False, False)
    assert (settings.block_size, settings.epoch_tag) == (64, False)


def test_what_is_not_given_keeps_its_default_but_logprobs_are_on() -> None:
    assert parsed() == EngineSettings.parse({"logprobs": True})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key", " \t\n"], "the API key is empty"),
        (["--api-key", "one\ntwo"], "the API key has a character"),
        (["--api-key", "\udce9"], "the API key has a character"),
        (["--served-model-name", "\udce9"], r"--served-model-name '\udce9'"),
        (["--host", "203.0.113.7"], "cannot bind 203.0.113.7"),
        (["--host", "no such host"], "cannot bind no such host"),
        (["--shutdown-seconds", "-1"], "--shutdown-seconds -1.0"),
        (["--max-body-mib", "0"], "--max-body-mib 0.0"),
        (["-p", "block_size", "["], "-p block_size"),
        (["-p", "blok_size", "16"], "did you mean 'block_size'?"),
        (["--protocol", "holt"], "copy_protocol"),
        (["--draft-tokens", "-1"], "draft_tokens"),
        (["--model", "preset:huge"], "'huge'; known: tiny, m395"),
        (["--model", "no_such_folder"], "no_such_folder: no such folder"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([*_TINY, *words]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: No such file or directory; expected a checkpoint folder"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ('{"model_type": "qwen3_next"}', "all layers have experts (num_experts=512 (its default)"),
        ('{"model_type": "qwen3_next", "num_experts": 0}', "no weights; expected model."),
    ],
)
def test_a_folder_that_is_no_checkpoint(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=re.escape(message)):
        serve.check_model(str(tmp_path))


def test_every_preset_may_be_served() -> None:
    assert tuple(PRESETS) == serve.PRESETS
    for name in PRESETS:
        serve.check_model(f"preset:{name}")


@pytest.mark.parametrize("model", ["preset:huge", "no_such_folder"])
def test_a_wrong_model_is_told_before_anything_heavy_is_imported(model: str) -> None:
    done, modules = in_a_fresh_process([*_TINY, "--model", model])
    assert model.removeprefix("preset:") in done.stderr
    assert not {"torch", "fastapi", "transformers", "pydantic"} & modules


def test_experts_and_settings_are_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next"}')
    heavy = {"torch", "fastapi", "transformers"}
    done, modules = in_a_fresh_process([*_TINY, "--model", str(tmp_path)])
    assert "have experts" in done.stderr
    assert not heavy & modules
    done, modules = in_a_fresh_process([*_TINY, "--draft-tokens", "9"])
    assert "draft_tokens: input should be less than or equal to 7" in done.stderr
    assert not heavy & modules


@pytest.mark.parametrize("key", [" a secret", "a secret \t", "a secret\r\n"])
def test_blanks_around_the_key_are_none_of_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.KEY_VARIABLE, key)
    parser = command_line.build_parser()
    assert serve.api_key(parser.parse_args(_TINY)) == "a secret"
    assert serve.api_key(parser.parse_args([*_TINY, "--api-key", key])) == "a secret"


def test_help_names_the_draft_tokens_that_the_engine_takes() -> None:
    about = next(one[3] for one in serve._ENGINE_OPTIONS if one[0] == "--draft-tokens")
    field = EngineSettings.model_fields["draft_tokens"]
    least = next(one.ge for one in field.metadata if hasattr(one, "ge"))
    most = next(one.le for one in field.metadata if hasattr(one, "le"))
    assert f"{least} to {most} (default: {field.default})" in about


def test_a_port_in_use_is_found_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command_line.main([*_TINY, "--port", port, "--model", "no_such_folder"]) == 2
    assert f"cannot bind 127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "alone"),
    [
        (("127.0.0.1", "127.9.9.9", "::1", "localhost"), True),
        (("0.0.0.0", "::", "192.0.2.1", "a.example"), False),
    ],
)
def test_which_addresses_only_this_machine_reaches(hosts: tuple[str, ...], alone: bool) -> None:
    for host in hosts:
        assert serve.is_loopback(host) is alone


def in_a_fresh_process(words: list[str]) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run a command line; what it printed, and every module that it imported."""
    program = (
        "import sys, json\nfrom atom.__main__ import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return done, set(json.loads(done.stderr.splitlines()[-1]))


def test_help_loads_nothing_heavy() -> None:
    done, modules = in_a_fresh_process(["serve", "--help"])
    assert "curl http://127.0.0.1:8000" in done.stdout
    assert not {"torch", "fastapi", "transformers", "pydantic"} & modules


def test_the_other_engines_start_command_still_names_this_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atom.entrypoints.openai_server"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert "python -m atom serve" in done.stderr


def test_ready_is_a_line_for_people_or_for_scripts() -> None:
    settings = EngineSettings.parse({"draft_tokens": 2})
    url = "http://127.0.0.1:8000/v1"
    line = serve.ready_line(url, "tiny", "a device", settings)
    assert line == f"ready: {url} serves tiny on a device (hold, guard report, 2 draft tokens)"
    line = serve.ready_line(url, "tiny", "a device", settings, as_json=True)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["url"], said["model"], said["device"]) == (url, "tiny", "a device")
    assert said["settings"]["draft_tokens"] == 2
    assert command_line.build_parser().parse_args([*_TINY, "--json"]).json


@pytest.mark.parametrize("both", [False, True])
def test_a_server_whose_output_nobody_reads_says_so_and_goes_on(both: bool) -> None:
    code = (
        "from atom.entrypoints.terminal import say, tell\nsay('ready'); say('again'); tell('later')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        errors = writer if both else subprocess.PIPE
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writer,
            stderr=errors,
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.close(writer)
    assert done.returncode == 0
    if not both:
        assert done.stderr.splitlines()[1:] == [b"ready", b"later"]
