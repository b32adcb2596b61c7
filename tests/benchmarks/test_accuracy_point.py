"""Points of the accuracy experiment on the virtual device: the fault reaches answers, or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from atom.benchmarks import accuracy_point
from atom.benchmarks.accuracy_clients import Answer, EngineAsker, HttpAsker, ask_all, item_rows
from atom.benchmarks.accuracy_point import run_point, start_engine
from atom.benchmarks.accuracy_settings import AccuracyPoint, AccuracySettings
from atom.benchmarks.gsm8k_task import TaskItem, prompts_of_test
from atom.benchmarks.seeded_model import make_seeded_model
from atom.benchmarks.throughput_rows import Outcome
from atom.config import CopyProtocol
from atom.device.operations import Part
from atom.device.virtual import VirtualDevice
from atom.entrypoints.api import ServedModel, Server
from atom.entrypoints.tokenizer import ByteTokenizer, open_tokenizer
from atom.model_engine.engine_builder import load_model
from atom.model_engine.request_output import RequestOutput

SETTINGS = AccuracySettings.parse(
    {"items": 4, "shots": 1, "max_tokens": 12, "concurrency": 4, "sampling": "first_n"},
    where="test",
)
REFERENCE = AccuracyPoint("hold", CopyProtocol.HOLD)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_seeded_model(tmp_path_factory.mktemp("model"), 42))


def latest(ready: list[Part]) -> Part:
    """Every copy as late as it can be."""
    return next((part for part in ready if part.stream_id == 0), ready[0])


def device() -> VirtualDevice:
    return VirtualDevice("H200", mode="schedule", chooser=latest)


def run(
    point: AccuracyPoint, model: str, settings: AccuracySettings = SETTINGS, **more: Any
) -> dict[str, Any]:
    told: dict[str, Any] = {}
    outcome = run_point(settings, point, told.update, model=model, **{"device": device(), **more})
    assert told["outcome"] == outcome.value
    return told


def hashes(told: dict[str, Any]) -> list[str]:
    return [row["answer_hash"] for row in told["items_table"]]


@pytest.fixture(scope="module")
def reference(model: str) -> dict[str, Any]:
    return run(REFERENCE, model)


def test_the_reference_answers_every_item_and_keeps_all_texts(reference: dict[str, Any]) -> None:
    assert reference["answered"] == 4
    assert reference["stale_tokens"] == reference["failed_requests"] == 0
    assert len(set(hashes(reference))) == 4
    assert len({row["prompt_hash"] for row in reference["items_table"]}) == 4
    assert [row["item"] for row in reference["texts_table"]] == [0, 1, 2, 3]
    assert all(row["output_tokens"] == row["steps"] == 12 for row in reference["items_table"])


@pytest.mark.parametrize("protocol", [CopyProtocol.HOLD, CopyProtocol.ZERO_COPY])
def test_drafts_and_pool_change_no_answer(
    protocol: CopyProtocol, model: str, reference: dict[str, Any]
) -> None:
    told = run(AccuracyPoint(protocol.value, protocol, True, True), model)
    assert hashes(told) == hashes(reference)
    assert told["drafted_tokens"] > told["accepted_tokens"] > 0
    assert told["stored_bytes"] > 0
    assert told["stale_statuses"] == told["stale_tokens"] == told["stale_drafts"] == 0


def test_without_the_fix_answers_are_damaged_and_stale_reads_counted(
    model: str, reference: dict[str, Any]
) -> None:
    """The control of the test above: the same schedule, and the sources dropped."""
    bare = AccuracyPoint("unpatched", CopyProtocol.UNPATCHED, True, True)
    told = run(bare, model, reference=hashes(reference))
    assert hashes(told) != hashes(reference)
    assert told["stale_statuses"] > 0
    assert told["stale_tokens"] > 0
    changed = [a for a, b in zip(hashes(told), hashes(reference), strict=True) if a != b]
    assert len(told["texts_table"]) == len(changed)


def test_pressure_on_other_streams_makes_the_fault_on_the_clock(model: str) -> None:
    loaded = load_model(model, VirtualDevice("H200"))
    bare = CopyProtocol.UNPATCHED
    calm, pressed = (
        run(
            AccuracyPoint("unpatched", bare, False, True, *pressure),
            model,
            device=VirtualDevice("H200"),
            loaded=loaded,
        )
        for pressure in ((0.0, 1), (8.0, 2))
    )
    assert calm["stale_statuses"] == calm["failed_requests"] == 0
    assert pressed["stale_statuses"] > 0


def test_a_model_that_is_none_is_an_outcome(tmp_path: Path) -> None:
    told = run(REFERENCE, str(tmp_path / "none"))
    assert told["outcome"] == Outcome.START_FAILED
    assert "none" in told["outcome_detail"]


def test_a_server_that_answers_nothing_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SETTINGS.model_copy(update={"server_label": "peer", "client": "http"})
    lost, fine = Answer(error="status 500"), Answer("#### 3")
    for answers, score in (([lost, lost], None), ([lost, fine], 0)):
        monkeypatch.setattr(accuracy_point, "_ask_server", lambda *_, told=answers: told)
        task = ([TaskItem("?", "#### 4")] * 2, [[{"role": "user", "content": "?"}]] * 2)
        told: dict[str, Any] = {}
        outcome = run_point(
            served, AccuracyPoint("peer", None, False, False), told.update, model="", task=task
        )
        assert (outcome is Outcome.OK) == (score is not None)
        assert told.get("strict") == score
        assert "status 500" in told["outcome_detail"]


def test_time_is_up_for_items_that_never_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_point, "_TELL_SECONDS", 0.001)
    told = run(REFERENCE, model, SETTINGS.model_copy(update={"point_seconds": 1e-6}))
    assert told["outcome"] == "ok"
    assert told["failed_requests"] > 0
    assert told["answered"] + told["failed_requests"] == 4


def test_our_server_gives_the_answers_that_the_engine_gives(model: str) -> None:
    """The same chats through ``/v1/chat/completions`` and straight to an engine."""
    _, chats = prompts_of_test(SETTINGS)
    tokenizer = open_tokenizer(model, 2048)

    async def both() -> tuple[list[Answer], list[Answer]]:
        engine = start_engine(SETTINGS, REFERENCE, VirtualDevice("H200"), model)
        vocab, longest = engine.vocab_size or 0, engine.settings.max_model_len
        server = Server(engine, ServedModel("words", tokenizer, vocab, longest, logprobs=False))
        server.engine.start()
        transport = httpx.ASGITransport(server.app)
        http = HttpAsker("http://atom", "words", 12, 60.0, transport=transport)
        straight = EngineAsker(server.engine, tokenizer, vocab, longest, 12)
        found = []
        for asker in (http, straight):
            answers: dict[int, Answer] = {}
            await ask_all(asker, chats, 2, answers)
            found.append([answers[number] for number in range(len(chats))])
        await http.close()
        await server.engine.stop()
        return found[0], found[1]

    http, straight = asyncio.run(both())
    assert [one.error for one in http] == [None] * 4
    assert [one.text for one in http] == [one.text for one in straight]
    assert [one.output_tokens for one in http] == [one.output_tokens for one in straight]


class _Stream:
    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs = list(outputs)
        self.aborted = False

    async def next(self) -> RequestOutput:
        return self.outputs.pop(0)

    def abort(self) -> None:
        self.aborted = True


class _Engine:
    def __init__(self, stream: _Stream) -> None:
        self.stream = stream

    async def submit(self, *_: object) -> _Stream:
        return self.stream


def ask(outputs: Sequence[RequestOutput]) -> tuple[Answer, _Stream]:
    stream = _Stream(outputs)
    asker = EngineAsker(_Engine(stream), ByteTokenizer(256), 256, 4096, 100)  # type: ignore[arg-type]
    return asyncio.run(asker.ask([{"role": "user", "content": "?"}])), stream


def test_an_answer_ends_at_a_stop_string_and_the_request_with_it() -> None:
    text = "#### 3\nQuestion: what now?"
    answer, stream = ask([RequestOutput("a", tuple(text.encode()))])
    assert answer.text == "#### 3\n"
    assert stream.aborted
    assert not stream.outputs


def test_ids_of_no_token_show_in_the_text() -> None:
    answer, _ = ask([RequestOutput("a", (104, 2**40, 105), finished=True, finish_reason="stop")])
    assert answer.text == f"h<{2**40}>i"
    assert answer.error is None


def test_a_request_that_failed_is_right_by_no_filter() -> None:
    failed = RequestOutput("a", tuple(b"#### 3"), None, True, "error", "lost")
    answer, _ = ask([failed])
    (row,) = item_rows([TaskItem("?", "#### 3")], [[{"role": "user", "content": "?"}]], [answer])
    assert (row["outcome"], row["strict"], row["flexible"]) == ("error", False, False)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(500, b"{}", "status 500"), (200, b"[]", "no chat completion"), (200, b"x", "no chat comp")],
)
def test_what_a_server_gets_wrong_is_an_answer_without_text(
    status: int, body: bytes, said: str
) -> None:
    seen: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        assert request.url.path == "/v1/chat/completions"
        return httpx.Response(status, content=body)

    async def one() -> Answer:
        transport = httpx.MockTransport(serve)
        asker = HttpAsker("http://host.example:1/v1", "m", 7, 5.0, transport=transport)
        return await asker.ask([{"role": "user", "content": "?"}])

    answer = asyncio.run(one())
    assert answer.error is not None
    assert said in answer.error
    assert seen[0]["temperature"] == 0
    assert seen[0]["max_tokens"] == 7
    assert "Question:" in seen[0]["stop"]
