"""Attention, norm, rotary, gate and step-input kernels against their references, interpreted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_batches import Shape, paged_batch
from interpreter import assert_check_passes, check_names

from atom.model_ops import activation, layer_norm, paged_attention, rotary_embedding
from atom.model_ops.decode_inputs import StepDrafts, StepInputs, step_inputs_reference


def _attention(
    shape: Shape,
    contexts: list[int],
    lengths: list[int],
    *,
    is_prefill: bool,
    splits: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    from atom.model_ops import paged_attention_triton

    batch = paged_batch(
        shape, contexts, lengths, is_prefill=is_prefill, padding_tokens=3, dtype=dtype
    )
    found = paged_attention_triton.paged_attention(
        batch.query, batch.kv_cache, batch.meta, scale=shape.scale, splits=splits
    )
    expected = paged_attention.paged_attention_reference(
        batch.query, batch.kv_cache, batch.meta, scale=shape.scale
    )
    used = slice(batch.used)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[used], expected[used], rtol=tolerance, atol=tolerance)


def check_half_precision() -> None:
    # Triton's interpreter multiplies no bf16 matrices; float16 takes the same path
    for is_prefill in (False, True):
        _attention(
            Shape(), [0, 140, 0], [1, 3, 0], is_prefill=is_prefill, splits=2, dtype=torch.float16
        )


def check_decode() -> None:
    for splits in (1, 4, None):
        _attention(Shape(), [0, 260, 126, 0], [4, 1, 3, 0], is_prefill=False, splits=splits)
    for shape in (Shape(6, 2, 80, 64), Shape(3, 3, 64, 256), Shape(16, 2, 256)):
        _attention(shape, [0, 150, 0], [1, 3, 0], is_prefill=False, splits=2)


def check_decode_of_many_queries() -> None:
    # more rows than a tile holds, so that several tiles share a row's keys
    for splits in (1, 2):
        _attention(Shape(16, 1, 64), [150, 3], [8, 5], is_prefill=False, splits=splits)


def check_prefill() -> None:
    for shape in (Shape(), Shape(6, 2, 80, 64), Shape(3, 3, 64, 256), Shape(16, 2, 256)):
        _attention(shape, [0, 70, 33, 0], [20, 1, 7, 0], is_prefill=True)
    _attention(Shape(4, 4), [0], [150], is_prefill=True)


def check_prefill_of_many_rows() -> None:
    lengths = [1 + 5 * row % 23 for row in range(21)]
    _attention(Shape(4, 1), [row % 3 * 9 for row in range(21)], lengths, is_prefill=True)


def check_a_stale_context_stays_in_the_cache() -> None:
    from atom.model_ops import paged_attention_triton

    batch = paged_batch(Shape(), [28], [4])
    stale = replace(batch.meta, context_lens=torch.tensor([16384], dtype=torch.int32))
    for is_prefill in (False, True):
        meta = replace(stale, is_prefill=is_prefill)
        found, expected = (
            attend(batch.query, batch.kv_cache, meta, scale=0.1)
            for attend in (
                paged_attention_triton.paged_attention,
                paged_attention.paged_attention_reference,
            )
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check_store() -> None:
    from atom.model_ops import paged_attention_triton

    for heads, head_size in ((2, 80), (3, 64), (5, 256)):
        cache = torch.randn(2, 6, 4, heads, head_size)
        other = cache.clone()
        fused = torch.randn(9, 2 * heads + 4, head_size)
        key, value = fused[:, 4 : 4 + heads], fused[:, 4 + heads :]
        slots = torch.tensor([5, 0, -1, 23, 7, -1, 8, 9, 1])
        paged_attention_triton.store_kv(key, value, cache, slots)
        paged_attention.store_kv_reference(key, value, other, slots)
        assert torch.equal(cache, other)


def check_norms() -> None:
    from atom.model_ops import layer_norm_triton

    for width in (1, 48, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(5, width + 8).to(dtype)[:, :width]
            residual = torch.randn(5, width).to(dtype)
            weight = torch.randn(width).to(dtype)
            for offset in (0.0, 1.0):
                found = layer_norm_triton.rms_norm(x, weight, 1e-6, offset=offset)
                expected = layer_norm.rms_norm_reference(x, weight, 1e-6, offset=offset)
                torch.testing.assert_close(found, expected)
            out = torch.full((6, width), 7).to(dtype)
            both = layer_norm_triton.add_rms_norm(x, residual, weight, 1e-6, out=out[:5])
            assert torch.equal(out[:5], both[0])
            assert out[5].eq(7).all()
            expected_both = layer_norm.add_rms_norm_reference(x, residual, weight, 1e-6)
            torch.testing.assert_close(both, expected_both)


def check_joined_norms() -> None:
    from atom.model_ops import layer_norm_triton

    for width in (1, 48, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            table, hidden = torch.randn(9, width).to(dtype), torch.randn(5, width + 8).to(dtype)
            # a column of ids, and rows of something wider
            ids, hidden = torch.randint(9, (5, 3))[:, 1], hidden[:, :width]
            first, second = torch.randn(2, width).to(dtype)
            found = layer_norm_triton.embed_norm_join(ids, table, hidden, first, second, 1e-6)
            expected = layer_norm.embed_norm_join_reference(ids, table, hidden, first, second, 1e-6)
            torch.testing.assert_close(found, expected)


def check_head_norm_and_rotary_embedding() -> None:
    from atom.model_ops import rotary_embedding_triton

    for heads, kv_heads, head_size, rotary_dim in (
        (6, 2, 80, 20),
        (16, 2, 256, 64),
        (3, 3, 64, 64),
    ):
        query = torch.randn(7, heads, 2 * head_size)[..., :head_size]
        key = torch.randn(7, kv_heads, head_size)
        table = rotary_embedding.RotaryTable.build(
            rotary_dim=rotary_dim, max_positions=99, theta=1e4
        )
        positions = torch.tensor([0, 1, 98, 99, -3, 50, 16384])
        query_weight, key_weight = torch.randn(2, head_size)
        arguments = (query_weight, key_weight, positions, table, 1e-6, rotary_dim)
        found = rotary_embedding_triton.qk_norm_rope(query, key, *arguments)
        expected = rotary_embedding.qk_norm_rope_reference(query, key, *arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

        value = torch.randn(7, kv_heads, 2 * head_size)[..., head_size:]
        cache = torch.randn(2, 3, 4, kv_heads, head_size)
        other = cache.clone()
        slots = torch.tensor([5, 0, -1, 11, 7, -1, 8])
        found_query, expected_query = (
            store(query, key, value, *arguments, kept, slots)
            for store, kept in (
                (rotary_embedding_triton.qk_norm_rope_store, cache),
                (rotary_embedding.qk_norm_rope_store_reference, other),
            )
        )
        torch.testing.assert_close(found_query, expected_query, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5)


def check_gates() -> None:
    from atom.model_ops import activation_triton

    for width in (24, 1500):
        gate_up = torch.randn(5, 2 * width)
        torch.testing.assert_close(
            activation_triton.silu_and_mul(gate_up), activation.silu_and_mul_reference(gate_up)
        )
    gate = torch.randn(5, 3, 160)[..., 80:]
    attention = torch.randn(5, 240)
    expected = activation.sigmoid_gate_reference(attention, gate)
    for form in (gate, gate.flatten(1)):
        torch.testing.assert_close(activation_triton.sigmoid_gate(attention, form), expected)


def check_step_inputs() -> None:
    from atom.model_ops import decode_inputs_triton

    draw = random.Random(7)
    for trial in range(24):
        rows, columns, width = draw.randint(1, 40), draw.randint(1, 5), draw.randint(1, 4)
        size = draw.choice([1, 16, 64])
        ids = torch.randint(0, 10**6, (rows + 2, columns)) if trial % 2 else None
        lengths = [draw.randint(-1, 6 if trial % 2 else 80) for _ in range(rows)]
        groups = [draw.randint(-1, rows + 3) for _ in range(rows)]
        contexts = [draw.randint(0, size * width + 3) for _ in range(rows)]
        # the first rows and blocks of tensors made for more
        metadata = torch.full((4, rows + 3), 99, dtype=torch.int32)[:, :rows]
        metadata.copy_(torch.tensor([contexts, lengths, groups, [1] * rows]))
        tables = torch.randint(-1, 50, (rows, width + 2), dtype=torch.int32)[:, :width]
        tokens = max(1, sum(lengths) + draw.randint(-5, 40))
        both = []
        for derive in (decode_inputs_triton.step_inputs, step_inputs_reference):
            out = StepInputs.allocate(rows, tokens + 2, columns - 1, "cpu")
            out.input_ids.fill_(-77)
            drafts = None
            if ids is not None and trial % 4 == 1:
                drafts = StepDrafts(
                    *(torch.full((rows + 1, columns - 1), -7), torch.full((rows + 1,), -7).int()),
                    *(torch.full((rows + 1,), -7), torch.full((rows + 1,), -7).int()),
                )
            derive(metadata, tables, ids, tokens, size, out=out, drafts=drafts)
            both.append((out, drafts))
        for found, wanted in zip(*both, strict=True):
            for name in () if found is None else found.__slots__:
                assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize("name", check_names(__file__))
def test_in_the_interpreter(name: str) -> None:
    assert_check_passes(__file__, name)
