"""The payload's layout, and what the host says of its tags. No device needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import StalePayload
from atom.transfer.payload import (
    Payload,
    PayloadKind,
    epoch_tag,
    payload_layout,
    read_payload,
    split_tag,
    write_tags,
)

STATUS = PayloadKind.SPEC_STATUS


def stamped(step: int, kind: PayloadKind = STATUS, shape: tuple[int, ...] = (2, 3)) -> Payload:
    layout = payload_layout(kind, shape, torch.int32)
    payload = Payload(layout, step, torch.zeros(layout.total_bytes, dtype=torch.uint8))
    payload.data.copy_(torch.arange(payload.data.numel()).view(shape))
    write_tags((), (layout.tags(payload.raw),), epoch_tag(step, kind))
    return payload


@given(st.integers(0, 2**40 - 1), st.sampled_from(PayloadKind))
def test_a_tag_names_its_step_and_kind(step: int, kind: PayloadKind) -> None:
    tag = epoch_tag(step, kind)
    assert 0 < tag < 2**63
    assert split_tag(tag) == (step, kind)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_two_small_numbers_are_no_tag(low: int, high: int) -> None:
    word = (high << 32) | (low & 0xFFFFFFFF)
    if abs(high) < 2**24:
        assert split_tag(word) is None


def test_a_step_out_of_range_is_refused() -> None:
    for step in (-1, 2**40):
        with pytest.raises(ValueError, match="outside"):
            epoch_tag(step)


@given(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from([torch.uint8, torch.bool, torch.int32, torch.float32, torch.int64]),
    st.none() | st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple),
    st.booleans(),
)
def test_parts_do_not_overlap_and_tags_bracket_the_data(
    shape: tuple[int, ...], dtype: torch.dtype, rest_shape: tuple[int, ...] | None, tagged: bool
) -> None:
    layout = payload_layout(PayloadKind.OTHER, shape, dtype, rest_shape, tagged)
    raw = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    payload = Payload(layout, 5, raw)
    assert payload.data.shape == shape
    assert layout.host_bytes % 8 == 0
    assert payload.copied.numel() == layout.host_bytes
    payload.data.fill_(1)
    if payload.rest is not None:
        assert payload.rest.shape == rest_shape
        payload.rest.fill_(1)
        assert payload.rest.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    if tagged:
        assert layout.tags(raw).tolist() == [0, 0]
        layout.tags(raw).fill_(epoch_tag(5))
        assert raw[:8].any()
        assert raw[layout.host_bytes - 8 : layout.host_bytes].any()
    assert bool((payload.data == 1).all())
    assert payload.rest is None or bool((payload.rest == 1).all())
    host = payload.copied.clone()
    assert torch.equal(read_payload(host, layout, 5), payload.data)


def test_a_read_is_a_copy() -> None:
    payload = stamped(7)
    data = read_payload(payload.raw, payload.layout, 7)
    payload.data.fill_(-1)
    assert data.tolist() == [[0, 1, 2], [3, 4, 5]]


def fault_of(raw: torch.Tensor, step: int) -> str:
    with pytest.raises(StalePayload) as error:
        read_payload(raw, payload_layout(STATUS, (2, 3), torch.int32), step)
    return str(error.value)


def test_another_step_is_named() -> None:
    assert "carries step 8 where step 7 was expected" in fault_of(stamped(8).raw, 7)


def test_another_kind_of_the_same_step_is_named() -> None:
    fault = fault_of(stamped(7, PayloadKind.DRAFT_IDS).raw, 7)
    assert "carries step 7 of draft ids where step 7 was expected" in fault


def test_bytes_that_are_no_tag_are_shown() -> None:
    raw = torch.full((stamped(7).layout.total_bytes,), 3, dtype=torch.uint8)
    fault = fault_of(raw, 7)
    assert "carries no step at all" in fault
    assert fault.count("0x0303030303030303") == 2


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_torn_payload_names_both_ends(end: str) -> None:
    old, new = stamped(7), stamped(8)
    part = slice(0, 16) if end == "first" else slice(16, None)
    old.raw[part] = new.raw[part]
    first, last = ("8", "7") if end == "first" else ("7", "8")
    fault = fault_of(old.raw, 7)
    assert f"step {first} in its first tag and step {last} in its last" in fault


def test_one_lost_tag_is_enough() -> None:
    payload = stamped(7)
    payload.raw[-1] ^= 1
    assert "no step in its last" in fault_of(payload.raw, 7)


def test_without_tags_nothing_is_checked() -> None:
    layout = payload_layout(STATUS, (2, 3), torch.int32, tagged=False)
    assert layout.host_bytes == 24
    raw = torch.full((24,), 9, dtype=torch.uint8)
    assert read_payload(raw, layout, 7).view(torch.uint8).unique().tolist() == [9]


def test_elements_wider_than_a_tag_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        payload_layout(STATUS, (1,), torch.complex128)
