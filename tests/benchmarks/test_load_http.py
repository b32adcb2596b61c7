"""The HTTP client against our own server, servers that misbehave, and bytes that mean nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from fake_engine import MODEL, FakeEngine
from serving import serve

from atom.benchmarks.agentic_sessions import Session, Turn
from atom.benchmarks.load_client import (
    HttpClient,
    LoadProgress,
    LoadResult,
    LoadSettings,
    run_load,
)
from atom.benchmarks.load_exchange import Exchange, LoadFailure, LoadRefusal
from atom.benchmarks.load_http import ColdStart
from atom.errors import BadInput

_KEY = "sk-0123456789abcdef"
_SESSIONS = [
    Session(name, (Turn(64, 9, (number,), 0.0), Turn(100, 9, (number, number + 50), 0.0)))
    for number, name in enumerate("abcd")
]
_END = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
_OVER = _USAGE.replace(b"7,", b'7,"prompt_tokens_details":{"cached_tokens":8},')
_TEXT = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
_DONE = b"data: [DONE]\n\n"


def exchange(**values: object) -> Exchange:
    plain: dict[str, object] = {"prompt_token_ids": [5] * 20, "output_tokens": 9, "seconds": 10.0}
    return Exchange(**{**plain, **values})  # type: ignore[arg-type]


def send(url: str, one: Exchange | None = None, **options: object) -> Exchange:
    one = one or exchange()

    async def main() -> None:
        client = HttpClient(url, MODEL, **options)  # type: ignore[arg-type]
        try:
            await client.send(one)
        finally:
            await client.close()

    asyncio.run(main())
    return one


def load(url: str, **values: object) -> LoadResult:
    plain: dict[str, object] = {"concurrency": 2, "duration_seconds": 0.3}
    load_settings = LoadSettings.parse({**plain, **values})

    async def main() -> LoadResult:
        client = HttpClient(url, MODEL)
        try:
            return await run_load(client, _SESSIONS, load_settings)
        finally:
            await client.close()

    return asyncio.run(main())


@contextmanager
def raw_server(*parts: bytes, silent: bool = False) -> Iterator[str]:
    """Sends these bytes to whoever asks, and hangs up; ``silent`` says nothing and stays."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                # what is left unread would end the connection before its bytes have arrived
                asked = b""
                while not asked.endswith(b"}") and (more := connection.recv(2**16)):
                    asked += more
                for part in parts:
                    # a client that has seen enough hangs up
                    with suppress(ConnectionError):
                        connection.sendall(part)
                    time.sleep(0.01)
                if silent:
                    over.wait(5)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        # wakes the accept
        socket.create_connection(listener.getsockname()).close()
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def stream(*parts: bytes) -> tuple[bytes, ...]:
    return (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", *parts)


# -- our own server
def test_the_servers_counts_and_times_are_taken() -> None:
    with serve(FakeEngine(step_seconds=0.01)) as running:
        one = send(running.url)
    assert (one.prompt_tokens, one.cached_tokens, one.generated) == (20, 10, 9)
    assert one.first_token is not None
    assert one.ended is not None
    assert one.started + 0.01 <= one.first_token < one.ended
    assert running.engine.seen[0].ignore_eos
    assert running.engine.seen[0].temperature == 0


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_is_taken_with_and_without_its_path(suffix: str) -> None:
    with serve() as running:
        assert send(running.url + suffix).generated == 9


def test_a_load_over_http_gives_a_row_a_request() -> None:
    with serve(FakeEngine(step_seconds=0.005)) as running:
        result = load(running.url)
        assert running.server.engine.num_streams == 0
    assert result.ended == "complete"
    assert {row.outcome for row in result.rows} == {"ok"}
    assert result.summary.cached_share == pytest.approx(0.5, abs=0.01)
    assert result.summary.requests >= 4
    assert 0 < result.client_cpu_share < 1


def test_refusals_are_told_apart_from_errors() -> None:
    engine = FakeEngine(step_seconds=0.01, most_waiting=0)
    with serve(engine) as running:
        with pytest.raises(LoadRefusal, match="HTTP 429: 0 requests wait already"):
            send(running.url)
        with pytest.raises(LoadRefusal, match=r"HTTP 400: the prompt has 9000 tokens"):
            send(running.url, exchange(prompt_token_ids=[5] * 9000))
        engine.most_waiting, engine.fail_next = 9, "a bad row"
        with pytest.raises(LoadFailure, match="error in the stream: a bad row") as failed:
            send(running.url)
    assert failed.type is LoadFailure


def test_a_key_is_sent_and_a_wrong_one_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_KEY", _KEY)
    with serve(api_key=_KEY) as running:
        assert send(running.url, api_key_env="LOAD_KEY").generated == 9
        monkeypatch.setenv("LOAD_KEY", "sk-another")
        with pytest.raises(LoadRefusal) as refused:
            send(running.url, api_key_env="LOAD_KEY")
    assert str(refused.value) == "HTTP 401"


def test_a_timeout_ends_the_request_on_the_server_too() -> None:
    with serve(FakeEngine(step_seconds=0.02)) as running:
        with pytest.raises(LoadFailure, match=r"no end of the answer within 0\.2 s"):
            send(running.url, exchange(output_tokens=900, seconds=0.2))
        running.wait_until_idle()
    assert running.engine.aborted


def test_a_server_that_vanishes_in_mid_stream_leaves_rows() -> None:
    engine = FakeEngine(step_seconds=0.01)

    def vanish() -> None:
        # some have been answered, on a busy machine too
        while len(engine.seen) < 7:
            time.sleep(0.01)
        running.server.engine.fail_all("gone")

    with serve(engine) as running:
        threading.Thread(target=vanish, daemon=True).start()
        result = load(running.url, duration_seconds=20, give_up_after=4)
    assert result.ended == "gave up"
    assert {row.outcome for row in result.rows} >= {"ok", "refused"}
    assert result.summary.requests > 0


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = load(f"http://127.0.0.1:{port}", duration_seconds=20, give_up_after=3)
    assert result.ended == "gave up"
    assert {row.error for row in result.rows} == {"the server took no connection"}


def test_a_server_whose_process_is_killed_leaves_rows() -> None:
    child = Path(__file__).resolve().parents[1] / "entrypoints" / "graceful_child.py"
    server = subprocess.Popen([sys.executable, child, "5"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"

        async def main() -> LoadResult:
            client = HttpClient(url, MODEL)
            told: list[LoadProgress] = []

            def progress(now: LoadProgress) -> None:
                told.append(now)
                if len(told) == 8:
                    server.kill()

            chosen = LoadSettings(concurrency=2, duration_seconds=120, give_up_after=4)
            try:
                return await run_load(client, _SESSIONS, chosen, on_progress=progress)
            finally:
                await client.close()

        result = asyncio.run(main())
    finally:
        server.kill()
        server.communicate()
    assert result.ended == "gave up"
    # two were on their way, and the next ones found nobody
    assert [row.outcome for row in result.rows[:8]] == ["ok"] * 8
    assert {row.outcome for row in result.rows[8:]} == {"error"}
    assert result.rows[-1].error == "the server took no connection"
    served = result.rows[:8]
    assert {(row.prompt_tokens, row.output_tokens) for row in served} <= {(64, 9), (100, 9)}


# -- servers that misbehave
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (stream(_TEXT), "the stream ended before the answer did"),
        (stream(_TEXT, _DONE), "the stream ended before the answer did"),
        (stream(_TEXT, _END, _DONE), "the stream has no token counts"),
        (stream(b"data: {not json\n\n"), "an event of the stream is not JSON"),
        (stream(b"data: 5\n\n"), "an event of the stream is no object"),
        (stream(b'data: {"choices":5}\n\n'), "choices in the stream are no list"),
        (stream(b"<html>busy</html>\n"), "a line of the stream is no server-sent event"),
        (stream(_TEXT, _END, _USAGE.replace(b"7", b'"7"')), "token counts of the stream"),
        (stream(_TEXT, _END, _USAGE.replace(b"7", b"-7")), "token counts of the stream"),
        (stream(_TEXT, _END, _USAGE.replace(b"7", b"7" * 30)), "token counts of the stream"),
        (stream(_TEXT, _END, _OVER), "more cached tokens than the prompt has"),
        (stream(b"data: " + b"x" * 2**21), "a line of the stream has over"),
        ((), r"the connection failed \(RemoteProtocolError\)"),
        ((b"220 mail.example.org ESMTP\r\n",), r"the connection failed \(RemoteProtocolError\)"),
        ((b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nbad",), "HTTP 502$"),
        ((b"HTTP/1.1 302 Moved\r\nLocation: http://a/\r\nContent-Length: 0\r\n\r\n",), "HTTP 302$"),
        (
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
            r"the connection failed \(RemoteProtocolError\)",
        ),
    ],
)  # fmt: skip
def test_a_broken_answer_is_an_error_that_says_what_broke(
    parts: tuple[bytes, ...], said: str
) -> None:
    with raw_server(*parts) as url, pytest.raises(LoadFailure, match=said) as failed:
        send(url)
    assert failed.type is LoadFailure


def test_the_answer_is_read_however_the_bytes_are_cut() -> None:
    whole = b": hello\n\n" + _TEXT.replace(b"\n\n", b"\r\n\r\n") + _TEXT + _END + _USAGE + _DONE
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    with raw_server(*stream(*pieces)) as url:
        one = send(url)
    assert (one.prompt_tokens, one.cached_tokens, one.generated) == (7, None, 2)


def test_a_silent_server_times_out() -> None:
    with raw_server(silent=True) as url, pytest.raises(LoadFailure, match="no end of the answer"):
        send(url, exchange(seconds=0.2))


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([_TEXT, _END, _USAGE, _DONE, b"data: null\n", b"\n"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(
                        st.sampled_from(
                            ["choices", "usage", "text", "error", "finish_reason", "prompt_tokens"]
                        ),
                        inner,
                        max_size=3,
                    )
                ),
                max_leaves=6,
            ).map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"),
        ),
        max_size=6,
    ),
    st.sampled_from([200, 200, 200, 400, 500]),
)
def test_no_bytes_raise_anything_but_a_failure(parts: list[bytes], status: int) -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            for part in parts:
                yield part

        return httpx.Response(status, content=body())

    async def main() -> None:
        client = HttpClient("http://server", MODEL, transport=httpx.MockTransport(answer))
        try:
            await client.send(exchange())
        except LoadFailure:
            return
        finally:
            await client.close()
        assert _END in parts or b"finish_reason" in b"".join(parts)

    asyncio.run(main())


# -- points on a server that keeps running
@pytest.mark.parametrize(
    ("answers", "how"),
    [
        ({"/reset_prefix_cache?reset_external=true": 200}, "reset and salt"),
        ({"/flush_cache": 200}, "reset and salt"),
        ({"/flush_cache": 500}, "salt"),
        ({}, "salt"),
    ],
)
@pytest.mark.parametrize("base", ["http://server", "http://server/deep/v1"])
def test_a_point_starts_cold_and_says_how(answers: dict[str, int], how: str, base: str) -> None:
    deep = base.removeprefix("http://server").removesuffix("/v1")

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().removeprefix(deep)
        return httpx.Response(answers.get(path, 404) if request.method == "POST" else 405)

    async def main() -> list[ColdStart]:
        client = HttpClient(base, MODEL, transport=httpx.MockTransport(answer))
        return [await client.start_cold(), await client.start_cold()]

    one, two = asyncio.run(main())
    assert one.how == two.how == how
    assert one.salt != two.salt


def test_our_own_server_and_one_that_is_gone_leave_the_salt() -> None:
    async def main(url: str) -> str:
        client = HttpClient(url, MODEL)
        try:
            return (await client.start_cold()).how
        finally:
            await client.close()

    with serve() as running:
        assert asyncio.run(main(running.url)) == "salt"
    assert asyncio.run(main(running.url)) == "salt"


# -- nothing that names anybody
def test_messages_of_a_server_are_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_KEY", _KEY)
    leaks = [
        _KEY,
        "sk-01234567******************cdef",
        "localhost",
        "user",
        "secret",
        "10.1.2.3:8000",
        "[fe80::1:2:3]:80",
        "gpu-node-17.cluster.internal",
        "someone@example.org",
        "http://proxy.example.org/path?key=1",
    ]
    body = json.dumps({"error": {"message": f"queue full at {' and '.join(leaks)}, try later"}})
    head = f"HTTP/1.1 429 Busy\r\nContent-Length: {len(body)}\r\n\r\n"
    with raw_server(head.encode() + body.encode()) as url:
        address = url.replace("http://127.0.0.1", "http://user:secret@localhost")
        with pytest.raises(LoadRefusal) as refused:
            send(address, api_key_env="LOAD_KEY")
    said = str(refused.value)
    assert said.startswith("HTTP 429: queue full at ")
    assert said.endswith("try later")
    assert not [leak for leak in leaks if leak in said]
    for part in ("cdef", "cluster", "example", "node", "fe80", "10.1"):
        assert part not in said


def test_plain_messages_stay_as_they_are() -> None:
    words = "the prompt has 9000 tokens; together at most 4096 fit (--max-model-len), got 1.5"
    body = json.dumps({"error": {"message": words}})
    head = f"HTTP/1.1 400 Bad\r\nContent-Length: {len(body)}\r\n\r\n"
    with raw_server(head.encode() + body.encode()) as url, pytest.raises(LoadRefusal) as refused:
        send(url)
    assert str(refused.value) == f"HTTP 400: {words}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "server",
        "ftp://user:secret@host",
        "http://",
        "http://host:abc/secret",
        "http://h/?a=secret",
    ],
)
def test_a_wrong_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(BadInput, match="base_url") as refused:
        HttpClient(url, MODEL)
    assert "secret" not in str(refused.value)


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOAD_KEY", raising=False)
    with pytest.raises(BadInput, match="LOAD_KEY is not set"):
        HttpClient("http://host", MODEL, "LOAD_KEY")
    monkeypatch.setenv("LOAD_KEY", "gehe\u00efm")
    with pytest.raises(BadInput, match="LOAD_KEY holds what no header can carry") as refused:
        HttpClient("http://host", MODEL, "LOAD_KEY")
    assert "gehe" not in str(refused.value)
