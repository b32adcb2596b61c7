"""A server around any engine on a free port of this machine, and clients of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn
from fake_engine import LONGEST, MODEL, FakeEngine

from atom.entrypoints.api import ServedModel, Server, ServerLimits
from atom.entrypoints.async_engine import Engine
from atom.entrypoints.tokenizer import ByteTokenizer, ServerTokenizer


@dataclass
class Running:
    """A server that runs in this process."""

    url: str
    server: Server
    engine: Any = field(repr=False)

    def client(self, **options: object) -> openai.OpenAI:
        values = {"api_key": "any", "max_retries": 0, "timeout": 20.0, **options}
        # a proxy of the environment must not stand between
        http = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=http, **values)  # type: ignore[arg-type]

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=20.0)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Wait until neither the server nor its engine has a request left."""
        end = time.monotonic() + seconds
        while self.server.engine.num_streams or self.engine.has_unfinished_requests():
            assert time.monotonic() < end, "requests were left hanging"
            time.sleep(0.01)


@contextmanager
def serve(
    engine: Engine | None = None,
    *,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    tokenizer: ServerTokenizer | None = None,
    logprobs: bool = True,
    vocab_size: int = 256,
    longest: int = LONGEST,
) -> Iterator[Running]:
    """A server on a free loopback port, for the length of a ``with``."""
    engine = engine or FakeEngine()
    tokenizer = tokenizer or ByteTokenizer(vocab_size)
    model = ServedModel(MODEL, tokenizer, vocab_size, longest, logprobs)
    server = Server(engine, model, limits, api_key)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn.Config(
        server.app, log_level="error", access_log=False, timeout_graceful_shutdown=5
    )
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, args=([listener],), daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not web.started:
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield Running(url, server, engine)
    finally:
        web.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not end"
