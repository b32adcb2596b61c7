"""The guard's record: first error wins, it stays until cleared, and it reads as a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atom.config import GuardMode
from atom.device import open_device
from atom.errors import BadInput, DeviceError
from atom.model_ops.guard import (
    CLEAR_RECORD,
    RECORD_WORDS,
    GuardCode,
    GuardError,
    GuardFault,
    IllegalAccess,
    caution,
    mapped_pool,
    new_record,
    parse_record,
    passes,
    report,
    unchecked,
)

ROW: dict[str, Any] = {
    "highest_count": 4,
    "slots": 8,
    "row": 3,
    "layer": 2,
    "count_code": GuardCode.CONV_COUNT,
    "slot_code": GuardCode.CONV_SLOT,
}


@pytest.mark.parametrize(
    ("guard", "simulated", "debug", "word"),
    [
        (GuardMode.TRAP, False, None, "checks nothing here"),
        (GuardMode.TRAP, False, "0", "checks nothing here"),
        (GuardMode.TRAP, False, "1", "ends the whole process"),
        (GuardMode.TRAP, True, None, None),
        (GuardMode.REPORT, False, None, None),
    ],
)
def test_a_trap_says_where_it_is_none(
    guard: GuardMode, simulated: bool, debug: str | None, word: str | None
) -> None:
    said = caution(guard, simulated=simulated, triton_debug=debug)
    assert said is None if word is None else said is not None and word in said


def test_an_empty_record_is_no_fault() -> None:
    assert parse_record(new_record()) is None


def test_the_first_error_wins_and_stays_until_it_is_cleared() -> None:
    record = new_record()
    assert report(record, GuardCode.CONV_COUNT, 0, 5, 16385, 7)
    assert not report(record, GuardCode.RECURRENT_SLOT, 1, -3, -3, 8)
    assert parse_record(record) == GuardFault(GuardCode.CONV_COUNT, 0, 5, 16385, 7)
    CLEAR_RECORD.body((), (record,))
    assert parse_record(record) is None
    assert report(record, GuardCode.RECURRENT_SLOT, 1, -3, -3, 8)
    assert parse_record(record) == GuardFault(GuardCode.RECURRENT_SLOT, 1, -3, -3, 8)


def test_a_record_is_cleared_through_a_device() -> None:
    device = open_device("virtual")
    record = device.empty((RECORD_WORDS,), torch.int32)
    device.launch(CLEAR_RECORD, (), (record,))
    host = device.pinned((RECORD_WORDS,), torch.int32)
    host.fill_(9)
    device.copy(host, record)
    device.synchronize()
    assert parse_record(host) is None


@pytest.mark.parametrize("words", [[0] * 7, [0] * 9, [5] + [0] * 7, [-1] + [0] * 7, [16384] * 8])
def test_bytes_that_are_no_record_are_refused(words: list[int]) -> None:
    with pytest.raises(BadInput, match="guard record"):
        parse_record(words)


@pytest.mark.parametrize(("count", "slot"), [(1, 0), (4, 7), (2, 3)])
@pytest.mark.parametrize("guard", GuardMode)
def test_what_is_in_range_passes(guard: GuardMode, count: int, slot: int) -> None:
    record = new_record()
    assert passes(guard, record, count=count, slot=slot, **ROW)
    assert parse_record(record) is None


@pytest.mark.parametrize(
    ("count", "slot", "code", "value"),
    [
        (0, 5, GuardCode.CONV_COUNT, 0),
        (5, 5, GuardCode.CONV_COUNT, 5),
        (16385, 5, GuardCode.CONV_COUNT, 16385),
        (-1, 5, GuardCode.CONV_COUNT, -1),
        (1, 8, GuardCode.CONV_SLOT, 8),
        (1, -1, GuardCode.CONV_SLOT, -1),
        # a slot that is not there has no count
        (16385, -1, GuardCode.CONV_SLOT, -1),
    ],
)
def test_what_is_out_of_range_does_not(count: int, slot: int, code: GuardCode, value: int) -> None:
    record = new_record()
    assert passes(GuardMode.NONE, record, count=count, slot=slot, **ROW)
    assert parse_record(record) is None
    assert not passes(GuardMode.REPORT, record, count=count, slot=slot, **ROW)
    assert parse_record(record) == GuardFault(code, 3, slot, value, 2)
    with pytest.raises(DeviceError, match=f"device assert.*row 3.*{value}"):
        passes(GuardMode.TRAP, record, count=count, slot=slot, **ROW)


@pytest.mark.parametrize("code", list(GuardCode)[1:])
def test_an_error_names_kernel_request_row_slot_value_and_layer(code: GuardCode) -> None:
    error = GuardError(GuardFault(code, 0, 5, 16385, 11), request=757, highest_count=4, slots=64)
    text = str(error)
    conv = code in (GuardCode.CONV_COUNT, GuardCode.CONV_SLOT)
    assert ("causal_conv1d_update" in text) is conv
    assert ("gated_delta_rule_update" in text) is not conv
    for words in ("request 757", "layer 11", "row 0", "16385"):
        assert words in text
    assert ("1 to 4" in text) is code.is_count
    assert ("slots 0 to 63" in text) is not code.is_count
    assert error.exit_code == 3


def test_unchecked_memory_ends_with_the_pool() -> None:
    pool = torch.arange(24).reshape(2, 3, 4)
    layer = pool[1]
    assert unchecked(layer, 0, 4).tolist() == [12, 13, 14, 15]
    # another slot, and another layer, in silence
    assert unchecked(layer, 8, 4).tolist() == [20, 21, 22, 23]
    assert unchecked(layer, -12, 4).tolist() == [0, 1, 2, 3]
    unchecked(layer, -12, 1).fill_(-7)
    assert pool[0, 0, 0] == -7
    for offset in (9, -13, 16385 * 4):
        with pytest.raises(IllegalAccess, match="illegal memory access"):
            unchecked(layer, offset, 4)


def test_a_pool_can_be_smaller_than_the_storage_it_lies_in() -> None:
    memory = torch.arange(100, dtype=torch.int16)
    pool = memory[10:34].reshape(2, 3, 4)
    assert unchecked(pool[0], -10, 4).tolist() == [0, 1, 2, 3]
    with mapped_pool(pool):
        assert unchecked(pool[1], 8, 4).tolist() == [30, 31, 32, 33]
        assert unchecked(pool[1], -12, 4).tolist() == [10, 11, 12, 13]
        for layer, offset in ((0, -1), (1, 9), (0, 24)):
            with pytest.raises(IllegalAccess, match="pool of 24"):
                unchecked(pool[layer], offset, 4)
    assert unchecked(pool[0], 24, 1).tolist() == [34]


def test_the_kernels_number_modes_as_the_host_does() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    from atom.model_ops.guard_triton import GUARD_NUMBER

    # the kernels' text compares with these numbers
    assert GUARD_NUMBER == {GuardMode.NONE: 0, GuardMode.TRAP: 1, GuardMode.REPORT: 2}
