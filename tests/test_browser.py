"""The site in a headless Chromium: nothing loaded, nothing complained of, all of it works."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from chromium_page import Browser, find_browser, open_browser
from sample_report import write_sample

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


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small report: two notebooks, one of which fell."""
    folder = tmp_path_factory.mktemp("report")
    write_sample(folder)
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
        ids = browser.value("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids)), page.name
        places[page.name] = set(ids)
        links[page.name] = browser.value(
            "[...document.links].map(a => [a.getAttribute('href'), a.hash.slice(1)])"
        )
    for name, found in links.items():
        for address, place in found:
            if re.match(r"https?:", address):
                continue
            target = re.split(r"[?#]", address)[0] or name
            assert target in places, (name, address)
            # a browser looks for the id as written, then with its % signs decoded
            assert not place or places[target] & {place, unquote(place)}, (name, address)


def test_mathematics_is_drawn_by_the_browser_alone(browser: Browser, sample: Path) -> None:
    browser.open(sample / "01_fault_arithmetic.html")
    heights = browser.value("[...document.querySelectorAll('mfrac')].map(e => e.clientHeight)")
    assert len(heights) == 2
    text = browser.value("document.querySelector('main').innerText")
    assert "frac" not in text
    assert "$" not in text


def test_a_wide_table_is_stacked_in_a_narrow_window(browser: Browser, sample: Path) -> None:
    heights = {}
    for width in (_NARROW, _WIDE):
        browser.open(sample / "01_fault_arithmetic.html", width=width)
        heights[width] = browser.value(
            "document.querySelectorAll('.stacked tr')[1].getBoundingClientRect().height"
        )
        assert browser.value("document.querySelector('.stacked td').dataset.label") == "head 0"
    assert heights[_NARROW] > 3 * heights[_WIDE]
    # so is one of few columns that holds sentences; a name of code has places to break
    texts = "[...document.querySelectorAll('.stacked')].at(-1).querySelector('tbody').rows[0].cells"
    assert browser.value(f"{texts}[0].dataset.label") == "head 0"
    assert browser.value(f"{texts}[1].innerHTML") == "code_<wbr>name"


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
    browser.click('.filter [data-verdict="not run"]')
    both = browser.value(f"{_SHOWN}.map(r => r.dataset.verdict)")
    assert set(both) == {"reproduced", "not run"}
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
    browser.open(sample / "index.html", "?notebook=99&verdict=none&nothing=1#claim-none-01")
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
    wanted = ("button", "link", "searchbox", "combobox")
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in wanted
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
        side_by_side = "(cells => cells[1].getBoundingClientRect().left > 20)"
        assert browser.value(f"{side_by_side}(document.querySelectorAll('.ledger td'))")
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")
