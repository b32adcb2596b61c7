"""The gated delta rule's Triton kernels against their references, in Triton's interpreter."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from gdn_batches import WIDTH, batch, draw, naive, states
from interpreter import assert_check_passes, check_names
from replay_steps import BothWays, new_pools
from replay_steps import draw as draw_step

from atom.config import GuardMode
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops import gated_delta_rule_replay as replay
from atom.model_ops.guard import GuardCode, new_record, parse_record


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def check_gates() -> None:
    from atom.model_ops.gated_delta_rule_triton import gdn_gating_triton

    # tokens with a stride, values on both sides of the soft and the linear part
    a, b = (torch.linspace(-60, 60, 3 * 22).view(3, 2, 11)[:, part, :7] for part in (0, 1))
    A_log, dt_bias = torch.randn(7), torch.randn(7)
    for found, expected in zip(
        gdn_gating_triton(a, b, A_log, dt_bias),
        ops.gdn_gating_reference(a, b, A_log, dt_bias),
        strict=True,
    ):
        _close(found, expected)
    g, beta = gdn_gating_triton(a[:0], b[:0], A_log, dt_bias)
    assert g.shape == beta.shape == (0, 7)


def check_gated_norm() -> None:
    from atom.model_ops.gated_delta_rule_triton import rms_norm_gated_triton

    for size, heads in ((6, 3), (128, 4)):
        both = torch.randn(5, 2, heads, size)
        x, gate, weight = both[:, 0], both[:, 1], torch.randn(size)
        found = rms_norm_gated_triton(x, gate, weight, 1e-6)
        _close(found, ops.rms_norm_gated_reference(x, gate, weight, 1e-6))
        assert rms_norm_gated_triton(x[:0], gate[:0], weight, 1e-6).shape == (0, heads, size)


def check_steps() -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

    shapes = ((2, 4, 8, 6), (1, 1, 16, 40), (3, 3, 5, 32))
    for (key_heads, heads, key_dim, value_dim), guard in product(
        shapes, (GuardMode.REPORT, GuardMode.NONE)
    ):
        inputs = draw(
            7, key_heads=key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim, padding=2
        )
        pool = states(4, inputs)
        counts = [4, 1, 3]
        for group, count in zip((2, 0, 3), counts, strict=True):
            pool[group * WIDTH + count - 1] = torch.randn(pool.shape[1:])
        meta = batch([2, 4, 1], [2, 0, 3], counts=counts, padding_rows=2, padding_tokens=2)
        copy, record = pool.clone(), new_record()
        expected = ops.gated_delta_rule_update_reference(
            *inputs, copy, meta, guard=guard, record=record, layer=1
        )
        found = gated_delta_rule_update_triton(
            *inputs, pool, meta, guard=guard, record=record, layer=1
        )
        _close(found[:7], expected[:7])
        _close(pool, copy)
        assert parse_record(record) is None


def check_steps_on_views_and_with_gates_inside() -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_from_gates_triton

    mixed = torch.randn(3, 2 * 2 * 8 + 4 * 6)
    q, k, v = mixed.split((16, 16, 24), 1)
    q, k, v = q.view(3, 2, 8), k.view(3, 2, 8), v.view(3, 4, 6)
    a, b = torch.randn(3, 8).split(4, 1)
    A_log, dt_bias = torch.randn(4), torch.randn(4)
    pool = torch.randn(2 * WIDTH, 4, 8, 6)
    copy = pool.clone()
    meta = batch([2, 1], [1, 0], counts=[2, 4])
    arguments = {"guard": GuardMode.REPORT, "record": new_record(), "layer": 1, "scale": 0.3}
    expected = ops.gated_delta_rule_update_from_gates_reference(
        q, k, v, a, b, A_log, dt_bias, copy, meta, **arguments
    )
    found = gated_delta_rule_update_from_gates_triton(
        q, k, v, a, b, A_log, dt_bias, pool, meta, **arguments
    )
    _close(found, expected)
    _close(pool, copy)


def check_the_guard_reports_what_the_reference_reports() -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

    inputs = draw(4)
    cases = [(0, 1, 0), (WIDTH + 1, 1, 0), (16385, 1, 0), (1, 3, 0), (1, -1, 0)]
    cases += [(1, 1, -1), (2, 1, 3 * WIDTH)]
    for count, group, entry in cases:
        pool = torch.randn(3 * WIDTH, 4, 8, 6)
        copy = pool.clone()
        meta = batch([2, 2], [0, group], counts=[2, count])
        if entry:
            meta.state_table[1, 3] = entry
        records = new_record(), new_record()
        expected = ops.gated_delta_rule_update_reference(
            *inputs, copy, meta, guard=GuardMode.REPORT, record=records[0], layer=7
        )
        found = gated_delta_rule_update_triton(
            *inputs, pool, meta, guard=GuardMode.REPORT, record=records[1], layer=7
        )
        assert parse_record(records[0]) is not None
        assert torch.equal(*records), (count, group, entry, records)
        _close(found, expected)
        assert not found[2:].any()
        _close(pool, copy)


def check_the_first_report_stays() -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

    inputs, record = draw(2), new_record()
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    for layer, count in ((3, 9), (4, 11)):
        meta = batch([2], [2], counts=[count])
        gated_delta_rule_update_triton(
            *inputs, pool, meta, guard=GuardMode.REPORT, record=record, layer=layer
        )
    assert record.tolist() == [int(GuardCode.RECURRENT_COUNT), 0, 2, 9, 3, 0, 0, 0]


def check_without_a_guard_a_stale_count_reads_another_request() -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

    inputs = draw(1)
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    expected, _ = naive(inputs, pool[2 * WIDTH + 1])
    meta = batch([1, 0], [0, 2], counts=[WIDTH + 2, 1])
    found = gated_delta_rule_update_triton(
        *inputs, pool, meta, guard=GuardMode.NONE, record=new_record(), layer=0
    )
    _close(found, expected)


def check_replay_gives_what_a_state_for_each_draft_gives() -> None:
    from atom.model_ops.gated_delta_rule_replay_triton import (
        gated_delta_rule_replay_from_gates_triton,
    )
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_from_gates_triton

    for sizes, dtype in (((2, 4, 8, 6), torch.float32), ((1, 2, 16, 40), torch.bfloat16)):
        run = BothWays(
            gated_delta_rule_replay_from_gates_triton,
            gated_delta_rule_update_from_gates_triton,
            sizes,
            dtype,
        )
        for number in range(5):
            kept, again, _ = run.step(number)
            # of a bfloat16 output, another rounding
            within = 1e-5 if dtype is torch.float32 else 8e-3
            torch.testing.assert_close(again, kept, atol=within, rtol=within)
        _close(*run.settled())
        assert run.state[[1, 2]].isnan().all()
        assert run.ring.gates[[1, 2]].isnan().all()


def check_replay_equals_its_reference_with_and_without_a_bad_row() -> None:
    from atom.model_ops.gated_delta_rule_replay_triton import (
        gated_delta_rule_replay_from_gates_triton,
    )

    inputs = draw_step(6)
    good, none, report = (2, 1), GuardMode.NONE, GuardMode.REPORT
    cases = [(good, report), (good, none), ((0, 1), report), ((WIDTH + 1, 1), report)]
    cases += [((1, 3), report), ((1, -1), report), ((16385, 1), none), ((-2, 1), none)]
    for (count, group), guard in cases:
        state, ring = new_pools(3)
        for tensor in (state, ring.keys_values, ring.gates):
            tensor[:] = torch.rand_like(tensor) - 0.5
        pools = [state, ring.keys_values, ring.gates]
        copies = [pool.clone() for pool in pools]
        meta = batch([2, 3], [0, group], contexts=[17, 3], counts=[3, count], padding_rows=1)
        records = new_record(), new_record()
        expected = replay.gated_delta_rule_replay_from_gates_reference(
            *(*inputs, copies[0], replay.ReplayRing(*copies[1:]), meta),
            guard=guard,
            record=records[0],
            layer=7,
        )
        found = gated_delta_rule_replay_from_gates_triton(
            *(*inputs, state, ring, meta), guard=guard, record=records[1], layer=7
        )
        assert torch.equal(*records), (count, group, records)
        assert (parse_record(records[0]) is None) is ((count, group) == good or guard is none)
        _close(found[:5], expected[:5])
        for pool, copy in zip(pools, copies, strict=True):
            _close(pool, copy)
