"""The scan over chunks: its gradient, and its kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from atom.models.training_scan import scan

_KERNELS = """
import torch
from atom.models.training_scan import scan_backward_reference, scan_forward_reference
from atom.models.training_scan_triton import scan_backward_triton, scan_forward_triton

torch.manual_seed(0)
rows, chunks, size, key, wide = 2, 3, 16, 16, 32
reads = 0.2 * torch.randn(rows, chunks, 2 * size, key)
values, gw, ga = torch.randn(3, rows, chunks, size, wide).unbind(0)
keys, kept = 0.2 * torch.randn(rows, chunks, key, size), torch.rand(rows, chunks)
for kernel, reference, arguments in (
    (scan_forward_triton, scan_forward_reference, (reads, values, keys, kept)),
    (scan_backward_triton, scan_backward_reference, (reads, keys, kept, gw, ga)),
):
    for ours, theirs in zip(kernel(*arguments), reference(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert ours.abs().max() > 0.1
print("equal")
"""


def inputs(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Reads, values, keys and kept of a few chunks of 64 tokens on a GPU, of 16 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    size = 16 if device == "cpu" else 64
    shapes = [(3, 3, 2 * size, size), (3, 3, size, 2 * size), (3, 3, size, size), (3, 3)]
    reads, values, keys, kept = (torch.randn(shape, generator=generator) for shape in shapes)
    scaled = [x.to(device, dtype) for x in (0.1 * reads, values, 0.1 * keys)]
    return [x.requires_grad_() for x in (*scaled, kept.sigmoid().to(device))]


def plain(reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, which autograd follows, in float32."""
    reads, values, keys = reads.float(), values.float(), keys.float()
    state = torch.zeros(values.shape[0], reads.shape[-1], values.shape[-1], device=values.device)
    written, answers = [], []
    for chunk in range(values.shape[1]):
        erase, queries = reads[:, chunk].chunk(2, 1)
        written.append(values[:, chunk] - erase @ state)
        answers.append(queries @ state)
        state = state * kept[:, chunk, None, None] + keys[:, chunk] @ written[-1]
    return torch.stack(written, 1), torch.stack(answers, 1)


def everything(run: object, given: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of an implementation."""
    outputs = run(*given)  # type: ignore[operator]
    torch.manual_seed(1)
    weights = [torch.randn(x.shape, device=x.device) for x in outputs]
    total = sum((x.float() * w).sum() for x, w in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(total, given)]


def test_outputs_and_gradients() -> None:
    given = inputs()
    for ours, theirs in zip(everything(scan, given), everything(plain, given), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _KERNELS], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.gpu
def test_kernels_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    given = inputs(device="cuda", dtype=torch.bfloat16)
    for ours, theirs in zip(everything(scan, given), everything(plain, given), strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 0.02
