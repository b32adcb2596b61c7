"""A step's inputs: against a plain model of one token after the other, and the kernel on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.decode_inputs import (
    StepDrafts,
    StepInputs,
    decode_inputs,
    prefill_inputs,
    step_inputs_reference,
)


@dataclass
class Step:
    """One step's inputs as the host knows them."""

    contexts: list[int]
    lengths: list[int]
    groups: list[int]
    tables: list[list[int]]
    ids: list[list[int]]
    num_tokens: int
    block_size: int

    @property
    def columns(self) -> int:
        return len(self.ids[0])

    def tensors(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = [self.contexts, self.lengths, self.groups, [1] * len(self.groups)]
        return (
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(self.tables, dtype=torch.int32, device=device),
            torch.tensor(self.ids, dtype=torch.int64, device=device),
        )

    def outputs(self, device: str = "cpu") -> StepInputs:
        """Outputs with room for more tokens, full of what no step writes."""
        out = StepInputs.allocate(len(self.lengths), self.num_tokens + 3, self.columns - 1, device)
        for name in StepInputs.__slots__:
            getattr(out, name).fill_(-77)
        return out


@st.composite
def steps(draw: st.DrawFn, longest: int) -> Step:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    block_size, width = draw(st.sampled_from([1, 16, 64])), draw(st.integers(1, 4))
    groups = draw(st.integers(rows, 12))
    lengths = draw(st.lists(st.integers(0, longest), min_size=rows, max_size=rows))
    numbers = st.integers(0, 10**6)
    step = Step(
        # some beyond the table, as a stale count makes them
        draw(st.lists(st.integers(0, block_size * width + 3), min_size=rows, max_size=rows)),
        lengths,
        draw(st.permutations(range(groups)))[:rows],
        draw(
            st.lists(
                st.lists(st.integers(-1, 50), min_size=width, max_size=width),
                min_size=rows,
                max_size=rows,
            )
        ),
        draw(
            st.lists(
                st.lists(numbers, min_size=columns, max_size=columns),
                min_size=groups,
                max_size=groups,
            )
        ),
        max(1, sum(lengths) + draw(st.integers(-2, 20))),
        block_size,
    )
    for row in range(draw(st.integers(0, rows)), rows):
        step.lengths[row], step.groups[row] = 0, -1
    return step


def plain(step: Step, *, decode: bool) -> dict[str, list[int] | list[list[int]]]:
    """The outputs, token by token."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    ids: list[int] = []
    for row, length in enumerate(step.lengths):
        for i in range(min(length, step.columns) if decode else length):
            if len(positions) == step.num_tokens:
                break
            position = step.contexts[row] + i
            place, offset = divmod(position, step.block_size)
            block = step.tables[row][place] if place < len(step.tables[row]) else -1
            positions.append(position)
            slots.append(block * step.block_size + offset if block >= 0 else -1)
            group = step.groups[row]
            ids.append(step.ids[group][i] if decode and group >= 0 else 0)
        starts.append(len(positions))
    padding = step.num_tokens - len(positions)
    columns = range(step.columns)
    return {
        "query_start_loc": starts,
        "positions": [*positions, *[0] * padding, *[-77] * 3],
        "slot_mapping": [*slots, *[-1] * padding, *[-77] * 3],
        "input_ids": [*ids, *[0] * padding, *[-77] * 3]
        if decode
        else [-77] * (step.num_tokens + 3),
        "state_table": [
            [group * step.columns + i if group >= 0 else -1 for i in columns]
            for group in step.groups
        ],
    }


def as_lists(out: StepInputs) -> dict[str, list[int] | list[list[int]]]:
    return {name: getattr(out, name).tolist() for name in StepInputs.__slots__}


@given(steps(longest=6))
@settings(max_examples=150)
def test_decode_inputs_are_those_of_the_plain_model(step: Step) -> None:
    metadata, tables, ids = step.tensors()
    out = step.outputs()
    decode_inputs(metadata, tables, ids, step.num_tokens, step.block_size, out=out)
    assert as_lists(out) == plain(step, decode=True)


@given(steps(longest=80))
@settings(max_examples=100)
def test_prefill_inputs_are_those_of_the_plain_model(step: Step) -> None:
    metadata, tables, _ = step.tensors()
    out = step.outputs()
    prefill_inputs(metadata, tables, step.num_tokens, step.block_size, out=out)
    assert as_lists(out) == plain(step, decode=False)


def test_a_group_outside_the_table_reads_no_ids() -> None:
    step = Step([4], [2], [9], [[3]], [[11, 12]], 2, 16)
    metadata, tables, ids = step.tensors()
    out = step.outputs()
    decode_inputs(metadata, tables, ids, 2, 16, out=out)
    assert out.input_ids.tolist()[:2] == [0, 0]
    assert out.slot_mapping.tolist()[:2] == [52, 53]


def test_the_batch_is_made_of_views() -> None:
    step = Step([4, 0], [2, 0], [1, -1], [[3], [0]], [[11, 12], [13, 14]], 4, 16)
    metadata, tables, ids = step.tensors()
    out = step.outputs()
    bounds = {"max_query_len": 2, "max_context_len": 64}
    meta = out.attention_metadata(metadata, tables, 4, **bounds, is_prefill=False)
    decode_inputs(metadata, tables, ids, 4, 16, out=out)
    assert (meta.num_rows, meta.num_tokens, meta.is_prefill) == (2, 4, False)
    assert meta.positions.tolist() == [4, 5, 0, 0]
    assert meta.query_start_loc.tolist() == [0, 2, 2]
    metadata[3, 0] = 4
    assert meta.num_accepted_tokens.tolist() == [4, 1]


def drafts_of(step: Step, device: str = "cpu") -> dict[str, list[int] | list[list[int]]]:
    """What a decode step leaves for the sampler, from a table whose last row is no group's."""
    metadata, tables, ids = step.tensors(device)
    spare = torch.full((1, step.columns), -5, device=device)
    rows = len(step.lengths)
    drafts = StepDrafts(
        torch.full((rows + 1, step.columns - 1), -77, device=device),
        *(torch.full((rows + 1,), -77, device=device, dtype=kind) for kind in _KINDS),
    )
    decode_inputs(
        *(metadata, tables, torch.cat([ids, spare]), step.num_tokens, step.block_size),
        out=step.outputs(device),
        drafts=drafts,
    )
    return {name: getattr(drafts, name).tolist() for name in StepDrafts.__slots__}


_KINDS = (torch.int32, torch.int64, torch.int32)


def plain_drafts(step: Step) -> dict[str, list[int] | list[list[int]]]:
    """As :func:`drafts_of`, row by row."""
    spare, k = len(step.ids), step.columns - 1
    known = [group if 0 <= group < spare else spare for group in step.groups]
    table = [*step.ids, [-5] * step.columns]
    return {
        "ids": [*(table[row][1:] for row in known), [-77] * k],
        "number": [*(length - 1 for length in step.lengths), -77],
        "positions": [*(context + 1 for context in step.contexts), -77],
        "table_rows": [*known, -77],
    }


@given(steps(longest=6), st.integers(-3, 20))
@settings(max_examples=60)
def test_a_decode_leaves_its_drafts_for_the_sampler(step: Step, group: int) -> None:
    # one that the table may not have
    step.groups[0] = group
    assert drafts_of(step) == plain_drafts(step)


@pytest.mark.gpu
class TestOnHardware:
    @given(steps(longest=6), st.integers(-3, 20))
    @settings(max_examples=30)
    def test_drafts(self, step: Step, group: int) -> None:
        step.groups[0] = group
        assert drafts_of(step, "cuda") == plain_drafts(step)

    @given(steps(longest=6), st.booleans())
    @settings(max_examples=60)
    def test_kernel(self, step: Step, decode: bool) -> None:
        metadata, tables, ids = step.tensors("cuda")
        out = step.outputs("cuda")
        if decode:
            decode_inputs(metadata, tables, ids, step.num_tokens, step.block_size, out=out)
        else:
            prefill_inputs(metadata, tables, step.num_tokens, step.block_size, out=out)
        assert as_lists(out) == plain(step, decode=decode)

    def test_a_large_prefill(self) -> None:
        lengths = [8000, 1, 8000, 0]
        metadata = torch.tensor([[5, 0, 90, 0], lengths, [2, 0, 1, -1], [1] * 4]).int().cuda()
        tables = torch.randperm(4 * 520).view(4, 520).int().cuda()
        out, expected = (StepInputs.allocate(4, 16100, 3, "cuda") for _ in range(2))
        prefill_inputs(metadata, tables, 16100, 16, out=out)
        step_inputs_reference(metadata, tables, None, 16100, 16, out=expected)
        assert as_lists(out) == as_lists(expected)

    def test_a_graph_follows_its_metadata(self) -> None:
        step = Step([4, 7], [2, 4], [1, 0], [[3], [5]], [[1, 2, 3, 4], [5, 6, 7, 8]], 8, 16)
        metadata, tables, ids = step.tensors("cuda")
        out = step.outputs("cuda")

        def derive() -> None:
            decode_inputs(metadata, tables, ids, step.num_tokens, step.block_size, out=out)

        derive()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            derive()
        for lengths in ([4, 1], [1, 0], [3, 4]):
            step.lengths = lengths
            metadata[1].copy_(torch.tensor(lengths))
            graph.replay()
            assert as_lists(out) == plain(step, decode=True)
