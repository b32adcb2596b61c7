"""Gated delta rule: the recurrent layer's gates, its prompt chunks and its speculative decode step.

One value head keeps a state matrix ``[K, V]``. A token decays it, reads it with its key, and writes
back what its value has more than the read::

    state = exp(g) * state
    state = state + key (outer) beta * (value - key @ state)
    output = scale * query @ state

A decode step verifies draft tokens, and only the sampler knows how many of them stay. So it leaves
the state behind every token in a slot of its own, and the next step starts from the slot that
``num_accepted_tokens`` names. Upstream trusts that count; see :mod:`atom.model_ops.guard`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.config import GuardMode
from atom.errors import BadInput
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.gated_delta_rule_chunked import (
    chunked_gated_delta_rule,
    kernel_gated_delta_rule,
    kernel_takes,
    l2_normalize,
)
from atom.model_ops.prefill_plan import PrefillPlan
from atom.model_ops.recurrent_state_slots import RecurrentStatePool, row_slots


def gdn_gating(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and write strength of each token and value head.

    Args:
        a: ``[T, HV]``.
        b: ``[T, HV]``.
        A_log: ``[HV]``, logarithm of the decay rate.
        dt_bias: ``[HV]``.

    Returns:
        float32 ``[T, HV]`` twice: ``-exp(A_log) * softplus(a + dt_bias)`` and ``sigmoid(b)``.
    """
    if a.is_cuda:
        from atom.model_ops.gated_delta_rule_triton import gdn_gating_triton

        return gdn_gating_triton(a, b, A_log, dt_bias)
    return gdn_gating_reference(a, b, A_log, dt_bias)


def gdn_gating_reference(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`gdn_gating` in plain torch."""
    log_decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return log_decay, b.float().sigmoid()


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each head, times its weight and ``silu(gate)``.

    Args:
        x: ``[T, HV, V]``.
        gate: ``[T, HV, V]``.
        weight: ``[V]``.
        eps: added to the mean square.

    Returns:
        ``[T, HV, V]`` in the dtype of ``x``; computed in float32.
    """
    if x.is_cuda:
        from atom.model_ops.gated_delta_rule_triton import rms_norm_gated_triton

        return rms_norm_gated_triton(x, gate, weight, eps)
    return rms_norm_gated_reference(x, gate, weight, eps)


def rms_norm_gated_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm_gated` in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(gate.float())).to(x.dtype)


def gated_delta_rule_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, for the tokens of one request.

    Args:
        q: ``[T, HK, K]``; normalised here, like ``k``.
        k: ``[T, HK, K]``.
        v: ``[T, HV, V]``.
        g: ``[T, HV]``, log decay.
        beta: ``[T, HV]``.
        state: ``[HV, K, V]`` before the first token.
        scale: factor of the queries.

    Returns:
        float32 outputs ``[T, HV, V]`` and the states behind each token ``[T, HV, K, V]``.
    """
    group = v.shape[1] // k.shape[1]
    queries = (l2_normalize(q) * scale).repeat_interleave(group, 1)
    keys = l2_normalize(k).repeat_interleave(group, 1)
    values, decay, strength = v.float(), g.float().exp(), beta.float()
    states = state.new_empty((v.shape[0], *state.shape), dtype=torch.float32)
    outputs = torch.empty_like(values)
    state = state.float()
    for token in range(v.shape[0]):
        key = keys[token, :, :, None]
        state = state * decay[token, :, None, None]
        missing = values[token] - (state * key).sum(1)
        state = state + key * (missing * strength[token, :, None])[:, None]
        states[token] = state
        outputs[token] = (state * queries[token, :, :, None]).sum(1)
    return outputs, states


def gated_delta_rule_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float | None = None,
    plan: PrefillPlan | None = None,
) -> Tensor:
    """Prompt chunks: start from the request's first slot, or from nothing, and leave the end there.

    A row with a context length of 0 starts from a state of zeros, whatever its slot holds. The slot
    is ``state_table[row, 0]`` both ways. No count is read, so there is nothing to guard.

    Args:
        q: ``[T, HK, K]``; normalised inside, like ``k``.
        k: ``[T, HK, K]``.
        v: ``[T, HV, V]``; value head ``h`` uses key head ``h // (HV / HK)``.
        g: float32 ``[T, HV]``, log decay.
        beta: float32 ``[T, HV]``.
        recurrent_state: float32 ``[slots, HV, K, V]``, one layer's pool; changed in place.
        meta: the batch.
        scale: factor of the queries; ``K ** -0.5`` by default.
        plan: what follows from the batch, to be made once for all layers; with it also other slots
            than those of the table.

    Returns:
        ``[T, HV, V]`` in the dtype of ``v``; what padding tokens get is not defined.

    Raises:
        BadInput: if the heads do not fit each other.
    """
    check_heads(q, k, v, recurrent_state)
    if v.shape[0] == 0 or meta.num_rows == 0:
        return torch.empty_like(v)
    plan = PrefillPlan(meta) if plan is None else plan
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kept = recurrent_state.index_select(0, plan.slots)
    # selecting, not multiplying: a slot that nobody has written yet may hold NaN
    initial = torch.where(plan.continued, kept, 0.0)
    parts = q, k, v, g, beta, initial
    if kernel_takes(q):
        output, final = kernel_gated_delta_rule(*parts, plan.start, plan.chunk_indices, scale)
    else:
        output, final = chunked_gated_delta_rule(*parts, plan.start, meta.max_query_len, scale)
    source = plan.source
    final = torch.where(plan.stores, final.index_select(0, source), kept.index_select(0, source))
    recurrent_state.index_copy_(0, plan.written, final)
    return output.to(v.dtype)


def gated_delta_rule_update(
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
) -> Tensor:
    """Decode step of 1 to ``1 + draft tokens`` tokens a row, keeping the state behind each of them.

    Row ``b`` starts from slot ``state_table[b, num_accepted_tokens[b] - 1]``; the state behind its
    token ``i`` goes to slot ``state_table[b, i]``.

    Args:
        q: ``[T, HK, K]``; normalised inside, like ``k``.
        k: ``[T, HK, K]``.
        v: ``[T, HV, V]``; value head ``h`` uses key head ``h // (HV / HK)``.
        g: float32 ``[T, HV]``, log decay.
        beta: float32 ``[T, HV]``.
        recurrent_state: float32 ``[slots, HV, K, V]``, one layer's pool; changed in place.
        meta: the batch.
        guard: what happens to a row whose count or slot is out of range. With ``none`` the table
            is read wherever the count points, and the pool wherever the table's value points.
        record: int32 ``[8]``, the guard's record.
        layer: the layer's number, for the record.
        scale: factor of the queries; ``K ** -0.5`` by default.

    Returns:
        ``[T, HV, V]`` in the dtype of ``v``; zero for a row that the guard refused, and what
        padding tokens get is not defined.

    Raises:
        BadInput: if the heads do not fit each other, or a row may have more tokens than slots.
        DeviceError: by the reference under ``trap``.
        IllegalAccess: by the reference under ``none``, for an access outside of all pools.
    """
    if v.is_cuda:
        from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_triton

        return gated_delta_rule_update_triton(
            *(q, k, v, g, beta, recurrent_state, meta),
            guard=guard,
            record=record,
            layer=layer,
            scale=scale,
        )
    return gated_delta_rule_update_reference(
        q,
        k,
        v,
        g,
        beta,
        recurrent_state,
        meta,
        guard=guard,
        record=record,
        layer=layer,
        scale=scale,
    )


def gated_delta_rule_update_reference(
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
) -> Tensor:
    """:func:`gated_delta_rule_update` in plain torch; reads the batch on the host."""
    check_update(q, k, v, recurrent_state, meta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    pool = RecurrentStatePool(recurrent_state)
    start = meta.query_start_loc.tolist()
    for row in range(meta.num_rows):
        begin, end = start[row], start[row + 1]
        if end <= begin:
            continue
        slots = row_slots(meta, row, end - begin, pool.slots, guard, record, layer)
        if slots is None:
            continue
        part = slice(begin, end)
        outputs, states = gated_delta_rule_recurrence(
            q[part], k[part], v[part], g[part], beta[part], pool.read(slots.initial), scale
        )
        output[part] = outputs.to(v.dtype)
        for slot, state in zip(slots.written, states, strict=True):
            pool.write(slot, state)
    return output


def gated_delta_rule_update_from_gates(
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
) -> Tensor:
    """:func:`gated_delta_rule_update` with :func:`gdn_gating` inside: on a GPU, one launch less.

    Args:
        q: as there, like every argument that is not named here.
        k: as there.
        v: as there.
        a: ``[T, HV]``.
        b: ``[T, HV]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        recurrent_state: as there.
        meta: as there.
        guard: as there.
        record: as there.
        layer: as there.
        scale: as there.
    """
    if v.is_cuda:
        from atom.model_ops.gated_delta_rule_triton import gated_delta_rule_update_from_gates_triton

        return gated_delta_rule_update_from_gates_triton(
            *(q, k, v, a, b, A_log, dt_bias, recurrent_state, meta),
            guard=guard,
            record=record,
            layer=layer,
            scale=scale,
        )
    return gated_delta_rule_update_from_gates_reference(
        *(q, k, v, a, b, A_log, dt_bias, recurrent_state, meta),
        guard=guard,
        record=record,
        layer=layer,
        scale=scale,
    )


def gated_delta_rule_update_from_gates_reference(
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
) -> Tensor:
    """:func:`gated_delta_rule_update_from_gates` in plain torch."""
    g, beta = gdn_gating_reference(a, b, A_log, dt_bias)
    return gated_delta_rule_update_reference(
        q,
        k,
        v,
        g,
        beta,
        recurrent_state,
        meta,
        guard=guard,
        record=record,
        layer=layer,
        scale=scale,
    )


def check_heads(q: Tensor, k: Tensor, v: Tensor, recurrent_state: Tensor) -> None:
    """Refuse heads that do not fit each other or the pool.

    Raises:
        BadInput: with the shapes.
    """
    fits = q.shape == k.shape and v.shape[1] % k.shape[1] == 0
    if not fits or recurrent_state.shape[1:] != (v.shape[1], k.shape[2], v.shape[2]):
        raise BadInput(
            f"gated delta rule: queries {tuple(q.shape)}, keys {tuple(k.shape)}, values "
            f"{tuple(v.shape)} and states {tuple(recurrent_state.shape)} do not fit; expected "
            f"[T, HK, K] twice, [T, HV, V] with HV a multiple of HK, and [slots, HV, K, V]"
        )


def check_update(
    q: Tensor, k: Tensor, v: Tensor, recurrent_state: Tensor, meta: AttentionMetadata
) -> None:
    """:func:`check_heads`, and refuse a step with more tokens a row than the request has slots.

    Raises:
        BadInput: with the numbers.
    """
    check_heads(q, k, v, recurrent_state)
    if meta.max_query_len > meta.state_table.shape[1]:
        raise BadInput(
            f"gated delta rule: rows of up to {meta.max_query_len} tokens, but a request has "
            f"{meta.state_table.shape[1]} state slots, one for each; verify fewer draft tokens"
        )
