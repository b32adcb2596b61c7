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
def row_passes(
    record,
    count,
    slot,
    highest_count,
    slots,
    row,
    layer,
    reports,
    GUARD: tl.constexpr,
    COUNT_CODE: tl.constexpr,
    SLOT_CODE: tl.constexpr,
):
    """Whether a row may touch its state; a bad one is reported (``GUARD`` 2) or asserted (1).

    Scalars only. ``reports`` says whether this program speaks for its row. ``GUARD`` 0 always
    passes. An assert exists only in a kernel that is compiled with ``debug=True`` or under
    ``TRITON_DEBUG=1``; elsewhere ``GUARD`` 1 is 0.
    """
    passes = tl.full((), 1, tl.int1)
    if GUARD != 0:
        good_slot = (slot >= 0) & (slot < slots)
        good_count = (count >= 1) & (count <= highest_count)
        if GUARD == 1:
            tl.device_assert(
                good_slot & good_count, "num_accepted_tokens or state slot out of range"
            )
        else:
            passes = good_slot & good_count
            if reports & (passes == 0):
                code = tl.where(good_slot, COUNT_CODE, SLOT_CODE)
                value = tl.where(good_slot, count, slot)
                report_fault(record, code, row, slot, value, layer)
    return passes
