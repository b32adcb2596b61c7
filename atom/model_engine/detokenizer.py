"""Text from tokens as they come, and stop strings that may lie across token borders.

Two laws, whatever the split into steps: the pieces joined are the text that the tokenizer gives
for all tokens at once, and a stop string cuts that text exactly where it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

#: what a decoder writes for bytes that are not (or not yet) UTF-8
REPLACEMENT = "\ufffd"
#: a character of UTF-8 has at most 4 bytes, and a token at least one
_CHARACTER_TOKENS = 4


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens without text of their own: end of text, turn markers."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out, without any clean-up of spaces."""
        ...


class IncrementalDecoder:
    """Gives each token's text as soon as it cannot change any more.

    A token is decoded behind the tokens before it, since decoders treat a word's first space
    differently at the start of a text. Text that ends inside a character is held back.

    The law needs a decoder whose text for a byte depends on the bytes of its character alone:
    byte-level BPE does, and others do on valid UTF-8.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_ids)
        self._context: list[int] = []
        self._pending: list[int] = []
        #: text of context and pending tokens, as far as it was given out
        self._shown = ""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often empty inside a character."""
        if token_id in self._special:
            return ""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending)
        if not text.startswith(self._shown):
            return ""
        if not text.endswith(REPLACEMENT):
            new = text[len(self._shown) :]
            # without text of its own, a token has to stay where the next one can see it
            if new:
                self._settle(self._pending, [])
            return new
        # only the last character can still change
        new = self._show(text.rstrip(REPLACEMENT))
        if len(self._pending) <= _CHARACTER_TOKENS:
            return new
        # bytes that never become a character: what the last token cannot reach is certain
        *settled, last = self._pending
        before = self._tokenizer.decode(self._context + settled)
        if before + self._tokenizer.decode([last]) == text:
            new += self._show(before)
            ahead = self._shown[len(before) :]
            self._settle(settled, [last])
            self._shown += ahead
        return new

    def finish(self) -> str:
        """The rest, when no token follows: an unfinished character as it decodes alone."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)
        self._pending = []
        return text[len(self._shown) :]

    def _show(self, certain: str) -> str:
        new = certain[len(self._shown) :]
        self._shown += new
        return new

    def _settle(self, tokens: list[int], pending: list[int]) -> None:
        self._context = tokens
        self._shown = self._tokenizer.decode(tokens)
        self._pending = pending


class StopStrings:
    """Cuts a text before the stop string that ends first; of those, before the longest.

    Args:
        stops: non-empty strings; none at all lets everything through.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("a stop string is empty: it would stop every text at its start")
        self._held = ""
        self.matched: str | None = None  #: the stop string that was found

    def push(self, text: str) -> str:
        """Text that is certainly before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return held[:start]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Detokenizer:
    """Text of one request's tokens, cut at its stop strings.

    Args:
        tokenizer: decodes tokens.
        stops: stop strings; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Decodes, stops: Iterable[str] = ()) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: no further token changes the text."""
        return self._stops.matched is not None

    def push(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Text that became certain, and how many of the tokens it took.

        Fewer than were given only when a stop string was found: the rest came after it.
        """
        pieces = []
        for used, token_id in enumerate(token_ids, start=1):
            pieces.append(self._stops.push(self._decoder.push(token_id)))
            if self.stopped:
                return "".join(pieces), used
        return "".join(pieces), len(token_ids)

    def finish(self) -> str:
        """The rest of the text, when no token follows; may still find a stop string."""
        if self.stopped:
            return ""
        rest = self._stops.push(self._decoder.finish())
        return rest if self.stopped else rest + self._stops.finish()
