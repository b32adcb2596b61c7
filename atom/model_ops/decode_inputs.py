"""What a step's layers need, derived on the device from lengths, state groups and block tables.

The host sends one small tensor of whole numbers a step; a single launch turns it into packed token
ids, positions, cache slots and state slots. Nothing here waits for the host, and every shape
depends on host numbers alone, so a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atom.model_ops.attention_metadata import AttentionMetadata

#: rows of the metadata tensor
CONTEXT_LENS, QUERY_LENS, STATE_SLOTS, NUM_ACCEPTED_TOKENS = range(4)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Preallocated outputs of :func:`decode_inputs` and :func:`prefill_inputs`.

    Attributes:
        query_start_loc: int32 ``[S + 1]``.
        positions: int64, at least ``[T]``.
        slot_mapping: int64, at least ``[T]``.
        input_ids: int64, at least ``[T]``; a prompt's are left as they are.
        state_table: int32 ``[S, 1 + draft tokens]``.
    """

    query_start_loc: Tensor
    positions: Tensor
    slot_mapping: Tensor
    input_ids: Tensor
    state_table: Tensor

    @classmethod
    def allocate(
        cls, rows: int, tokens: int, draft_tokens: int, device: torch.device | str
    ) -> StepInputs:
        """Zeroed outputs for ``rows`` requests and ``tokens`` tokens, padding included."""
        ids, positions, slots = (
            torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        table = torch.zeros(rows, 1 + draft_tokens, dtype=torch.int32, device=device)
        return cls(starts, positions, slots, ids, table)

    def attention_metadata(
        self,
        metadata: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        *,
        max_query_len: int,
        max_context_len: int,
        is_prefill: bool,
    ) -> AttentionMetadata:
        """The batch as operators see it: views of these outputs and of the host's tensors.

        Args:
            metadata: int32 ``[4, S]``, as :func:`decode_inputs` takes it.
            block_tables: int32 ``[S, blocks]``.
            num_tokens: ``T``, padding included.
            max_query_len: upper bound of a row's query length.
            max_context_len: upper bound of a row's context length.
            is_prefill: whether the rows are prompt chunks.
        """
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            context_lens=metadata[CONTEXT_LENS],
            state_slots=metadata[STATE_SLOTS],
            num_accepted_tokens=metadata[NUM_ACCEPTED_TOKENS],
            state_table=self.state_table,
            block_tables=block_tables,
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            is_prefill=is_prefill,
        )


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Preallocated outputs for the sampler of a decode step; may have more rows than the batch.

    Attributes:
        ids: int64 ``[S, k]``, the drafts that the step verifies.
        number: int32 ``[S]``, query length less 1.
        positions: int64 ``[S]``, of the first verified token.
        table_rows: int32 ``[S]``, row of the token table; its last one for padding and for a state
            group that it has not. The state kernels' guard judges a bad group; here it must only
            not lead out of the table.
    """

    ids: Tensor
    number: Tensor
    positions: Tensor
    table_rows: Tensor


def table_rows(groups: Tensor, token_table: Tensor) -> Tensor:
    """``StepDrafts.table_rows`` of state groups, int64."""
    spare = token_table.shape[0] - 1
    return torch.where((groups >= 0) & (groups < spare), groups, spare).long()


def decode_inputs(
    metadata: Tensor,
    block_tables: Tensor,
    token_table: Tensor,
    num_tokens: int,
    block_size: int,
    *,
    out: StepInputs,
    drafts: StepDrafts | None = None,
) -> None:
    """Fill ``out`` for a decode batch.

    Row ``b`` with state group ``g`` and query length ``q`` gets ``q`` packed tokens: the ids
    ``token_table[g, 0 .. q - 1]`` at the positions ``context length + i``. Query lengths are cut to
    ``0 .. 1 + draft tokens``, and rows behind ``num_tokens`` tokens are cut off. A token whose
    position lies outside its block table, or whose table entry is negative, gets cache slot -1.
    Padding tokens get id 0, position 0 and slot -1; rows without a state group get state slots -1.
    A group outside the token table gets ids 0.

    Args:
        metadata: int32 ``[4, S]``: context lengths, query lengths, state groups, accepted tokens.
        block_tables: int32 ``[S, blocks]``.
        token_table: int64 ``[groups, 1 + draft tokens]``: last accepted token, then the drafts.
        num_tokens: ``T``, padding included.
        block_size: tokens of a KV block.
        out: written in place; its state table has ``1 + draft tokens`` columns.
        drafts: written too, if given; then the last row of the token table is no group's.
    """
    run = step_inputs_reference
    if metadata.is_cuda:
        from atom.model_ops import decode_inputs_triton

        run = decode_inputs_triton.step_inputs
    run(metadata, block_tables, token_table, num_tokens, block_size, out=out, drafts=drafts)


def prefill_inputs(
    metadata: Tensor,
    block_tables: Tensor,
    num_tokens: int,
    block_size: int,
    *,
    out: StepInputs,
) -> None:
    """Fill ``out`` for a batch of prompt chunks, but for the token ids: the host sends those.

    As :func:`decode_inputs`, with query lengths of any size.
    """
    if metadata.is_cuda:
        from atom.model_ops import decode_inputs_triton

        decode_inputs_triton.step_inputs(
            metadata, block_tables, None, num_tokens, block_size, out=out
        )
    else:
        step_inputs_reference(metadata, block_tables, None, num_tokens, block_size, out=out)


def step_inputs_reference(
    metadata: Tensor,
    block_tables: Tensor,
    token_table: Tensor | None,
    num_tokens: int,
    block_size: int,
    *,
    out: StepInputs,
    drafts: StepDrafts | None = None,
) -> None:
    """:func:`decode_inputs` in plain torch; :func:`prefill_inputs` without a token table."""
    contexts, lengths, groups, _ = metadata.long()
    columns = out.state_table.shape[1]
    lengths = lengths.clamp(min=0, max=None if token_table is None else columns)
    ends = lengths.cumsum(0).clamp(max=num_tokens)
    out.query_start_loc[0] = 0
    out.query_start_loc[1:] = ends
    tokens = torch.arange(num_tokens, device=metadata.device)
    rows = torch.searchsorted(ends, tokens, right=True)
    used = rows < len(ends)
    rows = rows.clamp(max=len(ends) - 1)
    index = tokens - out.query_start_loc.long()[rows]
    positions = torch.where(used, contexts[rows] + index, 0)
    out.positions[:num_tokens] = positions

    blocks = positions // block_size
    inside = used & (positions >= 0) & (blocks < block_tables.shape[1])
    entries = block_tables[rows, torch.where(inside, blocks, 0)].long()
    slots = entries * block_size + positions % block_size
    out.slot_mapping[:num_tokens] = torch.where(inside & (entries >= 0), slots, -1)

    draft = torch.arange(columns, device=metadata.device)
    states = groups[:, None] * columns + draft
    out.state_table.copy_(torch.where(groups[:, None] >= 0, states, -1))
    if token_table is not None:
        group = groups[rows]
        owned = used & (group >= 0) & (group < token_table.shape[0])
        ids = token_table[torch.where(owned, group, 0), torch.where(owned, index, 0)]
        out.input_ids[:num_tokens] = torch.where(owned, ids, 0)
        if drafts is not None:
            count = metadata.shape[1]
            places = table_rows(groups, token_table)
            drafts.table_rows[:count] = places
            drafts.ids[:count] = token_table[places, 1:]
            drafts.number[:count] = metadata[QUERY_LENS] - 1
            drafts.positions[:count] = contexts + 1
