"""What a notebook uses: checked parameters, labelled figures and tables, verdicts, the result.

A notebook opens with its parameters cell, then::

    from atom.workbook.session import open_notebook

    book = open_notebook("01_fault_arithmetic", globals())

and its last cell is ``book.close()``.
"""

from __future__ import annotations

import ast
import base64
import html
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from atom.config import DeviceChoice, NotebookSettings
from atom.errors import AtomError, BadInput, ClaimFell
from atom.evidence import Evidence
from atom.workbook.kernels import REPORT_FOLDER_VARIABLE
from atom.workbook.notebooks import NOTEBOOKS, NotebookSpec
from atom.workbook.provenance import source_commit
from atom.workbook.results import RESULT_MIME

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from atom.workbook.claims import Claim, Settled


_FIGURE_DPI = 110


def open_notebook(stem: str, namespace: Mapping[str, Any]) -> Book:
    """Check a notebook's parameters and start its session.

    The values are those that the parameters cell and papermill's injected cell left in the
    notebook's globals. Names that only the injected cell has are refused, so that a bare
    ``papermill -p`` with a typo ends like ``python -m atom run -p`` does.

    Args:
        stem: the notebook's file name without suffix.
        namespace: the notebook's ``globals()``.

    Raises:
        BadInput: unknown notebook or parameters of a wrong name, type or range.
    """
    try:
        spec = NOTEBOOKS.get(stem)
        if spec is None:
            raise BadInput(f"no notebook '{stem}' is registered in atom/workbook/notebooks.py")
        values = {name: namespace[name] for name in spec.settings.model_fields if name in namespace}
        values.update(_unknown_injected(spec, namespace))
        settings = spec.settings.parse(values, where=f"notebook {stem}")
    except BadInput as error:
        raise _quiet(error) from None
    os.chdir(repository_root())
    return Book(spec, settings)


def repository_root() -> Path:
    """The checkout that this package lies in; relative paths in parameters start here."""
    return Path(__file__).resolve().parents[2]


def _unknown_injected(spec: NotebookSpec, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Names that a ``# Parameters`` cell assigned and the settings class does not know.

    Raises:
        BadInput: YAML like ``{trials:5}``, a name without a value, which papermill turns into a
            line that Python takes for an annotation.
    """
    cells = [str(source) for source in namespace.get("In", ())]
    injected = [source for source in cells if source.lstrip().startswith("# Parameters")]
    if not injected:
        return {}
    try:
        # the latest one: a reader who mends a typo in Jupyter runs the cell again
        statements = ast.parse(injected[-1]).body
    except SyntaxError:
        return {}
    for statement in statements:
        if isinstance(statement, ast.AnnAssign):
            name, value = ast.unparse(statement.target), ast.unparse(statement.annotation)
            raise BadInput(
                f"notebook {spec.stem}: parameter '{name}:{value}' has no value: YAML wants a "
                f"blank after the colon, as in '{name}: {value}'"
            )
    targets = [
        target.id
        for statement in statements
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    known = spec.settings.model_fields
    return {name: namespace.get(name) for name in targets if name not in known}


def _quiet(error: AtomError) -> AtomError:
    """Make IPython show ``error`` as its message alone."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: NumPy scalars unpacked, infinities and NaN as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Book:
    """One run of one notebook: what it was asked, what it settled, what it recorded.

    Attributes:
        spec: the notebook's entry in the registry.
        settings: its validated parameters.
        profile: report and accepted-verdict set, e.g. ``ci`` or ``h200``.
        claims: all claims by id.
    """

    def __init__(self, spec: NotebookSpec, settings: NotebookSettings) -> None:
        from atom.workbook import claims

        self.spec = spec
        self.settings: Any = settings
        self.profile = settings.profile
        self.claims: dict[str, Claim] = claims.load_claims()
        self._settled: dict[str, Settled] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        self._figures: list[dict[str, Any]] = []
        self._started = _now()

    @property
    def report_folder(self) -> Path:
        """Where this profile's executed notebooks and results lie, relative to the checkout."""
        given = os.environ.get(REPORT_FOLDER_VARIABLE)
        return Path(given) if given else Path("reports") / self.profile

    @property
    def runs_folder(self) -> Path:
        """Where new run folders go: ``data/runs`` from hardware, else beside the report."""
        if getattr(self.settings, "device", None) == DeviceChoice.ACCELERATOR:
            return Path("data/runs")
        # the runner clears its folder before it executes a notebook again; a session in JupyterLab
        # or a bare papermill run at the same time must not lose its rows to that
        ours = REPORT_FOLDER_VARIABLE in os.environ
        return self.report_folder / ("runs" if ours else ".interactive") / self.spec.stem

    def settle(self, claim_id: str, evidence: Evidence | str, **arguments: Any) -> Settled:
        """Judge a claim, show the verdict under an anchor of its own, and keep it.

        Args:
            claim_id: id in ``data/published/claims.csv``.
            evidence: kind of what was found.
            **arguments: what ``claims.judge`` takes for the claim's predicate.

        Raises:
            BadInput: unknown claim, or one that was settled already with this kind of evidence.
        """
        from atom.workbook import claims

        kind = Evidence(evidence)
        claim = self.claims.get(claim_id)
        if claim is None:
            raise BadInput(f"no claim '{claim_id}' in data/published/claims.csv")
        key = f"{claim_id}/{kind}"
        if key in self._settled:
            raise BadInput(f"claim {key} was settled before; run the notebook from its top")
        anchor = f"claim-{claim_id}-{kind}"
        settled = claims.judge(claim, kind, **arguments, cell=anchor)
        self._settled[key] = settled
        found = " · ".join(part for part in (settled.value, settled.detail) if part)
        _display_html(
            f'<div class="atom-verdict" id="{anchor}">{_badge(settled.verdict, "verdict")} '
            f"<b>{_text(claim_id)}</b> {_text(claim.claim)} {_badge(kind, 'evidence')}"
            f'<div class="atom-found">{_text(found)}</div></div>',
            f"[{settled.verdict}] {claim_id} ({kind}): {found}",
        )
        return settled

    def scalar(self, name: str, value: Any, unit: str, evidence: Evidence | str) -> None:
        """Record one number (or text) of the result. Nothing is returned, which a cell would show.

        Raises:
            BadInput: the name was recorded already, or the value is not a scalar.
        """
        if name in self._scalars:
            raise BadInput(f"scalar '{name}' was recorded before in this notebook")
        plain = _plain(value)
        if not isinstance(plain, bool | int | float | str | None):
            raise BadInput(f"scalar '{name}': a number or text is needed, got {type(value)}")
        self._scalars[name] = {"value": plain, "unit": unit, "evidence": str(Evidence(evidence))}

    def show(
        self,
        figure: Figure,
        caption: str,
        evidence: Evidence | str,
        text: str = "",
        *,
        run_ids: Sequence[str] = (),
    ) -> None:
        """Stamp a figure with its kind of evidence, display it with caption, and close it.

        Args:
            figure: a matplotlib figure.
            caption: one sentence; it is the picture's alternative text too.
            evidence: kind of every number in it.
            text: what made the numbers: a machine or a virtual profile.
            run_ids: recorded runs that it was drawn from.
        """
        from matplotlib import pyplot

        from atom.workbook import figures

        kind = Evidence(evidence)
        figures.stamp(figure, kind, text, run_ids=run_ids, date=self._started[:10])
        picture = io.BytesIO()
        # without Software the file would name the drawing program's version and differ
        figure.savefig(
            picture,
            format="png",
            dpi=_FIGURE_DPI,
            bbox_inches="tight",
            facecolor="white",
            metadata={"Software": None},
        )
        pyplot.close(figure)
        display(
            {
                "image/png": base64.b64encode(picture.getvalue()).decode("ascii"),
                "text/plain": f"[{kind}] {caption}",
            },
            metadata={"image/png": {"alt": caption}},
            raw=True,
        )
        _display_html(_caption(caption, kind, text, run_ids), f"[{kind}] {caption}")
        self._figures.append(
            {"caption": caption, "evidence": str(kind), "source": text, "run_ids": list(run_ids)}
        )

    def table(
        self,
        table: DataFrame,
        caption: str,
        evidence: Evidence | str,
        text: str = "",
        *,
        run_ids: Sequence[str] = (),
    ) -> None:
        """Display a table labelled with its kind of evidence. Missing cells show as a dash."""
        kind = Evidence(evidence)
        body = table.to_html(index=False, border=0, na_rep="–", justify="left")
        _display_html(
            f'{_caption(caption, kind, text, run_ids)}<div class="atom-table">{body}</div>',
            f"[{kind}] {caption}\n{table.to_string(index=False)}",
        )

    def result(self) -> dict[str, Any]:
        """The result as plain JSON values, as :meth:`close` displays it."""
        settings = json.loads(self.settings.model_dump_json())
        commit, dirty = source_commit()
        return {
            "format": 1,
            "notebook": self.spec.stem,
            "title": self.spec.title,
            "profile": self.profile,
            "settings": settings,
            "scalars": self._scalars,
            "verdicts": [json.loads(s.model_dump_json()) for s in self._settled.values()],
            "figures": self._figures,
            "provenance": {
                "started": self._started,
                "ended": _now(),
                "device": _device_text(settings),
                "evidence": sorted({str(s.evidence) for s in self._settled.values()}),
                "commit": commit[:12] if commit else None,
                "dirty": dirty,
                **library_versions(),
            },
        }

    def close(self) -> None:
        """Display the result (machine-readable, and as tables) and compare it.

        Raises:
            ClaimFell: a verdict is worse than the accepted one; names each.
        """
        from atom.workbook import claims

        result = self.result()
        settled = list(self._settled.values())
        rows = "".join(
            f"<tr><td>{_badge(s.verdict, 'verdict')}</td><td><a href='#{s.cell}'>{_text(s.claim)}"
            f"</a></td><td>{_badge(s.evidence, 'evidence')}</td><td>{_text(s.value)}</td></tr>"
            for s in settled
        )
        scalars = "".join(
            f"<tr><td>{_text(name)}</td><td>{_text(s['value'])}</td><td>{_text(s['unit'])}</td>"
            f"<td>{_badge(s['evidence'], 'evidence')}</td></tr>"
            for name, s in self._scalars.items()
        )
        table = (
            '<div class="atom-table"><table><thead><tr><th>verdict</th><th>claim</th>'
            f"<th>evidence</th><th>found</th></tr></thead><tbody>{rows}</tbody></table>"
            "<table><thead><tr><th>scalar</th><th>value</th><th>unit</th><th>evidence</th></tr>"
            f"</thead><tbody>{scalars}</tbody></table></div>"
        )
        plain = "\n".join(f"{s.verdict}: {s.claim} ({s.evidence}) {s.value}" for s in settled)
        display(
            {RESULT_MIME: result, "text/html": table, "text/plain": plain or "no claim settled"},
            raw=True,
        )
        accepted = claims.load_accepted(self.profile)
        fallen = claims.compare(settled, accepted, self.spec.number)
        if fallen:
            lines = "\n".join(f"  {line}" for line in fallen)
            raise _quiet(
                ClaimFell(
                    f"{self.spec.stem}, profile {self.profile}: worse than accepted:\n{lines}\n"
                    "Look into it; if it is right, record the reason with\n"
                    f"  python -m atom report --profile {self.profile} --accept CLAIM --reason TEXT"
                )
            )


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that numbers depend on. Imports none of them."""
    import platform

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _device_text(settings: Mapping[str, Any]) -> str:
    device = settings.get("device")
    if device is None or settings["records"]:
        return "none"
    if device == DeviceChoice.VIRTUAL:
        return f"virtual ({settings.get('device_profile', 'default profile')})"
    from atom.device.accelerator import accelerator_properties

    return accelerator_properties().name


def _text(value: Any) -> str:
    return html.escape("" if value is None else str(value))


def _badge(value: Any, group: str) -> str:
    name = str(value).replace(" ", "-")
    return f'<span class="atom-{group} {group}-{_text(name)}">{_text(value)}</span>'


def _caption(caption: str, evidence: Evidence, text: str, run_ids: Sequence[str]) -> str:
    source = f" {_text(text)}" if text else ""
    runs = f" <small>runs {_text(', '.join(run_ids))}</small>" if run_ids else ""
    label = _badge(evidence, "evidence")
    return f'<p class="atom-caption">{label}{source}: {_text(caption)}{runs}</p>'


def _display_html(markup: str, plain: str) -> None:
    display({"text/html": markup, "text/plain": plain}, raw=True)
