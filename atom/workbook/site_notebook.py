"""An executed notebook as the body of a page: code folded, mathematics as MathML, no scripts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import pass_context

from atom.errors import BadInput
from atom.workbook.endings import ERROR_CELL_TAG
from atom.workbook.results import Execution
from atom.workbook.site_html import template, text

_FALLEN = "ClaimFell"


def notebook_body(path: Path, execution: Execution | None = None) -> tuple[str, str]:
    """HTML of an executed notebook, and the style of its highlighted code.

    Args:
        path: the executed notebook.
        execution: how it went; a fallen claim is explained above the first heading.

    Raises:
        BadInput: mathematics that cannot be shown; names the notebook.
    """
    import nbformat
    from pygments.formatters import HtmlFormatter

    notebook = nbformat.read(path, as_version=4)
    raised = [
        output.ename
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error"
    ]
    notebook.cells = [
        cell for cell in notebook.cells if ERROR_CELL_TAG not in cell.metadata.get("tags", ())
    ]
    try:
        body, _ = _exporter().from_notebook_node(notebook)
    except BadInput as error:
        raise BadInput(f"{path.name}: {error}") from None
    notice = _notice(raised[0], execution) if raised else ""
    return notice + body, HtmlFormatter(style="default").get_style_defs(".highlight")


def first_section(body: str) -> tuple[str, str] | None:
    """Id and words of the first second-level heading of a notebook's body."""
    match = re.search(r'<h2 id="([^"]+)">(.*?)(?:<a class="anchor-link"|</h2>)', body, re.DOTALL)
    return (match[1], re.sub("<[^>]+>", "", match[2]).strip()) if match else None


def _notice(error: str, execution: Execution | None) -> str:
    message = text(execution.message) if execution else ""
    if error == _FALLEN:
        said = (
            "Every cell of this notebook ran. Its last cell then compared the verdicts with the "
            "accepted ones, found some of them worse or not accepted yet, and raised an error so "
            "that no run can pass over it."
        )
    else:
        said = "A cell of this notebook raised an error; what should follow it is missing here."
    lines = f"<details><summary>Which ones</summary><pre>{message}</pre></details>"
    return f'<aside class="atom-notice"><p>{said}</p>{lines if message else ""}</aside>'


def _exporter() -> Any:
    from nbconvert.exporters import HTMLExporter

    from atom.workbook.site_math import latex_output, markdown_to_html

    class Exporter(HTMLExporter):
        """nbconvert's own, with another Markdown filter."""

        @pass_context
        def markdown2html(self, context: Any, source: str) -> str:
            """Markdown to HTML with MathML."""
            return markdown_to_html(
                source,
                attachments=context.get("cell", {}).get("attachments", {}),
                embed_images=self.embed_images,
                path=context.get("resources", {}).get("metadata", {}).get("path", ""),
                anchor_link_text="#",
                exclude_anchor_links=self.exclude_anchor_links,
            )

    exporter = Exporter(raw_template=template("notebook.html.j2"))
    exporter.register_filter("latex_output", latex_output)
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    exporter.mermaid_js_url = ""
    exporter.embed_images = True
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    return exporter
