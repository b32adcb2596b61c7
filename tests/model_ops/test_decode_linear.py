"""Projections of a few tokens: the library's on a CPU, this project's kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from atom.model_ops.activation import silu_and_mul
from atom.model_ops.decode_linear import (
    MOST_TOKENS,
    linear,
    linear_parts,
    linear_silu_and_mul,
    reads_weights_only,
)
from atom.model_ops.layer_norm import add_rms_norm, add_rms_norm_reference

#: outputs and inputs of the layers of a model
SHAPES = [(6176, 1024), (8064, 1024), (1024, 4032), (1024, 2048), (512, 512)]


def test_on_a_cpu_they_are_the_librarys() -> None:
    x, weight, bias = torch.randn(5, 64), torch.randn(32, 64), torch.randn(32)
    assert not reads_weights_only(x, weight)
    assert torch.equal(linear(x, weight, bias), functional.linear(x, weight, bias))
    assert torch.equal(linear_parts(x, weight), functional.linear(x, weight))
    expected = silu_and_mul(functional.linear(x, weight))
    assert torch.equal(linear_silu_and_mul(x, weight), expected)


def test_a_norm_adds_parts_and_rounds_their_sum() -> None:
    parts, stream, weight = torch.randn(3, 5, 64), torch.randn(5, 64).bfloat16(), torch.randn(64)
    whole = parts.sum(0).bfloat16()
    for found, expected in zip(
        add_rms_norm(parts, stream, weight.bfloat16(), 1e-6),
        add_rms_norm(whole, stream, weight.bfloat16(), 1e-6),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize("tokens", [1, 17, 32, MOST_TOKENS, MOST_TOKENS + 1])
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    def test_projections(self, tokens: int, outputs: int, inputs: int) -> None:
        torch.manual_seed(tokens)
        # rows of something wider
        x = torch.randn(tokens, inputs + 64, device="cuda").bfloat16()[:, :inputs]
        weight = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()
        assert reads_weights_only(x, weight) is (tokens <= MOST_TOKENS)
        exact = x.float() @ weight.float().t()
        # a rounding of each, and of no more
        close = {"rtol": 1e-2, "atol": 2e-2}
        torch.testing.assert_close(linear(x, weight).float(), exact, **close)
        gate, up = exact.chunk(2, 1)
        found = linear_silu_and_mul(x, weight).float()
        torch.testing.assert_close(found, functional.silu(gate) * up, rtol=3e-2, atol=3e-2)
        parts = linear_parts(x, weight)
        summed = parts.sum(0) if parts.dim() == 3 else parts
        torch.testing.assert_close(summed.float(), exact, **close)
        stream, scale = torch.randn(2, tokens, outputs, device="cuda").bfloat16()
        for one, other in zip(
            add_rms_norm(parts, stream, scale[0], 1e-6),
            add_rms_norm_reference(parts, stream, scale[0], 1e-6),
            strict=True,
        ):
            # sums of another order may round to a neighbour
            torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=3e-2)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        x = torch.randn(32, 1024, device="cuda").bfloat16()
        weight = torch.randn(2048, 1024, device="cuda").bfloat16()
        whole = linear_silu_and_mul(x, weight)
        assert torch.equal(linear_silu_and_mul(x[3:20].clone(), weight), whole[3:20])
