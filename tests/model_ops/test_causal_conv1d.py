"""The causal convolution: laws of the reference, the guard, and (``gpu``) the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conv_batches import (
    BAD_COUNTS,
    BAD_SLOTS,
    ConvBatch,
    bad_batch,
    metadata,
    moved,
    random_batch,
    tokens_of,
    without_row,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atom.config import GuardMode
from atom.errors import BadInput, DeviceError
from atom.model_ops.causal_conv1d import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    packed_weight,
)
from atom.model_ops.guard import GuardCode, GuardFault, IllegalAccess, new_record, parse_record

LAYER = 4


def run_update(
    batch: ConvBatch,
    guard: GuardMode = GuardMode.REPORT,
    record: Tensor | None = None,
    pool_layer: int = 0,
) -> Tensor:
    """Outputs of the batch's tokens; the pool of the batch is written."""
    out = causal_conv1d_update(
        batch.x,
        batch.weight,
        batch.bias,
        batch.pool[pool_layer],
        batch.meta,
        guard=guard,
        record=new_record(batch.x.device) if record is None else record,
        layer=LAYER,
    )
    return out[: tokens_of(batch.meta)]


def run_prefill(batch: ConvBatch) -> Tensor:
    """Outputs of the batch's tokens; the pool of the batch is written."""
    out = causal_conv1d_prefill(batch.x, batch.weight, batch.bias, batch.pool[0], batch.meta)
    return out[: tokens_of(batch.meta)]


def convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own convolution of a whole sequence ``[n, D]``, in float64."""
    dim, width = weight.shape
    padded = torch.nn.functional.pad(inputs.double().t(), (width - 1, 0))[None]
    bias = None if bias is None else bias.double()
    out = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias, groups=dim)
    return torch.nn.functional.silu(out[0]).t()


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=25)
def test_a_prompt_in_chunks_is_the_whole_convolution(seed: int, chunks: list[int]) -> None:
    batch = random_batch(seed, is_prefill=True, rows=1)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(chunks), batch.x.shape[1], generator=generator)
    before = batch.pool.clone()
    slot, outs, done = 0, [], 0
    for length in chunks:
        batch.meta = metadata([length], [slot], contexts=[done], is_prefill=True)
        batch.x = inputs[done : done + length]
        outs.append(run_prefill(batch))
        done += length
    expected = convolution(inputs, batch.weight, batch.bias)
    torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=1e-5, atol=1e-5)
    # the other slots, the rows behind the history, and the other layer are as they were
    taps = batch.weight.shape[1] - 1
    batch.pool[0, slot, :taps] = before[0, slot, :taps]
    assert torch.equal(batch.pool, before)


@given(st.integers(0, 10**6), st.data())
@settings(max_examples=25)
def test_whatever_is_accepted_decoding_goes_on_with_the_accepted_tokens(
    seed: int, data: st.DataObject
) -> None:
    batch = random_batch(seed, is_prefill=True, rows=1, draft_tokens=3, width=4)
    generator = torch.Generator().manual_seed(seed)
    dim = batch.x.shape[1]
    accepted = torch.randn(data.draw(st.integers(1, 6)), dim, generator=generator)
    batch.meta = metadata([len(accepted)], [0], is_prefill=True)
    batch.x = accepted
    run_prefill(batch)
    # the prompt's last token left its rows at the start of the slot
    count = 1
    for _ in range(4):
        length = data.draw(st.integers(1, 4))
        tokens = torch.randn(length, dim, generator=generator)
        batch.meta = metadata([length], [0], counts=[count])
        batch.x = tokens
        out = run_update(batch)
        whole = convolution(torch.cat([accepted, tokens]), batch.weight, batch.bias)
        torch.testing.assert_close(out.double(), whole[-length:], rtol=1e-5, atol=1e-5)
        count = data.draw(st.integers(1, length))
        accepted = torch.cat([accepted, tokens[:count]])


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=25)
def test_rows_of_a_batch_do_not_see_each_other_or_the_padding(seed: int, is_prefill: bool) -> None:
    batch = random_batch(seed, is_prefill=is_prefill)
    run = run_prefill if is_prefill else run_update
    together = replace(batch, pool=batch.pool.clone())
    out = run(together)
    starts = batch.meta.query_start_loc.tolist()
    for row in range(batch.meta.num_rows):
        own = slice(starts[row], starts[row + 1])
        one = slice(row, row + 1)
        batch.meta, whole = (
            replace(
                together.meta,
                query_start_loc=torch.tensor([0, own.stop - own.start], dtype=torch.int32),
                context_lens=together.meta.context_lens[one],
                state_slots=together.meta.state_slots[one],
                num_accepted_tokens=together.meta.num_accepted_tokens[one],
            ),
            batch.x,
        )
        batch.x = whole[own]
        torch.testing.assert_close(run(batch), out[own])
        batch.x = whole
    assert torch.equal(batch.pool, together.pool)


def test_packed_weights_are_the_same_weights() -> None:
    batch = random_batch(5, dim=24)
    plain = batch.weight.contiguous()
    packed = packed_weight(plain)
    assert torch.equal(packed, plain)
    assert packed.stride() == (1, 24)
    first, second = (replace(batch, weight=w, pool=batch.pool.clone()) for w in (plain, packed))
    assert torch.equal(run_update(first), run_update(second))


# -- guard


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize(
    ("count", "slot"), [*((c, None) for c in BAD_COUNTS), *((None, s) for s in BAD_SLOTS)]
)
def test_report_stops_a_bad_row_and_no_other(row: int, count: int | None, slot: int | None) -> None:
    batch, record = bad_batch(row, count=count, slot=slot), new_record()
    others = without_row(batch, row)
    starts, slots = batch.meta.query_start_loc.tolist(), batch.meta.state_slots.tolist()
    out = run_update(batch, GuardMode.REPORT, record)
    expected = run_update(others, GuardMode.NONE)
    own = slice(starts[row], starts[row + 1])
    assert torch.equal(out[own], torch.zeros_like(out[own]))
    torch.testing.assert_close(torch.cat([out[: own.start], out[own.stop :]]), expected)
    assert torch.equal(batch.pool, others.pool)
    if slot is None:
        assert count is not None
        fault = GuardFault(GuardCode.CONV_COUNT, row, slots[row], count, LAYER)
    else:
        fault = GuardFault(GuardCode.CONV_SLOT, row, slot, slot, LAYER)
    assert parse_record(record) == fault


def test_the_first_of_several_bad_rows_is_reported() -> None:
    batch, record = bad_batch(1, count=16385), new_record()
    batch.meta.num_accepted_tokens[3] = 0
    run_update(batch, GuardMode.REPORT, record)
    found = parse_record(record)
    assert found is not None
    assert (found.row, found.value) == (1, 16385)


def test_trap_ends_the_step() -> None:
    with pytest.raises(DeviceError, match=r"device assert.*16385"):
        run_update(bad_batch(0, count=16385), GuardMode.TRAP)


def test_unguarded_a_bad_count_reads_another_slot_and_another_layer_in_silence() -> None:
    # slot 0: a count of 8 names row 7, which is row 1 of slot 1
    batch = bad_batch(2, count=8)
    honest = bad_batch(2, count=2)
    honest.pool[0, 0, 1:4] = honest.pool[0, 1, 1:4]
    assert torch.equal(run_update(batch, GuardMode.NONE)[5:7], run_update(honest)[5:7])
    # slot 3: row 3 * 6 + 22 - 1 = 39 of 36, which is row 3 of the next layer's slot 0
    batch, honest = bad_batch(3, count=22), bad_batch(3, count=4)
    honest.pool[0, 3, 3:6] = honest.pool[1, 0, 3:6]
    assert torch.equal(run_update(batch, GuardMode.NONE)[7:], run_update(honest)[7:])
    # the last layer's bad row is the pool's end
    with pytest.raises(IllegalAccess):
        run_update(bad_batch(3, count=22), GuardMode.NONE, pool_layer=1)
    with pytest.raises(IllegalAccess):
        run_update(bad_batch(0, count=16385), GuardMode.NONE)


# -- what cannot be


def test_shapes_that_do_not_fit_are_refused() -> None:
    batch = random_batch(1, dim=8, width=4, draft_tokens=3)
    with pytest.raises(BadInput, match="same channels"):
        run_prefill(replace(batch, weight=torch.zeros(9, 4)))
    with pytest.raises(BadInput, match="bias"):
        run_prefill(replace(batch, bias=torch.zeros(9)))
    with pytest.raises(BadInput, match="rows"):
        run_prefill(replace(batch, pool=batch.pool[:, :, :2]))
    with pytest.raises(BadInput, match="contiguous"):
        run_prefill(replace(batch, x=batch.x.t().contiguous().t().expand(-1, 8)))
    with pytest.raises(BadInput, match="room for 4"):
        run_update(replace(batch, meta=metadata([5], [0])))
    with pytest.raises(BadInput, match="activation"):
        causal_conv1d_prefill(
            batch.x, batch.weight, None, batch.pool[0], batch.meta, activation="relu"
        )


# -- kernels on hardware


TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2e-3)}


def same(found: ConvBatch, out: Tensor, expected: ConvBatch, reference: Tensor) -> None:
    """Outputs to rounding; the pool to the bit."""
    rtol, atol = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu(), reference, rtol=rtol, atol=atol)
    assert torch.equal(found.pool.cpu(), expected.pool)


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("is_prefill", [False, True])
    @pytest.mark.parametrize("dim", [8, 40, 513, 2048, 8192])
    def test_kernels_are_their_references(
        self, dtype: torch.dtype, is_prefill: bool, dim: int
    ) -> None:
        run = run_prefill if is_prefill else run_update
        for seed in range(6):
            batch = random_batch(
                seed, is_prefill=is_prefill, dim=dim, rows=7, longest=300, dtype=dtype
            )
            on_gpu = batch.on("cuda")
            same(on_gpu, run(on_gpu), batch, run(batch))

    def test_one_long_prompt_beside_many_short_ones(self) -> None:
        batch = random_batch(3, is_prefill=True, dim=256, rows=64)
        lengths = [5000] + [3] * 63
        batch.meta = metadata(lengths, list(range(64)), contexts=[9, 0] * 32, is_prefill=True)
        batch.x = torch.randn(sum(lengths), 256)
        on_gpu = batch.on("cuda")
        same(on_gpu, run_prefill(on_gpu), batch, run_prefill(batch))

    @pytest.mark.parametrize("guard", GuardMode)
    def test_a_graph_sees_new_counts_lengths_and_slots(self, guard: GuardMode) -> None:
        first = random_batch(21, dim=256, rows=5, draft_tokens=3, width=4)
        record = new_record("cuda")
        on_gpu = first.on("cuda")
        # room for a full batch: lengths are read on the device
        on_gpu.x = torch.zeros(7 * 4, 256, device="cuda")
        on_gpu.meta = moved(metadata([4] * 5 + [0, 0], [0, 1, 2, 3, 4, -1, -1]), "cuda")
        # compiled outside the capture
        run_update(replace(on_gpu, pool=on_gpu.pool.clone()), guard, record)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = causal_conv1d_update(
                on_gpu.x,
                on_gpu.weight,
                on_gpu.bias,
                on_gpu.pool[0],
                on_gpu.meta,
                guard=guard,
                record=record,
                layer=LAYER,
            )
        for lengths, slots, counts in (
            ([1, 2, 3, 4, 1, 0, 0], [4, 3, 2, 1, 0, -1, -1], [4, 3, 2, 1, 1, 0, 0]),
            ([4, 4, 0, 0, 0, 0, 0], [1, 0, -1, -1, -1, -1, -1], [2, 4, 0, 0, 0, 0, 0]),
        ):
            meta = metadata(lengths, slots, counts=counts)
            for name in ("query_start_loc", "state_slots", "num_accepted_tokens"):
                getattr(on_gpu.meta, name).copy_(getattr(meta, name))
            used = sum(lengths)
            values = torch.randn(used, 256)
            on_gpu.x[:used] = values.cuda()
            expected = replace(first, x=values, meta=meta, pool=on_gpu.pool.cpu())
            graph.replay()
            same(on_gpu, out[:used], expected, run_update(expected))
        assert parse_record(record.cpu()) is None

    def test_the_kernels_do_not_wait_for_the_host(self) -> None:
        decode = random_batch(1, dim=256, rows=4).on("cuda")
        prefill = random_batch(2, dim=256, rows=4, is_prefill=True).on("cuda")
        record = new_record("cuda")
        try:
            for _ in range(2):
                causal_conv1d_update(
                    decode.x,
                    decode.weight,
                    decode.bias,
                    decode.pool[0],
                    decode.meta,
                    guard=GuardMode.REPORT,
                    record=record,
                    layer=0,
                )
                causal_conv1d_prefill(
                    prefill.x, prefill.weight, prefill.bias, prefill.pool[0], prefill.meta
                )
                # compiled; from now on a wait is an error
                torch.cuda.set_sync_debug_mode("error")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize(
        ("count", "slot"), [*((c, None) for c in BAD_COUNTS), *((None, s) for s in BAD_SLOTS)]
    )
    def test_report_stops_a_bad_row_and_no_other(self, count: int | None, slot: int | None) -> None:
        for row in range(4):
            batch = bad_batch(row, count=count, slot=slot)
            on_gpu, record, expected = batch.on("cuda"), new_record("cuda"), new_record()
            out = run_update(on_gpu, GuardMode.REPORT, record)
            same(on_gpu, out, batch, run_update(batch, GuardMode.REPORT, expected))
            assert record.tolist() == expected.tolist()

    def test_one_of_many_bad_rows_is_reported_whole_and_stays(self) -> None:
        rows = 512
        counts = [100 + row if row % 3 else 1 for row in range(rows)]
        batch = random_batch(1, dim=1024, rows=rows, draft_tokens=3, width=4).on("cuda")
        batch.x = torch.randn(rows, 1024, device="cuda")
        batch.meta = moved(metadata([1] * rows, list(range(rows)), counts=counts), "cuda")
        record = new_record("cuda")
        run_update(batch, GuardMode.REPORT, record)
        found = parse_record(record.cpu())
        assert found is not None
        # all five words are of the same row
        row = found.row
        assert row % 3
        assert found == GuardFault(GuardCode.CONV_COUNT, row, row, 100 + row, LAYER)
        for _ in range(20):
            run_update(batch, GuardMode.REPORT, record)
        assert parse_record(record.cpu()) == found

    @pytest.mark.parametrize("debug", ["0", "1"])
    def test_trap_ends_the_process_where_asserts_are_compiled_in(self, debug: str) -> None:
        script = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "import torch\n"
            "from conv_batches import bad_batch\n"
            "from test_causal_conv1d import run_update\n"
            "from atom.config import GuardMode\n"
            "run_update(bad_batch(0, count=5).on('cuda'), GuardMode.TRAP)\n"
            "torch.cuda.synchronize()\n"
            "print('went on')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=dict(os.environ, TRITON_DEBUG=debug),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if debug == "1":
            assert done.returncode != 0
            assert "out of range" in done.stdout + done.stderr
        else:
            # a count of 5 stays inside the pool: nothing is said at all
            assert done.returncode == 0, done.stderr
            assert "went on" in done.stdout
