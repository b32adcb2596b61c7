"""The model that is shipped: its files, and its answers here and in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atom.benchmarks.gsm8k_task import TaskSettings, prompts_of_test
from atom.benchmarks.word_problem_accuracy import evaluate
from atom.config import DeviceChoice
from atom.device import open_device
from atom.entrypoints.tokenizer import open_tokenizer
from atom.model_engine.engine_settings import EngineSettings

MODEL = Path(__file__).resolve().parents[2] / "data" / "models" / "words8"
#: items answered by both; the first of them also without speculation
_ITEMS = 3

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"no model in {MODEL.name}")


def test_files_fit_the_repository() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(sizes.values()) <= 20_000_000
    assert max(sizes.values()) < 15_000_000
    assert {"README.md", "training.json", "loss_curve.csv", "tokenizer.json"} <= sizes.keys()
    facts = json.loads((MODEL / "training.json").read_text())
    assert facts["tokens"] > 0
    assert facts["machine"]


def engine_answers(draft_tokens: int, items: int) -> tuple[list[str], float | None]:
    """Answers in the engine on a virtual device, in float32, and the acceptance."""
    settings = EngineSettings(
        draft_tokens=draft_tokens,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        num_kv_blocks=512,
        num_state_checkpoints=8,
    )
    device = open_device(DeviceChoice.VIRTUAL)
    found = evaluate(MODEL, device, settings, TaskSettings(items=items, max_tokens=200))
    assert found.strict >= items - 1
    return list(found.answers), found.acceptance


def test_transformers_answers_the_same() -> None:
    """Greedy in float32: transformers without the MTP layer, the engine with drafts verified."""
    import transformers

    answers, acceptance = engine_answers(3, _ITEMS)
    assert acceptance is not None
    assert acceptance > 0.4
    peer = transformers.Qwen3NextForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = open_tokenizer(str(MODEL), peer.config.vocab_size)
    _, chats = prompts_of_test(TaskSettings(items=_ITEMS))
    for chat, answer in zip(chats, answers, strict=True):
        prompt = tokenizer.chat(chat, {})
        output = peer.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)
        assert tokenizer.decode(output[0, len(prompt) :].tolist()) == answer


def test_drafts_change_no_answer() -> None:
    assert engine_answers(0, 1)[0] == engine_answers(3, 1)[0]
