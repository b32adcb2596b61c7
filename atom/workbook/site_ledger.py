"""The ledger: each claim beside the evidence for it, as rows for a page and for a README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.errors import BadInput
from atom.workbook.claims import Claim, Settled, unsettled
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.results import VERDICT_ORDER, count_verdicts
from atom.workbook.site_html import evidence_badge, text, verdict_badge

COLUMNS = (
    "claim",
    "what is claimed",
    "published",
    "verdict",
    "evidence",
    "found here",
    "machine",
    "settled in",
)
#: what a cell without a value shows
_NOTHING = "–"


@dataclass(frozen=True)
class LedgerRow:
    """One claim and one kind of evidence.

    Attributes:
        claim: the claim.
        settled: its verdict, or the reason why there is none.
        stem: notebook that settled it; empty if none did.
    """

    claim: Claim
    settled: Settled
    stem: str

    @property
    def number(self) -> str:
        """Number of the notebook that settles it, or would."""
        if self.stem:
            return NOTEBOOKS[self.stem].number
        return self.claim.notebook_for(self.settled.evidence)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the code that the published value was measured with."""
        return tuple(re.split(r"\s*[/,]\s*", self.claim.subject_version))

    @property
    def published(self) -> str:
        """The published value; the unit stands behind plain numbers only."""
        value = self.claim.published_value or ""
        return f"{value} {self.claim.unit}" if re.fullmatch(r"[\d.,]+", value) else value

    @property
    def machine(self) -> str:
        """Where it was found, and whether that is the published hardware."""
        hardware = ""
        if self.settled.same_hardware is not None:
            hardware = "same hardware" if self.settled.same_hardware else "other hardware"
        return ", ".join(part for part in (self.settled.machine, hardware) if part)


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


def ledger_rows(
    claims: Mapping[str, Claim], results: Mapping[str, Mapping[str, Any]]
) -> list[LedgerRow]:
    """A row for each claim and kind of evidence, in the claims' order.

    Raises:
        BadInput: two notebooks settled the same claim with the same kind of evidence.
    """
    found = collect_settled(results)
    written = {spec.number for spec in NOTEBOOKS.values() if not spec.planned}
    known = [settled for _, settled in found.values()]
    rest = {one.key: ("", one) for one in unsettled(claims.values(), known, written)}
    rows = []
    for claim in claims.values():
        for evidence in claim.evidence:
            key = f"{claim.id}/{evidence}"
            stem, settled = found.get(key) or rest[key]
            rows.append(LedgerRow(claim, settled, stem))
    return rows


def filters(rows: Sequence[LedgerRow]) -> str:
    """Controls that narrow the ledger. They stay hidden where no script runs."""
    counts = count_verdicts({"verdict": row.settled.verdict} for row in rows)
    buttons = "".join(
        f'<button type="button" data-verdict="{text(verdict)}" aria-pressed="false">'
        f"{text(verdict)} ({count})</button>"
        for verdict, count in counts.items()
    )
    notebooks = {spec.number: f"{spec.number} {spec.title}" for spec in NOTEBOOKS.values()}
    present = {row.number for row in rows}
    kinds = dict.fromkeys(str(row.settled.evidence) for row in rows)
    versions = dict.fromkeys(version for row in rows for version in row.versions)
    choices = "".join(
        (
            _choice("notebook", {n: name for n, name in notebooks.items() if n in present}),
            _choice("evidence", {name: name for name in kinds}),
            _choice("version", {name: name for name in versions}),
        )
    )
    return f"""<form class="filter" role="search" aria-label="Filter the ledger" hidden>
<div role="group" aria-label="Verdicts, any number of them">{buttons}</div>
<div>{choices}
<label>contains <input type="search" name="text" autocomplete="off"></label>
<button type="reset">show all</button>
<output aria-live="polite"></output></div></form>"""


def ledger_table(rows: Iterable[LedgerRow]) -> str:
    """The ledger as a table: a body for each claim, whose id is the claim's permalink."""
    head = "".join(f'<th scope="col">{text(column)}</th>' for column in COLUMNS)
    bodies: dict[str, list[str]] = {}
    for row in rows:
        bodies.setdefault(row.claim.id, []).append(_row(row))
    body = "".join(
        f'<tbody id="claim-{text(claim)}">{"".join(lines)}</tbody>'
        for claim, lines in bodies.items()
    )
    return (
        '<div class="atom-table"><table class="ledger"><caption class="unseen">Claims and their '
        f"verdicts</caption><thead><tr>{head}</tr></thead>{body}</table></div>"
    )


def tally(rows: Sequence[LedgerRow]) -> str:
    """Number of rows by verdict; each leads to the ledger with these rows alone."""
    counts = count_verdicts({"verdict": row.settled.verdict} for row in rows)
    items = "".join(
        f'<li><a href="?verdict={text(verdict.replace(" ", "+"))}#ledger">{verdict_badge(verdict)} '
        f"{counts[verdict]}</a></li>"
        for verdict in VERDICT_ORDER
        if verdict in counts
    )
    return f'<ul class="tally" aria-label="Verdicts">{items}</ul>'


def _choice(name: str, values: Mapping[str, str]) -> str:
    options = "".join(
        f'<option value="{text(value)}">{text(said)}</option>'
        for value, said in {"": "all", **values}.items()
    )
    return f'<label>{name} <select name="{name}">{options}</select></label>'


def _row(row: LedgerRow) -> str:
    claim, settled = row.claim, row.settled
    name, kind = text(claim.id), text(settled.evidence)
    link = ""
    if row.stem:
        target = f"{row.stem}.html#{text(settled.cell)}"
        label = f"{name}, {kind}: the cell that settles it, in notebook {row.number}"
        link = f'<a href="{target}" aria-label="{label}">notebook {row.number}</a>'
    note = f'<div class="atom-found">{text(settled.detail)}</div>' if settled.detail else ""
    version = f'<div class="atom-found">with {text(claim.subject_version)}</div>'
    cells = (
        f'<a href="#claim-{name}" aria-label="Permalink of {name}">{name}</a>',
        text(claim.claim),
        (text(row.published) or _NOTHING) + version,
        verdict_badge(settled.verdict),
        evidence_badge(settled.evidence),
        (text(settled.value) or _NOTHING) + note,
        text(row.machine),
        link,
    )
    columns = zip(COLUMNS, cells, strict=True)
    body = "".join(f'<td data-label="{column}">{cell}</td>' for column, cell in columns)
    return (
        f'<tr id="{name}-{kind}" data-verdict="{text(settled.verdict)}" data-evidence="{kind}" '
        f'data-notebook="{row.number}" data-version="{text("|".join(row.versions))}">{body}</tr>'
    )
