"""What the recurrent layers of a prefill step derive from its batch, once for all of them.

A small model's prefill takes the host longer than the device, and most of that was this, once a
layer.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata
from atom.model_ops.gated_delta_rule_chunked import CHUNK_SIZE, chunk_bound, lay_out_chunks


class PrefillPlan:
    """Where each row's state is read and written, and where the chunks of its tokens lie.

    How many rows are real is not known on the host. So every row stores: one that is not real
    repeats the first real one's store, or puts back what slot 0 holds where there is none.

    Args:
        meta: the batch, with at least one row.
        slots: int ``[S]``, each row's slot in place of ``state_table[row, 0]``.

    Attributes:
        meta: the batch.
        slots: int64 ``[S]``, read by each row; 0 for one that is not real.
        continued: bool ``[S, 1, 1, 1]``, whether a row goes on from what its slot holds.
        source: int64 ``[S]``, the row whose end each row stores.
        stores: bool ``[S, 1, 1, 1]``, whether that one is real.
        written: int64 ``[S]``, slot that each row stores to.
    """

    def __init__(self, meta: AttentionMetadata, slots: Tensor | None = None) -> None:
        self.meta = meta
        real = (meta.query_start_loc.diff() > 0) & (meta.state_slots >= 0)
        self.slots = torch.where(real, meta.state_table[:, 0] if slots is None else slots, 0).long()
        self.continued = (real & (meta.context_lens > 0))[:, None, None, None]
        first = real.to(torch.uint8).argmax()
        every = torch.arange(meta.num_rows, device=real.device)
        self.source = torch.where(real, every, first)
        self.stores = real[self.source][:, None, None, None]
        self.written = self.slots[self.source]

    @cached_property
    def start(self) -> Tensor:
        """int64 ``[S + 1]``, where each row's tokens begin.

        A fresh tensor: flash-linear-attention caches what it derives from this object by identity.
        """
        return self.meta.query_start_loc.to(torch.int64, copy=True)

    @cached_property
    def chunk_indices(self) -> Tensor:
        """int64 ``[N, 2]``: row and number of each chunk, as flash-linear-attention takes them.

        Its own numbering reads the lengths on the host. Entries past the last chunk name one behind
        every row's end, where all its kernels load and store nothing.
        """
        meta = self.meta
        tokens = meta.num_tokens
        bound = chunk_bound(tokens, meta.num_rows, meta.max_query_len, CHUNK_SIZE)
        chunks = lay_out_chunks(self.start, bound, CHUNK_SIZE)
        row = torch.where(chunks.real, chunks.row, 0)
        return torch.stack((row, torch.where(chunks.real, chunks.number, tokens)), dim=1)
