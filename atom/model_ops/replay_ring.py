"""Tokens of the last decode step, kept until it is known which of them stand.

A ring has a place for each of ``2 * (1 + draft tokens)`` positions of a request: the token at
position ``p`` lies at place ``p mod places``. A step at context length ``c`` with ``n`` accepted
tokens of the last one reads the places of positions ``c - n .. c - 1`` and writes those of
``c .. c + q - 1``. Both counts are at most ``1 + draft tokens``, so no step writes a place that it
reads, in whatever order its programs run.

A place of zeros is a token that changes nothing: a log decay of 0, a write strength of 0. A prompt
chunk leaves the state behind its last token, and a ring of zeros: whatever count follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata


def ring_places(draft_tokens: int) -> int:
    """Places of a ring: of a step's tokens, and of as many of the step before."""
    return 2 * (1 + draft_tokens)


@dataclass(frozen=True, slots=True)
class ReplayRing:
    """Rings of all state groups, of one layer or (with one more dimension in front) of all.

    Attributes:
        keys_values: ``[groups, places, HK * K + HV * V]``, keys before they are normalised, then
            values, in the dtype in which the layer computes them.
        gates: float32 ``[groups, places, 2, HV]``, log decay and write strength.
    """

    keys_values: Tensor
    gates: Tensor

    def layer(self, number: int) -> ReplayRing:
        """One layer's part of the rings of all layers."""
        return ReplayRing(self.keys_values[number], self.gates[number])

    @property
    def places(self) -> int:
        """Positions that a group's ring holds."""
        return int(self.gates.shape[-3])

    @property
    def most_tokens(self) -> int:
        """``1 + draft tokens``: of a step, and the highest valid count."""
        return self.places // 2


def clear_rings(ring: ReplayRing, meta: AttentionMetadata) -> None:
    """Empty the rings of a prefill batch's requests; nothing here waits for the device.

    Args:
        ring: of one layer or of all; changed in place.
        meta: the batch. Rows without tokens or without a state group have no ring.
    """
    real = (meta.query_start_loc.diff() > 0) & (meta.state_slots >= 0)
    group = torch.where(real, meta.state_slots, 0).long()
    # as in the prefill: every other row repeats the first real one's store, or puts back what
    # group 0 holds where there is none
    first = real.to(torch.uint8).argmax()
    source = torch.where(real, torch.arange(meta.num_rows, device=group.device), first)
    group, clears = group[source], real.any()
    # groups first, layers, if any, behind them
    for part in (ring.keys_values.movedim(-3, 0), ring.gates.movedim(-4, 0)):
        part[group] = torch.where(clears, 0.0, part[group[:1]])
