"""Gated delta rule over a packed batch of prompt chunks, in chunks of tokens and batched matmuls.

Inside a chunk the rank-one updates become one triangular system; between chunks the state goes on
one step for all rows of the batch at once. Nothing here reads a device value on the host: sizes
follow from the host's upper bounds, and what is over them is masked. Where flash-linear-attention
is installed its kernels do the same work on a GPU, for 16-bit inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from atom.model_ops.launch_sizes import next_power_of_2

#: tokens of a chunk; the triangular system is this large
CHUNK_SIZE = 64
#: added to the sum of squares under the root when queries and keys are normalised
L2_EPS = 1e-6
#: largest key head that the kernels of flash-linear-attention take
_LARGEST_KEY_HEAD = 256


def l2_normalize(x: Tensor) -> Tensor:
    """``x`` in float32 with unit length along the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class Chunks(NamedTuple):
    """Where the chunks of a ragged batch lie.

    Attributes:
        count: int64 ``[S]``, chunks of each row.
        offset: int64 ``[S]``, first chunk of each row.
        row: int64 ``[N]``, the row of a chunk; N is an upper bound that the host knows.
        number: int64 ``[N]``, the chunk's number inside its row.
        real: bool ``[N]``, whether there is such a chunk.
    """

    count: Tensor
    offset: Tensor
    row: Tensor
    number: Tensor
    real: Tensor


def chunk_bound(tokens: int, rows: int, max_query_len: int, chunk_size: int) -> int:
    """Most chunks that ``rows`` rows can have: each ends with at most one that is not full."""
    longest = -(-max_query_len // chunk_size)
    return min(rows * longest, (tokens + rows * (chunk_size - 1)) // chunk_size)


def lay_out_chunks(query_start_loc: Tensor, bound: int, chunk_size: int) -> Chunks:
    """Number the chunks of a batch without reading its lengths on the host.

    Args:
        query_start_loc: integer ``[S + 1]``.
        bound: entries to make, see :func:`chunk_bound`.
        chunk_size: tokens of a chunk.
    """
    count = (query_start_loc.diff().long() + chunk_size - 1) // chunk_size
    end = count.cumsum(0)
    number = torch.arange(bound, device=count.device)
    row = torch.searchsorted(end, number, right=True).clamp_(max=count.shape[0] - 1)
    offset = end - count
    return Chunks(count, offset, row, number - offset[row], number < end[-1])


def chunked_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of every row from its initial state, in float32.

    Args:
        q: ``[T, HK, K]``; normalised here, like ``k``.
        k: ``[T, HK, K]``.
        v: ``[T, HV, V]``; value head ``h`` uses key head ``h // (HV / HK)``.
        g: ``[T, HV]``, log decay, 0 or less.
        beta: ``[T, HV]``.
        initial_state: ``[S, HV, K, V]``.
        query_start_loc: integer ``[S + 1]``; tokens behind its last value are padding.
        max_query_len: upper bound of a row's tokens.
        scale: factor of the queries.
        chunk_size: tokens of a chunk; 64 by default, less where no row has so many.

    Returns:
        float32 ``[T, HV, V]``, zero for padding, and the final states ``[S, HV, K, V]``.
    """
    tokens, heads = v.shape[:2]
    rows = initial_state.shape[0]
    start = query_start_loc.long()
    if chunk_size is None:
        # a chunk is filled up to its size, so short rows would pay for long ones
        chunk_size = min(CHUNK_SIZE, max(16, next_power_of_2(max_query_len)))
    bound = chunk_bound(tokens, rows, max_query_len, chunk_size)
    chunks = lay_out_chunks(start, bound + 1, chunk_size)
    place = torch.arange(chunk_size, device=v.device)
    token = (start[chunks.row] + chunks.number * chunk_size)[:, None] + place
    # a chunk that is not real counts on from the last row, and so lies behind its end
    real = token < start[chunks.row + 1][:, None]
    token = torch.where(real, token, 0)

    def gather(x: Tensor) -> Tensor:
        # [T, H, ...] -> [N, H, C, ...]; selecting keeps what padding tokens hold out of sums
        mask = real.view(*real.shape, *(1 for _ in x.shape[1:]))
        return torch.where(mask, x[token].float(), 0.0).transpose(1, 2)

    group = heads // k.shape[1]
    queries = l2_normalize(gather(q)) * scale
    keys = l2_normalize(gather(k))
    values, strength, log_decay = gather(v), gather(beta)[..., None], gather(g).cumsum(-1)
    passed = log_decay.exp()[..., None]

    above = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v.device).triu(1)
    between = log_decay[..., :, None] - log_decay[..., None, :]
    # masked before the exponential: above the diagonal it could overflow
    between = between.masked_fill(above, -torch.inf).exp()
    overlap = (keys @ keys.transpose(-1, -2)).repeat_interleave(group, 1) * between
    attention = (queries @ keys.transpose(-1, -2)).repeat_interleave(group, 1) * between
    queries = queries.repeat_interleave(group, 1) * passed
    keys = keys.repeat_interleave(group, 1)
    known = torch.cat((values, keys * passed), -1) * strength
    solved = torch.linalg.solve_triangular(
        overlap * strength, known, upper=False, unitriangular=True
    )
    new_values, old_reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    keys = (keys * (log_decay[..., -1:] - log_decay).exp()[..., None]).transpose(-1, -2)
    passed = passed[..., -1:, :]

    state = initial_state.float()
    output = torch.zeros_like(new_values)
    # a row that has no such chunk takes the last one, which holds nothing and changes nothing
    for step in range(-(-max_query_len // chunk_size)):
        index = torch.where(step < chunks.count, chunks.offset + step, bound)
        written = new_values[index] - old_reads[index] @ state
        output[index] = queries[index] @ state + attention[index] @ written
        state = state * passed[index] + keys[index] @ written

    every = torch.arange(tokens, device=v.device)
    row = torch.searchsorted(start[1:].contiguous(), every, right=True)
    padding = row >= rows
    row.clamp_(max=rows - 1)
    inside = every - start[row]
    chunk = torch.where(padding, bound, chunks.offset[row] + inside // chunk_size)
    return output[chunk, :, inside % chunk_size], state


@cache
def chunk_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """flash-linear-attention's ``chunk_gated_delta_rule``, or None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def kernel_takes(q: Tensor) -> bool:
    """Whether :func:`kernel_gated_delta_rule` can run on ``q``: a GPU, 16 bits, and installed.

    float32 stays here: those kernels multiply it in TF32.
    """
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return fits and q.shape[-1] <= _LARGEST_KEY_HEAD and chunk_kernel() is not None


def kernel_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    start: Tensor,
    chunk_indices: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same by flash-linear-attention's kernels.

    Args:
        q: as of :func:`chunked_gated_delta_rule`, like every argument that is not named here.
        k: as there.
        v: as there.
        g: as there.
        beta: as there.
        initial_state: as there.
        start: see :class:`atom.model_ops.prefill_plan.PrefillPlan`, like the next.
        chunk_indices: see there.
        scale: as there.

    Returns:
        ``[T, HV, V]`` in the dtype of ``q``, unwritten for padding, and float32 final states.
    """
    run = chunk_kernel()
    assert run is not None
    output, final_state = run(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=start,
        chunk_indices=chunk_indices,
    )
    return output[0], final_state
