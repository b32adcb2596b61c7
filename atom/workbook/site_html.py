"""Small pieces of HTML that every page of the site uses."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

_TEMPLATES = Path(__file__).parent / "templates"


def template(name: str) -> str:
    """A file of the package's templates."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def text(value: Any) -> str:
    """``value`` as escaped text; nothing for ``None``."""
    return html.escape("" if value is None else str(value))


def verdict_badge(verdict: str) -> str:
    """A verdict in its colour; the words carry the meaning too."""
    name = verdict.replace(" ", "-")
    return f'<span class="atom-verdict verdict-{text(name)}">{text(verdict)}</span>'


def evidence_badge(evidence: str) -> str:
    """A kind of evidence."""
    return f'<span class="atom-evidence">{text(evidence)}</span>'
