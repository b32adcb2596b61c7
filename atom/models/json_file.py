"""JSON files as this project writes them: readable, in one order, ended by a newline."""

from __future__ import annotations

import json
from pathlib import Path


def write_json(path: str | Path, value: object) -> None:
    """Write a value, its names sorted."""
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    Path(path).write_text(text, encoding="utf-8")
