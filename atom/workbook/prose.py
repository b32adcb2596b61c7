"""Sentences and lists that a cell prints beside the numbers they state."""

from __future__ import annotations

import textwrap
from html import escape

from IPython.display import display
from pandas import DataFrame

_WIDTH = 100


def say(*sentences: str) -> None:
    """Print sentences, each wrapped to the width of a page."""
    for sentence in sentences:
        print(textwrap.fill(sentence, _WIDTH, break_long_words=False))


def show_lines(table: DataFrame, caption: str) -> None:
    """Display lines of text that carry their kind of evidence in a column, or state no number.

    Figures of one kind of evidence go through ``Book.table`` instead, which labels them.
    """
    body = table.to_html(index=False, border=0, na_rep="–", justify="left")
    markup = f'<p class="atom-caption">{escape(caption)}</p><div class="atom-table">{body}</div>'
    plain = f"{caption}\n{table.to_string(index=False)}"
    display({"text/html": markup, "text/plain": plain}, raw=True)
