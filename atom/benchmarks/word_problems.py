"""Grade-school word problems with worked solutions, made from a seed.

A problem follows one quantity through 2 to 8 computed steps; some sentences carry numbers that no
step needs. The solution has a line a step and ends like GSM8K's, with ``#### N``.

Problems are dealt to the two splits by a hash of their signature: what is done, with which numbers,
whatever the names and words. So no problem of one split is in the other, not even in other words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from atom.benchmarks.word_problem_phrases import (
    DISTRACTORS,
    GOODS,
    GOODS_THEME,
    MEASURES,
    MONEY_THEME,
    NAMES,
    PARTS,
    PRICE,
    PRICE_FIRST,
    PRICE_LATER,
    SOLUTIONS,
    THINGS,
    Theme,
)
from atom.errors import BadInput

#: items of the test split: as many as GSM8K's
TEST_ITEMS = 1319
MOST_STEPS = 8
FEWEST_STEPS = 2
#: no number in a problem is larger
LARGEST = 2000
#: one signature in so many belongs to the test split
_TEST_SHARE = 8
_DISTRACTOR_RATE = 0.35


class Split(StrEnum):
    """Who may see a problem."""

    TRAIN = "train"  #: learned from, and shown as examples in a prompt
    TEST = "test"  #: asked


@dataclass(frozen=True, slots=True)
class Step:
    """One computed step, ``left operator right = result`` in whole numbers."""

    left: int
    operator: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A problem and its worked solution.

    Attributes:
        question: the text.
        answer: a line a step, then ``#### result``.
        result: the number asked for.
        steps: the computed steps in order; the last one's result is ``result``.
        signature: kinds of the steps and their numbers, without names and words.
        split: where its signature belongs.
    """

    question: str
    answer: str
    result: int
    steps: tuple[Step, ...]
    signature: str
    split: Split


def split_of(signature: str) -> Split:
    """The split that a signature belongs to: the same in every process and for every seed."""
    digest = hashlib.sha256(signature.encode()).digest()
    return Split.TEST if digest[0] % _TEST_SHARE == 0 else Split.TRAIN


def word_problem(seed: int, index: int, split: Split) -> WordProblem:
    """Problem ``index`` of a seed and split, whatever was made before.

    Args:
        seed: of the whole set.
        index: 0 or more.
        split: where it must belong.
    """
    generator = random.Random(f"word problem {seed} {split} {index}")
    while True:
        problem = _Story(generator).tell()
        if problem is not None and problem.split is split:
            return problem


def word_problems(
    seed: int, count: int, split: Split, *, first: int = 0, distinct: bool = True
) -> Iterator[WordProblem]:
    """Problems of a seed and split in order.

    Args:
        seed: of the whole set.
        count: how many.
        split: which part.
        first: index of the first.
        distinct: whether a signature comes at most once.

    Raises:
        BadInput: for a count or index below 0.
    """
    if count < 0 or first < 0:
        raise BadInput(f"word problems: count={count} and first={first}; expected 0 or more")
    seen: set[str] = set()
    index = first
    while count > 0:
        problem = word_problem(seed, index, split)
        index += 1
        if distinct:
            if problem.signature in seen:
                continue
            seen.add(problem.signature)
        count -= 1
        yield problem


def few_shot_messages(examples: Sequence[WordProblem], asked: WordProblem) -> list[dict[str, str]]:
    """A chat that shows solved problems, then asks one: as lm-eval's GSM8K task sends it.

    Args:
        examples: solved before it; five make 11 messages.
        asked: the last message.
    """
    messages = []
    for example in examples:
        messages.append({"role": "user", "content": question_text(example)})
        messages.append({"role": "assistant", "content": example.answer})
    return [*messages, {"role": "user", "content": question_text(asked)}]


def question_text(problem: WordProblem) -> str:
    """The text of a user's turn, as GSM8K's task form has it."""
    return f"Question: {problem.question}\nAnswer:"


class _Story:
    """One problem in the making."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator
        self.names = generator.sample(NAMES, 6)
        self.who = self.names.pop()
        self.box = ""
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.kinds: list[str] = []
        self.value = 0
        kind = generator.random()
        if kind < 0.6:
            self.theme = GOODS_THEME
            self.unit, self.box = generator.choice(GOODS)
        else:
            self.theme = MONEY_THEME if kind < 0.75 else generator.choice(MEASURES)
            self.unit = self.theme.unit

    def tell(self) -> WordProblem | None:
        """The problem, or ``None`` if the dice led to a dead end."""
        wanted = self.random.randint(FEWEST_STEPS, MOST_STEPS)
        (self._product if self.random.random() < 0.6 else self._total)()
        sold = self.box != "" and self.random.random() < 0.4
        price_at = self.random.randint(1, wanted - 1) if sold else -1
        last = ""
        while len(self.steps) < wanted:
            left = wanted - len(self.steps)
            if self.box and 0 < price_at <= len(self.steps) and self._price():
                last = "price"
                continue
            moves = [(n, w, m) for n, s, w, m in _MOVES if s <= left and n != last]
            for _ in range(12):
                name, _, move = self.random.choices(moves, [w for _, w, _ in moves])[0]
                if move(self):
                    last = name
                    break
            else:
                return None
        self._distract()
        question = self.random.choice(self.theme.question)
        self._say(question)
        signature = ";".join(
            f"{k} {s.left} {s.right}" for k, s in zip(self.kinds, self.steps, strict=True)
        )
        return WordProblem(
            question=" ".join(self.sentences),
            answer="\n".join([*self.lines, f"#### {self.value}"]),
            result=self.value,
            steps=tuple(self.steps),
            signature=signature,
            split=split_of(signature),
        )

    # -- writing
    def _fields(self, **values: object) -> dict[str, object]:
        return {
            "who": self.who,
            "Who": self.who,
            "unit": self.unit,
            "Unit": self.unit.capitalize(),
            "boxes": self.box,
            **values,
        }

    def _say(self, sentence: str, **values: object) -> None:
        self.sentences.append(sentence.format(**self._fields(**values)))

    def _solve(self, kind: str, left: int, operator: str, right: int, **values: object) -> int:
        """Write a step and its line; its result."""
        result = _OPERATORS[operator](left, right)
        step = Step(left, operator, right, result)
        line = self.random.choice(SOLUTIONS[kind])
        self.lines.append(line.format(**self._fields(step=step, a=right, **values)))
        self.steps.append(step)
        self.kinds.append(kind)
        return result

    def _friend(self) -> str:
        return self.random.choice(self.names)

    def _pick(self, sentences: Sequence[str]) -> str:
        return self.random.choice(sentences)

    def _distract(self) -> None:
        """Put sentences between the others that carry numbers for nothing."""
        while self.random.random() < _DISTRACTOR_RATE:
            place = self.random.randint(0, len(self.sentences))
            self._say(self._pick(DISTRACTORS), friend=self._friend(), a=self.random.randint(2, 60))
            self.sentences.insert(place, self.sentences.pop())

    # -- beginnings
    def _product(self) -> None:
        a, b = self.random.randint(2, 12), self.random.randint(2, 25)
        self._say(self._pick(self.theme.product), a=a, b=b)
        self.value = self._solve("product", a, "*", b)

    def _total(self) -> None:
        a, b = self.random.randint(3, 99), self.random.randint(3, 99)
        self._say(self._pick(self.theme.total), a=a, b=b)
        self.value = self._solve("total", a, "+", b)

    # -- what happens to the quantity; False if it cannot happen to this one
    def _gain(self) -> bool:
        a = self.random.randint(2, self.random.choice((20, 60, 200)))
        if self.value + a > LARGEST:
            return False
        self._say(self._pick(self.theme.gain), a=a, friend=self._friend(), thing="")
        self.value = self._solve("gain", self.value, "+", a)
        return True

    def _loss(self) -> bool:
        most = min(self.value - 2, self.random.choice((20, 60, 200)))
        if most < 2:
            return False
        a = self.random.randint(2, most)
        self._say(self._pick(self.theme.loss), a=a, friend=self._friend(), thing=self._pick(THINGS))
        self.value = self._solve("loss", self.value, "-", a)
        return True

    def _product_gain(self) -> bool:
        a, b = self.random.randint(2, 9), self.random.randint(2, 20)
        if self.value + a * b > LARGEST:
            return False
        self._say(self._pick(self.theme.product_gain), a=a, b=b, friend=self._friend())
        more = self._solve("added", a, "*", b)
        self.value = self._solve("gain", self.value, "+", more)
        return True

    def _product_loss(self) -> bool:
        a, b = self.random.randint(2, 9), self.random.randint(2, 20)
        if self.value - a * b < 2:
            return False
        self._say(self._pick(self.theme.product_loss), a=a, b=b, friend=self._friend())
        fewer = self._solve("removed", a, "*", b)
        self.value = self._solve("loss", self.value, "-", fewer)
        return True

    def _times(self) -> bool:
        a = self.random.randint(2, 5)
        if not 2 <= self.value <= 300:
            return False
        self._say(self._pick(self.theme.times), a=a)
        self.value = self._solve("times", self.value, "*", a)
        return True

    def _fraction_loss(self) -> bool:
        part, divisor = self.random.choice(PARTS)
        if self.value % divisor or self.value < 2 * divisor:
            return False
        parts = {"part": part, "Part": part.capitalize()}
        self._say(
            self._pick(self.theme.fraction_loss),
            **parts,
            friend=self._friend(),
            thing=self._pick(THINGS),
        )
        gone = self._solve("fraction", self.value, "/", divisor, **parts)
        self.value = self._solve("loss", self.value, "-", gone)
        return True

    def _share(self) -> bool:
        divisors = [d for d in range(2, 11) if self.value % d == 0 and self.value >= 3 * d]
        if not divisors:
            return False
        a = self.random.choice(divisors)
        self._say(self._pick(self.theme.share), a=a)
        self.value = self._solve("share", self.value, "/", a)
        return True

    def _compare(self) -> bool:
        a = self.random.randint(2, self.random.choice((15, 50)))
        more = self.random.random() < 0.5
        both = 2 * self.value + (a if more else -a)
        if both > LARGEST or (not more and self.value - a < 2):
            return False
        friend = self._friend()
        self._say(
            self._pick(self.theme.compare_more if more else self.theme.compare_less),
            a=a,
            friend=friend,
        )
        kind, operator = ("other_more", "+") if more else ("other_less", "-")
        other = self._solve(kind, self.value, operator, a, friend=friend)
        self.value = self._solve("both", self.value, "+", other)
        return True

    def _price(self) -> bool:
        a = self.random.randint(2, 9)
        if self.value * a > LARGEST:
            self.box = ""  # these goods are never sold
            return False
        if self.random.random() < 0.3:
            self._say(self._pick(PRICE_FIRST), a=a)
            self.sentences.insert(0, self.sentences.pop())
            self._say(self._pick(PRICE_LATER))
        else:
            self._say(self._pick(PRICE), a=a)
        self.value = self._solve("price", self.value, "*", a)
        self.theme, self.unit, self.box = MONEY_THEME, MONEY_THEME.unit, ""
        return True


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
}

#: name, steps, weight
_MOVES: tuple[tuple[str, int, float, Callable[[_Story], bool]], ...] = (
    ("gain", 1, 2.0, _Story._gain),
    ("loss", 1, 2.0, _Story._loss),
    ("times", 1, 1.0, _Story._times),
    ("share", 1, 1.5, _Story._share),
    ("product_gain", 2, 1.5, _Story._product_gain),
    ("product_loss", 2, 1.5, _Story._product_loss),
    ("fraction_loss", 2, 1.5, _Story._fraction_loss),
    ("compare", 2, 1.5, _Story._compare),
)
__all__ = [
    "TEST_ITEMS",
    "Split",
    "Step",
    "Theme",
    "WordProblem",
    "few_shot_messages",
    "question_text",
    "split_of",
    "word_problem",
    "word_problems",
]
