"""Sessions of requests without text: lengths, hashes of prompt blocks, pauses, and token ids.

A session is a chain of requests. Each sends the conversation so far, so its prompt begins with most
of the one before it. A prompt is a list of block hashes, each standing for a fixed number of
tokens. Token ids are drawn from the hashes, so that prompts share a prefix of tokens exactly as far
as they share a prefix of hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from atom.errors import BadInput

#: tokens that a hash of the recorded traces stands for
BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        input_tokens: length of the prompt.
        output_tokens: tokens to generate.
        block_hashes: hashes of the prompt's blocks, in order; the last block may be cut short.
        think_seconds: pause between the end of the answer before and this request.
        block_tokens: tokens that a hash stands for.
    """

    input_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...]
    think_seconds: float
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one agent, one after the other.

    Attributes:
        session_id: name of the trace, or of the generated session.
        turns: at least one.
    """

    session_id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Traces:
    """Sessions with where they came from.

    Attributes:
        sessions: in the order of their files, or of their generation.
        dropped: what was left out, as a count for each reason.
        block_tokens: tokens that a hash stands for.
        source: ``recorded: FOLDER NAME`` or ``generated: seed N``.
    """

    sessions: tuple[Session, ...]
    dropped: Mapping[str, int]
    block_tokens: int
    source: str


def prompt_token_ids(turn: Turn, *, vocab_size: int, salt: str = "") -> list[int]:
    """Token ids of a prompt, drawn from its hashes.

    Args:
        turn: whose prompt.
        vocab_size: ids are below it.
        salt: another salt gives other ids throughout, so that nothing of one is cached for another.

    Returns:
        ``turn.input_tokens`` ids. Two prompts with one salt begin alike as far as their hashes do.

    Raises:
        BadInput: the hashes stand for fewer tokens than the prompt has.
    """
    if len(turn.block_hashes) * turn.block_tokens < turn.input_tokens:
        raise BadInput(
            f"block_hashes: {len(turn.block_hashes)} blocks of {turn.block_tokens} tokens for a "
            f"prompt of {turn.input_tokens}"
        )
    key = np.uint64(hash_of(salt))
    hashes = np.array(turn.block_hashes, dtype=np.uint64) ^ key
    places = np.arange(turn.block_tokens, dtype=np.uint64)
    mixed = _mixed(_mixed(hashes)[:, None] + places[None, :] * _GOLDEN)
    ids = mixed % np.uint64(vocab_size)
    tokens: list[int] = ids.reshape(-1)[: turn.input_tokens].tolist()
    return tokens


def working_set_tokens(sessions: Iterable[Session]) -> int:
    """Tokens of all distinct blocks of the sessions: what a cache must hold to miss nothing."""
    whole: set[int] = set()
    open_ends: dict[int, int] = {}
    block_tokens = 0
    for session in sessions:
        for turn in session.turns:
            block_tokens = turn.block_tokens
            full, rest = divmod(turn.input_tokens, block_tokens)
            whole.update(turn.block_hashes[:full])
            if rest:
                last = turn.block_hashes[full]
                open_ends[last] = max(rest, open_ends.get(last, 0))
    ends = sum(tokens for block, tokens in open_ends.items() if block not in whole)
    return len(whole) * block_tokens + ends


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_of(*parts: object) -> int:
    """A 64-bit hash of the parts' texts, in order."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def within_context(
    sessions: Iterable[Session], most: int | None, dropped: Counter[str], source: str
) -> tuple[Session, ...]:
    """Sessions up to the first request of each that is too long; counts what is left out.

    Args:
        sessions: whole ones.
        most: longest request in tokens, prompt and output together; ``None`` leaves out nothing.
        dropped: gets the counts.
        source: of the sessions, for the error.

    Raises:
        BadInput: nothing is left.
    """
    kept = []
    for session in sessions:
        turns = session.turns
        if most is not None:
            fits = [turn.input_tokens + turn.output_tokens <= most for turn in turns]
            turns = turns[: fits.index(False)] if False in fits else turns
        if lost := len(session.turns) - len(turns):
            dropped["requests from the first over max_context_tokens on"] += lost
        if turns:
            kept.append(Session(session.session_id, turns))
        else:
            dropped["sessions without a request within max_context_tokens"] += 1
    if not kept:
        raise BadInput(
            f"{source}: no session begins with a request of at most {most} tokens; raise "
            "max_context_tokens, or lower block_tokens, which scales all lengths"
        )
    return tuple(kept)
