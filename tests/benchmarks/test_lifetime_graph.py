"""A graph's static output under every schedule: hold does not protect it, a wait does."""

from __future__ import annotations

import pytest

from atom.benchmarks.lifetime_graph import GraphOutputProgram, explore_graph_output
from atom.lifetime.explore import Method, ViolationKind, explore


@pytest.mark.parametrize("depth", [1, 2])
def test_hold_is_unsafe(depth: int) -> None:
    found = explore_graph_output(waits=False, depth=depth)
    assert found.complete
    assert set(found.counterexamples) == {ViolationKind.FOREIGN_BYTES}
    first = found.first
    assert first is not None
    assert "in place of" in first.text


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wait_before_the_replay_is_safe(depth: int) -> None:
    found = explore_graph_output(waits=True, depth=depth)
    assert found.complete
    assert found.holds
    assert len(found.outcomes) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_the_reduction_loses_no_outcome(waits: bool) -> None:
    program = GraphOutputProgram(waits)
    assert explore(program).outcomes == explore(program, method=Method.STATES).outcomes
