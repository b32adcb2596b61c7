"""Head norms and partial rotary embedding: against transformers' own, and the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.paged_attention import store_kv
from atom.model_ops.rotary_embedding import (
    RotaryTable,
    qk_norm_rope,
    qk_norm_rope_reference,
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
)

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def heads(tokens: int, head_size: int, device: str = "cpu", seed: int = 0) -> Case:
    """Queries as half of an interleaved projection, keys, and both weights."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, 6, 2 * head_size, generator=generator)[..., :head_size]
    key = torch.randn(tokens, 2, head_size, generator=generator)
    weights = torch.randn(2, head_size, generator=generator)
    return query.to(device), key.to(device), weights[0].to(device), weights[1].to(device)


@pytest.mark.parametrize("head_size", [16, 64, 256])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("theta", [1e4, 1e7])
def test_the_reference_is_the_models_attention_entry(
    head_size: int, factor: float, theta: float
) -> None:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = transformers.Qwen3NextConfig(
        head_dim=head_size,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
        },
    )
    positions = torch.tensor([0, 1, 77, 4095])
    query, key, query_weight, key_weight = heads(4, head_size)
    normed = []
    for x, weight in ((query, query_weight), (key, key_weight)):
        norm = modeling.Qwen3NextRMSNorm(head_size, eps=1e-6)
        norm.weight.data.copy_(weight)
        normed.append(norm(x).detach().transpose(0, 1)[None])
    cos, sin = modeling.Qwen3NextRotaryEmbedding(config)(normed[0], positions[None])
    expected = modeling.apply_rotary_pos_emb(*normed, cos, sin)

    rotary_dim = int(head_size * factor)
    table = RotaryTable.build(rotary_dim=rotary_dim, max_positions=4096, theta=theta)
    found = qk_norm_rope(query, key, query_weight, key_weight, positions, table, 1e-6, rotary_dim)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@given(st.integers(0, 900), st.integers(0, 900), st.integers(0, 99))
@settings(max_examples=40)
def test_scores_depend_on_the_distance_alone(first: int, second: int, shift: int) -> None:
    table = RotaryTable.build(rotary_dim=16, max_positions=1000, theta=1e4)
    query, key, query_weight, key_weight = heads(2, 32)
    # the same head at both places, so that only their distance can matter
    query, key = query[:1].repeat(2, 1, 1), key[:1].repeat(2, 1, 1)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        positions = torch.tensor([query_position, key_position])
        q, k = qk_norm_rope(query, key, query_weight, key_weight, positions, table, 1e-6, 16)
        return q[0, :2].flatten() @ k[1].flatten()

    here, there = score(first, second), score(first + shift, second + shift)
    torch.testing.assert_close(here, there, rtol=1e-3, atol=2e-2)


def test_a_position_outside_the_table_takes_its_nearest_entry() -> None:
    table = RotaryTable.build(rotary_dim=8, max_positions=4, theta=1e4)
    query, key, query_weight, key_weight = heads(1, 16)

    def at(position: int) -> torch.Tensor:
        positions = torch.tensor([position])
        return qk_norm_rope(query, key, query_weight, key_weight, positions, table, 1e-6, 8)[0]

    assert torch.equal(at(16384), at(3))
    assert torch.equal(at(-1), at(0))
    assert not torch.equal(at(2), at(3))


@pytest.mark.parametrize(("rotary_dim", "positions"), [(7, 4), (0, 4), (8, 0)])
def test_a_table_that_cannot_be(rotary_dim: int, positions: int) -> None:
    with pytest.raises(ValueError, match="rotary table"):
        RotaryTable.build(rotary_dim=rotary_dim, max_positions=positions, theta=1e4)


def test_a_table_of_another_size_is_refused() -> None:
    table = RotaryTable.build(rotary_dim=8, max_positions=4, theta=1e4)
    query, key, query_weight, key_weight = heads(1, 16)
    with pytest.raises(ValueError, match="rotary_dim 16"):
        qk_norm_rope(query, key, query_weight, key_weight, torch.zeros(1).long(), table, 1e-6, 16)


def test_stored_keys_are_those_that_were_returned() -> None:
    table = RotaryTable.build(rotary_dim=8, max_positions=9, theta=1e4)
    query, key, query_weight, key_weight = heads(4, 16)
    value, positions = torch.randn_like(key), torch.tensor([3, 4, 8, 0])
    slots = torch.tensor([6, 2, -1, 0])
    cache = torch.zeros(2, 2, 4, 2, 16)
    expected_cache = cache.clone()
    arguments = (query_weight, key_weight, positions, table, 1e-6, 8)
    found = qk_norm_rope_store(query, key, value, *arguments, cache, slots)
    expected, expected_key = qk_norm_rope(query, key, *arguments)
    store_kv(expected_key, value, expected_cache, slots)
    assert torch.equal(found, expected)
    assert torch.equal(cache, expected_cache)


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("head_size", "rotary_dim"), [(64, 16), (80, 20), (128, 128), (256, 64)]
    )
    def test_kernel(self, head_size: int, rotary_dim: int, dtype: torch.dtype) -> None:
        table = RotaryTable.build(
            rotary_dim=rotary_dim, max_positions=4096, theta=1e7, device="cuda"
        )
        query, key, query_weight, key_weight = (x.to(dtype) for x in heads(33, head_size, "cuda"))
        positions = torch.randint(-2, 5000, (33,), device="cuda")
        arguments = (query_weight, key_weight, positions, table, 1e-6, rotary_dim)
        for found, expected in zip(
            qk_norm_rope(query, key, *arguments),
            qk_norm_rope_reference(query, key, *arguments),
            strict=True,
        ):
            torch.testing.assert_close(found, expected)

        value = torch.randn(33, 4, head_size, device="cuda").to(dtype)[:, 1:3]
        caches = [torch.zeros(2, 4, 16, 2, head_size, device="cuda", dtype=dtype) for _ in "ab"]
        slots = torch.randperm(64, device="cuda")[:33]
        slots[5::7] = -1
        found, expected = (
            store(query, key, value, *arguments, cache, slots)
            for store, cache in zip(
                (qk_norm_rope_store, qk_norm_rope_store_reference), caches, strict=True
            )
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*caches)
