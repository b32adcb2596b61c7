"""Triton kernels of the gated delta rule's decode step, its gates and its gated norm.

The step is bound by memory: a program reads its tile of the state once, keeps it in registers over
the row's tokens, and writes it once a token. Nothing here waits for the device or sizes anything
by what is on it, so all of it can be captured in a graph.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.gated_delta_rule import check_update
from atom.model_ops.gated_delta_rule_chunked import L2_EPS
from atom.model_ops.guard import GuardCode
from atom.model_ops.guard_triton import GUARD_NUMBER, refuse_row, row_passes
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2

#: value columns of a state tile, and warps of its program: for one token a row, where no reduction
#: within one warp has a barrier, and for more, where states are written most of the time
STATE_TILE, DRAFTS_TILE = (32, 1), (64, 2)
_NORM_ELEMENTS = 2048
_GATE_ELEMENTS = 256


@triton.jit
def log_decay_of(a, A_log, dt_bias):
    x = a + dt_bias
    # the larger part stands outside of the exponential, which cannot overflow then
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return -tl.exp(A_log) * softplus


@triton.jit
def normalised(x, L2_EPS: tl.constexpr):
    """A key or query ``[K]`` in float32, of length 1."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + L2_EPS)


@triton.jit
def decayed_and_missing(state, key, value, decay, write):
    """The first half of a token: the decayed state, and what is to be written along its key."""
    state = state * tl.exp(decay)
    missing = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * write
    return state, missing


@triton.jit(do_not_specialize=["elements"])
def gdn_gating_kernel(
    a,
    b,
    A_log,
    dt_bias,
    log_decay,
    strength,
    elements,
    a_stride,
    b_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < elements
    token = (place // HEADS).to(tl.int64)
    head = place % HEADS
    gate = tl.load(a + token * a_stride + head, mask=real, other=0.0).to(tl.float32)
    write = tl.load(b + token * b_stride + head, mask=real, other=0.0).to(tl.float32)
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    tl.store(log_decay + place, log_decay_of(gate, rate, bias), mask=real)
    tl.store(strength + place, tl.sigmoid(write), mask=real)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_gated_kernel(
    x,
    gate,
    weight,
    output,
    eps,
    rows,
    x_stride,
    gate_stride,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_V)
    real = (row < rows)[:, None] & (column < V)[None, :]
    inside = ((row % HEADS) * V)[:, None] + column[None, :]
    token = (row // HEADS)[:, None]
    wide = tl.load(x + token * x_stride + inside, mask=real, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + inside, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 1) / V
    normed = wide * tl.rsqrt(mean + eps)[:, None] * scale[None, :]
    result = normed * opened * tl.sigmoid(opened)
    place = row[:, None] * V + column[None, :]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["pool_slots", "layer", "gate_stride", "strength_stride"])
def gated_delta_rule_update_kernel(
    q,
    k,
    v,
    gate,
    strength,
    A_log,
    dt_bias,
    output,
    pool,
    query_start_loc,
    num_accepted_tokens,
    state_slots,
    state_table,
    record,
    scale,
    pool_slots,
    layer,
    q_stride,
    k_stride,
    v_stride,
    gate_stride,
    strength_stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr,
    L2_EPS: tl.constexpr,
    GATES_INSIDE: tl.constexpr,
    GUARD: tl.constexpr,
    COUNT_CODE: tl.constexpr,
    SLOT_CODE: tl.constexpr,
):
    """One tile ``[K, BLOCK_V]`` of one value head's state, over the tokens of one row."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    begin = tl.load(query_start_loc + row)
    # no branch for padding: what is read behind one waits for the number of tokens
    tokens = tl.load(query_start_loc + row + 1) - begin
    used = tokens > 0
    count = tl.load(num_accepted_tokens + row)
    group = tl.load(state_slots + row)
    entry = state_table + row * WIDTH
    if GUARD == 0:
        # this reads wherever the count points, as upstream does
        slot = tl.load(entry + count - 1, mask=used, other=0)
        worst = slot
    else:
        # a vector of them, reduced, would make the compiler spill four times as much
        slot = tl.load(entry)
        lowest = slot
        highest = slot
        for place in tl.static_range(1, WIDTH):
            other = tl.load(entry + place)
            lowest = tl.minimum(lowest, other)
            highest = tl.maximum(highest, other)
            slot = tl.where(count == place + 1, other, slot)
        worst = tl.where(lowest < 0, lowest, highest)
    group_passes = row_passes(used, count, group, WIDTH, pool_slots // WIDTH, GUARD)
    passes = group_passes & row_passes(used, count, worst, WIDTH, pool_slots, GUARD)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_columns = columns < V
    # two conditions: the first is known when the kernel is compiled
    if GUARD == 2:  # noqa: SIM102
        if passes == 0:
            bad = tl.where(group_passes, worst, group)
            slots = tl.where(group_passes, pool_slots, pool_slots // WIDTH)
            reports = (tl.program_id(0) == 0) & (head == 0)
            outputs = output + (begin.to(tl.int64) * HEADS + head) * V + columns
            refuse_row(
                *(record, reports, count, bad, slots, row, layer, COUNT_CODE, SLOT_CODE),
                *(outputs, tokens, HEADS * V, real_columns, WIDTH, BLOCK_V),
            )
            return

    keys = tl.arange(0, BLOCK_K)
    real_keys = keys < K
    tile = head * (K * V) + keys[:, None] * V + columns[None, :]
    real = (real_keys[:, None] & real_columns[None, :]) & used
    state = tl.load(pool + slot.to(tl.int64) * (HEADS * K * V) + tile, mask=real, other=0.0)

    key_head = head // (HEADS // KEY_HEADS)
    if GATES_INSIDE:
        rate = tl.load(A_log + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
    # each token is asked for a token ahead: nothing else covers the way to memory
    first = begin.to(tl.int64)
    own_key = tl.load(k + first * k_stride + key_head * K + keys, mask=real_keys & used, other=0.0)
    own_query = tl.load(
        q + first * q_stride + key_head * K + keys, mask=real_keys & used, other=0.0
    )
    own_value = tl.load(
        v + first * v_stride + head * V + columns, mask=real_columns & used, other=0.0
    )
    own_decay = tl.load(gate + first * gate_stride + head, mask=used, other=0.0)
    own_write = tl.load(strength + first * strength_stride + head, mask=used, other=0.0)
    own_slot = tl.load(entry, mask=used, other=0)
    for number in range(tokens):
        token = (begin + number).to(tl.int64)
        there = number + 1 < tokens
        token_key = k + (token + 1) * k_stride + key_head * K + keys
        next_key = tl.load(token_key, mask=real_keys & there, other=0.0)
        token_query = q + (token + 1) * q_stride + key_head * K + keys
        next_query = tl.load(token_query, mask=real_keys & there, other=0.0)
        token_value = v + (token + 1) * v_stride + head * V + columns
        next_value = tl.load(token_value, mask=real_columns & there, other=0.0)
        next_decay = tl.load(gate + (token + 1) * gate_stride + head, mask=there, other=0.0)
        next_write = tl.load(strength + (token + 1) * strength_stride + head, mask=there, other=0.0)
        next_slot = tl.load(entry + number + 1, mask=there, other=0)
        written = own_slot.to(tl.int64)
        value = own_value
        decay = own_decay.to(tl.float32)
        write = own_write.to(tl.float32)
        if GATES_INSIDE:
            decay = log_decay_of(decay, rate, bias)
            write = tl.sigmoid(write)
        key = normalised(own_key, L2_EPS)
        query = normalised(own_query, L2_EPS) * scale
        own_key = next_key
        own_query = next_query
        own_value = next_value
        own_decay = next_decay
        own_write = next_write
        own_slot = next_slot
        # both reads are of the decayed state, so that neither waits for the other:
        # query @ (state + key (outer) missing) = query @ state + (query . key) * missing
        state, missing = decayed_and_missing(state, key, value, decay, write)
        result = tl.sum(state * query[:, None], 0) + tl.sum(query * key, 0) * missing
        state = state + key[:, None] * missing[None, :]
        tl.store(pool + written * (HEADS * K * V) + tile, state, mask=real)
        spot = output + (token * HEADS + head) * V + columns
        tl.store(spot, result.to(output.dtype.element_ty), mask=real_columns)


def packed(x: Tensor) -> tuple[Tensor, int]:
    """A tensor ``[T, ...]`` whose tokens are each contiguous, and the stride between them."""
    if not x[:1].is_contiguous():
        x = x.contiguous()
    return x, x.stride(0)


def gdn_gating_triton(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`atom.model_ops.gated_delta_rule.gdn_gating`."""
    (a, a_stride), (b, b_stride) = packed(a), packed(b)
    log_decay = torch.empty_like(a, dtype=torch.float32, memory_format=torch.contiguous_format)
    strength = torch.empty_like(log_decay)
    elements = log_decay.numel()
    if elements:
        gdn_gating_kernel[(ceil_div(elements, _GATE_ELEMENTS),)](
            *(a, b, A_log, dt_bias, log_decay, strength),
            *(elements, a_stride, b_stride),
            HEADS=a.shape[1],
            BLOCK=_GATE_ELEMENTS,
        )
    return log_decay, strength


def rms_norm_gated_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`atom.model_ops.gated_delta_rule.rms_norm_gated`."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    (x, x_stride), (gate, gate_stride) = packed(x), packed(gate)
    tokens, heads, size = x.shape
    block = next_power_of_2(size)
    block_rows = max(1, _NORM_ELEMENTS // block)
    if tokens:
        rms_norm_gated_kernel[(ceil_div(tokens * heads, block_rows),)](
            *(x, gate, weight, output, eps, tokens * heads, x_stride, gate_stride),
            HEADS=heads,
            V=size,
            BLOCK_ROWS=block_rows,
            BLOCK_V=block,
        )
    return output


def gated_delta_rule_update_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    meta: AttentionMetadata,
    *,
    guard: GuardMode,
    record: Tensor,
    layer: int,
    scale: float | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """See :func:`atom.model_ops.gated_delta_rule.gated_delta_rule_update`.

    Args:
        q: as there, like every argument that is not named here.
        k: as there.
        v: as there.
        g: as there.
        beta: as there.
        recurrent_state: as there.
        meta: as there.
        guard: as there; ``trap`` checks only where Triton compiles asserts in.
        record: as there.
        layer: as there.
        scale: as there.
        tile: value columns of a state tile (at most so many) and warps of its program; by default
            what serves so many tokens a row.
    """
    gates = (g, beta, None, None)
    return _update(q, k, v, gates, recurrent_state, meta, guard, record, layer, scale, tile)


def gated_delta_rule_update_from_gates_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    meta: AttentionMetadata,
    *,
    guard: GuardMode,
    record: Tensor,
    layer: int,
    scale: float | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """See :func:`atom.model_ops.gated_delta_rule.gated_delta_rule_update_from_gates`.

    ``tile`` is that of :func:`gated_delta_rule_update_triton`.
    """
    gates = (a, b, A_log, dt_bias)
    return _update(q, k, v, gates, recurrent_state, meta, guard, record, layer, scale, tile)


def _update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    recurrent_state: Tensor,
    meta: AttentionMetadata,
    guard: GuardMode,
    record: Tensor,
    layer: int,
    scale: float | None,
    tile: tuple[int, int] | None,
) -> Tensor:
    check_update(q, k, v, recurrent_state, meta)
    assert recurrent_state.is_contiguous()
    assert meta.state_table.is_contiguous()
    heads, key_heads, key_size, size = v.shape[1], k.shape[1], k.shape[2], v.shape[2]
    width = meta.state_table.shape[1]
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if v.shape[0] == 0 or meta.num_rows == 0:
        return output
    (q, q_stride), (k, k_stride), (v, v_stride) = packed(q), packed(k), packed(v)
    (gate, gate_stride), (strength, strength_stride) = packed(gates[0]), packed(gates[1])
    tile = tile or (STATE_TILE if meta.max_query_len <= 1 else DRAFTS_TILE)
    block_v = min(next_power_of_2(size), tile[0])
    gated_delta_rule_update_kernel[(ceil_div(size, block_v), heads, meta.num_rows)](
        *(q, k, v, gate, strength, gates[2], gates[3], output, recurrent_state),
        *(meta.query_start_loc, meta.num_accepted_tokens, meta.state_slots, meta.state_table),
        record,
        key_size**-0.5 if scale is None else scale,
        recurrent_state.shape[0],
        layer,
        *(q_stride, k_stride, v_stride, gate_stride, strength_stride),
        KEY_HEADS=key_heads,
        HEADS=heads,
        K=key_size,
        V=size,
        BLOCK_K=next_power_of_2(key_size),
        BLOCK_V=block_v,
        WIDTH=width,
        L2_EPS=L2_EPS,
        GATES_INSIDE=gates[2] is not None,
        GUARD=GUARD_NUMBER[guard],
        COUNT_CODE=int(GuardCode.RECURRENT_COUNT),
        SLOT_CODE=int(GuardCode.RECURRENT_SLOT),
        num_warps=tile[1],
    )
    return output
