"""Paged attention: the reference against torch's own, its laws, and the kernels on a GPU."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from attention_batches import PagedBatch, Shape, contiguous_attention, paged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.paged_attention import (
    paged_attention,
    paged_attention_reference,
    store_kv,
    store_kv_reference,
)

SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_size=80),
    Shape(heads=6, kv_heads=2, head_size=96, block_size=64),
    Shape(heads=16, kv_heads=2, head_size=128, block_size=256),
    Shape(heads=16, kv_heads=2, head_size=256),
    Shape(heads=16, kv_heads=1, head_size=64),
]

# kernels of float32 take long to compile: two suffice
HARDWARE = [
    *((shape, torch.bfloat16) for shape in SHAPES),
    *((shape, torch.float32) for shape in SHAPES[:2]),
    (SHAPES[4], torch.float16),
]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Shape, list[int], list[int]]:
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([8, 64, 80])),
        block_size=draw(st.sampled_from([1, 16, 64])),
    )
    rows = draw(st.integers(1, 4))
    contexts = draw(st.lists(st.integers(0, 70), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(1, 20), min_size=rows, max_size=rows))
    return shape, contexts, lengths


@given(batches(), st.booleans())
@settings(max_examples=40)
def test_the_reference_is_torchs_attention(
    drawn: tuple[Shape, list[int], list[int]], pad: bool
) -> None:
    shape, contexts, lengths = drawn
    if pad:
        contexts, lengths = [*contexts, 0], [*lengths, 0]
    batch = paged_batch(shape, contexts, lengths, padding_tokens=3 * pad)
    found = paged_attention(batch.query, batch.kv_cache, batch.meta, scale=shape.scale)
    expected = contiguous_attention(batch, shape.scale)
    torch.testing.assert_close(found[: batch.used], expected, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 40), st.integers(2, 40), st.integers(1, 39))
@settings(max_examples=25)
def test_chunks_of_queries_equal_the_whole(context: int, length: int, cut: int) -> None:
    shape = Shape()
    cut = min(cut, length - 1)
    whole = paged_batch(shape, [context], [length], is_prefill=True)
    starts = torch.tensor([0, cut, length], dtype=torch.int32)
    tables = whole.meta.block_tables.repeat(2, 1)
    contexts = torch.tensor([context, context + cut], dtype=torch.int32)
    # one request's two chunks as two rows: their keys are all stored already
    parts = replace(whole.meta, query_start_loc=starts, context_lens=contexts, block_tables=tables)
    one = paged_attention(whole.query, whole.kv_cache, whole.meta, scale=shape.scale)
    two = paged_attention(whole.query, whole.kv_cache, parts, scale=shape.scale)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 2**16), st.integers(1, 100))
@settings(max_examples=20)
def test_the_place_of_a_block_does_not_matter(seed: int, context: int) -> None:
    shape = Shape()
    batch = paged_batch(shape, [context, 5], [3, 1])
    moves = torch.randperm(batch.kv_cache.shape[1], generator=torch.Generator().manual_seed(seed))
    moved = torch.empty_like(batch.kv_cache)
    moved[:, moves] = batch.kv_cache
    tables = batch.meta.block_tables
    tables = torch.where(tables < 0, tables, moves[tables.long().clamp(min=0)].int())
    here = paged_attention(batch.query, batch.kv_cache, batch.meta, scale=shape.scale)
    there = paged_attention(
        batch.query, moved, replace(batch.meta, block_tables=tables), scale=shape.scale
    )
    assert torch.equal(here, there)


def test_more_queries_than_the_reference_takes_at_a_time() -> None:
    shape = Shape(heads=1, kv_heads=1, head_size=8)
    batch = paged_batch(shape, [3], [1030], is_prefill=True)
    found = paged_attention(batch.query, batch.kv_cache, batch.meta, scale=shape.scale)
    expected = contiguous_attention(batch, shape.scale)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_stale_context_is_cut_at_the_block_table() -> None:
    shape = Shape()
    batch = paged_batch(shape, [28], [4])
    meta = replace(batch.meta, context_lens=torch.tensor([16384], dtype=torch.int32))
    found = paged_attention(batch.query, batch.kv_cache, meta, scale=shape.scale)
    # every query sees all 32 keys of the table
    seen_all = replace(batch.meta, context_lens=torch.tensor([31], dtype=torch.int32))
    expected = paged_attention(batch.query, batch.kv_cache, seen_all, scale=shape.scale)
    torch.testing.assert_close(found[-1], expected[-1])
    assert found.isfinite().all()


def test_stored_keys_lie_in_their_slots_and_nowhere_else() -> None:
    kv_cache = torch.zeros(2, 3, 4, 2, 8)
    key, value = torch.randn(2, 3, 2, 8)
    store_kv(key, value, kv_cache, torch.tensor([9, -1, 2]))
    flat = kv_cache.view(2, 12, 2, 8)
    assert torch.equal(flat[0, [9, 2]], key[[0, 2]])
    assert torch.equal(flat[1, [9, 2]], value[[0, 2]])
    others = [slot for slot in range(12) if slot not in (9, 2)]
    assert not flat[:, others].any()


class TestTiles:
    triton = pytest.importorskip("triton", reason="Triton is not installed here")

    @given(st.integers(1, 4096), st.integers(1, 2**20), st.sampled_from([1, 4, 132, 304]))
    def test_parts_are_few_and_a_power_of_two(
        self, programs: int, max_keys: int, processors: int
    ) -> None:
        from atom.model_ops.decode_attention_triton import split_count

        count = split_count(programs, max_keys, processors)
        assert count.bit_count() == 1
        assert count <= 64
        assert count == 1 or count * programs <= 2 * processors
        assert count == 1 or max_keys // count >= 128

    @given(
        st.integers(1, 64),
        st.sampled_from([64, 80, 96, 128, 192, 256]),
        st.sampled_from([2, 4]),
        st.booleans(),
        st.integers(1, 8),
    )
    def test_tiles_hold_their_queries(
        self, ratio: int, head_size: int, element_bytes: int, hip: bool, queries: int
    ) -> None:
        from atom.model_ops.attention_tile_triton import decode_tiling, prefill_tiling

        for cut in (
            prefill_tiling(ratio, head_size, element_bytes, hip),
            decode_tiling(queries, ratio, head_size, element_bytes, hip),
        ):
            assert cut.rows >= cut.queries * ratio
            assert cut.rows.bit_count() == cut.keys.bit_count() == 1
            assert cut.rows >= 16
            assert cut.keys >= 16
            # a part of a row's keys is whole tiles
            assert 128 % cut.keys == 0

    @pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
    def test_a_hidden_score_less_itself_is_0(self, head_size: int) -> None:
        """Fused to one rounding too: a part of which a query sees no key would be no number."""
        from atom.model_ops.attention_tile_triton import HIDDEN

        scale = float(np.float32(head_size**-0.5 * math.log2(math.e)))
        rounded = float(np.float32(HIDDEN.value * scale))
        assert Fraction(HIDDEN.value) * Fraction(scale) == Fraction(rounded)
        assert rounded > HIDDEN.value

    @pytest.mark.parametrize(
        ("target", "most"), [("sm_90", 227 * 1024), ("gfx942", 64 * 1024)], ids=str
    )
    @pytest.mark.parametrize("kernel", ["prefill", "decode"])
    def test_tiles_fit_the_shared_memory(self, kernel: str, target: str, most: int) -> None:
        from compile_cases_attention import attention_case
        from test_triton_compile import TARGETS, compile_for

        from atom.model_ops.attention_tile_triton import decode_tiling, prefill_tiling

        hip = target.startswith("gfx")
        if kernel == "prefill":
            case = attention_case(kernel, 256, (16, 2), prefill_tiling(8, 256, 2, hip))
        else:
            tiling = decode_tiling(8, 8, 256, 2, hip)
            case = attention_case(kernel, 256, (16, 2), tiling, TILES=1, SPLIT=True)
        module = importlib.import_module(case.module)
        compiled = compile_for(TARGETS[target][0], getattr(module, case.kernel), case)
        assert compiled.metadata.shared <= most


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float32:
        return {"rtol": 1e-4, "atol": 1e-4}
    return {"rtol": 2e-2, "atol": 2e-2}


def _compare(batch: PagedBatch, scale: float, splits: int | None = None) -> None:
    from atom.model_ops import paged_attention_triton

    found = paged_attention_triton.paged_attention(
        batch.query, batch.kv_cache, batch.meta, scale=scale, splits=splits
    )
    expected = paged_attention_reference(batch.query, batch.kv_cache, batch.meta, scale=scale)
    used = slice(batch.used)
    torch.testing.assert_close(found[used], expected[used], **_tolerance(batch.query.dtype))


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize(("shape", "dtype"), HARDWARE, ids=str)
    @pytest.mark.parametrize("splits", [None, 1, 8])
    def test_decode(self, shape: Shape, dtype: torch.dtype, splits: int | None) -> None:
        batch = paged_batch(
            shape,
            # of 126 the first queries see nothing of the part of keys from 128 on
            [0, 1, 15, 300, 2049, 4000, 127, 126, 0],
            [4, 1, 2, 4, 3, 4, 1, 4, 0],
            padding_tokens=13,
            dtype=dtype,
            device="cuda",
        )
        _compare(batch, shape.scale, splits=splits)

    @pytest.mark.parametrize("queries", [1, 2, 5, 8])
    def test_decode_of_some_queries(self, queries: int) -> None:
        shape = Shape(heads=16, kv_heads=1, head_size=128)
        batch = paged_batch(
            shape, [700, 64], [queries, queries], dtype=torch.bfloat16, device="cuda"
        )
        _compare(batch, shape.scale)

    def test_a_long_context(self) -> None:
        shape = Shape(heads=16, kv_heads=2, head_size=256)
        batch = paged_batch(shape, [32764, 9], [4, 4], dtype=torch.bfloat16, device="cuda")
        _compare(batch, shape.scale)

    @pytest.mark.parametrize(("shape", "dtype"), HARDWARE, ids=str)
    def test_prefill(self, shape: Shape, dtype: torch.dtype) -> None:
        batch = paged_batch(
            shape,
            [0, 100, 0, 257, 0],
            [1, 333, 1000, 64, 0],
            is_prefill=True,
            padding_tokens=7,
            dtype=dtype,
            device="cuda",
        )
        _compare(batch, shape.scale)

    def test_many_rows_of_a_prefill(self) -> None:
        shape = Shape(heads=8, kv_heads=2, head_size=128)
        lengths = [1 + 7 * row % 150 for row in range(70)]
        contexts = [row % 3 * 40 for row in range(70)]
        batch = paged_batch(
            shape, contexts, lengths, is_prefill=True, dtype=torch.bfloat16, device="cuda"
        )
        _compare(batch, shape.scale)

    def test_a_stale_context_stays_in_the_cache(self) -> None:
        shape = Shape(heads=16, kv_heads=2, head_size=256)
        batch = paged_batch(shape, [28], [4], dtype=torch.bfloat16, device="cuda")
        stale = torch.tensor([16384], dtype=torch.int32, device="cuda")
        batch.meta = replace(batch.meta, context_lens=stale, max_context_len=32768)
        _compare(batch, shape.scale)

    def test_store(self) -> None:
        cache = torch.zeros(2, 40, 16, 2, 256, dtype=torch.bfloat16, device="cuda")
        other = cache.clone()
        # queries, keys and values as one projection gives them
        fused = torch.randn(50, 8, 256, device="cuda").bfloat16()
        slots = torch.randperm(640, device="cuda")[:50]
        slots[7::9] = -1
        store_kv(fused[:, 4:6], fused[:, 6:], cache, slots)
        store_kv_reference(fused[:, 4:6], fused[:, 6:], other, slots)
        assert torch.equal(cache, other)

    @pytest.mark.parametrize("splits", [1, 8])
    def test_a_graph_follows_its_metadata(self, splits: int) -> None:
        from atom.model_ops import paged_attention_triton

        shape = Shape(heads=16, kv_heads=2, head_size=256)
        kwargs = {"dtype": torch.bfloat16, "device": "cuda"}
        first = paged_batch(shape, [900, 900], [4, 4], **kwargs)
        query, cache = first.query.clone(), first.kv_cache.clone()
        meta = replace(first.meta, max_context_len=32768)

        def attend() -> torch.Tensor:
            return paged_attention_triton.paged_attention(
                query, cache, meta, scale=shape.scale, splits=splits
            )

        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = attend()
        for contexts, lengths in (([3, 901], [4, 2]), ([700, 0], [1, 0])):
            starts = [0, lengths[0], sum(lengths)]
            meta.query_start_loc.copy_(torch.tensor(starts))
            meta.context_lens.copy_(torch.tensor(contexts))
            output.zero_()
            graph.replay()
            expected = paged_attention_reference(query, cache, meta, scale=shape.scale)
            torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
