"""The model that is shipped: its files, and its answers here and in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atom.benchmarks.gsm8k_task import TaskSettings, hash_of, prompts_of_test
from atom.benchmarks.word_problem_accuracy import evaluate
from atom.config import DeviceChoice
from atom.device import open_device
from atom.entrypoints.tokenizer import open_tokenizer
from atom.model_engine.engine_settings import EngineSettings
from atom.models.training_card import card

MODEL = Path(__file__).resolve().parents[2] / "data" / "models" / "words8"
#: ends an answer
END = 2
#: items answered by both
_ITEMS = 2

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"no model in {MODEL.name}")


def test_files_fit_the_repository() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(sizes.values()) <= 20_000_000
    assert max(sizes.values()) < 15_000_000
    assert {"README.md", "training.json", "loss_curve.csv", "tokenizer.json"} <= sizes.keys()
    facts = json.loads((MODEL / "training.json").read_text())
    assert facts["tokens"] > 0
    assert facts["machine"]
    assert facts["name"] == MODEL.name
    # what the card says is what the tool says of these facts
    assert (MODEL / "README.md").read_text() == card(facts)


def test_transformers_answers_the_same() -> None:
    """Greedy in float32: transformers without the MTP layer, the engine with drafts verified.

    Where each token of an answer is the likeliest behind those before it, greedy decoding gives
    that answer; one pass over prompt and answer shows it of all of them.
    """
    import transformers

    settings = EngineSettings(
        draft_tokens=3,
        max_num_seqs=4,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        num_kv_blocks=512,
        num_state_checkpoints=8,
    )
    task = TaskSettings(items=_ITEMS, shots=2, max_tokens=200)
    found = evaluate(MODEL, open_device(DeviceChoice.VIRTUAL), settings, task)
    assert found.strict == _ITEMS
    assert found.acceptance is not None
    assert 0.4 < found.acceptance < 1
    peer, loading = transformers.Qwen3NextForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    tokenizer = open_tokenizer(str(MODEL), peer.config.vocab_size)
    _, chats = prompts_of_test(task)
    for chat, text, outcome in zip(chats, found.answers, found.outcomes, strict=True):
        prompt = tokenizer.chat(chat, {})
        answer = [*tokenizer.encode(text), END]
        assert hash_of(answer) == outcome.answer_hash
        with torch.no_grad():
            logits = peer.eval()(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
