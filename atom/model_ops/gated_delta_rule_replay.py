"""Gated delta rule with one state a request: accepted tokens are applied again a step later.

:func:`~atom.model_ops.gated_delta_rule.gated_delta_rule_update` reads a state and writes one for
each of a step's tokens, since any of them may turn out to be the last that stands. Here a step
leaves its tokens in a ring (:mod:`atom.model_ops.replay_ring`) and no state. The next step reads
the one state, applies the tokens that stood, writes the state back, and goes on over its own tokens
in registers. That is one state read and one written, however many drafts there are. The reference
does the same arithmetic for a token both times, in the same order; the kernel adds in another.

A prompt chunk is :func:`~atom.model_ops.gated_delta_rule.gated_delta_rule_prefill` with the groups
as its slots, behind :func:`~atom.model_ops.replay_ring.clear_rings`.

An unguarded count that is too large applies as many tokens as a step may have: it makes the state
wrong in silence, and leads nowhere. An unguarded group outside of the pool is an illegal access.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.config import GuardMode
from atom.errors import BadInput
from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.gated_delta_rule import (
    check_heads,
    gated_delta_rule_recurrence,
    gdn_gating_reference,
)
from atom.model_ops.guard import GuardCode, passes, unchecked
from atom.model_ops.recurrent_state_slots import RecurrentStatePool
from atom.model_ops.replay_ring import ReplayRing


def gated_delta_rule_replay_from_gates(
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
) -> Tensor:
    """Decode step of 1 to ``1 + draft tokens`` tokens a row, keeping one state and the tokens.

    A row's state is first brought behind the last ``num_accepted_tokens`` tokens in front of its
    context length, as the ring has them, and written back. The outputs of the row's own tokens
    follow from there; the tokens go to the ring.

    Args:
        q: ``[T, HK, K]``; normalised inside, like ``k``.
        k: ``[T, HK, K]``.
        v: ``[T, HV, V]``; value head ``h`` uses key head ``h // (HV / HK)``.
        a: ``[T, HV]``, see :func:`~atom.model_ops.gated_delta_rule.gdn_gating`.
        b: ``[T, HV]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        recurrent_state: float32 ``[groups, HV, K, V]``, one layer's pool; changed in place.
        ring: the layer's; changed in place.
        meta: the batch; its ``state_table`` is not read.
        guard: what happens to a row whose count or group is out of range. With ``none`` a group is
            read and written wherever it lies; of a count that is too large ``1 + draft tokens``
            tokens are applied, and of one below 1 none.
        record: int32 ``[8]``, the guard's record.
        layer: the layer's number, for the record.
        scale: factor of the queries; ``K ** -0.5`` by default.

    Returns:
        ``[T, HV, V]`` in the dtype of ``v``; zero for a row that the guard refused, and what
        padding tokens get is not defined.

    Raises:
        BadInput: if the heads do not fit each other, or a row may have more tokens than the ring
            has room for.
        DeviceError: by the reference under ``trap``.
        IllegalAccess: by the reference under ``none``, for an access outside of all pools.
    """
    run = gated_delta_rule_replay_from_gates_reference
    if v.is_cuda:
        from atom.model_ops import gated_delta_rule_replay_triton as kernels

        run = kernels.gated_delta_rule_replay_from_gates_triton
    return run(
        *(q, k, v, a, b, A_log, dt_bias, recurrent_state, ring, meta),
        guard=guard,
        record=record,
        layer=layer,
        scale=scale,
    )


def gated_delta_rule_replay_from_gates_reference(
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
) -> Tensor:
    """:func:`gated_delta_rule_replay_from_gates` in plain torch; reads the batch on the host."""
    check_replay(q, k, v, recurrent_state, ring, meta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    log_decay, strength = gdn_gating_reference(a, b, A_log, dt_bias)
    gates = torch.stack((log_decay, strength), 1)
    output = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    pool = RecurrentStatePool(recurrent_state)
    starts, groups = meta.query_start_loc.tolist(), meta.state_slots.tolist()
    counts, contexts = meta.num_accepted_tokens.tolist(), meta.context_lens.tolist()
    for row, (group, count, context) in enumerate(zip(groups, counts, contexts, strict=True)):
        part = slice(starts[row], starts[row + 1])
        if part.stop <= part.start or not passes(
            guard,
            record,
            count=count,
            slot=group,
            highest_count=ring.most_tokens,
            slots=pool.slots,
            row=row,
            layer=layer,
            count_code=GuardCode.RECURRENT_COUNT,
            slot_code=GuardCode.RECURRENT_SLOT,
        ):
            continue
        rows = _RingOfGroup(ring, group)
        state = pool.read(group)
        applied = min(max(count, 0), ring.most_tokens)
        for position in range(context - applied, context):
            kept, gate = rows.read(position)
            key, value = kept.split([k[0].numel(), v[0].numel()])
            decay, write = gate
            state = gated_delta_rule_recurrence(
                *(torch.zeros_like(k[:1]), key.view_as(k[:1]), value.view_as(v[:1])),
                *(decay[None], write[None], state, scale),
            )[1][0]
        pool.write(group, state)
        outputs, _ = gated_delta_rule_recurrence(
            q[part], k[part], v[part], log_decay[part], strength[part], state, scale
        )
        output[part] = outputs.to(v.dtype)
        for number, token in enumerate(range(part.start, part.stop)):
            kept = torch.cat((k[token].flatten(), v[token].flatten()))
            rows.write(context + number, kept, gates[token])
    return output


class _RingOfGroup:
    """One group's places, wherever they lie."""

    def __init__(self, ring: ReplayRing, group: int) -> None:
        self._ring, self._group = ring, group

    def _at(self, position: int) -> tuple[Tensor, Tensor]:
        number = self._group * self._ring.places + position % self._ring.places
        kept, gates = self._ring.keys_values, self._ring.gates
        length, pair = kept.shape[-1], gates.shape[-2:]
        return (
            unchecked(kept, number * length, length),
            unchecked(gates, number * pair.numel(), pair.numel()).view(pair),
        )

    def read(self, position: int) -> tuple[Tensor, Tensor]:
        kept, gates = self._at(position)
        return kept.clone(), gates.clone()

    def write(self, position: int, kept: Tensor, gates: Tensor) -> None:
        place, pair = self._at(position)
        place.copy_(kept)
        pair.copy_(gates)


def check_replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    recurrent_state: Tensor,
    ring: ReplayRing,
    meta: AttentionMetadata,
) -> None:
    """Refuse heads, states and a ring that do not fit each other, or too many tokens a row.

    Raises:
        BadInput: with the shapes or numbers.
    """
    check_heads(q, k, v, recurrent_state)
    groups, places = recurrent_state.shape[0], ring.places
    kept = (groups, places, k[:1].numel() + v[:1].numel())
    if v.shape[0] and (
        ring.keys_values.shape != kept or ring.gates.shape != (groups, places, 2, v.shape[1])
    ):
        raise BadInput(
            f"gated delta rule: a ring of {tuple(ring.keys_values.shape)} and "
            f"{tuple(ring.gates.shape)} for {groups} states, keys {tuple(k.shape)} and values "
            f"{tuple(v.shape)}; expected [groups, places, HK * K + HV * V] and "
            "[groups, places, 2, HV]"
        )
    if meta.max_query_len > ring.most_tokens:
        raise BadInput(
            f"gated delta rule: rows of up to {meta.max_query_len} tokens, but a ring of {places} "
            f"places has room for {ring.most_tokens}; verify fewer draft tokens"
        )
