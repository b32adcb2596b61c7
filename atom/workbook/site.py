"""The HTML site of a report folder: a ledger page and one self-contained page a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from atom.errors import BadInput
from atom.workbook.claims import Claim, Settled, load_claims, unsettled
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.results import (
    Execution,
    count_verdicts,
    load_executions,
    load_result,
    write_atomically,
)

_TEMPLATES = Path(__file__).parent / "templates"
_LEDGER_COLUMNS = (
    "claim",
    "what is claimed",
    "published",
    "verdict",
    "evidence",
    "found here",
    "machine",
    "settled in",
)


def build_site(folder: Path, profile: str) -> Path:
    """Write ``index.html`` and a page for each executed notebook in ``folder``.

    Args:
        folder: report folder with executed notebooks and result files.
        profile: ``ci`` or a machine's slug; shown as the site's name.

    Returns:
        Path of ``index.html``.

    Raises:
        BadInput: a damaged result file.
    """
    pages = [stem for stem in NOTEBOOKS if (folder / f"{stem}.ipynb").is_file()]
    results = {stem: load_result(folder, stem) for stem in pages}
    found = {stem: result for stem, result in results.items() if result is not None}
    for stem in pages:
        body, style = _notebook_body(folder / f"{stem}.ipynb")
        title = f"{NOTEBOOKS[stem].title} – {profile}"
        write_atomically(
            folder / f"{stem}.html", _page(title, body, pages, stem, profile, found, style)
        )
    body = _index_body(profile, found, load_executions(folder), load_claims())
    script = f"<script>\n{_template('ledger.js')}</script>"
    index = folder / "index.html"
    title = f"Claims and evidence – {profile}"
    write_atomically(index, _page(title, body, pages, "index", profile, found, script=script))
    return index


def site_is_complete(folder: Path) -> bool:
    """Whether the index and the page of every executed notebook are there."""
    notebooks = [stem for stem in NOTEBOOKS if (folder / f"{stem}.ipynb").is_file()]
    return all((folder / f"{stem}.html").is_file() for stem in ("index", *notebooks))


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _page(
    title: str,
    body: str,
    pages: Sequence[str],
    current: str,
    profile: str,
    results: Mapping[str, Mapping[str, Any]],
    style: str = "",
    script: str = "",
) -> str:
    names = {"index": "Claims", **{stem: NOTEBOOKS[stem].title for stem in pages}}
    links = [
        f'<a href="{stem}.html"{" aria-current=page" if stem == current else ""}>{_text(name)}</a>'
        for stem, name in names.items()
    ]
    facts = _run_facts(profile, results)
    footer = " · ".join(_text(f"{name}: {value}") for name, value in facts.items())
    return Template(_template("page.html")).substitute(
        title=_text(title),
        style=_template("site.css") + style,
        navigation="".join(links),
        body=body,
        footer=footer,
        script=script,
    )


def _notebook_body(path: Path) -> tuple[str, str]:
    """HTML of an executed notebook, and the style of its highlighted code."""
    import nbformat
    from nbconvert.exporters import HTMLExporter
    from pygments.formatters import HtmlFormatter

    notebook = nbformat.read(path, as_version=4)
    exporter = HTMLExporter(raw_template=_template("notebook.html.j2"))
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    exporter.mermaid_js_url = ""
    exporter.embed_images = True
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    return body, HtmlFormatter(style="default").get_style_defs(".highlight")


def _run_facts(profile: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the results have in common: device, date, commit, versions."""
    origins = [result["provenance"] for result in results.values()]

    def joined(name: str) -> str:
        return ", ".join(sorted({str(o[name]) for o in origins if o.get(name)})) or "–"

    devices = sorted({str(o["device"]) for o in origins if o.get("device") not in (None, "none")})
    changed = " with local changes" if any(o.get("dirty") for o in origins) else ""
    return {
        "profile": profile,
        "device": ", ".join(devices) or "none",
        "date": max((str(o["ended"]) for o in origins), default="–"),
        "commit": joined("commit") + changed,
        "torch": joined("torch"),
        "Python": joined("python"),
    }


def _index_body(
    profile: str,
    results: Mapping[str, Mapping[str, Any]],
    executions: Mapping[str, Execution],
    claims: Mapping[str, Claim],
) -> str:
    rows = list(_ledger(claims, collect_settled(results)))
    counts = count_verdicts({"verdict": verdict} for verdict, _ in rows)
    facts = _run_facts(profile, results)
    definitions = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in facts.items())
    buttons = "".join(
        f'<button type="button" data-verdict="{_text(verdict)}" aria-pressed="false">'
        f"{_text(verdict)} ({count})</button>"
        for verdict, count in counts.items()
    )
    head = "".join(f"<th>{_text(column)}</th>" for column in _LEDGER_COLUMNS)
    return f"""
<h1>Claims and evidence</h1>
<dl class="facts">{definitions}</dl>
<h2>Notebooks</h2>
<div class="atom-table"><table><thead><tr><th>notebook</th><th>state</th>
<th class="number">seconds</th><th class="number">budget</th><th>claims by verdict</th></tr></thead>
<tbody>{"".join(_notebook_rows(results, executions))}</tbody></table></div>
<h2>Ledger</h2>
<p>One row for each claim and kind of evidence. A number is <b>published</b> (the source's text),
<b>measured</b> (the hardware named in the row), <b>simulated</b> (the virtual profile named in the
row) or <b>arithmetic</b> (follows from published numbers alone).</p>
<div class="filter" role="group" aria-label="Filter the ledger">{buttons}
<label>contains <input type="search" aria-label="Text that a row contains"></label>
<output></output></div>
<div class="atom-table"><table class="ledger"><thead><tr>{head}</tr></thead>
<tbody>{"".join(row for _, row in rows)}</tbody></table></div>
"""


def _notebook_rows(
    results: Mapping[str, Mapping[str, Any]], executions: Mapping[str, Execution]
) -> Iterable[str]:
    for stem, spec in NOTEBOOKS.items():
        execution, result = executions.get(stem), results.get(stem)
        if execution is None and result is None:
            continue
        name = _text(f"{spec.number} {spec.title}")
        if result is not None:
            name = f'<a href="{stem}.html">{name}</a>'
        counts = count_verdicts(result["verdicts"] if result else ())
        badges = " ".join(f"{_verdict_badge(v)} {n}" for v, n in counts.items())
        state = execution.state if execution else "executed elsewhere"
        message = execution.message if execution else ""
        note = f'<div class="message">{_text(message)}</div>' if message else ""
        seconds = f"{execution.seconds:.1f}" if execution else ""
        yield (
            f"<tr><td>{name}</td><td><span class='state-{_text(state)}'>{_text(state)}</span>{note}"
            f'</td><td class="number">{seconds}</td><td class="number">{spec.budget_seconds}</td>'
            f"<td>{badges}</td></tr>"
        )


def collect_settled(
    results: Mapping[str, Mapping[str, Any]],
) -> dict[str, tuple[str, Settled]]:
    """Verdicts of all results: ``<claim>/<evidence>`` to notebook and verdict.

    Raises:
        BadInput: two notebooks settled the same claim with the same kind of evidence.
    """
    found: dict[str, tuple[str, Settled]] = {}
    for stem, result in results.items():
        for values in result["verdicts"]:
            settled = Settled.model_validate(values)
            if settled.key in found:
                other = found[settled.key][0]
                raise BadInput(f"{settled.key} is settled by notebooks {other} and {stem}")
            found[settled.key] = (stem, settled)
    return found


def _ledger(
    claims: Mapping[str, Claim], found: Mapping[str, tuple[str, Settled]]
) -> Iterable[tuple[str, str]]:
    """Verdict and table row of each claim and kind of evidence, in the claims' order."""
    written = {spec.number for spec in NOTEBOOKS.values() if not spec.planned}
    known = [settled for _, settled in found.values()]
    rest = {one.key: one for one in unsettled(claims.values(), known, written)}
    for claim in claims.values():
        for evidence in claim.evidence:
            key = f"{claim.id}/{evidence}"
            stem, settled = found[key] if key in found else ("", rest[key])
            link = ""
            if stem:
                target = f"{stem}.html#{_text(settled.cell)}"
                link = f'<a href="{target}">notebook {NOTEBOOKS[stem].number}</a>'
            note = f'<div class="atom-found">{_text(settled.detail)}</div>'
            cells = (
                f'<span id="{_text(claim.id)}-{evidence}">{_text(claim.id)}</span>',
                _text(claim.claim),
                _text(_published(claim)),
                _verdict_badge(settled.verdict),
                f'<span class="atom-evidence">{_text(evidence)}</span>',
                _text(settled.value) + (note if settled.detail else ""),
                _text(_machine(settled)),
                link,
            )
            columns = zip(_LEDGER_COLUMNS, cells, strict=True)
            row = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in columns)
            verdict = str(settled.verdict)
            yield verdict, f'<tr data-verdict="{_text(verdict)}">{row}</tr>'


def _published(claim: Claim) -> str:
    """The published value; the unit stands behind plain numbers only."""
    value = claim.published_value or ""
    return f"{value} {claim.unit}" if re.fullmatch(r"[\d.,]+", value) else value


def _machine(settled: Settled) -> str:
    hardware = ""
    if settled.same_hardware is not None:
        hardware = "same hardware" if settled.same_hardware else "other hardware"
    return ", ".join(part for part in (settled.machine, hardware) if part)


def _verdict_badge(verdict: str) -> str:
    name = verdict.replace(" ", "-")
    return f'<span class="atom-verdict verdict-{_text(name)}">{_text(verdict)}</span>'


def _text(value: Any) -> str:
    return html.escape("" if value is None else str(value))
