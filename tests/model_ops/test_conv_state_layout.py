"""Laws of the conv-state layout, for any width and any number of draft tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atom.config import FaultArithmeticSettings
from atom.errors import BadInput
from atom.model_ops.conv_state_layout import (
    ConvStateLayout,
    Landing,
    landing,
    landing_ranges,
    layers_needed,
    reachable_residues,
    row_sources,
    solutions,
)

PUBLISHED = ConvStateLayout(slots=64)
GROUPED = ConvStateLayout(slots=64, slots_per_request=4)


@st.composite
def layouts(draw: st.DrawFn) -> ConvStateLayout:
    per_request = draw(st.integers(1, 5))
    first = draw(st.integers(0, 3))
    return ConvStateLayout(
        slots=first + per_request * draw(st.integers(1, 6)) + draw(st.integers(0, 3)),
        conv_width=draw(st.integers(2, 6)),
        draft_tokens=draw(st.integers(0, 5)),
        slots_per_request=per_request,
        first_slot=first,
        layers=draw(st.integers(1, 3)),
    )


def test_published_case() -> None:
    assert PUBLISHED.rows_per_slot == 6
    assert 16487 % PUBLISHED.rows_per_slot == 5
    assert int(PUBLISHED.base_row(5, 16385)) == 16414
    assert solutions(PUBLISHED, 16487, 16385).tolist() == [[17, 16385, 1]]
    assert solutions(PUBLISHED, 16487, PUBLISHED.valid_counts).tolist() == [[2747, 4, 2]]


def test_published_row_is_no_base_row_for_that_bonus() -> None:
    found = solutions(PUBLISHED, 16487, 16385)
    assert 0 not in found[:, 2]
    assert int(PUBLISHED.base_row(17, 16386)) == 16487


def test_grouped_layout_depends_on_where_the_first_group_begins() -> None:
    by_start = {a: solutions(GROUPED.aligned(a), 16487, 16385).tolist() for a in range(4)}
    assert by_start == {0: [], 1: [[17, 16385, 1]], 2: [], 3: []}
    for start in range(4):
        layout = GROUPED.aligned(start)
        reached = solutions(layout, 16487, layout.valid_counts)
        assert (start == 3) == bool(len(reached))


@given(layouts())
def test_valid_counts_fill_the_slot_exactly_and_never_leave_it(layout: ConvStateLayout) -> None:
    for slot in layout.request_slots:
        rows = np.unique(layout.rows_read(slot, layout.valid_counts))
        start = slot * layout.rows_per_slot
        assert rows.tolist() == list(range(start, start + layout.rows_per_slot))
    slot = layout.last_request_slot
    assert slot == layout.request_slots[-1]
    assert np.all(landing(layout, 0, slot, layout.valid_counts) == Landing.OWN_SLOT)


@given(layouts())
def test_the_first_invalid_count_leaves_the_slot(layout: ConvStateLayout) -> None:
    slot = int(layout.request_slots[0])
    first_bad = landing(layout, 0, slot, layout.highest_valid_count + 1)[0]
    assert first_bad[-1] != Landing.OWN_SLOT
    assert landing(layout, 0, slot, 0)[0, 0] != Landing.OWN_SLOT


@given(layouts(), st.integers(0, 400))
def test_row_sources_are_exactly_the_brute_force(layout: ConvStateLayout, row: int) -> None:
    found = row_sources(layout, row)
    brute = {
        (slot, count, tap)
        for slot in layout.request_slots.tolist()
        for tap in range(layout.conv_width - 1)
        for count in range(1, row + 2)
        if slot * (layout.conv_width - 1 + layout.draft_tokens) + count - 1 + tap == row
    }
    rows, taps = np.nonzero(found.possible)
    listed = {
        (int(found.slots[i]), int(found.counts[i, t]), int(t))
        for i, t in zip(rows, taps, strict=True)
    }
    assert listed == brute
    assert {c for _, c, _ in brute if c <= layout.draft_tokens + 1} == set(
        found.counts[found.valid].tolist()
    )


@given(layouts(), st.integers(0, 3000), st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_solutions_agree_with_the_rows_read(
    layout: ConvStateLayout, row: int, counts: list[int]
) -> None:
    found = solutions(layout, row, sorted(set(counts)))
    for slot, count, tap in found.tolist():
        assert layout.rows_read(slot, count)[tap] == row
    # inside the pool the closed form must find what the enumeration finds
    sources = row_sources(layout, row)
    expected = int(np.isin(sources.counts, counts).sum())
    assert int((found[:, 0] <= layout.request_slots[-1]).sum()) == expected


@given(layouts(), st.integers(-20, 2000), st.data())
def test_landing_agrees_with_a_labelled_pool(
    layout: ConvStateLayout, count: int, data: st.DataObject
) -> None:
    slot = int(data.draw(st.sampled_from(layout.request_slots.tolist())))
    layer = data.draw(st.integers(0, layout.layers - 1))
    label: dict[int, Landing] = {}
    for each in range(layout.layers):
        for where in range(layout.slots):
            for row in range(layout.rows_per_slot):
                kind = Landing.ANOTHER_SLOT
                if where not in layout.request_slots:
                    kind = Landing.UNUSED_SLOT
                if where == slot:
                    kind = Landing.OWN_SLOT
                if each != layer:
                    kind = Landing.ANOTHER_LAYER
                label[(each * layout.slots + where) * layout.rows_per_slot + row] = kind
    start = (layer * layout.slots + slot) * layout.rows_per_slot + count - 1
    expected = [label.get(start + tap, Landing.OUTSIDE) for tap in range(layout.taps)]
    assert landing(layout, layer, slot, count)[0].tolist() == expected


@settings(max_examples=30)
@given(layouts())
def test_landing_ranges_cover_every_count_once(layout: ConvStateLayout) -> None:
    slot = int(layout.request_slots[0])
    ranges = landing_ranges(layout, 0, slot, np.arange(1, 501))
    assert [count for first, last, _ in ranges for count in range(first, last + 1)] == list(
        range(1, 501)
    )
    for first, last, kind in ranges:
        for count in (first, last):
            assert landing(layout, 0, slot, count).max() == kind
    assert ranges[0] == (1, layout.highest_valid_count, Landing.OWN_SLOT)


@given(layouts(), st.integers(1, 5000))
def test_layers_needed_is_the_least_that_keeps_the_access_inside(
    layout: ConvStateLayout, count: int
) -> None:
    slot = int(layout.request_slots[-1])
    need = layers_needed(layout, slot, count)
    last = layout.rows_read(slot, count)[-1]
    assert last < need * layout.rows_per_layer
    assert last >= (need - 1) * layout.rows_per_layer


def test_residues_of_honest_counts() -> None:
    assert reachable_residues(PUBLISHED, with_taps=False).tolist() == [0, 1, 2, 3]
    assert reachable_residues(PUBLISHED, with_taps=True).tolist() == [0, 1, 2, 3, 4, 5]
    assert 16487 % GROUPED.stride == 23
    assert 23 not in reachable_residues(GROUPED, with_taps=True)


def test_no_speculation_leaves_one_valid_count() -> None:
    layout = ConvStateLayout(slots=4, draft_tokens=0)
    assert layout.rows_per_slot == 3
    assert layout.valid_counts.tolist() == [1]


def test_bytes() -> None:
    layout = ConvStateLayout(slots=4, dim=8, element_bytes=2, layers=2)
    assert layout.row_bytes == 16
    assert int(layout.byte_offset(3)) == 48
    assert int(layout.byte_offset(0, layer=1)) == 4 * 6 * 16
    assert layout.pool_bytes == 2 * 4 * 6 * 16


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"conv_width": 1}, "conv_width must be at least 2"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"slots_per_request": 5}, "no request fits"),
        ({"first_slot": 4}, "no request fits"),
    ],
)
def test_impossible_layouts_are_refused(change: dict[str, int], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        ConvStateLayout(**{"slots": 4, **change})


def test_landing_refuses_a_slot_or_layer_that_does_not_exist() -> None:
    with pytest.raises(BadInput, match="no request begins at slot 5"):
        landing(GROUPED, 0, 5, 1)
    with pytest.raises(BadInput, match="layer 1 of 1"):
        landing(GROUPED, 1, 4, 1)


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(2, 6),
    st.integers(0, 5),
    st.integers(0, 60),
    st.integers(0, 400),
)
def test_settings_refuse_exactly_the_rows_that_nothing_reaches(
    slots: int, width: int, drafts: int, bonus: int, row: int
) -> None:
    given_values: dict[str, Any] = {
        "slots": slots,
        "conv_width": width,
        "draft_tokens": drafts,
        "bonus": bonus,
        "token_budget": 1,
        "slots_per_request": 1,
        "logged_slot": 0,
        "faulting_row": row,
    }
    layout = ConvStateLayout(slots=slots, conv_width=width, draft_tokens=drafts)
    reachable = row <= layout.highest_row(max(bonus, drafts, 1) + 1)
    if reachable:
        FaultArithmeticSettings(**given_values)
    else:
        with pytest.raises(ValidationError, match="cannot be reached"):
            FaultArithmeticSettings(**given_values)


def test_the_refusal_is_one_line_with_the_reason() -> None:
    with pytest.raises(BadInput) as caught:
        FaultArithmeticSettings.parse({"faulting_row": 10**6}, where="notebook 01")
    assert "the last of 64 slots" in str(caught.value)
    assert "raise slots or bonus" in str(caught.value)
    assert "{" not in str(caught.value)
