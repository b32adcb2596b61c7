"""Figures: series that a grey print keeps apart, stamps inside the picture, plots of given rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib import font_manager, mathtext
from matplotlib.colors import to_rgb

from atom.config import CopyProtocol
from atom.evidence import Evidence
from atom.workbook import figures, figures_engine

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    figures.style()
    yield
    plt.close("all")


def _rows() -> pd.DataFrame:
    return pd.DataFrame(
        [
            ("nothing", 0, 200, 0.0, 0.018, "published", "unpatched"),
            ("nothing", 0, 200, 0.0, 0.018, "measured", "hold"),
            ("a store", 200, 200, 0.982, 1.0, "simulated", "unpatched"),
            ("a store", 3, 200, 0.003, 0.043, "measured", "null"),
        ],
        columns=["label", "stale", "trials", "low", "high", "evidence", "protocol"],
    )


def test_every_protocol_and_the_null_arm_differ_in_every_way() -> None:
    arms = [*figures.PROTOCOL_STYLE.values(), figures.NULL_STYLE]
    assert set(figures.PROTOCOL_STYLE) == set(CopyProtocol)
    for name in ("colour", "marker", "linestyle", "hatch", "label"):
        values = [getattr(arm, name) for arm in arms]
        assert len(set(values)) == len(arms), name


def test_every_kind_of_evidence_has_its_own_fill_and_a_dark_label() -> None:
    assert set(figures.EVIDENCE_STYLE) == set(Evidence)
    styles = list(figures.EVIDENCE_STYLE.values())
    assert len({style.fill for style in styles}) == len(styles)
    for style in styles:
        red, green, blue = to_rgb(style.colour)
        assert 0.3 * red + 0.59 * green + 0.11 * blue < 0.4, "white words need a dark ground"


def test_landing_and_verdict_styles_differ_without_colour() -> None:
    from atom.workbook.figures_fault_arithmetic import LANDING_STYLE
    from atom.workbook.figures_summary import VERDICT_STYLE

    def grey(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.3 * red + 0.59 * green + 0.11 * blue

    for styles in (list(LANDING_STYLE.values()), list(VERDICT_STYLE.values())):
        for (colour, hatch), (other, other_hatch) in itertools.combinations(styles, 2):
            assert hatch != other_hatch or abs(grey(colour) - grey(other)) > 0.1


def test_a_stamp_is_inside_and_a_second_one_replaces_it() -> None:
    figure, _ = plt.subplots()
    figures.stamp(figure, "published")
    figures.stamp(figure, Evidence.MEASURED, "NVIDIA H200, 2026-01-31, run 3fa2c1")
    assert [text.get_text() for text in figure.texts] == [
        "measured on NVIDIA H200, 2026-01-31, run 3fa2c1"
    ]
    assert figures.evidence_label("simulated", "MI355X") == "simulated, profile MI355X"
    assert figures.evidence_label("arithmetic") == "arithmetic"
    with pytest.raises(ValueError, match="guessed"):
        figures.stamp(figure, "guessed")


def test_a_stamp_names_date_and_run() -> None:
    figure, _ = plt.subplots(figsize=(9, 3))
    run = "20260131T101112Z-race-3fa2c1"
    figures.stamp(figure, "measured", "NVIDIA H200", run_ids=[run], date="2026-02-02")
    assert figure.texts[0].get_text() == f"measured on NVIDIA H200; 2026-01-31, run {run}"
    figures.stamp(figure, "simulated", "MI355X", date="2026-02-02")
    assert figure.texts[0].get_text() == "simulated, profile MI355X; 2026-02-02"
    figures.stamp(figure, "measured", "NVIDIA H200, 2026-01-31, run 3fa2c1", run_ids=[run])
    assert figure.texts[0].get_text() == "measured on NVIDIA H200, 2026-01-31, run 3fa2c1"
    figures.stamp(figure, "measured", "NVIDIA H200", run_ids=[run[:-1] + last for last in "234"])
    lines = figure.texts[0].get_text().split("\n")
    assert len(lines) == 2, "a long stamp goes below nine inches in two lines"
    assert max(map(len, lines)) <= 108


def test_stale_rates_stand_at_their_percentages_with_counts() -> None:
    _, axes = plt.subplots()
    figures.stale_rate_plot(axes, _rows())
    points = [container[0] for container in axes.containers]
    assert [float(point.get_xdata()[0]) for point in points] == [0.0, 0.0, 100.0, 1.5]
    heights = [float(point.get_ydata()[0]) for point in points]
    assert len(set(heights)) == 4
    assert [text.get_text() for text in axes.get_yticklabels()] == ["nothing", "a store"]
    assert [text.get_text() for text in axes.texts] == ["0/200", "0/200", "200/200", "3/200"]
    legend = axes.get_legend()
    assert legend is not None
    assert {text.get_text() for text in legend.get_texts()} >= {
        "unpatched",
        "hold",
        "null arm (unpatched again)",
        "published",
        "measured",
        "simulated",
    }


def test_formulas_find_their_fonts_whatever_the_font_cache_lists(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw_formula() -> str:
        caplog.clear()
        font_manager.fontManager._findfont_cached.cache_clear()
        font_manager._get_font.cache_clear()
        mathtext.MathTextParser("path").parse("$10^{-2}$")
        return caplog.text

    manager = font_manager.fontManager
    poor = [font for font in manager.ttflist if "STIX" not in font.name]
    monkeypatch.setattr(manager, "ttflist", poor)
    assert "STIXGeneral" in draw_formula()
    figures.style()
    assert draw_formula() == ""


def test_stale_rates_refuse_an_unknown_arm() -> None:
    _, axes = plt.subplots()
    with pytest.raises(ValueError, match="mystery"):
        figures.stale_rate_plot(axes, _rows().assign(protocol="mystery"))


def test_a_timeline_has_its_lanes_in_order_and_the_block_below() -> None:
    _, axes = plt.subplots()
    figures.timeline_plot(
        axes,
        [("default", "write", 0, 2, "producer"), ("copy", "copy", 60, 62, "copy")],
        [("step N", 0, 15), ("free", 15, 20), ("step N+1", 20, 70)],
        marks=[("host", "drop", 15)],
    )
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["default", "copy", "host", "block owned by"]
    assert axes.get_xlabel() == "time (us)"
    widths = [round(patch.get_width(), 3) for patch in axes.patches]
    assert widths == [2, 2, 15, 5, 50]


def test_the_simulated_picture_shows_the_fault_and_its_end() -> None:
    from atom.workbook.fault_picture import fault_figure, trace_fault

    dropped = trace_fault("MI355X", hold=False)
    held = trace_fault("MI355X", hold=True)
    assert dropped.stale
    assert dropped.read[:3] == [16384, 1, 1]
    assert not held.stale
    copied = next(span for span in dropped.spans if span[4] == "copy")
    owners = [owner for owner, start, end in dropped.ownership if start <= copied[2] < end]
    assert owners == ["step N+1's tensor"]
    copied = next(span for span in held.spans if span[4] == "copy")
    owners = [owner for owner, start, end in held.ownership if start <= copied[2] < end]
    assert owners == ["step N's verdict"]
    fault_figure(dropped, held)


def test_bars_of_engine_speed_differ_in_a_grey_print() -> None:
    for looks in (figures_engine._SPEED_ARMS, figures_engine._CATEGORIES):
        shown = [
            hatch or ("white" if colour == "#FFFFFF" else "plain")
            for colour, hatch in looks.values()
        ]
        assert len(set(shown)) == len(shown)
