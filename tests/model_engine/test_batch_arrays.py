"""Arrays that go to the device: the incremental block tables against a full rebuild."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.batch_arrays import (
    BlockTables,
    PrefillArrays,
    all_greedy,
    any_filter,
    fill_confirmed,
    metadata_array,
    padded_counts,
    sampling_arrays,
)
from atom.model_engine.scheduled_batch import BatchKind, ScheduledBatch, ScheduledRow
from atom.model_engine.sequence import SamplingParams, Sequence
from atom.model_ops.decode_inputs import (
    CONTEXT_LENS,
    NUM_ACCEPTED_TOKENS,
    QUERY_LENS,
    STATE_SLOTS,
)

ROWS, BLOCKS = 5, 6


def request(number: int, blocks: list[int], prompt: int = 3, **params: object) -> Sequence:
    made = Sequence(number, array("q", range(prompt)), SamplingParams(**params))  # type: ignore[arg-type]
    made.block_table = list(blocks)
    return made


def decode_batch(requests: list[Sequence], query_len: int = 4) -> ScheduledBatch:
    rows = [ScheduledRow(one, query_len, len(one.token_ids), True) for one in requests]
    return ScheduledBatch(BatchKind.DECODE, 1, rows)


def full_table(requests: list[Sequence]) -> np.ndarray:
    """The oracle: every row written afresh."""
    table = np.full((len(requests), BLOCKS), -1, dtype=np.int32)
    for place, one in enumerate(requests):
        table[place, : len(one.block_table)] = one.block_table
    return table


#: what happens between two decode steps: a request comes, grows, ends, or is put back and comes
#: again with other blocks; a step is prepared and left after one has grown
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["come", "grow", "end", "put back", "swap", "leave", "nothing"]),
        st.integers(0, 99),
    ),
    max_size=40,
)


class _Life:
    """Requests of an engine that come and go, with block numbers that no two share."""

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.numbers = 0
        self.blocks = 0

    def block(self) -> int:
        self.blocks += 1
        return self.blocks

    def act(self, action: str, pick: int) -> None:
        place = pick % len(self.running) if self.running else 0
        if action == "come" and len(self.running) < ROWS:
            self.running.append(request(self.numbers, [self.block() for _ in range(1 + pick % 3)]))
            self.numbers += 1
        elif not self.running:
            return
        elif action in ("grow", "leave") and len(self.running[place].block_table) < BLOCKS:
            self.running[place].block_table.append(self.block())
        elif action == "end":
            self.running.pop(place)
        elif action == "put back":
            one = self.running[place]
            one.generation += 1
            one.block_table = [self.block() for _ in range(1 + pick % BLOCKS)]
        elif action == "swap":
            self.running.append(self.running.pop(place))


def new_tables(kind: type[BlockTables] = BlockTables) -> BlockTables:
    return kind(np.empty((ROWS, BLOCKS), dtype=np.int32))


def device_tables_follow(tables: BlockTables, actions: list[tuple[str, int]]) -> bool:
    """Whether the device's copy, fed only with what ``update`` says, is always the full table.

    A step may be left: then the device gets nothing, and the next step owes it all.
    """
    life, on_device = _Life(), np.full((ROWS, BLOCKS), -99, dtype=np.int32)
    for action, pick in actions:
        life.act(action, pick)
        if not life.running:
            continue
        count = tables.update(decode_batch(life.running))
        if action == "leave":
            continue
        on_device[:count] = tables.values[:count]
        tables.sent()
        expected = full_table(life.running)
        if not np.array_equal(on_device[: len(life.running)], expected):
            return False
    return True


@settings(max_examples=300)
@given(ACTIONS)
def test_the_incremental_tables_are_the_full_ones(actions: list[tuple[str, int]]) -> None:
    assert device_tables_follow(new_tables(), actions)


class _ForgetsGenerations(BlockTables):
    """Wrong on purpose: takes a request that was put back for the one it was."""

    def update(self, batch: ScheduledBatch) -> int:
        seen = [(row.seq, row.seq.generation) for row in batch.rows]
        for one, _ in seen:
            one.generation = 0
        try:
            return super().update(batch)
        finally:
            for one, generation in seen:
                one.generation = generation


class _LeavesOldBlocks(BlockTables):
    """Wrong on purpose: does not look at which request stands in a row."""

    def update(self, batch: ScheduledBatch) -> int:
        self._known = [
            (row.seq.request_id, row.seq.generation, n)
            for row, (_, _, n) in zip(batch.rows, self._known, strict=False)
        ]
        return super().update(batch)


class _ForgetsWhatWasLeft(BlockTables):
    """Wrong on purpose: takes a step that was prepared for one that was launched."""

    def update(self, batch: ScheduledBatch) -> int:
        self._unsent = 0
        return super().update(batch)


@pytest.mark.parametrize(
    ("broken", "actions"),
    [
        (_ForgetsGenerations, [("come", 2), ("put back", 2)]),
        (_LeavesOldBlocks, [("come", 2), ("come", 2), ("end", 0)]),
        (_ForgetsWhatWasLeft, [("come", 2), ("leave", 0), ("nothing", 0)]),
    ],
)
def test_the_law_tells_a_wrong_table(
    broken: type[BlockTables], actions: list[tuple[str, int]]
) -> None:
    assert device_tables_follow(new_tables(), actions)
    assert not device_tables_follow(new_tables(broken), actions)


def test_nothing_is_sent_for_what_the_device_has() -> None:
    tables = new_tables()
    one, two = request(1, [7]), request(2, [8, 9])
    assert tables.update(decode_batch([one, two])) == 2
    # of a smaller batch too: they have not gone
    assert tables.update(decode_batch([one])) == 2
    tables.sent()
    assert tables.update(decode_batch([one, two])) == 0
    # leading rows alone: they stand there already
    assert tables.update(decode_batch([one])) == 0
    assert tables.update(decode_batch([one, two])) == 0
    two.block_table.append(3)
    assert tables.update(decode_batch([one, two])) == 2
    assert tables.values[:2].tolist() == [[7, -1, -1, -1, -1, -1], [8, 9, 3, -1, -1, -1]]


def test_a_prefill_between_does_not_disturb_them() -> None:
    """Prefill tables are fresh blocks: the decode tables stay what they were."""
    tables = new_tables()
    one = request(1, [7])
    tables.update(decode_batch([one]))
    tables.sent()
    row = ScheduledRow(request(2, [4, 5], prompt=20), 20, 0, True)
    made = PrefillArrays.make(ScheduledBatch(BatchKind.PREFILL, 2, [row]))
    assert made.block_tables.tolist() == [[4, 5]]
    assert tables.update(decode_batch([one])) == 0


def test_prefill_arrays_hold_chunks_and_what_comes_behind_them() -> None:
    first, second = request(1, [3, 4, 5], prompt=10), request(2, [6], prompt=4)
    rows = [ScheduledRow(first, 5, 2, False), ScheduledRow(second, 4, 0, True)]
    made = PrefillArrays.make(ScheduledBatch(BatchKind.PREFILL, 1, rows))
    assert made.token_ids.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3]
    # the token behind the chunk, and none behind a prompt's end
    assert made.next_ids.tolist() == [7, -1]
    assert made.block_tables.tolist() == [[3, 4, 5], [6, -1, -1]]
    assert (made.max_query_len, made.max_context_len) == (5, 2)
    # no view of the request's own array: it must be able to grow
    first.token_ids.append(1)


def test_metadata_pads_with_rows_that_do_nothing() -> None:
    one, two = request(1, [3]), request(2, [4])
    one.state_group, one.num_bonus = 6, 2
    two.state_group = 1
    values = metadata_array(decode_batch([one, two]), ROWS)
    assert values.shape == (4, ROWS)
    assert values[CONTEXT_LENS].tolist() == [3, 3, 0, 0, 0]
    assert values[QUERY_LENS].tolist() == [4, 4, 0, 0, 0]
    assert values[STATE_SLOTS].tolist() == [6, 1, -1, -1, -1]
    assert values[NUM_ACCEPTED_TOKENS].tolist() == [3, 1, 0, 0, 0]
    prefill = ScheduledBatch(BatchKind.PREFILL, 1, [ScheduledRow(one, 3, 0, True)])
    # a prefill has no accepted tokens, whatever the request brought
    assert metadata_array(prefill, ROWS)[NUM_ACCEPTED_TOKENS].tolist() == [0] * ROWS


def test_a_stale_count_goes_to_the_kernels_as_it_came() -> None:
    one = request(1, [3])
    one.state_group, one.num_bonus = 0, 16384
    values = metadata_array(decode_batch([one]), ROWS)
    assert values[NUM_ACCEPTED_TOKENS, 0] == 16385
    one.num_bonus = 8192
    fill_confirmed(values, decode_batch([one]).rows)
    assert values[NUM_ACCEPTED_TOKENS, 0] == 8193


def test_what_a_status_decides_is_all_that_changes_behind_it() -> None:
    requests = [request(1, [3]), request(2, [4])]
    batch = decode_batch(requests)
    early = metadata_array(batch, ROWS)
    for number, row in enumerate(batch.rows):
        row.seq.num_bonus, row.context_len = 1 + number, 7 + number
    fill_confirmed(early, batch.rows)
    assert np.array_equal(early, metadata_array(batch, ROWS))


def test_sampling_arrays_give_each_request_its_own_stream() -> None:
    requests = [
        request(1, [1], temperature=0.5, top_p=0.9, top_k=4),
        request(2, [1], temperature=0.0, top_k=-1),
        request(3, [1], seed=-5),
    ]
    numbers, top_k, seeds = sampling_arrays(decode_batch(requests), ROWS, seed=2)
    np.testing.assert_allclose(numbers[0], [0.5, 0, 1, 0, 0])
    np.testing.assert_allclose(numbers[1], [0.9, 1, 1, 1, 1])
    assert top_k.tolist() == [4, 0, 0, 0, 0]
    assert seeds.tolist() == [2 * 2**31 + 1, 2 * 2**31 + 2, -5, 0, 0]
    other = sampling_arrays(decode_batch(requests), ROWS, seed=3)[2]
    assert set(other[:2].tolist()).isdisjoint(seeds[:2].tolist())
    assert other[2] == -5


@pytest.mark.parametrize("temperature", [1e-46, 1e-39, 9.9e-6])
def test_a_temperature_next_to_0_is_0(temperature: float) -> None:
    cold, warm = request(1, [1], temperature=temperature), request(2, [1], temperature=1e-5)
    batch = decode_batch([cold, warm])
    assert sampling_arrays(batch, ROWS, seed=2)[0][0, :2].tolist() == [0, np.float32(1e-5)]
    assert all_greedy(decode_batch([cold]))
    assert not all_greedy(batch)


def test_what_a_batch_needs_of_the_sampler() -> None:
    greedy, drawn = request(1, [1], temperature=0.0), request(2, [1])
    filtered = request(3, [1], top_p=0.5)
    assert all_greedy(decode_batch([greedy]))
    assert not all_greedy(decode_batch([greedy, drawn]))
    assert not any_filter(decode_batch([greedy, drawn]))
    assert any_filter(decode_batch([greedy, filtered]))
    assert padded_counts([3, 1], 4).tolist() == [3, 1, 0, 0]
