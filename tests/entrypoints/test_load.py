"""Many clients at once, clients that vanish, engines that fail: nothing is left hanging."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from fake_engine import MODEL, SAYS, FakeEngine
from serving import Running, serve

from atom.entrypoints.api import ServerLimits

_STREAMS = 256


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """A server whose answers take a while: 2 ms a step."""
    with serve(FakeEngine(step_seconds=0.002)) as running:
        yield running
        running.wait_until_idle()


def async_client(running: Running) -> openai.AsyncOpenAI:
    # a proxy of the environment must not stand between
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=30, http_client=http
    )


def open_raw(running: Running, **body: object) -> socket.socket:
    """A connection with a streaming request on it, whose first bytes have come."""
    address = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((address[0], int(address[1])), timeout=10)
    content = json.dumps({"model": MODEL, "prompt": "x", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    return connection


def test_256_streams_at_once(slow: Running) -> None:
    # no stream gets a token before all of them are there
    slow.engine.say_nothing_below = _STREAMS

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=12 + number % 7,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with async_client(slow) as client:
            return await asyncio.gather(*(one(client, number) for number in range(_STREAMS)))

    texts = asyncio.run(all_of_them())
    expected = [SAYS.encode()[: 12 + n % 7].decode(errors="replace") for n in range(_STREAMS)]
    assert texts == expected
    slow.wait_until_idle()


def test_clients_that_vanish_abort_their_requests(slow: Running) -> None:
    aborted = len(slow.engine.aborted)

    async def vanish(client: openai.AsyncOpenAI, number: int) -> None:
        # every third before the first token, the others in the middle; half of them do not stream
        create = client.completions.create(
            model=MODEL, prompt="x", max_tokens=4000, stream=number % 2 == 0
        )
        if number % 2 or number % 3 == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(create, 0.05 if number % 2 else 0.001)
            return
        stream = await create
        assert isinstance(stream, openai.AsyncStream)
        async for _ in stream:
            break
        await stream.close()

    async def all_of_them() -> None:
        async with async_client(slow) as client:
            await asyncio.gather(*(vanish(client, number) for number in range(60)))

    asyncio.run(all_of_them())
    slow.wait_until_idle()
    # those that ran were aborted, not finished: 4000 tokens take 4 s
    assert len(slow.engine.aborted) - aborted >= 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_aborts_its_request(slow: Running, stream: bool) -> None:
    aborted = len(slow.engine.aborted)
    connections = [open_raw(slow, max_tokens=4000, stream=stream) for _ in range(20)]
    while slow.server.engine.num_streams < 20:
        time.sleep(0.005)
    for number, connection in enumerate(connections):
        if number % 2:
            # a reset instead of an orderly end
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    slow.wait_until_idle()
    assert len(slow.engine.aborted) - aborted == 20


def test_a_client_that_does_not_read_holds_nobody_up(slow: Running) -> None:
    idle = [open_raw(slow, max_tokens=4000, stream=True) for _ in range(4)]
    answer = slow.client().completions.create(model=MODEL, prompt="x", max_tokens=20)
    assert answer.choices[0].finish_reason == "length"
    for connection in idle:
        connection.close()
    slow.wait_until_idle()


def test_garbage_on_the_connection(slow: Running) -> None:
    address = slow.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Le"):
        with socket.create_connection((address[0], int(address[1])), timeout=5) as connection:
            connection.sendall(garbage)
    with slow.http() as http:
        assert http.get("/health").json()["status"] == "ok"


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    slow: Running, caplog: pytest.LogCaptureFixture
) -> None:
    address = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
        with slow.http() as http:
            assert http.get("/health").json()["status"] == "ok"
    with slow.http() as http:
        time.sleep(0.1)
        assert 'end="error"' not in http.get("/metrics").text
    assert not caplog.records


def test_a_body_that_never_comes_is_408() -> None:
    with serve(limits=ServerLimits(body_seconds=0.1)) as running:
        address = running.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            answer = b""
            while piece := connection.recv(10_000):
                answer += piece
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive" in answer


def test_one_failing_request_leaves_the_others_alone() -> None:
    with serve(FakeEngine(step_seconds=0.002)) as running:
        client = running.client()
        first = client.completions.create(model=MODEL, prompt="x", max_tokens=600, stream=True)
        next(iter(first))
        second = client.completions.create(model=MODEL, prompt="x", max_tokens=60, stream=True)
        next(iter(second))
        running.engine.fail_next = "row 3 had num_accepted_tokens=16385"
        with pytest.raises(openai.APIError, match="num_accepted_tokens=16385"):
            list(first)
        assert list(second)[-1].choices[0].finish_reason == "length"
        running.engine.fail_next = "lost"
        with pytest.raises(openai.InternalServerError, match="lost"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=60)
        running.wait_until_idle()
        with running.http() as http:
            assert http.get("/health").status_code == 200
            assert 'end="error",endpoint="completions"} 2.0' in http.get("/metrics").text


def test_an_engine_that_fails_ends_every_request_and_says_so() -> None:
    engine = FakeEngine(step_seconds=0.002)
    with serve(engine) as running:
        ends: list[BaseException | None] = []

        def ask(stream: bool) -> None:
            try:
                answer = running.client().completions.create(
                    model=MODEL, prompt="x", max_tokens=4000, stream=stream
                )
                list(answer)
                ends.append(None)
            except openai.APIError as error:
                ends.append(error)

        threads = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(10)]
        for thread in threads:
            thread.start()
        while running.server.engine.num_streams < 10:
            time.sleep(0.005)

        def break_down() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        engine.before_step = break_down
        for thread in threads:
            thread.join(10)
        assert len(ends) == 10
        assert all("illegal memory access" in str(error) for error in ends)
        with running.http() as http:
            health = http.get("/health")
            assert health.status_code == 503
            assert "illegal memory access" in health.json()["status"]
            assert http.get("/metrics").status_code == 200
        with pytest.raises(openai.InternalServerError) as refused:
            running.client().completions.create(model=MODEL, prompt="x")
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_failed"
        running.wait_until_idle()
    assert engine.closed


def test_a_step_that_does_not_come_back_shows_in_health() -> None:
    go_on = threading.Event()
    engine = FakeEngine()
    with serve(engine, limits=ServerLimits(stall_seconds=0.05)) as running:
        engine.before_step = lambda: bool(go_on.wait(10))  # type: ignore[assignment]
        with open_raw(running), running.http() as http:
            while http.get("/health").status_code == 200:
                time.sleep(0.01)
            assert "has not come back" in http.get("/health").json()["status"]
            go_on.set()
        running.wait_until_idle()
        with running.http() as http:
            assert http.get("/health").status_code == 200


def test_the_end_of_the_server_ends_its_streams() -> None:
    engine = FakeEngine(step_seconds=0.002)
    with serve(engine) as running:
        stream = running.client().completions.create(
            model=MODEL, prompt="x", max_tokens=4000, stream=True
        )
        next(iter(stream))
        running.server.engine.fail_all("the server is shutting down")
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            running.client().completions.create(model=MODEL, prompt="x")
        assert refused.value.code == "shutting_down"
        running.wait_until_idle()
    assert engine.closed
    assert not engine.has_unfinished_requests()
