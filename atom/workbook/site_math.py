"""Mathematics of a notebook as MathML, so that a page shows it without a script or a network."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from nbconvert.filters.markdown_mistune import IPythonRenderer

from atom.errors import BadInput

#: delimiters of a formula that stands alone in an output of type ``text/latex``
_DELIMITERS = re.compile(
    r"\s*(?:\$\$(?P<a>.*)\$\$|\\\[(?P<b>.*)\\\]|\$(?P<c>.*)\$|\\\((?P<d>.*)\\\))\s*", re.DOTALL
)


def to_mathml(formula: str, *, block: bool = False) -> str:
    """One TeX formula, without delimiters, as a MathML element.

    Args:
        formula: TeX as far as the converter knows it.
        block: display style, on a line of its own.

    Raises:
        BadInput: a formula that would not come out whole; quotes it.
    """
    from latex2mathml.converter import convert

    # the converter knows this environment by its other name alone
    said = formula.strip().replace("{aligned}", "{align*}")
    try:
        markup = str(convert(said, display="block" if block else "inline"))
        words = "".join(ElementTree.fromstring(markup).itertext())
    # the converter has many kinds of errors; ParseError is its way to fail at a bare ampersand
    except Exception as error:
        raise BadInput(f"mathematics that cannot be shown: {said!r} ({error!r})") from None
    unknown = re.findall(r"\\\w+", words)
    if unknown:
        raise BadInput(f"mathematics that cannot be shown: {unknown[0]} in {said!r}")
    return markup


def latex_output(text: str) -> str:
    """An output of type ``text/latex`` as MathML.

    Raises:
        BadInput: as :func:`to_mathml`.
    """
    match = _DELIMITERS.fullmatch(text)
    if match is None:
        return to_mathml(text, block=True)
    name = str(match.lastgroup)
    return to_mathml(match[name], block=name in "ab")


class MathRenderer(IPythonRenderer):
    """nbconvert's Markdown renderer with MathML in the place of TeX for a script."""

    def block_math(self, body: str) -> str:
        """A formula on lines of its own."""
        return to_mathml(body, block=True)

    def inline_math(self, body: str) -> str:
        """A formula within a line."""
        return to_mathml(body)

    def latex_environment(self, name: str, body: str) -> str:
        """``\\begin{name} ... \\end{name}``, a formula by itself."""
        return to_mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", block=True)


def markdown_to_html(source: str, **options: Any) -> str:
    """Markdown of a cell as HTML, with mathematics as MathML.

    Args:
        source: the cell's text.
        **options: of nbconvert's renderer.
    """
    from nbconvert.filters.markdown_mistune import MarkdownWithMath

    return str(MarkdownWithMath(renderer=MathRenderer(escape=False, **options)).render(source))
