"""The site in a headless Chromium: nothing loaded, nothing complained of, all of it works."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from chromium_page import Browser, find_browser, open_browser

from atom.evidence import Evidence
from atom.workbook.claims import Claim, Predicate, Settled, judge, load_claims
from atom.workbook.results import Execution, save_executions
from atom.workbook.site import build_site

_ROOT = Path(__file__).resolve().parents[1]
_COMMITTED = sorted(
    path.parent for path in (_ROOT / "reports").glob("*/index.html") if path.parent.name != "ci"
)
_NARROW, _WIDE = 400, 1600
_SHOWN = "[...document.querySelectorAll('.ledger tbody tr')].filter(r => r.checkVisibility())"

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no chromium on the path, so no page can be opened"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find_browser()
    assert binary is not None
    with open_browser(binary) as running:
        yield running


def picture() -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3))
    axes.plot([0, 1])
    written = io.BytesIO()
    figure.savefig(written, format="png")
    pyplot.close(figure)
    return base64.b64encode(written.getvalue()).decode()


def claims_of(kind: Evidence, notebook: str, number: int) -> list[Claim]:
    found = [
        claim
        for claim in load_claims().values()
        if kind in claim.evidence
        and claim.predicate is Predicate.HOLDS
        and claim.notebook_for(kind) == notebook
    ]
    return found[:number]


def write_notebook(folder: Path, stem: str, settled: list[Settled], *, fell: bool) -> None:
    verdicts = "".join(f'<div id="{one.cell}">{one.claim}</div>' for one in settled)
    wide = "<table><tr>" + "".join(f"<td>column {n:04d}</td>" for n in range(60)) + "</tr></table>"
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
    if fell:
        outputs.append(
            nbformat.v4.new_output("error", ename="ClaimFell", evalue="worse", traceback=["worse"])
        )
    cells = [
        nbformat.v4.new_markdown_cell(
            "# Title\n\nHalf is $\\frac{1}{2}$.\n\n$$\\sum_{k=0}^{n} k \\le n^2 < m & 1$$".replace(
                " & 1", ""
            )
            + "\n\n    "
            + "a long line of code " * 20
        ),
        nbformat.v4.new_markdown_cell("## Which part\n\nText."),
        nbformat.v4.new_code_cell("value = 1\n" * 3, outputs=outputs, execution_count=1),
        nbformat.v4.new_code_cell("other = '" + "y" * 400 + "'", execution_count=2),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{stem}.ipynb")
    result: dict[str, Any] = {
        "verdicts": [json.loads(one.model_dump_json()) for one in settled],
        "provenance": {"ended": "2026-01-02T03:04:05+00:00", "device": "none"},
    }
    (folder / f"{stem}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small report: two notebooks, one of which fell."""
    folder = tmp_path_factory.mktemp("report")
    kind = Evidence.ARITHMETIC
    for stem, fell in (("00_summary", False), ("01_fault_arithmetic", True)):
        settled = [
            judge(claim, kind, holds=number % 2 == 0, cell=f"claim-{claim.id}-{kind}")
            for number, claim in enumerate(claims_of(kind, stem[:2], 4))
        ]
        assert len(settled) > 1
        write_notebook(folder, stem, settled, fell=fell)
    save_executions(
        folder,
        {
            "00_summary": Execution("finished", 3.2, 25, "k"),
            "01_fault_arithmetic": Execution("fell", 3.2, 25, "", "claims that fell " * 20),
        },
    )
    build_site(folder, "ci")
    return folder


@pytest.fixture(params=["sample", *(folder.name for folder in _COMMITTED)])
def report(request: pytest.FixtureRequest, sample: Path) -> Path:
    """The sample, and every committed report."""
    return sample if request.param == "sample" else _ROOT / "reports" / request.param


@pytest.mark.parametrize("width", [_NARROW, _WIDE])
def test_every_page_loads_nothing_and_fits_its_window(
    browser: Browser, report: Path, width: int
) -> None:
    for page in sorted(report.glob("*.html")):
        browser.open(page, width=width)
        assert browser.complaints == [], page.name
        loaded = [one for one in browser.requested if not one.startswith(("data:", "about:"))]
        assert loaded == [page.resolve().as_uri()], page.name
        assert browser.value("document.documentElement.scrollWidth") <= width, page.name
        outside = browser.value(
            "[...document.querySelectorAll('main > *, .cell, nav a')].filter(e =>"
            " e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className || e.tagName)"
        )
        assert outside == [], page.name


def test_figures_are_drawn_and_described(browser: Browser, report: Path) -> None:
    for page in sorted(report.glob("[0-9]*.html")):
        browser.open(page)
        images = browser.value(
            "[...document.images].map(i => [i.complete && i.naturalWidth, i.alt])"
        )
        assert images, page.name
        assert all(
            width > 0 and alt not in ("", "No description has been provided for this image")
            for width, alt in images
        ), page.name


def test_links_lead_to_places_in_pages(browser: Browser, report: Path) -> None:
    places = {}
    links = {}
    for page in sorted(report.glob("*.html")):
        browser.open(page)
        places[page.name] = set(
            browser.value("[...document.querySelectorAll('[id]')].map(e=>e.id)")
        )
        links[page.name] = browser.value(
            "[...document.links].map(a => [a.getAttribute('href'), decodeURIComponent(a.hash)])"
        )
    for name, found in links.items():
        for address, place in found:
            if re.match(r"https?:", address):
                continue
            target = re.split(r"[?#]", address)[0] or name
            assert target in places, (name, address)
            assert not place or place[1:] in places[target], (name, address)


def test_mathematics_is_drawn_by_the_browser_alone(browser: Browser, sample: Path) -> None:
    browser.open(sample / "01_fault_arithmetic.html")
    heights = browser.value("[...document.querySelectorAll('mfrac')].map(e => e.clientHeight)")
    assert len(heights) == 2
    text = browser.value("document.querySelector('main').innerText")
    assert "frac" not in text
    assert "$" not in text


def test_a_fallen_claim_is_explained(browser: Browser, sample: Path) -> None:
    browser.open(sample / "01_fault_arithmetic.html")
    assert "Every cell of this notebook ran" in browser.value("document.body.innerText")
    browser.open(sample / "00_summary.html")
    assert "Every cell of this notebook ran" not in browser.value("document.body.innerText")
    browser.open(sample / "index.html")
    assert browser.value("document.querySelector('.lead a').getAttribute('href')") == (
        "00_summary.html"
    )


def test_code_folds_by_mouse_and_by_keyboard(browser: Browser, sample: Path) -> None:
    browser.open(sample / "01_fault_arithmetic.html")
    opened = "[...document.querySelectorAll('details.atom-code')].map(d => d.open)"
    assert browser.value(opened) == [False, False]
    browser.click("details.atom-code summary")
    assert browser.value(opened) == [True, False]
    browser.focus("details.atom-code summary")
    browser.press("Enter", "\r")
    assert browser.value(opened) == [False, False]
    browser.focus(".fold")
    browser.press(" ", " ")
    assert browser.value(opened) == [True, True]
    assert browser.value("document.querySelector('.fold').getAttribute('aria-pressed')") == "true"
    browser.click(".fold")
    assert browser.value(opened) == [False, False]


def test_the_ledger_filters_by_mouse(browser: Browser, sample: Path) -> None:
    browser.open(sample / "index.html")
    everything = browser.value(f"{_SHOWN}.length")
    browser.click('.filter [data-verdict="reproduced"]')
    verdicts = browser.value(f"{_SHOWN}.map(r => r.dataset.verdict)")
    assert 0 < len(verdicts) < everything
    assert set(verdicts) == {"reproduced"}
    assert browser.value("location.search") == "?verdict=reproduced"
    assert str(len(verdicts)) in browser.value("document.querySelector('.filter output').value")
    browser.click('.filter [data-verdict="differs"]')
    both = browser.value(f"{_SHOWN}.map(r => r.dataset.verdict)")
    assert set(both) == {"reproduced", "differs"}
    browser.click('.filter [type="reset"]')
    assert browser.value(f"{_SHOWN}.length") == everything
    assert browser.value("location.search") == ""


def test_the_ledger_filters_by_keyboard(browser: Browser, sample: Path) -> None:
    browser.open(sample / "index.html")
    browser.focus(".filter button")
    browser.press(" ", " ")
    assert browser.value("document.querySelector('.filter button').ariaPressed") == "true"
    browser.press("Enter", "\r")
    assert browser.value("document.querySelector('.filter button').ariaPressed") == "false"
    browser.focus('.filter [name="evidence"]')
    browser.type("m")
    kinds = set(browser.value(f"{_SHOWN}.map(r => r.dataset.evidence)"))
    assert kinds == {"measured"}
    browser.focus('.filter [name="text"]')
    browser.type("reuse")
    rows = browser.value(f"{_SHOWN}.map(r => r.textContent.toLowerCase())")
    assert rows
    assert all("reuse" in row for row in rows)
    assert browser.value("location.search") == "?evidence=measured&text=reuse"


@pytest.mark.parametrize(
    ("name", "value"), [("notebook", "02"), ("evidence", "simulated"), ("version", "hold")]
)
def test_a_filtered_view_can_be_linked(
    browser: Browser, sample: Path, name: str, value: str
) -> None:
    browser.open(sample / "index.html", f"?{name}={value}")
    rows = browser.value(f"{_SHOWN}.map(r => r.dataset.{name})")
    assert 0 < len(rows) < browser.value("document.querySelectorAll('.ledger tbody tr').length")
    assert all(value in row.split("|") for row in rows)
    assert browser.value(f"document.querySelector('[name={name}]').value") == value


def test_an_unknown_filter_shows_everything(browser: Browser, sample: Path) -> None:
    browser.open(sample / "index.html", "?notebook=99&nothing=1#claim-none-01")
    assert browser.complaints == []
    assert browser.value(f"{_SHOWN}.length") == browser.value(
        "document.querySelectorAll('.ledger tbody tr').length"
    )


def test_a_linked_claim_is_marked_and_never_hidden(browser: Browser, sample: Path) -> None:
    browser.open(sample / "index.html", "?verdict=reproduced#claim-mech-01")
    shown = browser.value(f"{_SHOWN}.map(r => r.parentElement.id)")
    assert "claim-mech-01" in shown
    assert browser.value("document.querySelector(':target').id") == "claim-mech-01"
    place = browser.value("document.querySelector(':target').getBoundingClientRect().top")
    assert 0 <= place < 900
    colours = browser.value(
        "['#claim-mech-01', '#claim-mech-02'].map(s =>"
        " getComputedStyle(document.querySelector(s)).backgroundColor)"
    )
    assert colours[0] != colours[1]
    browser.open(sample / "index.html", "?verdict=reproduced")
    assert "claim-mech-01" not in browser.value(f"{_SHOWN}.map(r => r.parentElement.id)")


def test_controls_have_names(browser: Browser, sample: Path) -> None:
    browser.open(sample / "index.html")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = ("button", "link", "searchbox", "combobox", "MenuListPopup")
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in wanted[:4]
        and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    assert browser.value("document.querySelector('.filter').getAttribute('aria-label')")


def test_print_holds_the_ledger_and_no_controls(browser: Browser, report: Path) -> None:
    browser.open(report / "index.html")
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 2
    # an A4 sheet at 96 dpi
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=718,
        height=1046,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.value(f"{_SHOWN}.length") == browser.value(
            "document.querySelectorAll('.ledger tbody tr').length"
        )
        hidden = "['.filter', 'header'].map(s => document.querySelector(s).checkVisibility())"
        assert browser.value(hidden) == [False, False]
        assert browser.value("document.documentElement.scrollWidth") <= 718
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
