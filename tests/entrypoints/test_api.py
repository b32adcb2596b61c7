"""The HTTP interface as OpenAI's own client sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from fake_engine import MODEL, SAYS, FakeEngine, says
from openai.types.chat import ChatCompletionMessageParam
from pydantic import ValidationError
from serving import Running, serve

from atom.entrypoints import protocol
from atom.entrypoints.api import ServerLimits
from atom.entrypoints.api_error import ApiError
from atom.entrypoints.tokenizer import ByteTokenizer

_HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def post(http: httpx.Client, endpoint: str, body: dict[str, object]) -> httpx.Response:
    """Send a body that need not be Unicode."""
    content = json.dumps({"model": MODEL, **body}).encode()
    headers = {"Content-Type": "application/json"}
    return http.post(f"/v1/{endpoint}", content=content, headers=headers)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serve() as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "running" in request.fixturenames:
        request.getfixturevalue("running").wait_until_idle()


@pytest.mark.parametrize("tokens", [1, 2, 29, 30, 33, 200])
def test_completion_whole_and_streamed_are_the_same_text(running: Running, tokens: int) -> None:
    client = running.client()
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=tokens)
    assert whole.choices[0].text == says(tokens)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, tokens)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="hello",
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == says(tokens)
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_whole_and_streamed(running: Running) -> None:
    client = running.client()
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hel"}]},
        ],
        max_completion_tokens=29,
    )
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", says(29))
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=_HELLO, max_tokens=29, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == says(29)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_streams_never_show_half_a_character(running: Running) -> None:
    chunks = running.client().completions.create(
        model=MODEL, prompt="x", max_tokens=len(SAYS.encode()), stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert len(texts) > 10
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) == SAYS


@pytest.mark.parametrize(
    ("stop", "found"),
    [("mat", "mat"), (["nothing", " on"], " on"), ("猫 🙂", "猫 🙂"), ("never said", None)],
)
def test_stop_strings(running: Running, stop: str | list[str], found: str | None) -> None:
    client = running.client()
    before, match, _ = says(60).partition(found or "never said")
    whole = client.completions.create(model=MODEL, prompt="x", max_tokens=60, stop=stop)
    assert whole.choices[0].text == before
    assert whole.choices[0].finish_reason == ("stop" if found else "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len((before + match).encode())
    chunks = list(
        client.completions.create(model=MODEL, prompt="x", max_tokens=60, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs(running: Running) -> None:
    client = running.client()
    text = client.completions.create(model=MODEL, prompt="x", max_tokens=30, logprobs=0)
    found = text.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [-byte / 256 for byte in SAYS.encode()[:30]]
    assert found.text_offset == list(range(30))
    chat = client.chat.completions.create(
        model=MODEL, messages=_HELLO, max_tokens=30, logprobs=True, stream=True
    )
    tokens = [
        token
        for chunk in chat
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or ()
    ]
    # also tokens that are a part of a character have their bytes
    assert bytes(byte for token in tokens for byte in token.bytes or ()) == SAYS.encode()[:30]
    plain = client.chat.completions.create(model=MODEL, messages=_HELLO, max_tokens=3)
    assert plain.choices[0].logprobs is None


def test_what_the_engine_is_asked_for(running: Running) -> None:
    client = running.client()
    client.chat.completions.create(
        model=MODEL,
        messages=_HELLO,
        max_completion_tokens=3,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        seed=-7,
        user="someone",
        extra_body={"top_k": 4, "ignore_eos": True, "stop_token_ids": [5]},
    )
    params = running.engine.seen[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0, 0.5, -7)
    assert (params.top_k, params.ignore_eos, params.stop_token_ids) == (4, True, (5,))
    client.completions.create(
        model=MODEL, prompt=[1, 2, 3], extra_body={"ignore_eos": True, "min_tokens": 16}
    )
    params = running.engine.seen[-1]
    assert (params.max_tokens, params.temperature, params.top_k) == (16, 1.0, 0)
    assert len(running.engine.threads) == 1


def test_the_token_that_ends_a_request_is_counted_and_not_shown() -> None:
    with serve(FakeEngine(eos_after=12)) as running:
        answer = running.client().chat.completions.create(
            model=MODEL, messages=_HELLO, logprobs=True
        )
        assert answer.choices[0].message.content == says(12)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 13
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.content or ()) == 12


def test_models(running: Running) -> None:
    client = running.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"echo": 0}, "echo"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"min_tokens": "many", "ignore_eos": True}, "min_tokens"),
        ({"top_k": 10**23}, "top_k"),
        ({"stop_token_ids": [1, 2**31]}, "stop_token_ids.1"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a \udfff"]}, "prompt.0"),
        ({"stop": ["a", "b\udc00"]}, "stop.1"),
        ({"metadata": {"a": {"\udc00": 1}}}, "metadata.a"),
        ({"\ud800": 1}, None),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "stop": "x"}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1, 256]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"max_tokens": 4096}, "prompt"),
        ({"prompt": "!"}, "prompt"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"temperatur": 1}, "temperatur"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_a_bad_field_is_named(running: Running, body: dict[str, object], param: str | None) -> None:
    with running.http() as http:
        answer = post(http, "completions", {"prompt": "x", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "traceback" not in error["message"].lower()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nothing",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "fake", "prompt": "\xed\xa0\x80", "messages": []}',
        '{"model": "fake", "prompt": "x"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"model": "fake", "prompt": "x", "seed": ' + b"1" * 5000 + b"}",
        b'{"model": "fake", "prompt": "x", "temperature": NaN}',
        rb'{"model": "fake", "prompt": "\ud800", "messages": [{"role": "user"}]}',
        rb'{"model": "fake", "prompt": "\ud800", "messages": [{"role": "\ud800"}]}',
        rb'{"model": "fake", "prompt": "x", "\ud800 -": 1, "messages": []}',
        b'{"model": "fake", "prompt": "x", "messages": [], "' + b"y" * 1_000_000 + b'": 1}',
    ],
    ids=lambda body: ascii(body[:24])[2:-1] or "empty",
)
def test_malformed_bodies_are_answered_in_openais_form(running: Running, body: bytes) -> None:
    with running.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            headers = {"Content-Type": "application/json"}
            answer = http.post(path, content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stream_options": {"usage": 1}}, "known: include_usage, include_obfuscation"),
        ({"stream_options": {"include_usages": 1}}, "did you mean include_usage?"),
        ({"stream_options": []}, "stream_options: expected an object, got []"),
        ({"temperatures": 1}, "did you mean temperature?"),
        ({"messages": []}, "messages: expected a list of 1 to 16384 messages, got []"),
        ({"messages": [1]}, "messages.0: expected an object, got 1"),
        ({"messages": None}, "messages: expected a list of 1 to 16384 messages, got null"),
        ({"messages": [{}]}, "messages.0.role: the field is missing"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, r"content: the text holds \ud83d"),
        ({"messages": [{"role": "user", "\ud83d": "x"}]}, r"0: a field's name holds \ud83d"),
        ({"tools": [{"a": "\ude00\ud83d"}]}, r"tools.0.a: the text holds \ude00"),
        ({"top_k": 10**23}, "top_k: input should be less than 2147483648"),
        ({"stop": ""}, "stop: expected a text of 1 to 256 characters"),
    ],
)
def test_what_a_message_says(running: Running, body: dict[str, object], message: str) -> None:
    with running.http() as http:
        answer = post(http, "chat/completions", {"messages": _HELLO, **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": [-1] * 5000},
        {"prompt": ["a"] * 5000 + [1]},
        {"prompt": [[]] * 5000},
        {"stop": [""] * 5000},
        {"stop_token_ids": [-1] * 5000},
        {"messages": [{}] * 5000},
        {"messages": [{"role": "user", "content": [{}] * 5000}]},
        {"messages": [{"role": "assistant", "tool_calls": [0] * 5000}]},
        {"messages": _HELLO * 20_000},
        {"tools": [0] * 5000},
        {"stream_options": dict.fromkeys(map(str, range(5000)), 1)},
        dict.fromkeys(map(str, range(5000)), 1),
    ],
    ids=lambda field: next(iter(field)),
)
def test_of_a_million_faults_only_the_first_takes_time(
    field: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # each fault takes 15 us in which nobody else is served, and 500 bytes
    counts = []
    explain = protocol._explain

    def count(kind: type[protocol.GenerationRequest], error: ValidationError) -> ApiError:
        counts.append(error.error_count())
        return explain(kind, error)

    monkeypatch.setattr(protocol, "_explain", count)
    for kind in (protocol.CompletionRequest, protocol.ChatRequest):
        body = {"model": MODEL, "messages": _HELLO, "prompt": "x", **field}
        with pytest.raises(ApiError):
            protocol.parse_body(kind, json.dumps(body).encode())
    assert max(counts) < 10


def test_whole_surrogate_pairs_are_text(running: Running) -> None:
    body = rb'{"model": "fake", "prompt": "\ud83d\ude42", "max_tokens": 1}'
    with running.http() as http:
        headers = {"Content-Type": "application/json"}
        answer = http.post("/v1/completions", content=body, headers=headers)
    assert answer.json()["usage"]["prompt_tokens"] == len("🙂".encode())


class _FailsAt(ByteTokenizer):
    """Fails as no tokenizer should: where a prompt or the answer's last token is."""

    def encode(self, text: str) -> list[int]:
        if text == "fail":
            raise RuntimeError("on purpose")
        return super().encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    "body",
    [{"prompt": "fail"}, {"prompt": "x", "logprobs": 0}, {"prompt": "x", "stream": True}],
    ids=["before", "whole", "streamed"],
)
def test_an_unexpected_failure_is_counted_once(body: dict[str, object]) -> None:
    with serve(tokenizer=_FailsAt(256)) as running, running.http() as http:
        answer = http.post("/v1/completions", json={"model": MODEL, **body})
        running.wait_until_idle()
        page = http.get("/metrics").text
    assert answer.status_code == (200 if "stream" in body else 500)
    assert "the server failed" in answer.text
    ends = re.findall(r'atom_requests_total{end="(\w+)",endpoint="(\S+)"} (\S+)', page)
    assert ends == [("error", "completions", "1.0")]


def test_logprobs_that_are_no_numbers_are_null() -> None:
    engine = FakeEngine()
    engine.logprob = lambda token: float("nan") if token % 2 else float("-inf")
    with serve(engine) as running, running.http() as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "logprobs": 0}
        answer = http.post("/v1/completions", json=body).json()
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None] * 3
    assert "NaN" not in streamed
    assert "Infinity" not in streamed


def test_other_wrong_requests(running: Running) -> None:
    with running.http() as http:
        form = http.post("/v1/completions", data={"model": MODEL})
        assert form.status_code == 415
        assert "expected application/json" in form.json()["error"]["message"]
        assert http.get("/v1/completions").status_code == 405
        assert http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        messages = [{"role": "user", "content": [image]}]
        answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages.0.content.0.type"


def test_a_prompt_that_is_too_long_has_openais_code(running: Running) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        running.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 5000}]
        )
    assert error.value.code == "context_length_exceeded"


def test_a_full_queue_is_429_with_a_time_to_come_back() -> None:
    with serve(FakeEngine(most_waiting=1, step_seconds=0.01)) as running:
        client = running.client()
        stream = client.completions.create(model=MODEL, prompt="x", max_tokens=2000, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model=MODEL, prompt="x")
        assert error.value.response.headers["retry-after"] == "1"
        assert error.value.code == "queue_full"
        stream.close()
        running.wait_until_idle()
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text


def test_api_key() -> None:
    with serve(api_key="a secret") as running:
        good = running.client(api_key="a secret")
        assert good.completions.create(model=MODEL, prompt="x").choices[0].text == says(16)
        for key in ("a secre", "a secrets", "käse", "a secret\xa0"):
            with running.http() as http:
                answer = http.get(
                    "/v1/models", headers={b"Authorization": f"Bearer {key}".encode()}
                )
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            running.client(api_key="wrong").completions.create(model=MODEL, prompt="x")
        with running.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200


@pytest.mark.parametrize("key", ["käse", "voilà", "Å"])
def test_a_key_of_any_letters_is_right(key: str) -> None:
    with serve(api_key=key) as running, running.http() as http:
        for blanks in ("", " "):
            header = f"Bearer {blanks}{key}".encode()
            assert http.get("/v1/models", headers={b"Authorization": header}).status_code == 200


def test_a_body_above_the_limit_is_413() -> None:
    with serve(limits=ServerLimits(body_bytes=1000)) as running, running.http() as http:
        headers = {"Content-Type": "application/json"}
        told = http.post("/v1/completions", content=b"x" * 1001, headers=headers)
        # in pieces, without a length told before
        pieces = (b"x" * 100 for _ in range(11))
        untold = http.post("/v1/completions", content=pieces, headers=headers)
        for answer in (told, untold):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        just = b'{"model": "fake", "prompt": "x"}'.ljust(1000)
        assert http.post("/v1/completions", content=just, headers=headers).status_code == 200


def test_logprobs_are_refused_where_the_engine_has_none() -> None:
    refused = pytest.raises(openai.BadRequestError, match="--no-logprobs")
    with serve(logprobs=False) as running, refused:
        running.client().chat.completions.create(model=MODEL, messages=_HELLO, logprobs=True)


def test_metrics() -> None:
    with serve() as running:
        client = running.client()
        for _ in range(3):
            client.completions.create(model=MODEL, prompt="hello", max_tokens=10)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt="!")
        with running.http() as http:
            page = http.get("/metrics").text
    values = dict(re.findall(r"(?m)^(atom_\S+) (\S+)$", page))
    assert values['atom_requests_total{end="length",endpoint="completions"}'] == "3.0"
    assert values['atom_requests_total{end="refused",endpoint="completions"}'] == "1.0"
    assert values["atom_prompt_tokens_total"] == "15.0"
    assert values["atom_cached_prompt_tokens_total"] == "6.0"
    assert values["atom_generation_tokens_total"] == "30.0"
    assert values["atom_time_to_first_token_seconds_count"] == "3.0"
    assert values["atom_inter_token_latency_seconds_count"] == "27.0"
    assert values["atom_requests_in_flight"] == "0.0"
    assert values["atom_running_requests"] == "0.0"
    assert values["atom_kv_usage_ratio"] == "0.25"
    assert values["atom_prefix_hit_ratio"] == "0.75"
    assert values["atom_guard_errors_total"] == "2.0"
    assert values["atom_stale_statuses_total"] == "1.0"
    assert float(values["atom_spec_acceptance_ratio"]) == pytest.approx(2 / 3)
    assert values["atom_engine_something_new"] == "7.0"
