"""The part of the gated delta rule that goes from chunk to chunk, and its gradient.

A state ``S`` of ``[K, V]`` passes through the chunks of a sequence::

    written = values - erase @ S      what a chunk writes
    answers = queries @ S             what it reads for its queries
    S = kept * S + keys @ written

These two operators are opaque to torch.compile: on a GPU each is one Triton kernel, elsewhere a
loop. All of the gradient that needs no order is left to batched matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op(
    "atom_training::scan_forward",
    mutates_args=(),
    schema="(Tensor reads, Tensor values, Tensor keys, Tensor kept) -> (Tensor, Tensor, Tensor)",
)
def scan_forward(
    reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the states through all chunks, from zeros.

    Args:
        reads: ``[R, N, 2 * C, K]``, ``erase`` above ``queries``; R rows of batch and head.
        values: ``[R, N, C, V]``.
        keys: ``[R, N, K, C]``.
        kept: float32 ``[R, N]``.

    Returns:
        ``written`` and ``answers`` ``[R, N, C, V]``, and the states before each chunk
        ``[R, N, K, V]``, all in the dtype of ``values``.
    """
    if values.is_cuda:
        from atom.models.training_scan_triton import scan_forward_triton

        return scan_forward_triton(reads, values, keys, kept)
    return scan_forward_reference(reads, values, keys, kept)


def scan_forward_reference(
    reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`scan_forward` in plain torch."""
    rows, chunks, size, wide = values.shape
    state = values.new_zeros(rows, reads.shape[-1], wide, dtype=torch.float32)
    written, answers, states = [], [], []
    for chunk in range(chunks):
        states.append(state.to(values.dtype))
        read = reads[:, chunk] @ states[-1]
        written.append(values[:, chunk] - read[:, :size])
        answers.append(read[:, size:])
        state = state * kept[:, chunk, None, None] + (keys[:, chunk] @ written[-1]).float()
    return torch.stack(written, 1), torch.stack(answers, 1), torch.stack(states, 1)


@torch.library.custom_op(
    "atom_training::scan_backward",
    mutates_args=(),
    schema="(Tensor reads, Tensor keys, Tensor kept, Tensor grad_written, Tensor grad_answers) "
    "-> (Tensor, Tensor)",
)
def scan_backward(
    reads: Tensor, keys: Tensor, kept: Tensor, grad_written: Tensor, grad_answers: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the states' gradients back through all chunks.

    Args:
        reads: as in :func:`scan_forward`, like ``keys`` and ``kept``.
        keys: as there.
        kept: as there.
        grad_written: ``[R, N, C, V]``, of what follows but the states.
        grad_answers: ``[R, N, C, V]``.

    Returns:
        The whole gradient of ``written`` ``[R, N, C, V]``, and that of the states behind each
        chunk ``[R, N, K, V]``, in the dtype of ``grad_written``.
    """
    if reads.is_cuda:
        from atom.models.training_scan_triton import scan_backward_triton

        return scan_backward_triton(reads, keys, kept, grad_written, grad_answers)
    return scan_backward_reference(reads, keys, kept, grad_written, grad_answers)


def scan_backward_reference(
    reads: Tensor, keys: Tensor, kept: Tensor, grad_written: Tensor, grad_answers: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`scan_backward` in plain torch."""
    rows, chunks, size, wide = grad_written.shape
    dtype = grad_written.dtype
    state = reads.new_zeros(rows, reads.shape[-1], wide, dtype=torch.float32)
    news, states = [], []
    for chunk in reversed(range(chunks)):
        states.append(state.to(dtype))
        new = grad_written[:, chunk] + keys[:, chunk].mT @ states[-1]
        news.append(new)
        erase, queries = reads[:, chunk].split(size, 1)
        back = queries.mT @ grad_answers[:, chunk] - erase.mT @ new
        state = state * kept[:, chunk, None, None] + back.float()
    return torch.stack(news[::-1], 1), torch.stack(states[::-1], 1)


@scan_forward.register_fake
def _(reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, chunks, _, wide = values.shape
    states = values.new_empty(rows, chunks, reads.shape[-1], wide)
    return values.new_empty(values.shape), values.new_empty(values.shape), states


@scan_backward.register_fake
def _(
    reads: Tensor, keys: Tensor, kept: Tensor, grad_written: Tensor, grad_answers: Tensor
) -> tuple[Tensor, Tensor]:
    rows, chunks, _, wide = grad_written.shape
    states = grad_written.new_empty(rows, chunks, reads.shape[-1], wide)
    return grad_written.new_empty(grad_written.shape), states


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    reads, _, keys, kept = inputs
    written, _, states = output
    ctx.save_for_backward(reads, keys, kept, written, states)


def _gradient(
    ctx: Any, grad_written: Tensor, grad_answers: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    reads, keys, kept, written, states = ctx.saved_tensors
    dtype = written.dtype
    grad_answers = grad_answers.to(dtype).contiguous()
    grad_new, grad_states = scan_backward(
        reads, keys, kept, grad_written.to(dtype).contiguous(), grad_answers
    )
    grad_reads = torch.cat((-grad_new, grad_answers), -2) @ states.mT
    grad_keys = grad_states @ written.mT
    grad_kept = (grad_states.float() * states.float()).sum((-1, -2))
    return grad_reads, grad_new, grad_keys, grad_kept


torch.library.register_autograd("atom_training::scan_forward", _gradient, setup_context=_keep)


def scan(reads: Tensor, values: Tensor, keys: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """``written`` and ``answers`` of :func:`scan_forward`; differentiable."""
    written, answers, _ = scan_forward(
        reads.contiguous(), values.contiguous(), keys.contiguous(), kept.contiguous()
    )
    return written, answers
