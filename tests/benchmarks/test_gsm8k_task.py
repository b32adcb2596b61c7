"""Prompts and scores of GSM8K's task: our own, and lm-eval's where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.gsm8k_task import (
    Sampling,
    TaskItem,
    TaskSettings,
    build_chats,
    cut_at_stops,
    flexible_extract,
    hash_of,
    is_right,
    load_items,
    prompts_of_test,
    strict_match,
    write_task,
)
from atom.errors import BadInput


def write_gsm8k(folder: Path, test: int = 4, train: int = 8) -> Path:
    for name, count in (("test", test), ("train", train)):
        rows = [
            {"question": f"{name} {i}: what is {i} + 1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_prompts_are_chats_of_five_examples() -> None:
    settings = TaskSettings(items=3)
    asked, chats = prompts_of_test(settings)
    assert [len(chat) for chat in chats] == [11] * 3
    assert [m["role"] for m in chats[0]] == ["user", "assistant"] * 5 + ["user"]
    assert chats[0][-1]["content"] == f"Question: {asked[0].question}\nAnswer:"
    assert chats[0][:2] != chats[1][:2]
    assert (asked, chats) == prompts_of_test(settings)
    assert all(2 <= (item.steps or 0) <= 8 for item in asked)


def test_first_examples_are_the_same_in_all_prompts() -> None:
    test, train = load_items(TaskSettings(items=3, shots=2, sampling=Sampling.FIRST_N))
    chats = build_chats(TaskSettings(shots=2, sampling=Sampling.FIRST_N), test, train)
    assert chats[0][:4] == chats[1][:4] == chats[2][:4]
    assert [m["content"] for m in chats[0][1:4:2]] == [train[0].answer, train[1].answer]


def test_real_files_are_read_and_what_is_wrong_with_them_is_said(tmp_path: Path) -> None:
    settings = TaskSettings(gsm8k=str(write_gsm8k(tmp_path)), items=3, shots=5)
    test, train = load_items(settings)
    assert [item.answer for item in test] == ["0+1=1\n#### 1", "1+1=2\n#### 2", "2+1=3\n#### 3"]
    assert len(train) == 8
    assert "gsm8k" not in settings.model_dump()
    with pytest.raises(BadInput, match="4 test and 8 train items; 5 are to be asked"):
        load_items(settings.model_copy(update={"items": 5}))
    (tmp_path / "train.jsonl").write_text('{"question": "no answer"}\n')
    with pytest.raises(BadInput, match=r"train\.jsonl cannot be read") as caught:
        load_items(settings)
    assert str(tmp_path) not in str(caught.value)


def test_more_shots_than_examples_are_refused() -> None:
    with pytest.raises(BadInput, match="examples 2 are fewer than the 5 shots"):
        TaskSettings.parse({"examples": 2}, where="task")


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("so 3*4=12 pens.\n#### 12", True, True),
        ("so 3*4=12 pens.\n#### 1,2", True, True),
        ("so it is $12.", False, True),
        ("#### 13 and then #### 12", False, True),
        ("nothing", False, False),
        ("#### 12\n7", True, False),
    ],
)
def test_answers_are_read_as_the_peer_reads_them(answer: str, strict: bool, flexible: bool) -> None:
    solution = "Then 3*4=12.\n#### 12"
    assert is_right(strict_match(answer), solution) is strict
    assert is_right(flexible_extract(answer), solution) is flexible


def test_an_answer_ends_at_the_first_stop() -> None:
    assert cut_at_stops("#### 3\nQuestion: and </s>") == "#### 3\n"
    assert cut_at_stops("#### 3") == "#### 3"


def test_hashes_tell_answers_apart() -> None:
    assert hash_of("a") == hash_of("a") != hash_of("b")
    assert hash_of([1, 2]) != hash_of([1, 3])
    assert len(hash_of("")) == 16


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("sampling", list(Sampling))
def test_lm_eval_sends_the_same_prompts_and_scores_alike(
    sampling: Sampling, real: bool, tmp_path: Path
) -> None:
    """Its own task code over our task file: the prompts it makes, and what it says of answers."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[accuracy]'")
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    (tmp_path / "real").mkdir()
    folder = str(write_gsm8k(tmp_path / "real", 12, 30)) if real else None
    settings = TaskSettings(items=12, sampling=sampling, gsm8k=folder, examples=20)
    test, train = load_items(settings)
    answers = _answers(test)
    seen: list[tuple[Any, Any]] = []

    class Peer(LM):
        tokenizer_name = "none"

        def apply_chat_template(self, history: Any, add_generation_prompt: bool = True) -> str:
            assert add_generation_prompt
            return json.dumps(history)

        def chat_template(self, *_: Any, **__: Any) -> str:
            return ""

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            seen.extend(request.args for request in requests)
            return list(answers)

        def loglikelihood(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    name = write_task(tmp_path / "task", settings, test, train)
    found = simple_evaluate(
        Peer(),
        tasks=[name],
        task_manager=TaskManager(include_path=str(tmp_path / "task"), include_defaults=False),
        num_fewshot=settings.shots,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        fewshot_random_seed=settings.seed,
        bootstrap_iters=0,
    )
    assert found is not None
    assert [json.loads(args[0]) for args in seen] == build_chats(settings, test, train)
    assert {args[1]["max_tokens"] for args in seen} == {12288}
    for reader, metric in ((strict_match, "strict-match"), (flexible_extract, "flexible-extract")):
        theirs = {
            sample["doc_id"]: bool(sample["exact_match"])
            for sample in found["samples"][name]
            if sample["filter"] == metric
        }
        ours = [is_right(reader(a), item.answer) for a, item in zip(answers, test, strict=True)]
        assert [theirs[number] for number in range(len(test))] == ours
        assert 0 < sum(ours) < len(ours)


def _answers(test: list[TaskItem]) -> list[str]:
    """Right ones, and ones that are wrong in each way that a filter knows."""
    answers = [item.answer for item in test]
    answers[1] = answers[1].replace("#### ", "#### $")
    answers[2] = answers[2].replace("#### ", "so it is ")
    answers[3] = "#### 1 and so #### 2"
    answers[4] = ""
    answers[5] += " and 17"
    answers[6] = "Question"
    return answers
