"""Sessions of a coding agent as load: read from recorded traces, or generated like them.

A session is a chain of requests. Each sends the conversation so far, so its prompt begins with most
of the one before it. Traces hold no text: a prompt is a list of block hashes, each standing for a
fixed number of tokens. Token ids are drawn from the hashes, so that prompts share a prefix of
tokens exactly as far as they share a prefix of hashes.

Format: the public Weka trace of agentic coding sessions (kv-cache-tester). One JSON file a session;
``requests`` hold ``t`` and ``api_time`` (seconds), ``in`` and ``out`` (tokens) and ``hash_ids``
(one a full block of ``block_size`` tokens).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from atom.config import Settings
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


class SessionShape(Settings):
    """Shape of generated sessions; the defaults resemble the recorded ones.

    Lengths are in tokens at the scale of the record, where a block has 64; ``block_tokens`` scales
    all of them.
    """

    turns_median: float = Field(14.0, ge=1, le=1000)
    """Requests of a session (log-normal)."""

    turns_sigma: float = Field(0.75, ge=0, le=3)
    """Spread of the requests of a session."""

    turns_most: int = Field(60, ge=1, le=10000)
    """Most requests of a session."""

    first_input_median: float = Field(26000.0, ge=64, le=1e6)
    """Prompt of a session's first request (log-normal)."""

    first_input_sigma: float = Field(0.8, ge=0, le=3)
    """Spread of the first prompt."""

    growth_median: float = Field(880.0, ge=1, le=1e6)
    """Tokens that a prompt is longer than the one before (log-normal)."""

    growth_sigma: float = Field(1.25, ge=0, le=3)
    """Spread of the growth."""

    output_median: float = Field(250.0, ge=1, le=1e5)
    """Tokens generated (log-normal)."""

    output_sigma: float = Field(0.9, ge=0, le=3)
    """Spread of the tokens generated."""

    think_median: float = Field(10.0, ge=0, le=1e5)
    """Pause before a request in seconds (log-normal)."""

    think_sigma: float = Field(1.4, ge=0, le=4)
    """Spread of the pauses."""

    rewrite_share: float = Field(0.02, ge=0, le=1)
    """Share of requests that rewrite a part of the conversation before them."""

    rewrite_kept: float = Field(0.5, ge=0, le=1)
    """Share of the prompt before it that such a request keeps, in the mean."""

    input_most: int = Field(450000, ge=64, le=2**22)
    """Longest prompt; a session ends before it."""


def load_traces(
    folder: str | Path,
    *,
    max_context_tokens: int | None = None,
    block_tokens: int | None = None,
) -> Traces:
    """Read every ``*.json`` of a folder as one session.

    Args:
        folder: of trace files.
        max_context_tokens: longest request, prompt and output together. A session ends before its
            first longer request; ``dropped`` counts the requests and sessions that are lost so.
        block_tokens: let a hash stand for that many tokens in place of the record's. All lengths
            shrink or grow with it, and what is shared stays shared.

    Raises:
        BadInput: no trace is there, or one is damaged; it names the file and the field.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise BadInput(f"{folder}: no trace there; expected a folder with one .json a session")
    dropped: Counter[str] = Counter()
    sessions: list[Session] = []
    sizes: dict[int, str] = {}
    for path in paths:
        trace = _read(path)
        sizes.setdefault(trace["block_size"], path.name)
        if len(sizes) > 1:
            shown = ", ".join(f"{size} in {name}" for size, name in sizes.items())
            raise BadInput(f"{folder}: block_size differs between traces: {shown}")
        sessions.append(_recorded_session(path, trace, block_tokens))
    kept = _within(sessions, max_context_tokens, dropped)
    if not kept:
        raise BadInput(
            f"{folder}: no session has a request of at most {max_context_tokens} tokens; raise "
            "max_context_tokens, or lower block_tokens, which scales the lengths"
        )
    size = block_tokens or next(iter(sizes))
    return Traces(kept, dict(dropped), size, f"recorded: {folder.resolve().name}")


def generate_sessions(
    count: int,
    seed: int,
    *,
    block_tokens: int = BLOCK_TOKENS,
    max_context_tokens: int | None = None,
    **shape: Any,
) -> Traces:
    """Draw sessions that resemble the recorded ones.

    Args:
        count: sessions.
        seed: equal seeds give equal sessions; more of them continue the same list.
        block_tokens: tokens that a hash stands for; lengths scale with it.
        max_context_tokens: as in :func:`load_traces`.
        **shape: fields of :class:`SessionShape`.

    Raises:
        BadInput: a value is out of range.
    """
    if count < 1:
        raise BadInput(f"count: expected at least 1 session, got {count}")
    form = SessionShape.parse(shape, where="shape of sessions")
    dropped: Counter[str] = Counter()
    sessions = [_generated_session(number, seed, form, block_tokens) for number in range(count)]
    kept = _within(sessions, max_context_tokens, dropped)
    if not kept:
        raise BadInput(
            f"no generated session has a request of at most {max_context_tokens} tokens; raise "
            "max_context_tokens, or lower block_tokens, which scales the lengths"
        )
    return Traces(kept, dict(dropped), block_tokens, f"generated: seed {seed}")


def prompt_token_ids(turn: Turn, *, vocab_size: int, salt: str = "") -> list[int]:
    """Token ids of a prompt, drawn from its hashes.

    Args:
        turn: whose prompt.
        vocab_size: ids are below it.
        salt: another salt gives other ids throughout, so that nothing of one is cached for another.

    Returns:
        ``turn.input_tokens`` ids. Two prompts with one salt begin alike as far as their hashes do.
    """
    key = np.uint64(int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little"))
    hashes = np.array(turn.block_hashes, dtype=np.uint64) ^ key
    places = np.arange(turn.block_tokens, dtype=np.uint64)
    mixed = _mixed(_mixed(hashes)[:, None] + places[None, :] * _GOLDEN)
    ids = mixed % np.uint64(vocab_size)
    tokens: list[int] = ids.reshape(-1)[: turn.input_tokens].tolist()
    return tokens


def working_set_tokens(sessions: Iterable[Session]) -> int:
    """Tokens of all distinct blocks of the sessions: what a cache must hold to miss nothing."""
    sizes: dict[int, int] = {}
    for session in sessions:
        for turn in session.turns:
            for place, block in enumerate(turn.block_hashes):
                size = min(turn.block_tokens, turn.input_tokens - place * turn.block_tokens)
                sizes[block] = max(size, sizes.get(block, 0))
    return sum(sizes.values())


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash_of(*parts: object) -> int:
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


# -- recorded traces
def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(trace, dict):
        raise BadInput(f"{path}: expected an object with requests, got {type(trace).__name__}")
    if not isinstance(trace.get("id"), str):
        raise BadInput(f"{path}: id: expected a text, got {trace.get('id')!r}")
    _number(path, "block_size", trace, least=1, whole=True)
    if not isinstance(trace.get("requests"), list) or not trace["requests"]:
        raise BadInput(f"{path}: requests: expected a list with at least one request")
    return trace


def _number(
    path: Path, place: str, values: Mapping[str, Any], *, least: float, whole: bool = False
) -> float:
    value: Any = values.get(place.rpartition(".")[2])
    kinds = (int,) if whole else (int, float)
    right = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value < least:
        kind = "a whole number" if whole else "a number"
        raise BadInput(f"{path}: {place}: expected {kind} of at least {least:g}, got {value!r}")
    return float(value)


def _recorded_session(path: Path, trace: dict[str, Any], block_tokens: int | None) -> Session:
    recorded: int = trace["block_size"]
    size = block_tokens or recorded
    # ids of one session mean nothing in another, unless the trace says so
    scope = "" if trace.get("hash_id_scope") == "global" else trace["id"]
    requests = trace["requests"]
    hash_of = cache(lambda one: _hash_of(scope, one))
    blocks: list[tuple[int, ...]] = []
    for number, request in enumerate(requests):
        place = f"requests[{number}]"
        if not isinstance(request, dict):
            raise BadInput(f"{path}: {place}: expected an object, got {request!r}")
        if "requests" in request:
            raise BadInput(f"{path}: {place}: requests of sub-agents are not supported")
        _number(path, f"{place}.t", request, least=0)
        length = int(_number(path, f"{place}.in", request, least=1, whole=True))
        _number(path, f"{place}.out", request, least=1, whole=True)
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise BadInput(f"{path}: {place}.hash_ids: expected a list of whole numbers")
        if len(ids) not in (length // recorded, -(-length // recorded)):
            raise BadInput(
                f"{path}: {place}.hash_ids: {len(ids)} blocks of {recorded} tokens for a prompt "
                f"of {length}"
            )
        blocks.append(tuple(map(hash_of, ids)))
    turns = []
    for number, request in enumerate(requests):
        length = max(1, request["in"] * size // recorded)
        hashes = blocks[number]
        if len(hashes) * size < length:
            hashes = (*hashes, _tail(hashes, blocks[number + 1 : number + 2], scope, number))
        turns.append(
            Turn(
                length,
                max(1, round(request["out"] * size / recorded)),
                hashes[: -(-length // size)],
                _pause(requests, number),
                size,
            )
        )
    return Session(trace["id"], tuple(turns))


def _tail(
    hashes: tuple[int, ...], following: Sequence[tuple[int, ...]], scope: str, number: int
) -> int:
    """Hash of a prompt's last block, which is not full and so not in the record.

    It is the block that the next prompt has there, if that one goes on from this one.
    """
    count = len(hashes)
    for block in following:
        if len(block) > count and block[:count] == hashes:
            return block[count]
    return _hash_of(scope, "tail", number)


def _pause(requests: Sequence[Mapping[str, Any]], number: int) -> float:
    """Seconds from the end of the answer before to a request, by the record's clock.

    The record's own ``think_time`` counts from the last answer whose end is known.
    """
    if number == 0:
        return 0.0
    before = requests[number - 1]
    return max(0.0, requests[number]["t"] - before["t"] - (before.get("api_time") or 0.0))


# -- generated sessions
def _generated_session(number: int, seed: int, form: SessionShape, block_tokens: int) -> Session:
    random = np.random.default_rng([seed, number])
    name = f"generated_{seed}_{number:04d}"
    count = int(
        min(form.turns_most, max(1, round(_draw(random, form.turns_median, form.turns_sigma))))
    )
    scale = block_tokens / BLOCK_TOKENS
    length = _draw(random, form.first_input_median, form.first_input_sigma)
    hashes: tuple[int, ...] = ()
    fresh = 0
    turns: list[Turn] = []
    for place in range(count):
        if place:
            length += _draw(random, form.growth_median, form.growth_sigma)
        if length > form.input_most:
            break
        tokens = max(1, round(length * scale))
        kept = len(hashes)
        if place and random.random() < form.rewrite_share:
            kept = int(kept * min(1.0, 2 * form.rewrite_kept * random.random()))
        blocks = -(-tokens // block_tokens)
        added = max(0, blocks - kept)
        hashes = hashes[:kept] + tuple(_hash_of(name, fresh + one) for one in range(added))
        hashes = hashes[:blocks]
        fresh += added
        output = max(1, round(_draw(random, form.output_median, form.output_sigma) * scale))
        think = _draw(random, form.think_median, form.think_sigma) if place else 0.0
        turns.append(Turn(tokens, output, hashes, think, block_tokens))
    return Session(name, tuple(turns))


def _draw(random: np.random.Generator, median: float, sigma: float) -> float:
    return float(median * math.exp(sigma * random.standard_normal()))


# -- both
def _within(
    sessions: Iterable[Session], most: int | None, dropped: Counter[str]
) -> tuple[Session, ...]:
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
    return tuple(kept)
