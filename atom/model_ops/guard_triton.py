# mypy: disable-error-code="no-untyped-def"
"""What a Triton kernel calls to check a row's count and slot, and to report a bad one.

Numbers of modes and codes are those of ``GuardMode`` and ``GuardCode``; a test holds them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.config import GuardMode

#: ``GuardMode`` as kernels take it (a constexpr)
GUARD_NUMBER = {GuardMode.NONE: 0, GuardMode.TRAP: 1, GuardMode.REPORT: 2}


@triton.jit
def report_fault(record, code, row, slot, value, layer):
    """Write a fault into ``record`` (int32 [8]) unless one is there.

    Scalars only. One program of a row should call it: its others would find the same.
    """
    # relaxed order suffices: the words are read by a later kernel or copy of the same stream
    before = tl.atomic_cas(record, 0, code, sem="relaxed")
    if before == 0:
        tl.store(record + 1, row)
        tl.store(record + 2, slot)
        tl.store(record + 3, value)
        tl.store(record + 4, layer)


@triton.jit
def is_slot(slot, slots):
    """Whether a slot lies in the pool."""
    return (slot >= 0) & (slot < slots)


@triton.jit
def row_passes(used, count, slot, highest_count, slots, GUARD: tl.constexpr):
    """Whether a row may touch its state; a bad one is asserted under ``GUARD`` 1.

    Scalars only, no branch, and nothing is read: the kernel has count and slot already. ``GUARD`` 0
    always passes, and so does padding, which is not ``used``. An assert exists only in a kernel
    that is compiled with ``debug=True`` or under ``TRITON_DEBUG=1``; elsewhere ``GUARD`` 1 is 0.
    Under ``GUARD`` 2 the kernel calls :func:`refuse_row` for a bad row and returns, before it loads
    anything but what is checked: a fault kept in mind up to the end would cost every row registers.
    """
    passes = tl.full((), 1, tl.int1)
    if GUARD != 0:
        good = is_slot(slot, slots) & (count >= 1) & (count <= highest_count)
        if GUARD == 1:
            tl.device_assert(good | (used == 0), "num_accepted_tokens or state slot out of range")
        else:
            passes = good | (used == 0)
    return passes


@triton.jit
def refuse_row(
    record,
    reports,
    count,
    slot,
    slots,
    row,
    layer,
    COUNT_CODE: tl.constexpr,
    SLOT_CODE: tl.constexpr,
    outputs,
    tokens,
    token_stride,
    real,
    MOST_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is done about a row that did not pass under ``GUARD`` 2: zeros as its outputs, a report.

    The kernel returns behind it. ``reports`` says whether this program speaks for its row;
    ``outputs`` are the places of its columns in the row's first token, ``real`` their mask.
    """
    nothing = tl.zeros((BLOCK,), outputs.dtype.element_ty)
    # not a loop over tokens, which would be unrolled to code that every row has to jump over
    for token in tl.static_range(MOST_TOKENS):
        tl.store(outputs + token * token_stride, nothing, mask=real & (token < tokens))
    if reports:
        good_slot = is_slot(slot, slots)
        code = tl.where(good_slot, COUNT_CODE, SLOT_CODE)
        value = tl.where(good_slot, count, slot)
        report_fault(record, code, row, slot, value, layer)
