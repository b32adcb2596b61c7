"""The server's tokenizers: a folder's own with its chat template, and bytes where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import MODEL
from hypothesis import given
from hypothesis import strategies as st
from serving import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atom.entrypoints.api_error import ApiError
from atom.entrypoints.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    open_tokenizer,
    plain_chat,
)
from atom.errors import BadInput

_TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "größer 猫?"}]
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<turn>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {{ mood }}{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str | None = None) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat. " * 5], trainer)
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder = tmp_path_factory.mktemp("plain")
    write_tokenizer(folder)
    return FolderTokenizer(folder)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    folder = tmp_path_factory.mktemp("templated")
    write_tokenizer(folder, template=_TEMPLATE)
    return FolderTokenizer(folder)


def test_text_survives(plain: FolderTokenizer) -> None:
    text = "the cat, größer als 猫 🙂 .  , !"
    ids = plain.encode(text)
    assert plain.decode(ids) == text
    assert b"".join(map(plain.token_bytes, ids)) == text.encode()
    assert len(ids) < len(text.encode())


def test_special_tokens_have_no_text(plain: FolderTokenizer) -> None:
    assert plain.special_ids == {0, 1}
    assert plain.decode([0, *plain.encode("cat"), 1]) == "cat"
    assert plain.token_bytes(0) == b"<end>"


def test_the_folders_template_is_used(templated: FolderTokenizer) -> None:
    ids = templated.chat(_TALK, {"mood": "calm"})
    turn, end = 1, 0
    assert ids[0] == turn
    assert ids.count(turn) == 3
    assert ids.count(end) == 2
    expected = "system: be briefuser: größer 猫?assistant: calm"
    assert templated.decode(ids) == expected


def test_a_template_that_refuses_is_the_clients_fault(templated: FolderTokenizer) -> None:
    with pytest.raises(ApiError, match="no tools here") as error:
        templated.chat([{"role": "tool", "content": "7"}], {})
    assert error.value.status == 400


def test_without_a_template_roles_are_plain_lines(plain: FolderTokenizer) -> None:
    expected = "system: be brief\nuser: größer 猫?\nassistant:"
    assert plain_chat(_TALK) == expected
    assert plain.decode(plain.chat(_TALK, {})) == expected
    assert bytes(ByteTokenizer(512).chat(_TALK, {})).decode() == expected


def test_tools_and_their_calls_are_in_the_prompt() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    text = plain_chat([call], [{"name": "weather"}])
    assert text == 'tools: [{"name": "weather"}]\nassistant: [{"id": "c1"}]\nassistant:'


@given(st.text())
def test_bytes_survive(text: str) -> None:
    tokenizer = ByteTokenizer(512)
    text = text.encode(errors="replace").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_for_any_vocabulary() -> None:
    assert ByteTokenizer(512).decode([72, 300, 105]) == "H<300>i"
    assert max(ByteTokenizer(100).encode("größer")) < 100


def test_which_tokenizer_a_model_gets(tmp_path: Path) -> None:
    assert isinstance(open_tokenizer("preset:tiny", 512), ByteTokenizer)
    assert isinstance(open_tokenizer(str(tmp_path), 512), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="the tokenizer cannot be read"):
        open_tokenizer(str(tmp_path), 512)


def test_served_with_a_template(templated: FolderTokenizer) -> None:
    with serve(tokenizer=templated) as running:
        client = running.client()
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=9,
            extra_body={"chat_template_kwargs": {"mood": "calm"}},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(
            templated.chat([{"role": "user", "content": "hi"}], {"mood": "calm"})
        )
        with running.http() as http:
            body = {"model": MODEL, "messages": [{"role": "tool", "content": "7"}]}
            refused = http.post("/v1/chat/completions", json=body)
            body["chat_template_kwargs"] = {"tokenize": True}  # type: ignore[assignment]
            meddled = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "no tools here" in refused.json()["error"]["message"]
    assert "may not set tokenize" in meddled.json()["error"]["message"]


def test_a_text_too_long_for_any_request_is_refused_before_it_is_cut_into_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path, template=_TEMPLATE)
    tokenizer = FolderTokenizer(tmp_path, most_tokens=10)
    longest = max(len(tokenizer.token_bytes(token)) for token in range(300))
    fits = "the cat sat" * 4
    assert len(tokenizer.encode("é" * (5 * longest))) > 10
    with pytest.raises(ApiError, match="11 tokens at least; together with the output at most 10"):
        tokenizer.encode("a" * (11 * longest))
    # from here on a text that is cut into tokens fails
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    with pytest.raises(ApiError, match="characters") as refused:
        tokenizer.encode("é" * (6 * longest))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(AttributeError):
        tokenizer.encode(fits)


def test_a_tokenizer_whose_texts_may_shrink_takes_them_at_any_length(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": "aa"}, "content": ""}
    path.write_text(json.dumps(values))
    assert FolderTokenizer(tmp_path, most_tokens=10).encode("aa" * 5000 + "b") == [
        *FolderTokenizer(tmp_path).encode("b")
    ]
    values["normalizer"] = None
    kept = values["pre_tokenizer"]
    values["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, kept],
    }
    path.write_text(json.dumps(values))
    assert FolderTokenizer(tmp_path, most_tokens=10).encode("a" + " " * 5000 + "b") == [
        *FolderTokenizer(tmp_path).encode("a b")
    ]
    values["pre_tokenizer"] = kept
    values["added_tokens"][0]["rstrip"] = True
    path.write_text(json.dumps(values))
    assert len(FolderTokenizer(tmp_path, most_tokens=10).encode("<end>" + " " * 5000)) == 1
