"""A next-step tensor written over a status verdict, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.errors import BadInput
from atom.model_ops.status_overwrite import (
    Fit,
    block_bytes,
    chance_of_ones,
    enumerate_readings,
    host_reads,
    largest_batch,
    payload_bytes,
    share_of_ones,
)

LOGGED = (16384, 1, 1)


def test_a_wide_integer_shows_its_high_word() -> None:
    verdict = np.ones(4, dtype=np.int32)
    assert host_reads(verdict, np.array([16384], dtype=np.int64)).tolist() == [16384, 0, 1, 1]
    assert host_reads(verdict, np.array([16384], dtype=np.int32)).tolist() == [16384, 1, 1, 1]


def test_a_narrow_integer_leaves_the_verdicts_high_bytes() -> None:
    verdict = np.array([65537, 1], dtype=np.int32)
    assert host_reads(verdict, np.array([16384], dtype=np.int16)).tolist() == [65536 + 16384, 1]


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30),
)
def test_equal_dtypes_replace_a_prefix(verdict: list[int], written: list[int]) -> None:
    read = host_reads(np.array(verdict, dtype=np.int32), np.array(written, dtype=np.int32))
    cut = min(len(verdict), len(written))
    assert read.tolist() == written[:cut] + verdict[cut:]


def test_only_short_writes_fit_the_log_unless_a_batch_is_mixed() -> None:
    readings = enumerate_readings(LOGGED, 16384, 32)
    fits = [reading for reading in readings if reading.fit is Fit.FITS]
    alone = [reading for reading in fits if not reading.tensor.mixed_batch]
    assert {(r.dtype, r.verdict_dtype) for r in alone if len(r.tensor.values) == 1} == {
        ("int16", "int32"),
        ("int16", "int64"),
        ("int32", "int32"),
        ("int32", "int64"),
        ("int64", "int64"),
    }
    assert any(reading.tensor.mixed_batch for reading in fits)
    assert all(r.fit is Fit.HEAD_DIFFERS for r in readings if r.dtype.startswith("float"))


def test_cumulative_lengths_never_fit() -> None:
    readings = enumerate_readings(LOGGED, 16384, 32)
    found = [r for r in readings if r.tensor.values == (0, 16384)]
    assert found
    assert all(r.fit is Fit.HEAD_DIFFERS for r in found)


def test_a_budget_of_one_is_still_enumerated_and_too_small_a_batch_refused() -> None:
    assert enumerate_readings((1, 1), 1, 2)
    with pytest.raises(BadInput, match="batch of at least 3"):
        enumerate_readings(LOGGED, 16384, 2)


def test_share_of_ones_of_the_forced_mean() -> None:
    assert share_of_ones(2.32) == pytest.approx(0.68)
    assert chance_of_ones(2.32, [0, 2]).tolist() == pytest.approx([1.0, 0.4624])
    assert share_of_ones(1.0) == 0.0
    assert share_of_ones(1.25) == pytest.approx(0.25)
    assert share_of_ones(3.5) == 0.0
    with pytest.raises(BadInput, match="at least 1"):
        share_of_ones(0.5)


@given(st.integers(1, 5000), st.integers(1, 4), st.sampled_from([4, 8]), st.booleans())
def test_the_largest_batch_is_the_last_that_fits_one_block(
    batch: int, rows: int, width: int, tagged: bool
) -> None:
    size = payload_bytes(batch, rows=rows, element_bytes=width, tagged=tagged)
    edge = largest_batch(rows=rows, element_bytes=width, tagged=tagged)
    assert (int(block_bytes(size)) == 512) == (batch <= edge)


def test_block_edges() -> None:
    assert block_bytes([0, 1, 512, 513]).tolist() == [512, 512, 512, 1024]
    assert largest_batch() == 64
    assert largest_batch(tagged=True) == 62
