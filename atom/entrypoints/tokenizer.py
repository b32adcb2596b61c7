"""Tokenizers of the server: the model folder's own, or bytes where a model has none."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from atom.errors import BadInput

#: a message of a chat: role, content (text) and whatever else the client sent
Message = Mapping[str, Any]

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
#: what cuts a text into pieces and leaves some of it out, by its name or behaviour
_DROP_TEXT = ("Removed", "Whitespace", "CharDelimiterSplit", "BertPreTokenizer")


class ServerTokenizer(Protocol):
    """Text to tokens and back; safe to use from one encoding and one decoding thread at a time."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens without text of their own."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a completion's prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens left out."""
        ...

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's next turn begins.

        Raises:
            ApiError: if the chat template refuses the messages, or they are too long.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, also where that is a part of a character."""
        ...


class ByteTokenizer:
    """A token a byte of UTF-8, for models made at random that have no tokenizer.

    Ids from 256 on show as ``<id>``. With fewer than 256 ids, a byte's id is its remainder.
    """

    special_ids: Collection[int] = ()

    def __init__(self, vocab_size: int) -> None:
        self._bytes = min(vocab_size, 256)

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return [byte % self._bytes for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The bytes as UTF-8; the replacement character where they are none."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Tokens of :func:`plain_chat`."""
        return self.encode(plain_chat(messages, options.get("tools")))

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the id's stand-in."""
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()


class FolderTokenizer:
    """The tokenizer in a model's folder, with its chat template.

    Args:
        folder: a checkpoint's folder. Only files in it are read.
        most_tokens: a text that has more, as its length alone shows, is refused before it is
            turned into tokens, which would take a second a megabyte; ``None`` takes any.

    Raises:
        BadInput: if transformers cannot read it.
    """

    def __init__(self, folder: Path, most_tokens: int | None = None) -> None:
        # a name that is no folder must never be looked up on a network
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # transformers raises whatever its many loaders raise
            raise BadInput(
                f"{folder}: the tokenizer cannot be read ({type(error).__name__}: {error}); "
                "expected tokenizer.json and tokenizer_config.json beside the weights"
            ) from None
        self._special = frozenset(self._tokenizer.all_special_ids) | {
            number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        }
        # without transformers' wrapping a token is decoded several times faster
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._byte_level = self._backend is not None and "ByteLevel" in repr(self._backend.decoder)
        self._most_tokens = most_tokens
        self._longest_token = self._most_bytes_of_a_token()

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens without text of their own."""
        return self._special

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with what the tokenizer sets before it.

        Raises:
            ApiError: if the text is too long for any request.
        """
        self._refuse_too_long(text, "prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text as the model wrote it: spaces are not cleaned up."""
        kept = [token for token in token_ids if token not in self._special]
        if self._backend is not None:
            return str(self._backend.decode(kept, skip_special_tokens=False))
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """The folder's chat template, or :func:`plain_chat` where it has none."""
        if not self._tokenizer.chat_template:
            return self.encode(plain_chat(messages, options.get("tools")))
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except Exception as error:
            # only here: a tokenizer is used where no web server is installed, too
            from atom.entrypoints.api_error import ApiError

            # templates raise by themselves for conversations that they do not know
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        self._refuse_too_long(text, "messages")
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _refuse_too_long(self, text: str, param: str) -> None:
        most, longest = self._most_tokens, self._longest_token
        if most is None or longest is None or len(text.encode()) // longest <= most:
            return
        assert self._backend is not None
        normalizer = self._backend.normalizer
        kept = text if normalizer is None else normalizer.normalize_str(text)
        if (least := len(kept.encode()) // longest) > most:
            from atom.entrypoints.api_error import ApiError

            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, which make {least} tokens at least; "
                f"together with the output at most {most} fit (--max-model-len)",
                param=param,
                code="context_length_exceeded",
            )

    def _most_bytes_of_a_token(self) -> int | None:
        """``None`` where some text may have no token at all, so that its length says nothing."""
        backend = self._backend
        if backend is None or not self._byte_level:
            return None
        pieces = repr(backend.pre_tokenizer)
        if "ByteLevel" not in pieces or any(name in pieces for name in _DROP_TEXT):
            return None
        added = self._tokenizer.added_tokens_decoder.values()
        words = backend.get_vocab(with_added_tokens=False)
        # such a token takes the blanks beside it, however many
        if any(one.lstrip or one.rstrip for one in added) or _byte_alphabet().keys() - words:
            return None
        return max(*map(len, words), *(len(str(one).encode()) for one in added), 1)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes behind a byte-level token; of any other, its text."""
        if self._byte_level and token_id not in self._special:
            piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text.encode()


def open_tokenizer(model: str, vocab_size: int, most_tokens: int | None = None) -> ServerTokenizer:
    """The tokenizer of ``--model``: of a folder that has one, else bytes.

    Args:
        model: a checkpoint's folder, or a preset.
        vocab_size: ids of the model.
        most_tokens: longest request, as :class:`FolderTokenizer` wants it.

    Raises:
        BadInput: if the folder's tokenizer cannot be read.
    """
    folder = Path(model)
    if any((folder / name).is_file() for name in _FILES):
        return FolderTokenizer(folder, most_tokens)
    return ByteTokenizer(vocab_size)


def plain_chat(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
    """A conversation as plain lines, for models without a chat template of their own.

    Each turn is its role, a colon and its text; the last line leaves the word to the assistant.
    """
    lines = [f"tools: {json.dumps(list(tools))}"] if tools else []
    for message in messages:
        text = message.get("content") or ""
        if message.get("tool_calls"):
            text += json.dumps(message["tool_calls"])
        lines.append(f"{message['role']}: {text}")
    return "\n".join([*lines, "assistant:"])


@cache
def _byte_alphabet() -> dict[str, int]:
    """Characters that byte-level vocabularies write for bytes: printable ones stand for themselves.

    The others get, in order, the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }
