"""Gates: against their definition, and the kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.activation import (
    sigmoid_gate,
    sigmoid_gate_reference,
    silu_and_mul,
    silu_and_mul_reference,
)


def test_silu_and_mul() -> None:
    gate, up = torch.randn(2, 5, 24)
    found = silu_and_mul(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(found, gate * gate.sigmoid() * up)


def test_sigmoid_gate_of_an_interleaved_projection() -> None:
    projection = torch.randn(5, 3, 32)
    attention, gate = torch.randn(5, 48), projection[..., 16:]
    found = sigmoid_gate(attention, gate)
    expected = attention * gate.reshape(5, 48).sigmoid()
    torch.testing.assert_close(found, expected)
    assert torch.equal(sigmoid_gate(attention.view(5, 3, 16), gate.reshape(5, 48)), found)


@pytest.mark.gpu
class TestOnHardware:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("width", [24, 1000, 2816])
    def test_silu_and_mul(self, width: int, dtype: torch.dtype) -> None:
        gate_up = 20 * torch.randn(7, 2 * width, device="cuda").to(dtype)
        torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("count", "head_size"), [(3, 80), (16, 256)])
    def test_sigmoid_gate(self, count: int, head_size: int, dtype: torch.dtype) -> None:
        gate = 20 * torch.randn(7, count, 2 * head_size, device="cuda").to(dtype)
        gate = gate[..., head_size:]
        attention = torch.randn(7, count * head_size, device="cuda").to(dtype)
        expected = sigmoid_gate_reference(attention, gate)
        torch.testing.assert_close(sigmoid_gate(attention, gate), expected)
        torch.testing.assert_close(sigmoid_gate(attention, gate.flatten(1)), expected)
