"""Look-ups of a pool: of recorded sessions where there are any, else of generated ones."""

from __future__ import annotations

import json
import os
import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atom.kv_transfer.replay import Lookup

CHUNK = 256


def lookups(chunks: int = 8) -> list[Lookup]:
    """Of the Weka traces in the folder that ``ATOM_TRACES`` names, or 288 of 24 made-up sessions.

    ``chunks``: most that a made-up turn adds.
    """
    folder = os.environ.get("ATOM_TRACES")
    if folder:
        return recorded_lookups(Path(folder))
    return generated_lookups(24, 12, chunks)


def recorded_lookups(folder: Path) -> list[Lookup]:
    """Requests of all sessions of a folder of Weka traces, by their time within the session."""
    timed: list[tuple[float, str, Lookup]] = []
    for file in sorted(folder.glob("*.json")):
        session = json.loads(file.read_text())
        size = session["block_size"]
        for request in session["requests"]:
            if request.get("hash_ids") is None:
                continue
            digests, digest = [], session["id"].encode()
            ids = request["hash_ids"]
            a_chunk = CHUNK // size
            for start in range(0, request["in"] // CHUNK * a_chunk, a_chunk):
                words = repr(ids[start : start + a_chunk]).encode()
                digest = blake2b(digest + words, digest_size=16).digest()
                digests.append(digest.hex())
            lookup = Lookup(tuple(digests), request["in"])
            timed.append((request["t"], session["id"], lookup))
    return [lookup for _, _, lookup in sorted(timed, key=lambda each: each[:2])]


def generated_lookups(sessions: int, turns: int, chunks: int, seed: int = 3) -> list[Lookup]:
    """Sessions that grow turn by turn and come in a shuffled order."""
    generator = random.Random(seed)
    grown: list[list[Any]] = [[] for _ in range(sessions)]
    order = [number for number in range(sessions) for _ in range(turns)]
    generator.shuffle(order)
    lookups = []
    for number in order:
        own = grown[number]
        for _ in range(generator.randint(1, 2 * chunks)):
            own.append((number, len(own)))
        lookups.append(Lookup(tuple(own), 256 * len(own) + generator.randrange(256)))
    return lookups
