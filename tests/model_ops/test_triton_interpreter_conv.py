"""The convolution's Triton kernels against their references, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from conv_batches import (
    BAD_COUNTS,
    BAD_SLOTS,
    ConvBatch,
    bad_batch,
    metadata,
    random_batch,
    tokens_of,
    without_row,
)
from interpreter import assert_check_passes, check_names
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops.causal_conv1d import (
    causal_conv1d_prefill_reference,
    causal_conv1d_update_reference,
)
from atom.model_ops.guard import GuardCode, GuardFault, new_record, parse_record

EXAMPLES = 16


def update(
    batch: ConvBatch,
    guard: GuardMode,
    record: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """Outputs and pool after the update kernel; layer 0 of the pool."""
    from atom.model_ops.causal_conv1d_triton import launch_update

    pool = batch.pool.clone()
    out = launch_update(
        batch.x,
        batch.weight,
        batch.bias,
        pool[0],
        batch.meta,
        guard=guard,
        record=new_record() if record is None else record,
        layer=9,
        activation=activation,
        block=32,
    )
    return out[: tokens_of(batch.meta)], pool


def reference_update(batch: ConvBatch, activation: str | None = "silu") -> tuple[Tensor, Tensor]:
    """The same by the reference, unguarded."""
    pool = batch.pool.clone()
    out = causal_conv1d_update_reference(
        batch.x,
        batch.weight,
        batch.bias,
        pool[0],
        batch.meta,
        guard=GuardMode.NONE,
        record=new_record(),
        layer=9,
        activation=activation,
    )
    return out[: tokens_of(batch.meta)], pool


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Outputs to rounding; the pool to the bit, as its rows are only moved."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], expected[1])


def check_update_is_the_reference_on_random_batches() -> None:
    for seed in range(EXAMPLES):
        batch = random_batch(seed)
        activation = "silu" if seed % 2 else None
        expected = reference_update(batch, activation)
        for guard in GuardMode:
            record = new_record()
            assert_same(update(batch, guard, record, activation), expected)
            assert parse_record(record) is None, seed


def check_update_in_bfloat16() -> None:
    for seed in range(4):
        batch = random_batch(seed, dtype=torch.bfloat16, draft_tokens=3, width=4)
        found, expected = update(batch, GuardMode.REPORT), reference_update(batch)
        torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=1e-3)
        assert torch.equal(found[1], expected[1])


def check_sums_whose_exponential_overflows() -> None:
    for seed in range(2):
        batch = random_batch(seed)
        # whole numbers, so that no sum is rounded
        batch.x, batch.pool = (1000 * batch.x).round(), (1000 * batch.pool).round()
        batch.weight = batch.weight.round()
        batch.bias = None
        found = update(batch, GuardMode.REPORT)
        assert float(found[0].max()) > 1000
        assert_same(found, reference_update(batch))


def check_every_valid_count() -> None:
    for count in range(1, 5):
        for length in range(1, 5):
            batch = bad_batch(0, count=count)
            batch.meta = metadata([length], [2], counts=[count])
            batch.x = batch.x[:length]
            assert_same(update(batch, GuardMode.REPORT), reference_update(batch))


def check_a_bad_count_is_reported_and_leaves_the_others_alone() -> None:
    for row in range(4):
        for count in BAD_COUNTS:
            batch, record = bad_batch(row, count=count), new_record()
            slot = int(batch.meta.state_slots[row])
            stopped(batch, row, record)
            expected = GuardFault(GuardCode.CONV_COUNT, row, slot, count, 9)
            assert parse_record(record) == expected


def check_a_bad_slot_is_reported_and_leaves_the_others_alone() -> None:
    for row in range(4):
        for slot in BAD_SLOTS:
            batch, record = bad_batch(row, slot=slot), new_record()
            stopped(batch, row, record)
            expected = GuardFault(GuardCode.CONV_SLOT, row, slot, slot, 9)
            assert parse_record(record) == expected


def stopped(batch: ConvBatch, row: int, record: Tensor) -> None:
    """The row's outputs are zeros, its slot is as it was, and the others are as without it."""
    out, pool = update(batch, GuardMode.REPORT, record)
    others, pool_of_others = reference_update(without_row(batch, row))
    starts = batch.meta.query_start_loc.tolist()
    own = slice(starts[row], starts[row + 1])
    assert torch.equal(out[own], torch.zeros_like(out[own]))
    rest = torch.cat([out[: own.start], out[own.stop :]])
    assert_same((rest, pool), (others, pool_of_others))


def check_the_first_record_stays() -> None:
    record = new_record()
    update(bad_batch(1, count=16385), GuardMode.REPORT, record)
    first = parse_record(record)
    assert first is not None
    assert first.row == 1
    update(bad_batch(2, slot=-1), GuardMode.REPORT, record)
    assert parse_record(record) == first
    record.zero_()
    update(bad_batch(2, slot=-1), GuardMode.REPORT, record)
    assert parse_record(record) == GuardFault(GuardCode.CONV_SLOT, 2, -1, -1, 9)


def check_unguarded_it_reads_what_lies_there_in_silence() -> None:
    # slot 0 with a count of 8: the rows of slot 1; slot 3 with 22: the next layer's
    for row, count in ((2, 8), (3, 22)):
        batch, record = bad_batch(row, count=count), new_record()
        assert_same(update(batch, GuardMode.NONE, record), reference_update(batch))
        assert parse_record(record) is None


def check_prefill_is_the_reference_on_random_batches() -> None:
    from atom.model_ops.causal_conv1d_triton import launch_prefill

    for seed in range(EXAMPLES):
        batch = random_batch(seed, is_prefill=True, longest=13)
        pool, expected_pool = batch.pool.clone(), batch.pool.clone()
        arguments = (batch.x, batch.weight, batch.bias)
        expected = causal_conv1d_prefill_reference(*arguments, expected_pool[0], batch.meta)
        found = launch_prefill(*arguments, pool[0], batch.meta, block=32, tokens=4)
        used = tokens_of(batch.meta)
        assert_same((found[:used], pool), (expected[:used], expected_pool))


def check_a_prefill_program_takes_several_chunks() -> None:
    from atom.model_ops import causal_conv1d_triton

    batch = random_batch(3, is_prefill=True, dim=8, rows=1)
    batch.meta = metadata([150], [0], contexts=[7], is_prefill=True)
    batch.x = torch.randn(150, 8)
    pool, expected_pool = batch.pool.clone(), batch.pool.clone()
    arguments = (batch.x, batch.weight, batch.bias)
    expected = causal_conv1d_prefill_reference(*arguments, expected_pool[0], batch.meta)
    # eight programs for 38 chunks
    causal_conv1d_triton._PREFILL_PROGRAMS = 1
    found = causal_conv1d_triton.launch_prefill(*arguments, pool[0], batch.meta, block=8, tokens=4)
    assert_same((found, pool), (expected, expected_pool))


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)
