"""Signals end a server: the first lets streams finish, or cuts them in time; the second at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from fake_engine import MODEL, says

_CHILD = Path(__file__).with_name("graceful_child.py")


@contextmanager
def child(patience: float) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    process = subprocess.Popen(
        [sys.executable, str(_CHILD), str(patience)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        http = openai.DefaultHttpxClient(trust_env=False)
        url = f"http://127.0.0.1:{port}/v1"
        yield process, openai.OpenAI(base_url=url, api_key="any", max_retries=0, http_client=http)
    finally:
        process.kill()
        process.wait()


def start_stream(client: openai.OpenAI, tokens: int) -> tuple[openai.Stream[object], str]:
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=tokens, stream=True)
    return stream, next(iter(stream)).choices[0].text  # type: ignore[return-value]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_finish_and_nobody_else_gets_in(number: signal.Signals) -> None:
    with child(patience=20) as (process, client):
        stream, text = start_stream(client, 400)
        process.send_signal(number)
        time.sleep(0.2)
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model=MODEL, prompt="x")
        text += "".join(chunk.choices[0].text for chunk in stream)  # type: ignore[attr-defined]
        assert text == says(400)
        assert process.wait(10) == 0


def test_streams_that_take_too_long_end_with_an_error() -> None:
    with child(patience=0.3) as (process, client):
        stream, _ = start_stream(client, 4000)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait(10) == 0
        assert 0.2 < time.monotonic() - began < 3


def test_a_signal_to_the_process_and_its_group_is_one() -> None:
    with child(patience=20) as (process, client):
        stream, text = start_stream(client, 40)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].text for chunk in stream)  # type: ignore[attr-defined]
        assert text == says(40)
        assert process.wait(10) == 0


def test_a_second_signal_ends_at_once() -> None:
    with child(patience=60) as (process, client):
        stream, _ = start_stream(client, 4000)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - began < 2
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
