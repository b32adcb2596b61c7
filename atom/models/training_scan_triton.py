"""Triton kernels of :mod:`atom.models.training_scan`.

A program carries a strip of a state's columns through all chunks of one sequence and head.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns of a state that one program carries
_STRIP = 32
_WARPS = 4


@triton.jit
def scan_forward_kernel(
    reads,
    values,
    keys,
    kept,
    written,
    answers,
    states,
    chunks,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Grid: strips of columns, rows of batch and head."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)
    k = tl.arange(0, K)
    v = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    state = tl.zeros((K, STRIP), dtype=tl.float32)
    for step in range(chunks):
        chunk = row * chunks + step
        narrow = state.to(values.dtype.element_ty)
        tl.store(states + chunk * K * V + k[:, None] * V + v[None, :], narrow)
        place = reads + chunk * 2 * C * K + c[:, None] * K + k[None, :]
        cell = chunk * C * V + c[:, None] * V + v[None, :]
        erased = tl.dot(tl.load(place), narrow)
        answer = tl.dot(tl.load(place + C * K), narrow)
        new = (tl.load(values + cell).to(tl.float32) - erased).to(values.dtype.element_ty)
        tl.store(written + cell, new)
        tl.store(answers + cell, answer.to(values.dtype.element_ty))
        key = tl.load(keys + chunk * K * C + k[:, None] * C + c[None, :])
        state = state * tl.load(kept + chunk) + tl.dot(key, new)


@triton.jit
def scan_backward_kernel(
    reads,
    keys,
    kept,
    grad_written,
    grad_answers,
    grad_new,
    grad_states,
    chunks,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Grid: strips of columns, rows of batch and head."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, C)
    k = tl.arange(0, K)
    v = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    state = tl.zeros((K, STRIP), dtype=tl.float32)
    for step in range(chunks):
        chunk = row * chunks + (chunks - 1 - step)
        narrow = state.to(grad_written.dtype.element_ty)
        tl.store(grad_states + chunk * K * V + k[:, None] * V + v[None, :], narrow)
        cell = chunk * C * V + c[:, None] * V + v[None, :]
        # transposed by the order of loads
        key = tl.load(keys + chunk * K * C + k[None, :] * C + c[:, None])
        new = tl.load(grad_written + cell).to(tl.float32) + tl.dot(key, narrow)
        new = new.to(grad_written.dtype.element_ty)
        tl.store(grad_new + cell, new)
        place = reads + chunk * 2 * C * K + c[None, :] * K + k[:, None]
        erase = tl.load(place)
        query = tl.load(place + C * K)
        state = state * tl.load(kept + chunk)
        state += tl.dot(query, tl.load(grad_answers + cell)) - tl.dot(erase, new)


def scan_forward_triton(
    reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`atom.models.training_scan.scan_forward`."""
    rows, chunks, size, wide = values.shape
    key = reads.shape[-1]
    written, answers = torch.empty_like(values), torch.empty_like(values)
    states = values.new_empty(rows, chunks, key, wide)
    strip = min(_STRIP, wide)
    scan_forward_kernel[(wide // strip, rows)](
        *(reads, values, keys, kept, written, answers, states, chunks),
        C=size,
        K=key,
        V=wide,
        STRIP=strip,
        num_warps=_WARPS,
    )
    return written, answers, states


def scan_backward_triton(
    reads: Tensor, keys: Tensor, kept: Tensor, grad_written: Tensor, grad_answers: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`atom.models.training_scan.scan_backward`."""
    rows, chunks, size, wide = grad_written.shape
    key = reads.shape[-1]
    grad_new = torch.empty_like(grad_written)
    grad_states = grad_written.new_empty(rows, chunks, key, wide)
    strip = min(_STRIP, wide)
    scan_backward_kernel[(wide // strip, rows)](
        *(reads, keys, kept, grad_written, grad_answers, grad_new, grad_states, chunks),
        C=size,
        K=key,
        V=wide,
        STRIP=strip,
        num_warps=_WARPS,
    )
    return grad_new, grad_states
