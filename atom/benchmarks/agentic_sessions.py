"""Sessions of a coding agent as load: read from recorded traces, or generated like them.

Format: the public Weka trace of agentic coding sessions (kv-cache-tester). One JSON file a session;
its ``requests`` hold ``t`` and ``api_time`` (seconds), ``in`` and ``out`` (tokens) and ``hash_ids``
(one a full block of ``block_size`` tokens). It holds no text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from atom.benchmarks.session_generator import SessionShape, generate_sessions
from atom.benchmarks.session_model import (
    BLOCK_TOKENS,
    Session,
    Traces,
    Turn,
    hash_of,
    prompt_token_ids,
    within_context,
    working_set_tokens,
)
from atom.errors import BadInput

__all__ = [
    "BLOCK_TOKENS",
    "Session",
    "SessionShape",
    "Traces",
    "Turn",
    "generate_sessions",
    "load_traces",
    "prompt_token_ids",
    "working_set_tokens",
    "write_traces",
]


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
        sessions.append(_recorded_session(path, trace, block_tokens, dropped))
    source = f"recorded: {folder.resolve().name}"
    kept = within_context(sessions, max_context_tokens, dropped, source)
    return Traces(kept, dict(dropped), block_tokens or next(iter(sizes)), source)


def write_traces(traces: Traces, folder: str | Path) -> None:
    """Write sessions as trace files that :func:`load_traces` reads back, for other clients.

    A prompt's last block has no place in the format unless it is full; who reads it back gets
    another hash for it where no later prompt has the block.

    Args:
        traces: sessions; their names become names of files.
        folder: made if need be; files of the same names are overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for session in traces.sessions:
        text = json.dumps(_as_trace(session, traces.block_tokens), separators=(",", ":"))
        (folder / f"{session.session_id}.json").write_text(text + "\n", encoding="utf-8")


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


def _recorded_session(
    path: Path, trace: dict[str, Any], block_tokens: int | None, dropped: Counter[str]
) -> Session:
    recorded: int = trace["block_size"]
    size = block_tokens or recorded
    # ids of one session mean nothing in another, unless the trace says so
    scope = "" if trace.get("hash_id_scope") == "global" else trace["id"]
    requests = _own_requests(path, trace, dropped)
    block_of = cache(lambda one: hash_of(scope, one))
    blocks: list[tuple[int, ...]] = []
    for number, request in enumerate(requests):
        place = f"requests[{number}]"
        _number(path, f"{place}.t", request, least=0)
        length = int(_number(path, f"{place}.in", request, least=1, whole=True))
        _number(path, f"{place}.out", request, least=1, whole=True)
        if request.get("api_time") is not None:
            _number(path, f"{place}.api_time", request, least=0)
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise BadInput(f"{path}: {place}.hash_ids: expected a list of whole numbers")
        if len(ids) not in (length // recorded, -(-length // recorded)):
            raise BadInput(
                f"{path}: {place}.hash_ids: {len(ids)} blocks of {recorded} tokens for a prompt "
                f"of {length}"
            )
        blocks.append(tuple(map(block_of, ids)))
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


def _own_requests(path: Path, trace: dict[str, Any], dropped: Counter[str]) -> list[dict[str, Any]]:
    """Requests of the session itself; those of sub-agents run beside it and are left out."""
    own = []
    for number, request in enumerate(trace["requests"]):
        if not isinstance(request, dict):
            raise BadInput(f"{path}: requests[{number}]: expected an object, got {request!r}")
        if request.get("type") == "subagent":
            inner = request.get("requests")
            dropped["requests of sub-agents"] += len(inner) if isinstance(inner, list) else 1
        else:
            own.append(request)
    if not own:
        raise BadInput(f"{path}: requests: none but those of sub-agents")
    return own


def _tail(
    hashes: tuple[int, ...], following: Sequence[tuple[int, ...]], scope: str, number: int
) -> int:
    """Hash of a prompt's last block, which is not full and so not in the record.

    It is the block that the next prompt has there, if that one goes on from this one, as a
    conversation does. The AgentX harness writes other text there: its prompts share up to a block
    less.
    """
    count = len(hashes)
    for block in following:
        if len(block) > count and block[:count] == hashes:
            return block[count]
    return hash_of(scope, "tail", number)


def _pause(requests: Sequence[Mapping[str, Any]], number: int) -> float:
    """Seconds from the end of the answer before to a request, by the record's clock.

    The record's own ``think_time`` counts from the last answer whose end is known.
    """
    if number == 0:
        return 0.0
    before = requests[number - 1]
    return max(0.0, requests[number]["t"] - before["t"] - (before.get("api_time") or 0.0))


def _as_trace(session: Session, size: int) -> dict[str, Any]:
    numbers: dict[int, int] = {}
    requests = []
    now = 0.0
    for turn in session.turns:
        now += turn.think_seconds
        full = turn.block_hashes[: turn.input_tokens // size]
        ids = [numbers.setdefault(one, len(numbers) + 1) for one in full]
        requests.append(
            {
                "t": now,
                "type": "s",
                "model": "none",
                "in": turn.input_tokens,
                "out": turn.output_tokens,
                "hash_ids": ids,
                "input_types": ["text"],
                "output_types": ["text"],
                "stop": "",
                "api_time": 0.0,
                "think_time": turn.think_seconds,
            }
        )
    return {
        "id": session.session_id,
        "models": ["none"],
        "block_size": size,
        "hash_id_scope": "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": requests,
    }
