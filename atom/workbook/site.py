"""The HTML site of a report folder: a ledger page and one self-contained page a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from atom.workbook.claims import load_claims
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.results import (
    Execution,
    count_verdicts,
    load_executions,
    load_result,
    write_atomically,
)
from atom.workbook.site_html import template, text, verdict_badge
from atom.workbook.site_ledger import (
    LedgerRow,
    collect_settled,
    filters,
    ledger_rows,
    ledger_table,
    tally,
)
from atom.workbook.sweep_progress import NoProgress, SweepProgress

#: on one core
_PAGE_SECONDS = 1.2

__all__ = ["Report", "build_site", "collect_settled", "load_report"]

_SUMMARY = "00_summary"
_STATES = {"fell": "executed, a claim fell", "finished": "executed"}


@dataclass(frozen=True)
class Report:
    """What a report folder holds, read once for all pages.

    Attributes:
        folder: where it lies.
        profile: ``ci`` or a machine's slug.
        pages: stems of the executed notebooks, in reading order.
        results: results by stem.
        executions: how each execution went, by stem.
        rows: the ledger.
    """

    folder: Path
    profile: str
    pages: tuple[str, ...]
    results: Mapping[str, Mapping[str, Any]]
    executions: Mapping[str, Execution]
    rows: Sequence[LedgerRow]


def load_report(folder: Path, profile: str) -> Report:
    """Read a report folder.

    Raises:
        BadInput: a damaged result file, or a claim settled twice.
    """
    pages = tuple(stem for stem in NOTEBOOKS if (folder / f"{stem}.ipynb").is_file())
    loaded = {stem: load_result(folder, stem) for stem in pages}
    results = {stem: result for stem, result in loaded.items() if result is not None}
    rows = ledger_rows(load_claims(), results)
    return Report(folder, profile, pages, results, load_executions(folder), rows)


def build_site(folder: Path, profile: str, progress: SweepProgress | None = None) -> Path:
    """Write ``index.html``, a page for each executed notebook, and ``README.md`` with its figures.

    Args:
        folder: report folder with executed notebooks and result files.
        profile: ``ci`` or a machine's slug; shown as the site's name.
        progress: told of each page; ``None`` is silent.

    Returns:
        Path of ``index.html``.

    Raises:
        BadInput: a damaged result file, or mathematics that cannot be shown.
    """
    from atom.workbook.report_readme import write_readme
    from atom.workbook.site_notebook import first_section, notebook_body

    progress = progress or NoProgress()
    report = load_report(folder, profile)
    section = None
    progress.start(len(report.pages), len(report.pages) * _PAGE_SECONDS)
    try:
        for stem in report.pages:
            body, style = notebook_body(folder / f"{stem}.ipynb", report.executions.get(stem))
            section = first_section(body) if stem == _SUMMARY else section
            title = f"{NOTEBOOKS[stem].title} – {profile}"
            fold = '<button type="button" class="fold" aria-pressed="false" hidden></button>'
            page = _page(report, title, fold + body, stem, "notebook.js", style)
            write_atomically(folder / f"{stem}.html", page)
            progress.advance(1)
    finally:
        progress.stop()
    index = folder / "index.html"
    body = _index_body(report, section)
    write_atomically(
        index, _page(report, f"Claims and evidence – {profile}", body, "index", "ledger.js")
    )
    write_readme(report)
    return index


def _page(report: Report, title: str, body: str, current: str, script: str, style: str = "") -> str:
    names = {"index": "Claims", **{stem: NOTEBOOKS[stem].title for stem in report.pages}}
    links = [
        f'<a href="{stem}.html"{" aria-current=page" if stem == current else ""}>{text(name)}</a>'
        for stem, name in names.items()
    ]
    facts = run_facts(report.profile, report.results)
    footer = " · ".join(text(f"{name}: {value}") for name, value in facts.items())
    return Template(template("page.html")).substitute(
        title=text(title),
        style=template("site.css") + style,
        navigation="".join(links),
        body=body,
        footer=footer,
        script=f"<script>\n{template(script)}</script>",
    )


def run_facts(profile: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the results have in common: device, date, commit, versions."""
    origins = [result["provenance"] for result in results.values()]

    def joined(name: str) -> str:
        return ", ".join(sorted({str(o[name]) for o in origins if o.get(name)})) or "–"

    devices = sorted({str(o["device"]) for o in origins if o.get("device") not in (None, "none")})
    changed = " with local changes" if any(o.get("dirty") for o in origins) else ""
    ended = max((str(o["ended"]) for o in origins), default="–")
    return {
        "profile": profile,
        "device": ", ".join(devices) or "no device: published tables and recorded rows alone",
        "date": ended[:16].replace("T", " ") + (" UTC" if ended.endswith("+00:00") else ""),
        "commit": joined("commit") + changed,
        "torch": joined("torch"),
        "Python": joined("python"),
    }


def _index_body(report: Report, section: tuple[str, str] | None) -> str:
    facts = run_facts(report.profile, report.results)
    definitions = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in facts.items())
    return f"""
<h1>Claims and evidence</h1>
{_lead(report, section)}
{tally(report.rows)}
<h2 id="ledger">Ledger</h2>
<p>One row for each claim and kind of evidence. A number is <b>published</b> (the source's text),
<b>measured</b> (the hardware named in the row), <b>simulated</b> (the virtual profile named in the
row; its times come of a cost model, whose error on hardware notebook 06 shows) or
<b>arithmetic</b> (follows from published numbers alone). <i>With</i> says which version of
the code the published value was measured with. A claim's name is a link to it, and the address
keeps what is filtered.</p>
{filters(report.rows)}
{ledger_table(report.rows)}
<h2 id="notebooks">Notebooks of this report</h2>
<div class="atom-table"><table class="stacked"><thead><tr><th scope="col">notebook</th>
<th scope="col">state</th><th scope="col" class="number">seconds</th>
<th scope="col" class="number">budget</th><th scope="col">verdicts</th></tr></thead>
<tbody>{"".join(_notebook_rows(report))}</tbody></table></div>
<h2 id="run">This run</h2>
<dl class="facts">{definitions}</dl>
"""


def _lead(report: Report, section: tuple[str, str] | None) -> str:
    if _SUMMARY not in report.pages:
        return ""
    matrix = ""
    if section is not None:
        place, name = section
        link = f'<a href="{_SUMMARY}.html#{place}">{text(name[:1].lower() + name[1:])}</a>'
        matrix = f": {link}, the fault in one picture, and what differs"
    fallen = [stem for stem, one in report.executions.items() if one.state != "finished"]
    notice = (
        f" <b>{len(fallen)} of {len(report.executions)} notebooks did not end well</b>: "
        '<a href="#notebooks">why</a>.'
        if fallen
        else ""
    )
    return (
        f'<p class="lead">Begin with the <a href="{_SUMMARY}.html">summary</a>{matrix}. This page '
        "is its reference: every claim beside the evidence for it, each with a link to the cell "
        f"that settles it.{notice}</p>"
    )


def _notebook_rows(report: Report) -> Iterable[str]:
    for stem, spec in NOTEBOOKS.items():
        execution, result = report.executions.get(stem), report.results.get(stem)
        if execution is None and result is None:
            continue
        name = text(f"{spec.number} {spec.title}")
        if result is not None:
            name = f'<a href="{stem}.html">{name}</a>'
        counts = count_verdicts(result["verdicts"] if result else ())
        badges = " ".join(f"{verdict_badge(v)} {n}" for v, n in counts.items())
        state = execution.state if execution else "executed elsewhere"
        note = ""
        if execution and execution.message:
            note = f"<details><summary>why</summary><pre>{text(execution.message)}</pre></details>"
        seconds = f"{execution.seconds:.1f}" if execution else ""
        yield (
            f'<tr><td data-label="notebook">{name}</td><td data-label="state">'
            f'<span class="state-{text(state.split()[0])}">{text(_STATES.get(state, state))}</span>'
            f'{note}</td><td class="number" data-label="seconds">{seconds}</td>'
            f'<td class="number" data-label="budget">{spec.budget_seconds}</td>'
            f'<td data-label="verdicts">{badges}</td></tr>'
        )
