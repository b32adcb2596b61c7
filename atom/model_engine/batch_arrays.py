"""A scheduled batch as the arrays that go to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atom.errors import DeviceError
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch, ScheduledRow
from atom.model_ops.decode_inputs import (
    CONTEXT_LENS,
    NUM_ACCEPTED_TOKENS,
    QUERY_LENS,
    STATE_SLOTS,
)
from atom.spec_decode.sampling import COLDEST

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
#: one seed of the engine gives each request its own stream
_SEED_STRIDE = 2**31


def all_greedy(batch: ScheduledBatch) -> bool:
    """Whether no request of the batch draws its tokens."""
    return all(row.seq.params.temperature < COLDEST for row in batch.rows)


def any_filter(batch: ScheduledBatch) -> bool:
    """Whether any request draws from less than the whole vocabulary."""
    return any(row.seq.params.top_k > 0 or row.seq.params.top_p < 1 for row in batch.rows)


def metadata_array(batch: ScheduledBatch, max_rows: int) -> IntArray:
    """int32 ``[4, max_rows]``: context lengths, query lengths, state groups, accepted tokens."""
    values = np.zeros((4, max_rows), dtype=np.int32)
    values[STATE_SLOTS] = -1
    rows = batch.rows
    count = len(rows)
    values[QUERY_LENS, :count] = [row.query_len for row in rows]
    groups = [-1 if row.seq.state_group is None else row.seq.state_group for row in rows]
    values[STATE_SLOTS, :count] = groups
    if batch.kind is BatchKind.DECODE:
        fill_confirmed(values, rows)
    else:
        values[CONTEXT_LENS, :count] = [row.context_len for row in rows]
    return values


def fill_confirmed(metadata: IntArray, rows: Sequence[ScheduledRow]) -> None:
    """Write what the status before decides into decode rows' ``metadata``: contexts and counts."""
    count = len(rows)
    metadata[CONTEXT_LENS, :count] = [row.context_len for row in rows]
    metadata[NUM_ACCEPTED_TOKENS, :count] = [row.seq.num_bonus for row in rows]
    metadata[NUM_ACCEPTED_TOKENS, :count] += 1


def check_groups(metadata: IntArray, batch: ScheduledBatch, groups: int) -> None:
    """Refuse a decode batch with a state group that does not exist.

    Raises:
        DeviceError: naming the request.
    """
    used = metadata[STATE_SLOTS, : len(batch.rows)]
    wrong = np.flatnonzero((used < 0) | (used >= groups))
    if len(wrong):
        index = int(wrong[0])
        raise DeviceError(
            f"step {batch.step}: request {batch.rows[index].seq.request_id} (row {index}) names "
            f"state group {int(used[index])}; there are {groups}"
        )


def padded_counts(counts: Sequence[int], max_rows: int) -> IntArray:
    """int32 ``[max_rows]``: the counts, then zeros."""
    values = np.zeros(max_rows, dtype=np.int32)
    values[: len(counts)] = counts
    return values


def sampling_arrays(
    batch: ScheduledBatch, max_rows: int, seed: int
) -> tuple[NDArray[np.float32], IntArray, LongArray]:
    """Temperature and top-p float32 ``[2, max_rows]``, top-k int32 and seeds int64, a row each.

    The temperature of a greedy request is 0.
    """
    rows = batch.rows
    count = len(rows)
    numbers = np.zeros((2, max_rows), dtype=np.float32)
    numbers[1] = 1
    heat = [row.seq.params.temperature for row in rows]
    numbers[0, :count] = [0 if one < COLDEST else one for one in heat]
    numbers[1, :count] = [row.seq.params.top_p for row in rows]
    top_k = np.zeros(max_rows, dtype=np.int32)
    top_k[:count] = [max(row.seq.params.top_k, 0) for row in rows]
    seeds = np.zeros(max_rows, dtype=np.int64)
    for index, row in enumerate(rows):
        own = row.seq.params.seed
        seeds[index] = seed * _SEED_STRIDE + row.seq.request_id if own is None else own
    return numbers, top_k, seeds


@dataclass(frozen=True)
class PrefillArrays:
    """Prompt chunks of a batch.

    Attributes:
        token_ids: int64 ``[T]``, packed.
        next_ids: int64 ``[S]``, the prompt token behind each chunk; -1 behind a prompt's last.
        block_tables: int32 ``[S, blocks]``; -1 where a row has fewer.
        max_query_len: longest chunk.
        max_context_len: longest context in front of one.
    """

    token_ids: LongArray
    next_ids: LongArray
    block_tables: IntArray
    max_query_len: int
    max_context_len: int

    @classmethod
    def make(cls, batch: ScheduledBatch) -> PrefillArrays:
        """The arrays of a prefill batch."""
        rows = batch.rows
        width = max(len(row.seq.block_table) for row in rows)
        tables = np.full((len(rows), width), -1, dtype=np.int32)
        ids = np.empty(batch.num_tokens, dtype=np.int64)
        following = np.full(len(rows), -1, dtype=np.int64)
        place = 0
        for index, row in enumerate(rows):
            table = row.seq.block_table
            tables[index, : len(table)] = table
            start, count = row.context_len, row.query_len
            # copied at once: a view would keep the array from growing
            ids[place : place + count] = row.seq.token_ids[start : start + count]
            if start + count < row.seq.num_tokens:
                following[index] = row.seq.token_ids[start + count]
            place += count
        return cls(
            ids,
            following,
            tables,
            max(row.query_len for row in rows),
            max(row.context_len for row in rows),
        )


class BlockTables:
    """Block tables of decode rows, and what of them the device has already.

    Args:
        values: where to keep them: int32 ``[max_rows, max_blocks]``.

    Attributes:
        values: the same; -1 where a row has no block.
    """

    def __init__(self, values: IntArray) -> None:
        self.values = values
        values.fill(-1)
        self._known: list[tuple[int, int, int]] = []
        self._unsent = 0

    def update(self, batch: ScheduledBatch) -> int:
        """Take in a batch's tables. Returns how many leading rows the device lacks; 0 if none.

        It lacks them until :meth:`sent` is called: a step may be prepared and never launched.
        """
        self._unsent = max(self._unsent, self._take_in(batch))
        return self._unsent

    def sent(self) -> None:
        """The device gets all that :meth:`update` said, in front of whatever is queued next."""
        self._unsent = 0

    def _take_in(self, batch: ScheduledBatch) -> int:
        """Returns how many leading rows to send for this batch."""
        wanted = [
            (row.seq.request_id, row.seq.generation, len(row.seq.block_table)) for row in batch.rows
        ]
        known = self._known[: len(wanted)]
        if wanted == known:
            return 0
        for index, row in enumerate(batch.rows):
            table, first = row.seq.block_table, 0
            if index < len(known):
                if wanted[index] == known[index]:
                    continue
                if wanted[index][:2] == known[index][:2]:
                    first = min(known[index][2], len(table))
            self.values[index, first : len(table)] = table[first:]
            self.values[index, len(table) :] = -1
        self._known[: len(wanted)] = wanted
        return len(wanted)
