"""What ``sweep accuracy`` refuses before anything starts: servers and tokenizers of no use."""

from __future__ import annotations

import warnings
from importlib import import_module

from atom.benchmarks.accuracy_point import Task
from atom.benchmarks.accuracy_settings import AccuracySettings
from atom.benchmarks.lm_eval_client import refuse_no_lm_eval
from atom.benchmarks.load_http import checked_url, key_of
from atom.entrypoints.tokenizer import open_tokenizer
from atom.errors import BadInput


def refuse_no_server(settings: AccuracySettings) -> None:
    """Raise unless a server can be asked.

    Raises:
        BadInput: no address, nobody there, no key, or no lm-eval where it is to ask.
    """
    if settings.base_url is None:
        raise BadInput(
            f"server_label {settings.server_label}: give --base-url; no record has it, so a "
            "resumed run needs it again"
        )
    url = checked_url(settings.base_url)
    if settings.api_key_env is not None:
        key_of(settings.api_key_env)
    if settings.client == "lm-eval":
        refuse_no_lm_eval()
    import httpx

    try:
        # any status will do: servers need not list their models
        httpx.get(url.join("models"), timeout=10.0, trust_env=False)
    except httpx.TransportError as error:
        raise BadInput(
            f"base_url: no server answers there ({type(error).__name__}); start it first, or "
            "mend the address"
        ) from None


def refuse_other_tokenizer(folder: str, vocab_size: int, task: Task) -> None:
    """Raise if a folder's tokenizer is that of another model.

    Args:
        folder: a checkpoint's.
        vocab_size: tokens that the model knows.
        task: items and chats; the first chat is tried.

    Raises:
        BadInput: it writes a token that the model does not know, or cannot be read.
    """
    with warnings.catch_warnings():
        # the tokenizer's library imports it, and in a notebook it warns of a missing widget
        warnings.simplefilter("ignore")
        import_module("tqdm.auto")
    largest = max(open_tokenizer(folder, vocab_size).chat(task[1][0], {}))
    if largest >= vocab_size:
        raise BadInput(
            f"{folder}: the tokenizer writes token {largest}, the model has {vocab_size}; expected "
            "the tokenizer that the model was trained with"
        )
