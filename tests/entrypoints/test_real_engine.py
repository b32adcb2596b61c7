"""The server over the real engine: a tiny model with random weights, on the virtual device."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serving import MODEL, Running, serve

from atom.entrypoints.loading import load

_ROOT = Path(__file__).parents[2]
_SETTINGS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "num_kv_blocks": 96,
    "state_checkpoint_tokens": 16,
    "max_waiting": 64,
    "logprobs": True,
}
_PROMPTS = ["tell me more. " * (1 + number % 5) + "abcdef"[number] for number in range(6)]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    loaded = load("preset:tiny", "virtual", _SETTINGS)
    with serve(loaded.engine, vocab_size=loaded.vocab_size, longest=512) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(running: Running) -> Iterator[None]:
    yield
    running.wait_until_idle()


def ask(running: Running, prompt: str, tokens: int = 12) -> str:
    answer = running.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens
    return answer.choices[0].text


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-6])
def test_a_temperature_next_to_0_says_what_0_says(running: Running, temperature: float) -> None:
    # a second request draws, so that the batch is not greedy as a whole
    client = running.client()
    stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=60, stream=True)
    cold = client.completions.create(
        model=MODEL, prompt=_PROMPTS[0], max_tokens=12, temperature=temperature
    )
    assert list(stream)
    assert cold.choices[0].text == ask(running, _PROMPTS[0])


def test_streams_side_by_side_say_what_each_says_alone(running: Running) -> None:
    alone = [ask(running, prompt) for prompt in _PROMPTS]
    assert len(set(alone)) > 3

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def together() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", http_client=http) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in _PROMPTS))

    assert asyncio.run(together()) == alone


def test_logprobs_seeds_and_cached_tokens(running: Running) -> None:
    client = running.client()

    def talk() -> tuple[str | None, list[float], int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "once upon a time " * 6}],
            max_tokens=12,
            temperature=1.0,
            seed=5,
            logprobs=True,
        )
        found = answer.choices[0].logprobs
        assert found is not None
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        logprobs = [token.logprob for token in found.content or ()]
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        return answer.choices[0].message.content, logprobs, cached

    first, second = talk(), talk()
    assert len(first[1]) == 12
    assert all(-30 < logprob < 0 for logprob in first[1])
    assert second[0] == first[0]
    assert second[1] == pytest.approx(first[1], abs=1e-3)
    assert second[2] > 0


def test_what_can_never_fit_is_refused(running: Running) -> None:
    client = running.client()
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert error.value.code == "context_length_exceeded"
    # without a wish it may go on to the longest that fits, and does
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x" * 490}]
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512


def test_clients_that_vanish(running: Running) -> None:
    client = running.client()
    for _ in range(3):
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
    running.wait_until_idle()
    with running.http() as http:
        page = http.get("/metrics").text
    values = {name: float(value) for name, value in re.findall(r"(?m)^(atom_\w+) (\S+)$", page)}
    assert values["atom_engine_aborted_requests_total"] == 3
    assert values["atom_running_requests"] == 0
    assert values["atom_kv_used_blocks"] == 0
    assert 0 < values["atom_spec_acceptance_ratio"] < 1
    assert values["atom_guard_errors_total"] == values["atom_stale_statuses_total"] == 0


def test_the_command_serves_without_any_files() -> None:
    words = ["serve", "--model", "preset:tiny", "--device", "virtual", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "atom", *words, "--max-num-seqs", "4"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = re.match(
                r"ready: (http://127\.0\.0\.1:\d+/v1) serves tiny on the virtual device ", ready
            )
            assert found, ready
            http = openai.DefaultHttpxClient(trust_env=False)
            client = openai.OpenAI(base_url=found[1], api_key="any", http_client=http)
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 8
            client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
