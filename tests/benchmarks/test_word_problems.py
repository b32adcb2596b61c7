"""Generated word problems: steps are right, splits share nothing, seeds decide everything."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from atom.benchmarks.word_problem_tokens import DataSettings, answer_of, make, prompt_of
from atom.benchmarks.word_problems import (
    LARGEST,
    TEST_ITEMS,
    Split,
    WordProblem,
    few_shot_messages,
    split_of,
    word_problem,
    word_problems,
)
from atom.errors import BadInput
from atom.models.training_data import TokenPool

_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
# what computes here is not what computed there
_COMPUTE = {
    "+": lambda a, b, c: c - b == a,
    "-": lambda a, b, c: c + b == a,
    "*": lambda a, b, c: c % b == 0 and c // b == a,
    "/": lambda a, b, c: c * b == a,
}


@pytest.fixture(scope="module")
def train() -> list[WordProblem]:
    return list(word_problems(0, 1500, Split.TRAIN))


@pytest.fixture(scope="module")
def test() -> list[WordProblem]:
    return list(word_problems(0, TEST_ITEMS, Split.TEST))


def faults(problem: WordProblem) -> list[str]:
    """What is wrong with a solution."""
    *lines, last = problem.answer.split("\n")
    found = []
    results = []
    for line, step in zip(lines, problem.steps, strict=True):
        written = _STEP.findall(line)
        if len(written) != 1 or "".join(written[0][:3]) + "=" + written[0][3] != str(step):
            found.append(f"{line!r} does not show {step}")
            continue
        a, operator, b, c = written[0]
        if not _COMPUTE[operator](int(a), int(b), int(c)):
            found.append(f"{line!r} is not right")
        results.append(int(c))
    if last != f"#### {problem.result}" or not results or results[-1] != problem.result:
        found.append(f"{last!r} does not follow")
    return found


def test_every_worked_step_is_right_and_the_answer_follows(
    train: list[WordProblem], test: list[WordProblem]
) -> None:
    for problem in train + test:
        assert not faults(problem), problem
        assert 2 <= len(problem.steps) <= 8
        assert all(1 <= step.result <= LARGEST for step in problem.steps)


def test_numbers_come_from_the_question_or_from_a_step_before(train: list[WordProblem]) -> None:
    parts = {"half": 2, "third": 3, "quarter": 4, "fifth": 5, "tenth": 10}
    shares = {"50%": 2, "25%": 4, "20%": 5, "10%": 10}
    for problem in train:
        known = {int(n) for n in re.findall(r"\d+", problem.question)}
        text = problem.question.lower()
        known |= {n for word, n in {**parts, **shares}.items() if word in text}
        for step in problem.steps:
            assert {step.left, step.right} <= known, (problem, step)
            known.add(step.result)


def test_the_checks_can_fail(train: list[WordProblem]) -> None:
    good = train[0]
    wrong = good.answer.replace(f"={good.steps[0].result} ", f"={good.steps[0].result + 1} ", 1)
    fields = (good.question, wrong, good.result, good.steps, good.signature, good.split)
    assert faults(WordProblem(*fields))


def test_splits_share_no_problem_not_even_in_other_words(
    train: list[WordProblem], test: list[WordProblem]
) -> None:
    assert len({problem.signature for problem in test}) == TEST_ITEMS
    assert not {p.signature for p in train} & {p.signature for p in test}
    assert all(split_of(p.signature) is p.split for p in train + test)
    # another seed's training cannot meet this test either
    other = {p.signature for p in word_problems(99, 500, Split.TRAIN, distinct=False)}
    assert not other & {p.signature for p in test}


def test_problems_are_of_many_kinds(train: list[WordProblem]) -> None:
    steps = Counter(len(problem.steps) for problem in train)
    assert set(steps) == set(range(2, 9))
    assert min(steps.values()) > 100
    # words without names and numbers: hardly any two problems are told alike
    shapes = {re.sub(r"\d+|[A-Z]\w+", "", problem.question) for problem in train}
    assert len(shapes) > 0.95 * len(train)
    used = set(re.findall(r"\d+", " ".join(problem.question for problem in train)))
    computed = {str(n) for p in train for s in p.steps for n in (s.left, s.right)}
    assert used - computed or any("years old" in problem.question for problem in train)


def test_a_problem_is_its_seed_split_and_index() -> None:
    first = list(word_problems(5, 40, Split.TRAIN))
    assert first == list(word_problems(5, 40, Split.TRAIN))
    assert first[7] == word_problem(5, 7, Split.TRAIN)
    assert first != list(word_problems(6, 40, Split.TRAIN))
    with pytest.raises(BadInput, match="count=-1"):
        list(word_problems(5, -1, Split.TRAIN))


def test_training_rows_are_the_prompts_of_the_evaluation(tmp_path: Path) -> None:
    """A row's tokens are those of the chat template, and what is to be written is the answers."""
    from atom.entrypoints.tokenizer import open_tokenizer

    make(DataSettings(problems=100, tokenizer_problems=300, vocab_size=600), tmp_path, workers=1)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer"), 600)
    problems = list(word_problems(1, 100, Split.TRAIN, distinct=False))
    chat = few_shot_messages(problems[:5], problems[5])
    text = "".join(prompt_of(p) + answer_of(p) for p in problems[:5]) + prompt_of(problems[5])
    prompt = tokenizer.chat(chat, {})
    assert prompt == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(problems[0].answer)) == problems[0].answer
    # every digit is a token
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("1024")] == [b"1", b"0", b"2", b"4"]

    pool = TokenPool.load(tmp_path / "problems.npz")
    assert pool.tokens[: len(prompt)].tolist() == prompt
    ids, written = pool.rows(seed=3, rows=4, length=1200)
    again, _ = pool.rows(seed=3, rows=4, length=1200)
    assert (ids == again).all()
    solutions = {problem.answer for problem in problems}
    for row, mask in zip(ids.tolist(), written.tolist(), strict=True):
        answers: list[list[int]] = [[]]
        for token, wanted in zip(row, mask, strict=True):
            if wanted:
                answers[-1].append(token)
            elif answers[-1]:
                answers.append([])
        # the last may be cut
        assert len(answers) > 3
        assert {tokenizer.decode(answer) for answer in answers[:-1]} <= solutions
        # it learns to stop
        end = tokenizer.encode("<|im_end|>")
        assert all(answer[-1:] == end for answer in answers[:-1])


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="do not fit"):
        TokenPool.of(np.arange(9), np.array([4, 4]), np.array([1, 1]))
    (tmp_path / "no.npz").write_text("no")
    with pytest.raises(BadInput, match=r"no\.npz"):
        TokenPool.load(tmp_path / "no.npz")
