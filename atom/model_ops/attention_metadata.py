"""What one step's layers know of its batch: lengths, state slots and cache places."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One batch as the operators see it. A batch is wholly prefill or wholly decode.

    Padding rows stand at the end, with a query length of 0 and a state slot of -1. Padding tokens
    stand behind ``query_start_loc[-1]`` and have a slot mapping of -1. Operators skip both.

    Attributes:
        query_start_loc: int32 ``[S + 1]``, where each row's tokens begin in the packed batch.
        context_lens: int32 ``[S]``, tokens of the request that are in the caches already.
        state_slots: int32 ``[S]``, the request's state group; -1 for padding.
        num_accepted_tokens: int32 ``[S]``, accepted drafts of the last step, plus 1. Decode only.
        state_table: int32 ``[S, 1 + draft tokens]``, the group's recurrent-state slots.
        block_tables: int32 ``[S, blocks]``, KV blocks of each row in order.
        positions: int64 ``[T]``, position of each token in its request.
        slot_mapping: int64 ``[T]``, ``block * block size + offset`` of each token; -1 for padding.
        num_tokens: ``T``, padding included.
        max_query_len: upper bound of a row's query length.
        max_context_len: upper bound of a row's context length.
        is_prefill: whether the rows are prompt chunks.
    """

    query_start_loc: Tensor
    context_lens: Tensor
    state_slots: Tensor
    num_accepted_tokens: Tensor
    state_table: Tensor
    block_tables: Tensor
    positions: Tensor
    slot_mapping: Tensor
    num_tokens: int
    max_query_len: int
    max_context_len: int
    is_prefill: bool

    @property
    def num_rows(self) -> int:
        """``S``, padding included."""
        return int(self.context_lens.shape[0])
