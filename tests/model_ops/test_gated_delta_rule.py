"""Gated delta rule: the chunked form, the recurrence and the decode step hold each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gdn_batches import WIDTH, batch, cut, draw, naive, states, update
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config import GuardMode
from atom.errors import BadInput, DeviceError
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops import gated_delta_rule_chunked as chunked
from atom.model_ops.guard import GuardCode, IllegalAccess, new_record, parse_record
from atom.model_ops.prefill_plan import PrefillPlan

# -- against transformers


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 1), (2, 4), (2, 8)])
def test_recurrence_and_chunks_equal_transformers(key_heads: int, heads: int) -> None:
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = draw(150, key_heads=key_heads, heads=heads)
    state = torch.randn(1, heads, 8, 6)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    q, k, v, g, beta = (part[None] for part in inputs)
    for run in (peer.torch_recurrent_gated_delta_rule, peer.torch_chunk_gated_delta_rule):
        expected, final = run(q, k, v, g=g, beta=beta, initial_state=state, **options)
        outputs, ours = naive(inputs, state[0])
        torch.testing.assert_close(outputs, expected[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours[-1], final[0], atol=2e-5, rtol=1e-4)
    pool = states(1, inputs)
    pool[0] = state[0]
    outputs = ops.gated_delta_rule_prefill(*inputs, pool, batch([150], [0], contexts=[9]))
    torch.testing.assert_close(outputs, expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pool[0], final[0], atol=2e-5, rtol=1e-4)


def test_gates_and_norm_equal_transformers() -> None:
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    a, b, A_log, dt_bias = (torch.randn(shape) * 4 for shape in ((5, 4), (5, 4), 4, 4))
    g, beta = ops.gdn_gating(a, b, A_log, dt_bias)
    expected = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    torch.testing.assert_close(g, expected)
    torch.testing.assert_close(beta, b.sigmoid())
    norm = peer.Qwen3NextRMSNormGated(6, eps=1e-5)
    norm.weight.data.normal_()
    x, gate = torch.randn(5, 4, 6), torch.randn(5, 4, 6)
    torch.testing.assert_close(ops.rms_norm_gated(x, gate, norm.weight, 1e-5), norm(x, gate))


# -- prompt chunks


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([4, 16, 64]),
    st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_chunks_equal_the_recurrence(
    lengths: list[int], padding_rows: int, padding_tokens: int, size: int, seed: int
) -> None:
    inputs = draw(sum(lengths), padding=padding_tokens, seed=seed)
    initial = torch.randn(len(lengths) + padding_rows, 4, 8, 6)
    meta = batch(lengths, list(range(len(lengths))), padding_rows=padding_rows)
    outputs, final = chunked.chunked_gated_delta_rule(
        *inputs, initial, meta.query_start_loc, meta.max_query_len, 8**-0.5, chunk_size=size
    )
    begin = 0
    for row, length in enumerate(lengths):
        expected, behind = naive(cut(inputs, begin, begin + length), initial[row])
        torch.testing.assert_close(outputs[begin : begin + length], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(final[row], behind[-1], atol=1e-4, rtol=1e-4)
        begin += length
    assert not outputs[begin:].any()


@pytest.mark.parametrize("lengths", [[64], [65, 1], [3, 128, 64]])
def test_a_fresh_row_ignores_its_slot_and_padding_touches_nothing(lengths: list[int]) -> None:
    groups = list(range(3, 3 - len(lengths), -1))
    inputs = draw(sum(lengths), padding=5)
    pool = states(4, inputs)
    meta = batch(lengths, groups, padding_rows=2, padding_tokens=5)
    outputs = ops.gated_delta_rule_prefill(*inputs, pool, meta)
    begin = 0
    for length, group in zip(lengths, groups, strict=True):
        expected, behind = naive(cut(inputs, begin, begin + length), torch.zeros(4, 8, 6))
        torch.testing.assert_close(outputs[begin : begin + length], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[group * WIDTH], behind[-1], atol=1e-4, rtol=1e-4)
        begin += length
    written = {group * WIDTH for group in groups}
    assert {slot for slot in range(len(pool)) if not pool[slot].isnan().all()} == written


def test_a_broken_row_does_not_spread() -> None:
    lengths = [40, 70, 5]
    inputs = draw(sum(lengths))
    inputs[2][0] = torch.nan
    pool = states(3, inputs)
    outputs = ops.gated_delta_rule_prefill(*inputs, pool, batch(lengths, [0, 1, 2]))
    assert outputs[:40].isnan().any()
    assert outputs[40:].isfinite().all()
    assert pool[[WIDTH, 2 * WIDTH]].isfinite().all()


@given(st.lists(st.integers(0, 150), max_size=4), st.integers(0, 2**16))
@settings(max_examples=15)
def test_a_prompt_in_pieces_equals_the_prompt(cuts: list[int], seed: int) -> None:
    tokens = 150
    inputs = draw(tokens, seed=seed)
    whole, pieces = states(1, inputs), states(1, inputs)
    expected = ops.gated_delta_rule_prefill(*inputs, whole, batch([tokens], [0]))
    edges = sorted({0, tokens, *cuts})
    outputs = []
    for begin, end in pairwise(edges):
        meta = batch([end - begin], [0], contexts=[begin], max_query_len=100 + end - begin)
        outputs.append(ops.gated_delta_rule_prefill(*cut(inputs, begin, end), pieces, meta))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pieces[0], whole[0], atol=1e-4, rtol=1e-4)


def test_one_plan_serves_the_layers_of_a_step() -> None:
    layers = [draw(21, padding=3) for _ in range(2)]
    meta = batch([9, 0, 12], [2, 0, 1], contexts=[4, 0, 0], padding_rows=1, padding_tokens=3)
    plan = PrefillPlan(meta)
    for inputs in layers:
        apart, shared = (states(3, inputs, fill=0.5) for _ in range(2))
        expected = ops.gated_delta_rule_prefill(*inputs, apart, meta)
        output = ops.gated_delta_rule_prefill(*inputs, shared, meta, plan=plan)
        assert torch.equal(output, expected)
        assert torch.equal(shared, apart)
    # the library's chunks: of both rows with tokens, then one behind every row's end
    assert plan.chunk_indices.tolist()[:2] == [[0, 0], [2, 0]]
    assert all(number == 24 for _, number in plan.chunk_indices.tolist()[2:])


def test_a_batch_of_padding_alone_changes_nothing() -> None:
    inputs = draw(0, padding=4)
    pool = states(2, inputs, fill=3.0)
    ops.gated_delta_rule_prefill(*inputs, pool, batch([], [], padding_rows=2, padding_tokens=4))
    assert (pool == 3.0).all()


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=8),
    st.sampled_from([16, 64]),
    st.integers(0, 9),
)
def test_the_chunk_bound_holds_every_chunk(lengths: list[int], size: int, padding: int) -> None:
    real = sum(-(-length // size) for length in lengths)
    bound = chunked.chunk_bound(sum(lengths) + padding, len(lengths), max(lengths), size)
    assert real <= bound
    chunks = chunked.lay_out_chunks(batch(lengths, lengths).query_start_loc, bound, size)
    found = [
        (int(row), int(number))
        for row, number, exists in zip(chunks.row, chunks.number, chunks.real, strict=True)
        if exists
    ]
    expected = [(r, n) for r, length in enumerate(lengths) for n in range(-(-length // size))]
    assert found == expected


# -- decode


@given(
    st.lists(st.tuples(st.integers(1, WIDTH), st.integers(1, WIDTH)), min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_a_step_starts_at_its_count_and_keeps_every_state(
    rows: list[tuple[int, int]], padding: int, seed: int
) -> None:
    lengths, counts = [row[0] for row in rows], [row[1] for row in rows]
    inputs = draw(sum(lengths), padding=padding, seed=seed)
    pool = states(5, inputs)
    groups = list(range(4, 4 - len(rows), -1))
    initial = torch.randn(len(rows), 4, 8, 6)
    for row, group in enumerate(groups):
        pool[group * WIDTH + counts[row] - 1] = initial[row]
    before = pool.clone()
    meta = batch(lengths, groups, counts=counts, padding_rows=padding, padding_tokens=padding)
    outputs = update(inputs, pool, meta)
    begin = 0
    expected_pool = before
    for row, group in enumerate(groups):
        expected, behind = naive(cut(inputs, begin, begin + lengths[row]), initial[row])
        assert torch.equal(outputs[begin : begin + lengths[row]], expected)
        expected_pool[group * WIDTH : group * WIDTH + lengths[row]] = behind
        begin += lengths[row]
    torch.testing.assert_close(pool, expected_pool, atol=0, rtol=0, equal_nan=True)
    assert not outputs[begin:].any()


@given(st.integers(1, WIDTH), st.integers(1, WIDTH), st.integers(0, 2**16))
def test_tokens_one_by_one_equal_one_step(tokens: int, count: int, seed: int) -> None:
    inputs = draw(tokens, seed=seed)
    pool = states(2, inputs)
    pool[WIDTH + count - 1] = torch.randn(4, 8, 6)
    single = pool.clone()
    expected = update(inputs, pool, batch([tokens], [1], counts=[count]))
    outputs = []
    for token in range(tokens):
        meta = batch([1], [1], counts=[count if token == 0 else 1])
        outputs.append(update(cut(inputs, token, token + 1), single, meta))
        # a step of one token leaves its state in the first slot
        assert torch.equal(single[WIDTH], pool[WIDTH + token])
    assert torch.equal(torch.cat(outputs), expected)


@given(
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(1, WIDTH), st.integers(1, WIDTH)), min_size=1, max_size=4),
    st.integers(0, 2**16),
)
@settings(max_examples=25)
def test_a_prompt_and_verified_steps_equal_the_accepted_sequence(
    prompt: int, steps: list[tuple[int, int]], seed: int
) -> None:
    """Rejected drafts leave no trace: outputs are those of the accepted tokens alone."""
    inputs = draw(prompt + WIDTH * len(steps), seed=seed)
    pool = states(1, inputs)
    head = cut(inputs, 0, prompt)
    ops.gated_delta_rule_prefill(*head, pool, batch([prompt], [0]))
    kept, outputs, count, place = [head], [], 1, prompt
    for tokens, accepted in ((max(step), min(step)) for step in steps):
        drafts = cut(inputs, place, place + tokens)
        step_outputs = update(drafts, pool, batch([tokens], [0], counts=[count]))
        kept.append(cut(drafts, 0, accepted))
        outputs.append(step_outputs[:accepted])
        count, place = accepted, place + tokens
    q, k, v, g, beta = (torch.cat(parts) for parts in zip(*kept, strict=True))
    expected, behind = naive((q, k, v, g, beta), torch.zeros(4, 8, 6))
    torch.testing.assert_close(torch.cat(outputs), expected[prompt:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool[count - 1], behind[-1], atol=1e-4, rtol=1e-4)


def test_gates_inside_equal_gates_outside() -> None:
    q, k, v, _, _ = draw(3)
    a, b, A_log, dt_bias = (torch.randn(shape) for shape in ((3, 4), (3, 4), 4, 4))
    meta = batch([2, 1], [0, 1], counts=[2, 4])
    pool = torch.randn(2 * WIDTH, 4, 8, 6)
    fused = pool.clone()
    expected = update((q, k, v, *ops.gdn_gating(a, b, A_log, dt_bias)), pool, meta)
    found = ops.gated_delta_rule_update_from_gates(
        *(q, k, v, a, b, A_log, dt_bias, fused, meta),
        guard=GuardMode.REPORT,
        record=new_record(),
        layer=0,
    )
    assert torch.equal(found, expected)
    assert torch.equal(fused, pool)


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = draw(8)
    with pytest.raises(BadInput, match="rows of up to 5 tokens"):
        update(inputs, states(2, inputs), batch([5, 3], [0, 1], counts=[1, 1]))
    with pytest.raises(BadInput, match="do not fit"):
        ops.gated_delta_rule_prefill(*inputs, states(2, inputs)[:, :2], batch([8], [0]))


# -- the guard, and what its absence does


@pytest.mark.parametrize(
    ("count", "group", "code", "value"),
    [
        (0, 1, GuardCode.RECURRENT_COUNT, 0),
        (WIDTH + 1, 1, GuardCode.RECURRENT_COUNT, WIDTH + 1),
        (16385, 1, GuardCode.RECURRENT_COUNT, 16385),
        (-7, 1, GuardCode.RECURRENT_COUNT, -7),
        (1, 3, GuardCode.RECURRENT_SLOT, 3),
        (1, -1, GuardCode.RECURRENT_SLOT, -1),
    ],
)
def test_report_keeps_a_bad_row_from_its_state(
    count: int, group: int, code: GuardCode, value: int
) -> None:
    inputs = draw(4)
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    before = pool.clone()
    record = new_record()
    meta = batch([2, 2], [0, group], counts=[2, count])
    outputs = update(inputs, pool, meta, record=record)
    fault = parse_record(record)
    assert fault is not None
    assert (fault.code, fault.row, fault.slot, fault.value, fault.layer) == (
        code,
        1,
        group,
        value,
        7,
    )
    expected, behind = naive(cut(inputs, 0, 2), before[1])
    assert torch.equal(outputs[:2], expected)
    assert not outputs[2:].any()
    assert torch.equal(pool[:2], behind)
    assert torch.equal(pool[2:], before[2:])
    with pytest.raises(DeviceError, match="device assert"):
        update(inputs, pool, meta, GuardMode.TRAP)


@pytest.mark.parametrize("entry", [-1, 3 * WIDTH])
def test_report_checks_the_entries_of_the_table(entry: int) -> None:
    inputs = draw(2)
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    before = pool.clone()
    meta = batch([2], [1], counts=[1])
    meta.state_table[0, 2] = entry
    record = new_record()
    assert not update(inputs, pool, meta, record=record).any()
    fault = parse_record(record)
    assert fault is not None
    assert (fault.code, fault.value) == (GuardCode.RECURRENT_SLOT, entry)
    assert torch.equal(pool, before)


def test_without_a_guard_a_stale_count_reads_another_request() -> None:
    """Control: the count walks into the next row's table entries, and nobody notices."""
    inputs = draw(2)
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    before = pool.clone()
    outputs = update(inputs, pool, batch([1, 1], [0, 2], counts=[WIDTH + 2, 1]), GuardMode.NONE)
    expected, _ = naive(cut(inputs, 0, 1), before[2 * WIDTH + 1])
    assert torch.equal(outputs[:1], expected)


def test_without_a_guard_a_far_count_leaves_the_table() -> None:
    inputs = draw(2)
    pool = torch.randn(3 * WIDTH, 4, 8, 6)
    with pytest.raises(IllegalAccess):
        update(inputs, pool, batch([1, 1], [0, 2], counts=[16385, 1]), GuardMode.NONE)


def test_without_a_guard_a_slot_reaches_another_layer() -> None:
    inputs = draw(1)
    layers = torch.randn(2, 2 * WIDTH, 4, 8, 6)
    meta = batch([1], [0], counts=[1])
    meta = replace(meta, state_table=meta.state_table + 2 * WIDTH + 1)
    expected, behind = naive(inputs, layers[1, 1].clone())
    assert torch.equal(update(inputs, layers[0], meta, GuardMode.NONE), expected)
    assert torch.equal(layers[1, 1], behind[0])
    with pytest.raises(IllegalAccess):
        update(inputs, layers[1], meta, GuardMode.NONE)
