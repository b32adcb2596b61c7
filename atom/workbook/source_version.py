"""Which commit of this checkout made a result."""

from __future__ import annotations

import subprocess
from pathlib import Path


def source_version(root: Path) -> dict[str, str | bool | None]:
    """``commit`` and ``dirty`` (tracked files changed) of a checkout; ``None`` without git.

    Args:
        root: the checkout.
    """
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()
