"""Mathematics becomes MathML, or an error that quotes it; no page keeps TeX."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from atom.errors import BadInput
from atom.workbook.site_math import latex_output, markdown_to_html, to_mathml
from atom.workbook.site_notebook import first_section, notebook_body

_NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
_TEX = re.compile(r"\\[a-zA-Z]{2,}|\$[^$\s][^$]*\$|\\begin\{")


def words_of(body: str) -> str:
    """What a reader sees outside code."""
    body = re.sub(r"<(pre|code)\b.*?</\1>", "", body, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", body)


@pytest.mark.parametrize(
    ("formula", "tags"),
    [
        (r"\frac{a}{b}", {"mfrac"}),
        (r"6 s + n - 1 \le x_0^2", {"msubsup", "mo"}),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", {"mtable", "mtr"}),
        (r"\sqrt{1 - p}", {"msqrt"}),
    ],
)
def test_formulas_become_elements(formula: str, tags: set[str]) -> None:
    found = {
        node.tag.rpartition("}")[2] for node in ElementTree.fromstring(to_mathml(formula)).iter()
    }
    assert tags <= found


@pytest.mark.parametrize("formula", [r"\frac{", r"\nosuchthing x", "a & b"])
def test_what_cannot_be_shown_is_an_error_that_quotes_it(formula: str) -> None:
    with pytest.raises(BadInput, match=re.escape(repr(formula))):
        to_mathml(formula)


@pytest.mark.parametrize("text", ["$x_1$", "$$x_1$$", r"\(x_1\)", r"\[x_1\]", "x_1"])
def test_outputs_lose_their_delimiters(text: str) -> None:
    assert "".join(ElementTree.fromstring(latex_output(text)).itertext()) == "x1"
    assert ('display="inline"' in latex_output(text)) == (text in ("$x_1$", r"\(x_1\)"))


def test_markdown_keeps_no_tex_outside_code() -> None:
    source = (
        "Half is $\\frac{1}{2}$, and\n\n$$\\sum_k k$$\n\n"
        "\\begin{equation} a \\le b \\end{equation}\n\nbut `$\\frac$` is code."
    )
    body = markdown_to_html(source)
    assert body.count("<math") == 3
    assert not _TEX.search(words_of(body))
    assert _TEX.search(words_of("<p>$\\frac{1}{2}$</p>")), "this search can find something"


def test_an_error_names_the_notebook(tmp_path: Path) -> None:
    cell = nbformat.v4.new_markdown_cell("so $\\nosuchthing$")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "one.ipynb")
    with pytest.raises(BadInput, match=r"one\.ipynb: .*nosuchthing"):
        notebook_body(tmp_path / "one.ipynb")


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_no_page_of_ours_keeps_tex(path: Path) -> None:
    body, _ = notebook_body(path)
    assert not _TEX.search(words_of(body))
    assert first_section(body) is not None
