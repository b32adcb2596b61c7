"""A decode step is one copy to the device: what is in it, and what a left step owes the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engines import make_engine, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.device.operations import Operation
from atom.model_engine import step_inputs
from atom.model_engine.batch_arrays import BlockTables
from atom.model_engine.sequence import SamplingParams
from atom.model_engine.step_inputs import InputLayout

#: the longest grows over several blocks while it decodes
PROMPTS = random_prompts(3, (5, 17, 30), seed=3)
DRAWN = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return make_engine().generate(PROMPTS, LONG)


class _ToTheDevice:
    """A device observer that notes the bytes of each copy to the device."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def queued(self, operation: Operation, stream_id: int) -> None:
        direction, size, *_ = *operation.name.split(), ""
        if direction == "h2d":
            self.sizes.append(int(size))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def copies_of_decode_steps(engine: Any, params: SamplingParams) -> list[list[int]]:
    """Bytes of the copies to the device of each step but those of prompts."""
    found = []
    for prompt in PROMPTS:
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        before, seen = engine.counters.decode_steps, _ToTheDevice()
        engine.runner.device.observe(seen)
        engine.step()
        engine.runner.device.observe(None)
        if engine.counters.decode_steps > before:
            found.append(seen.sizes)
    return found


@pytest.mark.parametrize(
    ("params", "more"),
    [
        (LONG, {"draft_tokens": 0}),
        (DRAWN, {"draft_tokens": 3}),
        (LONG, {"draft_tokens": 3, "forced_acceptance_length": 2.5}),
    ],
    ids=["no drafts", "drawn", "forced"],
)
def test_a_decode_step_is_one_copy_to_the_device(
    params: SamplingParams, more: dict[str, Any]
) -> None:
    engine: Any = make_engine(**more)
    found = copies_of_decode_steps(engine, params)
    assert len(found) > 5
    assert {len(sizes) for sizes in found} == {1}
    # tables go when a row has a new block, and then with all rows up to the last
    layout = engine.runner.buffers.layout
    sizes = [size for (size,) in found]
    assert set(sizes) <= {layout.bytes_with(rows) for rows in range(len(PROMPTS) + 1)}
    assert layout.bytes_with(0) in sizes
    assert layout.bytes_with(len(PROMPTS)) in sizes


def test_large_tables_go_ahead_and_change_nothing(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_inputs, "MOST_TABLE_BYTES", 0)
    engine: Any = make_engine()
    # only steps with a new block send tables
    found = copies_of_decode_steps(engine, LONG)
    assert {len(sizes) for sizes in found} == {1, 2}
    assert {sizes[-1] for sizes in found} == {engine.runner.buffers.layout.bytes_with(0)}
    assert make_engine().generate(PROMPTS, LONG) == expected


def _leaves_a_step(engine: Any) -> list[list[int]]:
    """Tokens of an engine that prepares every step, leaves it, and prepares it again."""
    prepare = engine.runner.prepare

    def twice(*arguments: Any) -> None:
        prepare(*arguments)
        prepare(*arguments)

    engine.runner.prepare = twice
    return list(engine.generate(PROMPTS, LONG))


def test_a_step_that_is_left_owes_its_tables_to_the_next(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = make_engine()
    assert _leaves_a_step(engine) == expected
    assert engine.runner._staging._ring.busy == 0
    # the control: tables that were noted for a step are forgotten with it
    monkeypatch.setattr(BlockTables, "update", BlockTables._take_in)
    assert _leaves_a_step(make_engine()) != expected


@settings(max_examples=60)
@given(st.integers(1, 33), st.integers(1, 19), st.data())
def test_the_leading_bytes_are_the_parts(rows: int, blocks: int, data: st.DataObject) -> None:
    layout = InputLayout(rows, blocks)
    sent = data.draw(st.integers(0, rows))
    host = torch.zeros(layout.nbytes, dtype=torch.uint8)
    arrays = layout.arrays(host)
    for number, part in enumerate(arrays, 1):
        part[...] = number
    target = torch.zeros_like(host)
    size = layout.bytes_with(sent)
    target[:size] = host[:size]
    found = layout.tensors(target)
    for number, part in enumerate(found[:-1], 1):
        assert set(part.flatten().tolist()) == {number}
    assert found.block_tables[:sent].eq(6).all()
    # no more than an odd table's next entry goes along
    assert found.block_tables.count_nonzero() <= sent * blocks + 1
    assert size <= layout.nbytes
    assert size % 8 == 0
    assert np.array_equal(layout.metadata(host.numpy()[:size]), arrays.metadata)
    for part in found:
        assert (part.data_ptr() - target.data_ptr()) % 128 == 0
    numbers = torch.zeros_like(host)
    numbers[layout.sampling] = host[layout.sampling]
    whole = [bool(part.count_nonzero() == part.numel()) for part in layout.tensors(numbers)]
    none = [bool(part.count_nonzero() == 0) for part in layout.tensors(numbers)]
    assert whole == [False, False, True, True, True, False]
    assert none == [True, True, False, False, False, True]


def test_tables_travel_along_until_they_take_time() -> None:
    layout = InputLayout(64, 2048)
    assert layout.travels_along(8)
    assert not layout.travels_along(9)
    assert InputLayout(64, 128).travels_along(64)
