"""Where a prompt's chunks end, and which of those ends leave a state checkpoint."""

from __future__ import annotations

from atom.model_engine.block_manager import BlockManager
from atom.model_engine.scheduled_batch import ScheduledRow
from atom.model_engine.sequence import Sequence


def chunk_length(
    manager: BlockManager, seq: Sequence, start: int, branch: int, budget: int, joins: bool
) -> int:
    """Tokens of a request's next chunk.

    With a prefix cache a chunk ends at the last boundary before the prompt's end, where the next
    prompt with this prefix resumes, and at the place where prompts were seen to part. Other chunks
    that do not reach the end are cut back to a boundary.

    Args:
        manager: knows the boundaries and the checkpoints.
        seq: the request.
        start: its tokens that are computed.
        branch: boundary at which prompts part; 0 for none.
        budget: tokens left in the batch.
        joins: whether the batch has rows already.

    Returns:
        Tokens; 0 when what is left of the batch's budget reaches no boundary, so that the request
        waits for the next prefill batch.
    """
    prompt = seq.num_tokens
    end = min(start + budget, prompt)
    if not manager.prefix_caching:
        return end - start
    spacing = manager.checkpoint_spacing
    for boundary in (branch, (prompt - 1) // spacing * spacing):
        if start < boundary <= end and not manager.has_checkpoint(seq, boundary):
            return boundary - start
    if end < prompt:
        aligned = end // spacing * spacing
        if aligned > start:
            return aligned - start
        # a budget under one spacing still has to get on
        return 0 if joins else end - start
    return end - start


def prefill_row(
    manager: BlockManager, seq: Sequence, length: int, saved: set[bytes]
) -> ScheduledRow:
    """The row of a request's next chunk, with a checkpoint slot reserved if one is due.

    Args:
        manager: gives the slot.
        seq: the request, admitted.
        length: tokens of the chunk.
        saved: keys of the checkpoints that the batch saves; this row's is added.
    """
    end = seq.num_computed_tokens + length
    row = ScheduledRow(seq, length, seq.num_computed_tokens, end == seq.num_tokens)
    row.restore_slot = seq.restore_slot
    if manager.prefix_caching and end % manager.checkpoint_spacing == 0:
        state_hash = manager.block_hash_at(seq, end)
        if state_hash not in saved and manager.checkpoints.find(state_hash) is None:
            row.save_slot = manager.checkpoints.reserve()
            row.save_hash = state_hash
            saved.add(state_hash)
    return row
