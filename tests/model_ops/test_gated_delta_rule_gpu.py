"""Gated delta rule on hardware: kernels against references, graphs, and nothing that waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from gdn_batches import WIDTH, Inputs, batch, cut, naive, states, update
from gdn_batches import draw as draw_any
from replay_steps import BothWays, new_pools
from replay_steps import draw as draw_step
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops import gated_delta_rule as ops
from atom.model_ops import gated_delta_rule_chunked as chunked
from atom.model_ops import gated_delta_rule_replay as replay
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.guard import GuardCode, new_record, parse_record
from atom.model_ops.replay_ring import clear_rings

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def draw(
    tokens: int, *, padding: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Inputs:
    """Inputs with the head sizes of a real model."""
    sizes = {"key_heads": 4, "heads": 8, "key_dim": 128, "value_dim": 128}
    return draw_any(tokens, padding=padding, dtype=dtype, device=device, **sizes)


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_cpu(inputs: Inputs) -> Inputs:
    q, k, v, g, beta = (part.cpu() for part in inputs)
    return q, k, v, g, beta


def moved(meta: AttentionMetadata, device: str = "cuda") -> AttentionMetadata:
    values = {field.name: getattr(meta, field.name) for field in fields(meta)}
    tensors = {n: value.to(device) for n, value in values.items() if isinstance(value, Tensor)}
    return replace(meta, **tensors)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    size = TOLERANCE[dtype]
    found, expected = found.cpu().float(), expected.cpu().float()
    torch.testing.assert_close(found, expected, atol=size, rtol=size, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(8, 1), (16, 1), (32, 2), (32, 4), (128, 8)])
@pytest.mark.parametrize("guard", [GuardMode.REPORT, GuardMode.NONE])
def test_a_step_equals_the_reference(
    dtype: torch.dtype, tile: tuple[int, int], guard: GuardMode
) -> None:
    from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

    inputs = draw(8, padding=3, dtype=dtype)
    pool = states(5, inputs)
    counts = [4, 1, 3]
    for group, count in zip((2, 0, 4), counts, strict=True):
        pool[group * WIDTH + count - 1] = torch.randn(pool.shape[1:])
    meta = batch([3, 4, 1], [2, 0, 4], counts=counts, padding_rows=2, padding_tokens=3)
    on_gpu = pool.cuda()
    record = new_record("cuda")
    expected = update(inputs, pool, meta)
    q, k, v, g, beta = (part.cuda() for part in inputs)
    found = gated_delta_rule_update_triton(
        *(q, k, v, g, beta, on_gpu, moved(meta)),
        guard=guard,
        record=record,
        layer=1,
        tile=tile,
    )
    close(found[:8], expected[:8], dtype)
    close(on_gpu, pool)
    assert parse_record(record.cpu()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_norm_equal_the_reference(dtype: torch.dtype) -> None:
    a, b = (torch.randn(33, 16).to(dtype) * 4).split(8, 1)
    A_log, dt_bias, weight = torch.randn(8), torch.randn(8).to(dtype), torch.randn(128).to(dtype)
    found = ops.gdn_gating(a.cuda(), b.cuda(), A_log.cuda(), dt_bias.cuda())
    for part, expected in zip(found, ops.gdn_gating(a, b, A_log, dt_bias), strict=True):
        close(part, expected)
    x, gate = torch.randn(2, 33, 8, 128).to(dtype)
    normed = ops.rms_norm_gated(x.cuda(), gate.cuda(), weight.cuda(), 1e-6)
    assert normed.dtype == dtype
    close(normed, ops.rms_norm_gated(x, gate, weight, 1e-6), dtype)


def test_gates_inside_equal_gates_outside() -> None:
    q, k, v, _, _ = draw(6, dtype=torch.bfloat16, device="cuda")
    a, b = torch.randn(2, 6, 8, device="cuda", dtype=torch.bfloat16)
    A_log, dt_bias = torch.randn(2, 8, device="cuda")
    meta = moved(batch([2, 4], [0, 1], counts=[2, 4]))
    pool = torch.randn(2 * WIDTH, 8, 128, 128, device="cuda")
    fused = pool.clone()
    expected = update((q, k, v, *ops.gdn_gating(a, b, A_log, dt_bias)), pool, meta)
    found = ops.gated_delta_rule_update_from_gates(
        *(q, k, v, a, b, A_log, dt_bias, fused, meta),
        guard=GuardMode.REPORT,
        record=new_record("cuda"),
        layer=0,
    )
    close(found, expected, torch.bfloat16)
    close(fused, pool)


def test_a_captured_step_follows_its_metadata() -> None:
    inputs = draw(8, device="cuda")
    pool = torch.randn(6 * WIDTH, 8, 128, 128, device="cuda")
    record = new_record("cuda")
    static = moved(batch([4, 4, 0], [0, 1, 2], counts=[1, 1, 1]))
    scratch = pool.clone()
    update(inputs, scratch, static, record=record)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = update(inputs, pool, static, record=record)
    steps = [
        batch([4, 2, 1], [3, 0, 5], counts=[4, 1, 2]),
        batch([1, 1], [2, 1], counts=[3, 4], padding_rows=1),
        batch([2, 2, 2], [5, 4, 1], counts=[1, 17, 2]),
        batch([], [], padding_rows=3),
    ]
    for meta in steps:
        expected_pool = pool.cpu()
        expected_record = record.cpu()
        expected = update(on_cpu(inputs), expected_pool, meta, record=expected_record)
        for field in ("query_start_loc", "num_accepted_tokens", "state_slots", "state_table"):
            getattr(static, field).copy_(getattr(meta, field))
        graph.replay()
        tokens = int(meta.query_start_loc[-1])
        close(output[:tokens], expected[:tokens])
        close(pool, expected_pool)
        assert record.tolist() == expected_record.tolist()
    fault = parse_record(record.cpu())
    assert fault is not None
    assert (fault.code, fault.row, fault.value) == (GuardCode.RECURRENT_COUNT, 1, 17)


@pytest.mark.parametrize(("count", "group"), [(0, 1), (16385, 1), (1, 3), (1, -1)])
def test_the_guard_reports_and_touches_no_state(count: int, group: int) -> None:
    inputs = draw(4, device="cuda")
    pool = torch.randn(3 * WIDTH, 8, 128, 128, device="cuda")
    expected_pool, expected_record = pool.cpu(), new_record()
    record = new_record("cuda")
    meta = batch([2, 2], [0, group], counts=[2, count])
    expected = update(on_cpu(inputs), expected_pool, meta, record=expected_record)
    found = update(inputs, pool, moved(meta), record=record)
    assert record.tolist() == expected_record.tolist()
    assert not found[2:].any()
    close(found, expected)
    close(pool, expected_pool)


#: head sizes of a real model
LARGE = (4, 8, 128, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [(16, 1), (32, 1), (64, 2)])
def test_replayed_states_are_those_that_are_kept(dtype: torch.dtype, tile: tuple[int, int]) -> None:
    from atom.model_ops import gated_delta_rule_replay_triton as kernels

    def with_tile(*inputs: Any, **settings: Any) -> Tensor:
        return kernels.gated_delta_rule_replay_from_gates_triton(*inputs, **settings, tile=tile)

    run = BothWays(with_tile, ops.gated_delta_rule_update_from_gates, LARGE, dtype, "cuda")
    for number in range(10):
        kept, again, _ = run.step(number)
        close(again, kept, dtype)
        states, made = run.settled()
        # in float32 both ways: far less than a token's share
        torch.testing.assert_close(made, states, atol=1e-4, rtol=1e-4)
    assert run.state[[1, 2]].isnan().all()


def test_a_captured_replay_follows_its_metadata_and_clears_its_rings() -> None:
    inputs = draw_step(8, LARGE, device="cuda")
    state, ring = new_pools(4, LARGE, device="cuda")
    for tensor in (state, ring.keys_values, ring.gates):
        tensor.uniform_(-0.5, 0.5)
    pools = [state, ring.keys_values, ring.gates]
    record = new_record("cuda")
    static = moved(batch([4, 4, 0], [0, 1, 2], contexts=[5, 6, 7], counts=[1, 1, 1]))

    def step(*given: Any, record: Tensor) -> Tensor:
        *pools, meta, inputs = given
        return replay.gated_delta_rule_replay_from_gates(
            *(*inputs, pools[0], replay.ReplayRing(pools[1], pools[2]), meta),
            guard=GuardMode.REPORT,
            record=record,
            layer=2,
        )

    step(*(pool.clone() for pool in pools), static, inputs, record=record)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(*pools, static, inputs, record=record)
    for meta in (
        batch([4, 2, 1], [3, 0, 1], contexts=[9, 100, 31], counts=[4, 1, 2]),
        batch([2, 2, 2], [2, 1, 0], contexts=[3, 4, 5], counts=[1, 17, 2]),
        batch([], [], padding_rows=3),
    ):
        copies, expected_record = [pool.cpu() for pool in pools], record.cpu()
        on_host = tuple(part.cpu() for part in inputs)
        expected = step(*copies, meta, on_host, record=expected_record)
        for field in ("query_start_loc", "num_accepted_tokens", "state_slots", "context_lens"):
            getattr(static, field).copy_(getattr(meta, field))
        graph.replay()
        tokens = int(meta.query_start_loc[-1])
        close(output[:tokens], expected[:tokens])
        for pool, copy in zip(pools, copies, strict=True):
            close(pool, copy)
        assert record.tolist() == expected_record.tolist()
    prompts = moved(batch([3, 9], [3, 1], padding_rows=1))
    with no_host_waits():
        clear_rings(ring, prompts)
    assert not ring.keys_values[[3, 1]].any()
    assert not ring.gates[[3, 1]].any()
    assert ring.gates[[0, 2]].all()


TRAP = """
import torch
from gdn_batches import WIDTH, batch, draw, update
from test_gated_delta_rule_gpu import moved
from atom.config import GuardMode
inputs = draw(1, device="cuda")
pool = torch.zeros(WIDTH, 4, 8, 6, device="cuda")
update(inputs, pool, moved(batch([1], [0], counts=[COUNT])), GuardMode.TRAP)
torch.cuda.synchronize()
print("went on")
"""


@pytest.mark.parametrize(("count", "goes_on"), [(2, True), (9, False)])
def test_a_trap_ends_its_process(
    count: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEBUG", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    program = TRAP.replace("COUNT", str(count))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False
    )
    assert ("went on" in done.stdout) is goes_on, done.stderr
    assert (done.returncode == 0) is goes_on
    if not goes_on:
        assert "assert" in done.stderr


RAGGED = [[200], [64, 1, 130], [5, 63, 65, 128, 300]]


def prefill(inputs: Inputs, pool: Tensor, meta: AttentionMetadata) -> Tensor:
    return ops.gated_delta_rule_prefill(*inputs, pool, meta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("library", [True, False])
def test_prompt_chunks_equal_the_recurrence(
    dtype: torch.dtype, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library:
        pytest.importorskip("fla", reason="flash-linear-attention is not installed here")
    else:
        monkeypatch.setattr(ops, "kernel_takes", lambda q: False)
    uses_library = library and dtype is torch.bfloat16
    for lengths in RAGGED:
        rows = len(lengths)
        inputs = draw(sum(lengths), padding=9, dtype=dtype, device="cuda")
        assert not uses_library or chunked.kernel_takes(inputs[0])
        groups = list(range(rows, 0, -1))
        contexts = [7 * (row % 2) for row in range(rows)]
        pool = states(rows + 1, inputs)
        for group, context in zip(groups, contexts, strict=True):
            if context:
                pool[group * WIDTH] = torch.randn(pool.shape[1:])
        before = pool.cpu()
        meta = batch(lengths, groups, contexts=contexts, padding_rows=2, padding_tokens=9)
        meta = moved(meta)
        # the first call may tune kernels, which waits; the second may not wait
        prefill(inputs, pool.clone(), meta)
        with no_host_waits():
            outputs = prefill(inputs, pool, meta)
        begin = 0
        for length, group, context in zip(lengths, groups, contexts, strict=True):
            initial = before[group * WIDTH] if context else torch.zeros(before.shape[1:])
            part = cut(on_cpu(inputs), begin, begin + length)
            expected, behind = naive(part, initial)
            size = 3e-2 if dtype is torch.bfloat16 else 1e-4
            for found, wanted in (
                (outputs[begin : begin + length], expected),
                (pool[group * WIDTH], behind[-1]),
            ):
                scale = float(wanted.abs().max())
                error = float((found.cpu().float() - wanted).abs().max())
                assert error < size * scale, (lengths, group, error, scale)
            begin += length
        untouched = [s for s in range(len(pool)) if s not in {g * WIDTH for g in groups}]
        assert pool[untouched].isnan().all()


def test_metadata_that_changes_in_place_is_read_again() -> None:
    """The library keeps what it derived from a tensor for as long as it sees the same object."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed here")
    inputs = draw(256, dtype=torch.bfloat16, device="cuda")
    meta = moved(batch([200, 56], [0, 1], max_query_len=256))
    pool, other = states(2, inputs), states(2, inputs)
    prefill(inputs, pool, meta)
    meta.query_start_loc.copy_(torch.tensor([0, 10, 256], dtype=torch.int32))
    found = prefill(inputs, pool, meta)
    expected = prefill(inputs, other, moved(batch([10, 246], [0, 1], max_query_len=256)))
    assert torch.equal(found, expected)
    assert torch.equal(pool[::WIDTH], other[::WIDTH])
