"""A small report for tests: notebooks with every kind of output, without executing any."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import nbformat

from atom.evidence import Evidence
from atom.workbook.claims import Claim, Predicate, Settled, judge, load_claims
from atom.workbook.results import RESULT_MIME, Execution, save_executions

_KIND = Evidence.ARITHMETIC


def picture() -> str:
    """A figure as base64 PNG."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    axes.plot([0, 1])
    written = io.BytesIO()
    figure.savefig(written, format="png")
    pyplot.close(figure)
    return base64.b64encode(written.getvalue()).decode()


def claims_of(kind: Evidence, notebook: str, number: int) -> list[Claim]:
    """Claims that a yes or no settles."""
    found = [
        claim
        for claim in load_claims().values()
        if kind in claim.evidence
        and claim.predicate is Predicate.HOLDS
        and claim.notebook_for(kind) == notebook
    ]
    return found[:number]


def write_notebook(folder: Path, stem: str, settled: list[Settled], *, fell: bool) -> None:
    """An executed notebook with wide outputs, and its result."""
    verdicts = "".join(f'<div id="{one.cell}">{one.claim}</div>' for one in settled)
    cells_of_a_row = "".join(f"<td>column {n:04d}</td>" for n in range(60))
    heads = "".join(f"<th>head {n}</th>" for n in range(60))
    wide = (
        f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells_of_a_row}</tr></tbody></table>"
        f"<table><tr>{cells_of_a_row}</tr></table>"
    )
    texts = "".join(f"<td>{text}</td>" for text in ("a sentence of words " * 4, "code_name", "3"))
    wide += f"<table><thead><tr>{heads[:45]}</tr></thead><tbody><tr>{texts}</tr></tbody></table>"
    outputs = [
        nbformat.v4.new_output("display_data", {"text/html": verdicts}),
        nbformat.v4.new_output(
            "display_data", {"text/html": f'<div class="atom-table">{wide}</div>'}
        ),
        nbformat.v4.new_output(
            "display_data", {"image/png": picture()}, metadata={"image/png": {"alt": "A line"}}
        ),
        nbformat.v4.new_output("display_data", {"text/latex": r"$\frac{1}{2}$", "text/plain": "h"}),
        nbformat.v4.new_output("stream", name="stdout", text="word " * 60 + "x" * 300 + "\n"),
    ]
    result: dict[str, Any] = {
        "profile": "ci",
        "settings": {"profile": "ci", "records": []},
        "verdicts": [json.loads(one.model_dump_json()) for one in settled],
        "figures": [],
        "provenance": {"ended": "2026-01-02T03:04:05+00:00", "device": "none"},
    }
    outputs.append(nbformat.v4.new_output("display_data", {RESULT_MIME: result, "text/plain": "r"}))
    if fell:
        outputs.append(
            nbformat.v4.new_output("error", ename="ClaimFell", evalue="worse", traceback=["worse"])
        )
    cells = [
        nbformat.v4.new_markdown_cell(
            "# Title\n\nHalf is $\\frac{1}{2}$.\n\n$$\\sum_{k=0}^{n} k \\le n^2 < m$$\n\n    "
            + "a long line of code " * 20
        ),
        nbformat.v4.new_markdown_cell("## Which part\n\nText."),
        nbformat.v4.new_code_cell("value = 1\n" * 3, outputs=outputs, execution_count=1),
        nbformat.v4.new_code_cell("other = '" + "y" * 400 + "'", execution_count=2),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{stem}.ipynb")
    (folder / f"{stem}.json").write_text(json.dumps(result))


def write_sample(folder: Path) -> None:
    """Two notebooks with their results; the second one fell."""
    for stem, fell in (("00_summary", False), ("01_fault_arithmetic", True)):
        settled = [
            judge(claim, _KIND, holds=number % 2 == 0, cell=f"claim-{claim.id}-{_KIND}")
            for number, claim in enumerate(claims_of(_KIND, stem[:2], 4))
        ]
        assert len(settled) > 1
        write_notebook(folder, stem, settled, fell=fell)
    executions = {
        "00_summary": Execution("finished", 3.2, 25, "k"),
        "01_fault_arithmetic": Execution("fell", 3.2, 25, "", "claims that fell " * 20),
    }
    save_executions(folder, executions)
