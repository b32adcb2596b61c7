"""A report as Markdown, for readers on a code host, where a page of HTML shows as its source."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.workbook.claims import Verdict
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.report_manifest import read_notebook, write_manifest
from atom.workbook.results import VERDICT_ORDER, count_verdicts, write_atomically
from atom.workbook.site_ledger import COLUMNS

if TYPE_CHECKING:
    from atom.workbook.site import Report
    from atom.workbook.site_ledger import LedgerRow

FIGURES_FOLDER = "figures"
#: enough for flat colours with soft edges, at about a third of the bytes
_COLOURS = 96
_LONGEST_DETAIL = 160
# the page has the version inside the cell of the published value
_COLUMNS = (*COLUMNS[:3], "with", *COLUMNS[3:])


@dataclass(frozen=True)
class Picture:
    """A figure of an executed notebook.

    Attributes:
        stem: its notebook.
        name: file name below the figures' folder.
        caption: what it shows.
        origin: its kind of evidence and what made its numbers.
        content: PNG.
    """

    stem: str
    name: str
    caption: str
    origin: str
    content: bytes


def write_readme(report: Report) -> Path:
    """Write ``README.md``, its figures and the manifest into the report's folder.

    The same executed notebooks give the same bytes.

    Args:
        report: what the folder holds.

    Returns:
        Path of ``README.md``.

    Raises:
        BadInput: an executed notebook that cannot be read.
    """
    pictures = [
        picture
        for stem in report.pages
        for picture in key_figures(report.folder, stem, report.results.get(stem, {}))
    ]
    folder = report.folder / FIGURES_FOLDER
    folder.mkdir(exist_ok=True)
    for old in set(folder.glob("*.png")) - {folder / picture.name for picture in pictures}:
        old.unlink()
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.content)
    write_manifest(report.folder, report.profile, report.results)
    path = report.folder / "README.md"
    write_atomically(path, "\n".join(_lines(report, pictures)) + "\n")
    return path


def key_figures(folder: Path, stem: str, result: Mapping[str, Any]) -> Iterator[Picture]:
    """The figures of an executed notebook that its entry in the registry names.

    Args:
        folder: report folder.
        stem: the notebook.
        result: its result, which knows each figure's kind of evidence, in order.
    """
    # a simulated and a measured figure may share a caption: they come in the notebook's order
    origins: dict[str, list[str]] = {}
    for one in result.get("figures", ()):
        origin = ", ".join(filter(None, (one["evidence"], one["source"])))
        origins.setdefault(one["caption"], []).append(origin)
    found = [
        (output["data"]["image/png"], output.get("metadata", {}).get("image/png", {}).get("alt"))
        for cell in read_notebook(folder / f"{stem}.ipynb")["cells"]
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    for position in NOTEBOOKS[stem].key_figures:
        if position < len(found):
            encoded, caption = found[position]
            content = base64.b64decode("".join(encoded))
            name = f"{stem}-{position + 1}.png"
            words = caption or NOTEBOOKS[stem].title
            earlier = sum(other == caption for _, other in found[:position])
            origin = next(iter(origins.get(words, [])[earlier:]), "")
            yield Picture(stem, name, words, origin, smaller(content))


def smaller(content: bytes) -> bytes:
    """The same picture with a palette; unchanged if that does not make it smaller, or cannot."""
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(content)).convert("RGB")
    except (UnidentifiedImageError, OSError):
        return content
    few = picture.quantize(_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, format="PNG", optimize=True)
    return min(content, written.getvalue(), key=len)


def _lines(report: Report, pictures: Sequence[Picture]) -> Iterator[str]:
    from atom.workbook.site import run_facts

    yield f"# Report `{report.profile}`"
    yield ""
    yield (
        "Every claim beside the evidence for it. This file is generated from the executed "
        "notebooks beside it; `index.html` is the same with filters, for a browser that opens it "
        "from disk."
    )
    yield ""
    yield (
        "A number is *published* (the source's text), *measured* (on the hardware that is named), "
        "*simulated* (on the virtual profile that is named; its times come of a cost model, whose "
        "error on hardware notebook 06 shows) or *arithmetic* (it follows from "
        "published numbers alone). A claim has at most one verdict for each kind."
    )
    yield ""
    counts = count_verdicts({"verdict": row.settled.verdict} for row in report.rows)
    yield "## Notebooks"
    yield ""
    yield from _table(("notebook", "state", "verdicts"), _notebooks(report))
    yield "## Key figures"
    yield ""
    for picture in pictures:
        spec = NOTEBOOKS[picture.stem]
        yield f"![{_alternative(picture.caption)}]({FIGURES_FOLDER}/{picture.name})"
        yield ""
        origin = f"**{_cell(picture.origin)}**: " if picture.origin else ""
        link = f"[{spec.number} {spec.title}]({spec.stem}.ipynb)"
        yield f"{origin}{_cell(picture.caption)} ({link})"
        yield ""
    yield "## Ledger"
    yield ""
    said = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in VERDICT_ORDER if verdict in counts
    )
    yield f"{len(report.rows)} rows, one a claim and kind of evidence: {said}."
    yield ""
    settled = [row for row in report.rows if row.settled.verdict is not Verdict.NOT_RUN]
    rest = [row for row in report.rows if row.settled.verdict is Verdict.NOT_RUN]
    seen: set[str] = set()
    yield from _table(_COLUMNS, _ledger(settled, seen))
    yield "<details><summary>What is not run, and why</summary>"
    yield ""
    yield from _table(_COLUMNS, _ledger(rest, seen))
    yield "</details>"
    yield ""
    yield "## This run"
    yield ""
    yield from _table(("", ""), run_facts(report.profile, report.results).items())


def _notebooks(report: Report) -> Iterator[tuple[str, ...]]:
    for stem in report.pages:
        execution, result = report.executions.get(stem), report.results.get(stem)
        counts = count_verdicts(result["verdicts"] if result else ())
        spec = NOTEBOOKS[stem]
        yield (
            f"[{spec.number} {spec.title}]({stem}.ipynb)",
            execution.state if execution else "executed elsewhere",
            ", ".join(f"{number} {verdict}" for verdict, number in counts.items()) or "none",
        )


def _ledger(rows: Iterable[LedgerRow], seen: set[str]) -> Iterator[tuple[str, ...]]:
    """Rows of the ledger; the first of a claim, by ``seen``, carries the claim's anchor."""
    for row in rows:
        claim, settled = row.claim, row.settled
        name = _cell(claim.id)
        if claim.id not in seen:
            seen.add(claim.id)
            name = f'<a id="claim-{claim.id}"></a>{name}'
        detail = settled.detail
        if len(detail) > _LONGEST_DETAIL:
            detail = detail[:_LONGEST_DETAIL].rsplit(" ", 1)[0] + " ..."
        verdict = str(settled.verdict)
        yield (
            name,
            _cell(claim.claim),
            _cell(row.published),
            _cell(claim.subject_version),
            f"**{verdict}**" if row.stem else verdict,
            str(settled.evidence),
            "; ".join(_cell(part) for part in (settled.value, detail) if part),
            _cell(row.machine),
            f"[{row.number}]({row.stem}.ipynb)" if row.stem else "",
        )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """A Markdown table and the empty line behind it."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def _cell(value: Any) -> str:
    """Plain text as a table's cell shows it: nothing in it is taken for Markdown or HTML."""
    said = " ".join(str("" if value is None else value).split())
    said = said.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]~$#])", r"\\\1", said)


def _alternative(caption: str) -> str:
    return re.sub(r"[\[\]\n]", " ", caption)
