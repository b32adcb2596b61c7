"""Sentences and lists that a cell displays beside the numbers they state."""

from __future__ import annotations

import textwrap
from html import escape

from IPython.display import display
from pandas import DataFrame

_WIDTH = 100


def say(*sentences: str) -> None:
    """Display sentences: a paragraph each on a page, wrapped lines where there is only text."""
    if not sentences:
        return
    markup = "".join(f'<p class="atom-say">{escape(sentence)}</p>' for sentence in sentences)
    wrapped = [textwrap.fill(one, _WIDTH, break_long_words=False) for one in sentences]
    display({"text/html": markup, "text/plain": "\n".join(wrapped)}, raw=True)


def show_lines(table: DataFrame, caption: str) -> None:
    """Display lines of text that carry their kind of evidence in a column, or state no number.

    Figures of one kind of evidence go through ``Book.table`` instead, which labels them.
    """
    body = table.to_html(index=False, border=0, na_rep="–", justify="left")
    markup = f'<p class="atom-caption">{escape(caption)}</p><div class="atom-table">{body}</div>'
    plain = f"{caption}\n{table.to_string(index=False)}"
    display({"text/html": markup, "text/plain": plain}, raw=True)
