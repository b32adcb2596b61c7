"""Triton kernel of the decode step that keeps one state and applies accepted tokens a step later.

A program reads its tile of the state, applies the tokens of the ring, writes the tile, and answers
the row's own tokens from it. It is capturable in a graph, as the kernel is that keeps a state for
each draft.

No state behind an own token is ever made: what a key or a query finds there is what it finds in the
tile as written, decayed, and its dot product with each token's key since, times what that token
wrote. So no reduction over the tile waits for another one. Sums are those of the recurrence in
another order, and the two ways of keeping states agree within rounding.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, assignment"
import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.config import GuardMode
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.gated_delta_rule_chunked import L2_EPS
from atom.model_ops.gated_delta_rule_replay import check_replay
from atom.model_ops.gated_delta_rule_triton import log_decay_of, packed
from atom.model_ops.guard import GuardCode
from atom.model_ops.guard_triton import GUARD_NUMBER, refuse_row, row_passes
from atom.model_ops.launch_sizes import ceil_div, next_power_of_2
from atom.model_ops.replay_ring import ReplayRing

#: value columns of a state tile, and warps of its program
REPLAY_TILE = (32, 1)


@triton.jit
def reciprocal_length(x, L2_EPS: tl.constexpr):
    """What brings a float32 key or query ``[K]`` to length 1."""
    return tl.rsqrt(tl.sum(x * x, 0) + L2_EPS)


@triton.jit(do_not_specialize=["groups", "layer", "gate_stride", "strength_stride"])
def gated_delta_rule_replay_kernel(
    q,
    k,
    v,
    gate,
    strength,
    A_log,
    dt_bias,
    output,
    pool,
    kept,
    kept_gates,
    query_start_loc,
    context_lens,
    num_accepted_tokens,
    state_slots,
    record,
    scale,
    groups,
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
    MOST_TOKENS: tl.constexpr,
    L2_EPS: tl.constexpr,
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
    count = tl.load(num_accepted_tokens + row)
    group = tl.load(state_slots + row)
    context = tl.load(context_lens + row)
    first = tl.program_id(0) == 0
    passes = row_passes(tokens > 0, count, group, MOST_TOKENS, groups, GUARD)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_columns = columns < V
    # two conditions: the first is known when the kernel is compiled
    if GUARD == 2:  # noqa: SIM102
        if passes == 0:
            outputs = output + (begin.to(tl.int64) * HEADS + head) * V + columns
            refuse_row(
                *(record, first & (head == 0), count, group, groups, row, layer),
                *(COUNT_CODE, SLOT_CODE, outputs, tokens, HEADS * V, real_columns),
                *(MOST_TOKENS, BLOCK_V),
            )
            return
    used = tokens > 0
    # no count leads to a place that this step writes
    applied = tl.where(used, tl.minimum(tl.maximum(count, 0), MOST_TOKENS), 0)

    PLACES: tl.constexpr = 2 * MOST_TOKENS
    PLACE: tl.constexpr = KEY_HEADS * K + HEADS * V
    keys = tl.arange(0, BLOCK_K)
    real_keys = keys < K
    tile = head * (K * V) + keys[:, None] * V + columns[None, :]
    real = (real_keys[:, None] & real_columns[None, :]) & used
    # without a guard this reads wherever the group points
    place = pool + group.to(tl.int64) * (HEADS * K * V) + tile
    state = tl.load(place, mask=real, other=0.0)

    key_head = head // (HEADS // KEY_HEADS)
    ring = kept + group.to(tl.int64) * (PLACES * PLACE)
    ring_gates = kept_gates + group.to(tl.int64) * (PLACES * 2 * HEADS) + head
    key_place = key_head * K + keys
    value_place = KEY_HEADS * K + head * V + columns
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    # each token is asked for a token ahead: nothing else covers the way to memory
    at = ((context - applied) % PLACES + PLACES) % PLACES
    there = applied > 0
    key = tl.load(ring + at * PLACE + key_place, mask=real_keys & there, other=0.0)
    value = tl.load(ring + at * PLACE + value_place, mask=real_columns & there, other=0.0)
    decay = tl.load(ring_gates + at * 2 * HEADS, mask=there, other=0.0)
    write = tl.load(ring_gates + at * 2 * HEADS + HEADS, mask=there, other=0.0)
    first_token = begin.to(tl.int64)
    own_key = tl.load(
        k + first_token * k_stride + key_head * K + keys, mask=real_keys & used, other=0.0
    )
    own_query = tl.load(
        q + first_token * q_stride + key_head * K + keys, mask=real_keys & used, other=0.0
    )
    own_value = tl.load(
        v + first_token * v_stride + head * V + columns, mask=real_columns & used, other=0.0
    )
    own_decay = tl.load(gate + first_token * gate_stride + head, mask=used, other=0.0)
    own_write = tl.load(strength + first_token * strength_stride + head, mask=used, other=0.0)
    for number in range(applied):
        at = ((context - applied + number + 1) % PLACES + PLACES) % PLACES
        there = number + 1 < applied
        next_key = tl.load(ring + at * PLACE + key_place, mask=real_keys & there, other=0.0)
        next_value = tl.load(ring + at * PLACE + value_place, mask=real_columns & there, other=0.0)
        next_decay = tl.load(ring_gates + at * 2 * HEADS, mask=there, other=0.0)
        next_write = tl.load(ring_gates + at * 2 * HEADS + HEADS, mask=there, other=0.0)
        # lengths go into scalars and values, which are few beside the tile
        unit = key.to(tl.float32)
        length = reciprocal_length(unit, L2_EPS)
        factor = tl.exp(decay)
        seen = tl.sum(state * unit[:, None], 0) * (factor * length)
        missing = (value.to(tl.float32) - seen) * (write * length)
        state = state * factor + unit[:, None] * missing[None, :]
        key = next_key
        value = next_value
        decay = next_decay
        write = next_write
    tl.store(place, state, mask=real)

    # one program a key head keeps the keys, and one a head the gates
    keeps_key = first & (head % (HEADS // KEY_HEADS) == 0)
    units = ()
    lengths = ()
    factors = ()
    wrote = ()
    for number in tl.static_range(MOST_TOKENS):
        token = (begin + number).to(tl.int64)
        at = ((context + number) % PLACES + PLACES) % PLACES
        there = number < tokens
        if number + 1 < MOST_TOKENS:
            follows = number + 1 < tokens
            token_key = k + (token + 1) * k_stride + key_head * K + keys
            next_key = tl.load(token_key, mask=real_keys & follows, other=0.0)
            token_query = q + (token + 1) * q_stride + key_head * K + keys
            next_query = tl.load(token_query, mask=real_keys & follows, other=0.0)
            token_value = v + (token + 1) * v_stride + head * V + columns
            next_value = tl.load(token_value, mask=real_columns & follows, other=0.0)
            token_decay = gate + (token + 1) * gate_stride + head
            next_decay = tl.load(token_decay, mask=follows, other=0.0)
            token_write = strength + (token + 1) * strength_stride + head
            next_write = tl.load(token_write, mask=follows, other=0.0)
        decay = log_decay_of(own_decay.to(tl.float32), rate, bias)
        write = tl.sigmoid(own_write.to(tl.float32))
        tl.store(ring + at * PLACE + key_place, own_key, mask=real_keys & (keeps_key & there))
        tl.store(ring + at * PLACE + value_place, own_value, mask=real_columns & there)
        tl.store(ring_gates + at * 2 * HEADS, decay, mask=first & there)
        tl.store(ring_gates + at * 2 * HEADS + HEADS, write, mask=first & there)
        unit = own_key.to(tl.float32)
        query = own_query.to(tl.float32)
        length = reciprocal_length(unit, L2_EPS)
        query_length = reciprocal_length(query, L2_EPS) * scale
        seen = tl.zeros((BLOCK_V,), tl.float32)
        result = tl.zeros((BLOCK_V,), tl.float32)
        if there:
            seen = tl.sum(state * unit[:, None], 0) * length
            result = tl.sum(state * query[:, None], 0) * query_length
        for before in tl.static_range(number):
            near = tl.sum(unit * units[before], 0) * (length * lengths[before])
            asked = tl.sum(query * units[before], 0) * (query_length * lengths[before])
            seen = seen * factors[before] + near * wrote[before]
            result = result * factors[before] + asked * wrote[before]
        factor = tl.exp(decay)
        missing = (own_value.to(tl.float32) - seen * factor) * write
        asked = tl.sum(query * unit, 0) * (query_length * length)
        result = result * factor + asked * missing
        spot = output + (token * HEADS + head) * V + columns
        tl.store(spot, result.to(output.dtype.element_ty), mask=real_columns & there)
        units += (unit,)
        lengths += (length,)
        factors += (factor,)
        wrote += (missing,)
        if number + 1 < MOST_TOKENS:
            own_key = next_key
            own_query = next_query
            own_value = next_value
            own_decay = next_decay
            own_write = next_write


def gated_delta_rule_replay_from_gates_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    ring: ReplayRing,
    meta: AttentionMetadata,
    *,
    guard: GuardMode,
    record: Tensor,
    layer: int,
    scale: float | None = None,
    tile: tuple[int, int] = REPLAY_TILE,
) -> Tensor:
    """See :func:`~atom.model_ops.gated_delta_rule_replay.gated_delta_rule_replay_from_gates`.

    ``tile``: value columns of a state tile (at most so many) and warps of its program.
    """
    check_replay(q, k, v, recurrent_state, ring, meta)
    assert recurrent_state.is_contiguous()
    assert ring.keys_values.is_contiguous()
    assert ring.gates.is_contiguous()
    heads, key_heads, key_size, size = v.shape[1], k.shape[1], k.shape[2], v.shape[2]
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if v.shape[0] == 0 or meta.num_rows == 0:
        return output
    (q, q_stride), (k, k_stride), (v, v_stride) = packed(q), packed(k), packed(v)
    (a, a_stride), (b, b_stride) = packed(a), packed(b)
    block_v = min(next_power_of_2(size), tile[0])
    gated_delta_rule_replay_kernel[(ceil_div(size, block_v), heads, meta.num_rows)](
        *(q, k, v, a, b, A_log, dt_bias, output, recurrent_state),
        *(ring.keys_values, ring.gates),
        *(meta.query_start_loc, meta.context_lens, meta.num_accepted_tokens, meta.state_slots),
        record,
        key_size**-0.5 if scale is None else scale,
        recurrent_state.shape[0],
        layer,
        *(q_stride, k_stride, v_stride, a_stride, b_stride),
        KEY_HEADS=key_heads,
        HEADS=heads,
        K=key_size,
        V=size,
        BLOCK_K=next_power_of_2(key_size),
        BLOCK_V=block_v,
        MOST_TOKENS=ring.most_tokens,
        L2_EPS=L2_EPS,
        GUARD=GUARD_NUMBER[guard],
        COUNT_CODE=int(GuardCode.RECURRENT_COUNT),
        SLOT_CODE=int(GuardCode.RECURRENT_SLOT),
        num_warps=tile[1],
    )
    return output
