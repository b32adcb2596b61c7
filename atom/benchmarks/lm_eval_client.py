"""lm-eval itself puts the task to a server: in a process of its own, with its own code.

Its samples are read back by item, so that points asked by it can be compared item by item too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atom.benchmarks.accuracy_clients import Answer
from atom.benchmarks.accuracy_settings import AccuracySettings
from atom.benchmarks.gsm8k_task import cut_at_stops, load_items, write_task
from atom.benchmarks.load_http import checked_url, key_of
from atom.errors import BadInput, DeviceError

_STRICT = "strict-match"


def refuse_no_lm_eval() -> None:
    """Raise unless lm-eval is installed.

    Raises:
        BadInput: says how to install it, and what does without.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise BadInput(
            "client lm-eval: it is not installed: pip install '.[accuracy]' in the checkout, or "
            "take client http, which sends the same prompts and reads answers alike"
        )


def ask_by_lm_eval(settings: AccuracySettings) -> list[Answer]:
    """The answers to all items, as lm-eval got them.

    Raises:
        BadInput: no lm-eval, or an address that is none.
        DeviceError: it failed; its last line says why.
    """
    refuse_no_lm_eval()
    with tempfile.TemporaryDirectory(prefix="atom-lm-eval-") as folder:
        path = Path(folder)
        name = write_task(path / "task", settings, *load_items(settings))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(path / "hub")}
        key = "EMPTY" if settings.api_key_env is None else key_of(settings.api_key_env)
        done = subprocess.run(
            command(settings, name, path),
            env={**environment, "OPENAI_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            words = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            raise DeviceError(f"lm-eval failed: {words[-1][:300] if words else done.returncode}")
        return read_samples(path / "out", settings.items)


def command(settings: AccuracySettings, task: str, folder: Path) -> list[str]:
    """lm-eval's command line.

    Args:
        settings: of the sweep.
        task: name of the task file below ``folder/task``.
        folder: its results go to ``folder/out``.
    """
    url = checked_url(settings.base_url or "").join("chat/completions")
    model = {
        "model": settings.server_model,
        "base_url": str(url),
        "num_concurrent": settings.concurrency,
        "max_retries": 3,
        "tokenized_requests": False,
        "tokenizer_backend": None,
        "timeout": int(settings.request_seconds),
    }
    return [
        *(sys.executable, "-m", "lm_eval", "--model", "local-chat-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model.items())),
        *("--tasks", task, "--include_path", str(folder / "task")),
        *("--num_fewshot", str(settings.shots), "--apply_chat_template"),
        *("--gen_kwargs", f"max_tokens={settings.max_tokens},temperature=0"),
        *("--output_path", str(folder / "out"), "--log_samples"),
        *("--seed", str(settings.seed)),
    ]


def read_samples(folder: Path, items: int) -> list[Answer]:
    """Answers by item from lm-eval's sample files.

    Raises:
        DeviceError: an item has none.
    """
    found: dict[int, Answer] = {}
    for path in folder.rglob("samples_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            sample: dict[str, Any] = json.loads(line)
            if sample.get("filter", _STRICT) == _STRICT:
                text = sample["resps"][0][0]
                found[int(sample["doc_id"])] = Answer(cut_at_stops(str(text)))
    if missing := [number for number in range(items) if number not in found]:
        raise DeviceError(f"lm-eval has no answer of item {missing[0]}")
    return [found[number] for number in range(items)]
