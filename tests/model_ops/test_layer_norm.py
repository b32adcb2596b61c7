"""Root-mean-square norms: against transformers' own, and the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.layer_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    embed_norm_join,
    embed_norm_join_reference,
    rms_norm,
    rms_norm_reference,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_models_norm(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = modeling.Qwen3NextRMSNorm(48, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    theirs.to(dtype)
    x = (3 * torch.randn(7, 48)).to(dtype)
    ours = rms_norm(x, theirs.weight.detach(), 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs(x).detach(), rtol=1e-6, atol=1e-6)


@given(st.floats(1e-2, 1e3), st.integers(1, 65))
@settings(max_examples=25)
def test_the_scale_of_the_input_does_not_matter(factor: float, width: int) -> None:
    x, weight = torch.randn(3, width).double().float() + 0.1, torch.randn(width)
    one, other = rms_norm(x, weight, 0.0), rms_norm(factor * x, weight, 0.0)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_plain_weight() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset=0.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_before_its_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))
    out = torch.full_like(x, 7)
    assert add_rms_norm(x, residual, weight, 1e-6, out=out)[0] is out
    assert torch.equal(out, normed)


def test_joined_norms_are_those_of_each_part() -> None:
    table, hidden, weights = torch.randn(9, 16), torch.randn(4, 16), torch.randn(2, 16)
    ids = torch.tensor([8, 0, 3, 3])
    joined = embed_norm_join(ids, table, hidden, weights[0], weights[1], 1e-6)
    assert torch.equal(joined[:, :16], rms_norm(table[ids], weights[0], 1e-6))
    assert torch.equal(joined[:, 16:], rms_norm(hidden, weights[1], 1e-6))


@pytest.mark.gpu
class TestOnHardware:
    def test_joined_norms(self) -> None:
        table, hidden = torch.randn(9, 1024), torch.randn(5, 1024)
        weights, ids = torch.randn(2, 1024), torch.randint(9, (5, 3))[:, 1]
        a, b, c, d = (part.bfloat16() for part in (table, hidden, *weights))
        found = embed_norm_join(ids.cuda(), a.cuda(), b.cuda(), c.cuda(), d.cuda(), 1e-6)
        expected = embed_norm_join_reference(ids, a, b, c, d, 1e-6)
        torch.testing.assert_close(found.cpu(), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("width", [1, 48, 1024, 2048, 5120, 16384])
    def test_norms(self, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(width)
        # rows of a wider projection
        x = torch.randn(9, width + 64, device="cuda").to(dtype)[:, :width]
        residual = torch.randn(9, width, device="cuda").to(dtype)
        weight = torch.randn(width, device="cuda").to(dtype)
        torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
        found, total = add_rms_norm(x, residual, weight, 1e-6)
        expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
        assert torch.equal(total, expected_total)
        torch.testing.assert_close(found, expected)
        # rows of a longer buffer, and none behind them
        out = torch.full((11, width), 7, device="cuda", dtype=dtype)
        written, total = add_rms_norm(x, residual, weight, 1e-6, out=out[:9])
        assert torch.equal(total, expected_total)
        assert torch.equal(out, torch.cat((found, out.new_full((2, width), 7))))
        assert written.data_ptr() == out.data_ptr()
