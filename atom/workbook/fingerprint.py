"""Whether a notebook has to be executed again: a hash over all that its outputs depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any


def source_hash(root: Path, *, runs: bool) -> str:
    """SHA-256 over the package, the data and the pinned environment.

    Args:
        root: the checkout.
        runs: whether ``data/runs`` counts. A run on hardware adds to it and must not invalidate
            itself.
    """
    digest = hashlib.sha256()
    files = sorted((root / "atom").rglob("*"))
    files += sorted((root / "data").rglob("*"))
    files.append(root / "environment.yml")
    skipped = {"__pycache__", ".partial"} | (set() if runs else {"runs"})
    for file in files:
        name = file.relative_to(root)
        if file.is_file() and not skipped.intersection(name.parts):
            _add(digest, name.as_posix(), file.read_bytes())
    return digest.hexdigest()


def fingerprint(
    notebook: Path,
    parameters: Mapping[str, Any],
    sources: str,
    inputs: Mapping[str, Path],
) -> str:
    """SHA-256 of one execution.

    Args:
        notebook: the source notebook.
        parameters: what it is executed with.
        sources: :func:`source_hash` of the checkout.
        inputs: other files that it reads, e.g. results of earlier notebooks, by name.
    """
    digest = hashlib.sha256()
    _add(digest, "notebook", notebook.read_bytes())
    _add(digest, "parameters", json.dumps(parameters, sort_keys=True).encode())
    _add(digest, "sources", sources.encode())
    _add(digest, "versions", f"{python_version()} {metadata.version('torch')}".encode())
    for name, file in sorted(inputs.items()):
        _add(digest, name, file.read_bytes() if file.is_file() else b"missing")
    return digest.hexdigest()


def _add(digest: Any, name: str, content: bytes) -> None:
    # lengths keep (name, content) pairs apart
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
