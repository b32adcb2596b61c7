"""How many word problems a model solves in this workbook's engine, item by item.

Prompts are what lm-eval's GSM8K task sends (5 solved examples as a chat, then the question), and
answers are read as its two filters read them. The engine runs in this process, at temperature 0,
with real verification of drafts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from atom.benchmarks.gsm8k_task import (
    TaskSettings,
    flexible_extract,
    hash_of,
    is_right,
    prompts_of_test,
    strict_match,
)
from atom.device.interface import Device
from atom.entrypoints.tokenizer import open_tokenizer
from atom.errors import BadInput
from atom.model_engine.engine_builder import load_engine
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.sequence import SamplingParams
from atom.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """One item's answer.

    Attributes:
        item: number of the test item.
        steps: computed steps of its solution.
        strict, flexible: whether it is right by each of lm-eval's filters.
        output_tokens: tokens of the answer.
        prompt_hash, answer_hash: the first 64 bits of SHA-256, in hexadecimal.
    """

    item: int
    steps: int
    strict: bool
    flexible: bool
    output_tokens: int
    prompt_hash: str
    answer_hash: str


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Outcomes of an evaluation.

    Attributes:
        outcomes: of the items in order.
        drafted_tokens, accepted_tokens: drafts verified, and those that held.
        decode_steps: decode steps launched.
        generated_tokens: tokens of all answers.
        seconds: of generation.
        answers: texts, in order of the items.
    """

    outcomes: tuple[ItemOutcome, ...]
    drafted_tokens: int
    accepted_tokens: int
    decode_steps: int
    generated_tokens: int
    seconds: float
    answers: tuple[str, ...] = field(repr=False)

    @property
    def strict(self) -> int:
        """Items right by strict-match."""
        return sum(outcome.strict for outcome in self.outcomes)

    @property
    def flexible(self) -> int:
        """Items right by flexible-extract."""
        return sum(outcome.flexible for outcome in self.outcomes)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts of those verified; ``None`` without speculation."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


def evaluate(
    model: str | Path,
    device: Device,
    engine_settings: EngineSettings,
    settings: TaskSettings | None = None,
) -> Accuracy:
    """Ask a model all items at once; the engine batches as its settings say.

    Args:
        model: checkpoint folder with a tokenizer.
        device: where it runs.
        engine_settings: the engine; ``max_waiting`` must hold the items.
        settings: what is asked.

    Raises:
        BadInput: a folder that cannot be used.
        RequestRefused, RequestFailed: a prompt that does not fit, a request that failed.
    """
    settings = settings or TaskSettings()
    tokenizer = open_tokenizer(str(model), ModelConfig.from_pretrained(model).vocab_size)
    asked, chats = prompts_of_test(settings)
    prompts = [tokenizer.chat(chat, {}) for chat in chats]
    engine = load_engine(model, engine_settings, device)
    try:
        room = engine_settings.max_model_len - max(map(len, prompts))
        if room < 1:
            raise BadInput(
                f"max_model_len {engine_settings.max_model_len} leaves no room behind the longest "
                f"prompt; raise it, or ask with fewer shots"
            )
        params = SamplingParams(temperature=0.0, max_tokens=min(settings.max_tokens, room))
        began = time.monotonic()
        outputs = engine.generate(prompts, params)
        seconds = time.monotonic() - began
        counters = engine.counters
    finally:
        engine.close()
    answers = [tokenizer.decode(output) for output in outputs]
    return Accuracy(
        outcomes=tuple(
            ItemOutcome(
                item=number,
                steps=problem.steps or 0,
                strict=is_right(strict_match(answer), problem.answer),
                flexible=is_right(flexible_extract(answer), problem.answer),
                output_tokens=len(output),
                prompt_hash=hash_of(prompt),
                answer_hash=hash_of(output),
            )
            for number, (problem, prompt, output, answer) in enumerate(
                zip(asked, prompts, outputs, answers, strict=True)
            )
        ),
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        decode_steps=counters.decode_steps,
        generated_tokens=counters.generated_tokens,
        seconds=seconds,
        answers=tuple(answers),
    )
