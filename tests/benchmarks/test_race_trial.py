"""What a trial tells from bytes, and that the fault shows where it must."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.benchmarks.race_outcome import classify
from atom.benchmarks.race_plan import CUT_BATCH_SIZE, Arm, NextStep
from atom.benchmarks.race_rows import Outcome, ProducerEdge
from atom.benchmarks.race_trial import TrialBench
from atom.config import CopyProtocol, Front, RaceSettings, Source
from atom.device import CopyPath, open_device
from atom.errors import DeviceError

SIZE = st.integers(1, 64)


def content(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two steps' bytes that differ everywhere."""
    this = np.arange(size, dtype=np.uint8)
    return this, this + np.uint8(101)


@given(SIZE)
def test_own_bytes_are_clean(size: int) -> None:
    this, following = content(size)
    assert classify(this.copy(), this, following) is Outcome.CLEAN


@given(SIZE)
def test_next_bytes_are_overwritten(size: int) -> None:
    this, following = content(size)
    assert classify(following.copy(), this, following) is Outcome.OVERWRITTEN


@given(st.data())
def test_whole_shorter_tensor_is_partial(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 64))
    length = data.draw(st.integers(1, size - 1))
    offset = data.draw(st.integers(0, size - length))
    this, following = content(size)
    received = this.copy()
    received[offset : offset + length] = following[:length]
    # Where the shorter tensor happens to agree with the source, its bytes say nothing.
    if (received[offset : offset + length] == this[offset : offset + length]).all():
        return
    assert classify(received, this, following[:length], offset) is Outcome.PARTIAL


@given(st.data())
def test_cut_inside_the_next_tensor_is_torn(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 64))
    cut = data.draw(st.integers(1, size - 1))
    first_half = data.draw(st.booleans())
    this, following = content(size)
    received = this.copy()
    received[:cut] = following[:cut]
    if not first_half:
        received = following.copy()
        received[:cut] = this[:cut]
    assert classify(received, this, following) is Outcome.TORN


@given(SIZE, st.integers(0, 63), st.integers(0, 255))
def test_bytes_of_neither_step_are_an_error(size: int, place: int, value: int) -> None:
    this, following = content(size)
    place %= size
    if value in (this[place], following[place]):
        return
    received = this.copy()
    received[place] = value
    with pytest.raises(DeviceError, match=f"byte {place} of {size}"):
        classify(received, this, following)


def test_a_tensor_elsewhere_cannot_explain_foreign_bytes() -> None:
    this, following = content(16)
    assert classify(this.copy(), this, following, offset=512) is Outcome.CLEAN
    with pytest.raises(DeviceError, match="neither"):
        classify(following, this, following, offset=512)


def test_two_equal_steps_tell_nothing() -> None:
    this, _ = content(16)
    with pytest.raises(DeviceError, match="same bytes"):
        classify(this.copy(), this, this.copy())


# -- on the virtual device

SETTINGS = RaceSettings.parse(
    {
        "store_bytes": 2**24,
        "matmul_size": 512,
        "matmul_streams": 4,
        "matmuls_per_stream": 2,
        "spin_seconds": 0.001,
    }
)
BASE = Arm(
    "test/arm",
    "test",
    CopyProtocol.UNPATCHED,
    False,
    Front.SPIN,
    CopyPath.ENGINE,
    1,
    batch_size=8,
)


def outcomes(
    arm: Arm, trials: int = 6, profile: str = "MI355X", settings: RaceSettings = SETTINGS
) -> list[Outcome]:
    """Outcomes of an arm on a fresh virtual device whose copy stream has a queue of its own."""
    bench = TrialBench(open_device("virtual", profile=profile, seed=3), settings, seed=3)
    assert bench.shares_default_queue is False
    bench.warm_up(arm)
    return [bench.run(arm).outcome for _ in range(trials)]


@pytest.mark.parametrize("path", list(CopyPath))
def test_unpatched_races_behind_a_parked_copy_stream(path: CopyPath) -> None:
    arm = dataclasses.replace(BASE, copy_path=path)
    assert outcomes(arm) == [Outcome.OVERWRITTEN] * 6


@pytest.mark.parametrize(
    "protocol",
    [protocol for protocol in CopyProtocol if protocol is not CopyProtocol.UNPATCHED],
)
def test_every_other_protocol_is_clean_there(protocol: CopyProtocol) -> None:
    assert outcomes(dataclasses.replace(BASE, protocol=protocol)) == [Outcome.CLEAN] * 6


def test_nothing_in_front_is_clean_by_luck_alone() -> None:
    assert outcomes(dataclasses.replace(BASE, front=Front.NOTHING)) == [Outcome.CLEAN] * 6


@pytest.mark.parametrize("profile", ["MI355X", "H200"])
def test_a_bulk_store_on_the_copy_stream_makes_the_copy_late(profile: str) -> None:
    arm = dataclasses.replace(BASE, front=Front.STORE_ON_COPY_STREAM)
    assert outcomes(arm, profile=profile) == [Outcome.OVERWRITTEN] * 6


def test_a_store_on_another_stream_delays_what_shares_its_engine() -> None:
    arm = dataclasses.replace(BASE, front=Front.STORE_ON_OTHER_STREAMS)
    assert outcomes(arm, profile="H200") == [Outcome.OVERWRITTEN] * 6
    by_kernel = dataclasses.replace(arm, copy_path=CopyPath.KERNEL)
    assert outcomes(by_kernel, profile="H200") == [Outcome.CLEAN] * 6


def test_a_static_output_is_stale_even_when_held_and_right_once_the_writer_waits() -> None:
    held = dataclasses.replace(BASE, protocol=CopyProtocol.HOLD, source=Source.GRAPH_OUTPUT)
    assert outcomes(held) == [Outcome.OVERWRITTEN] * 6
    waited = dataclasses.replace(held, source=Source.GRAPH_OUTPUT_WAIT)
    assert outcomes(waited) == [Outcome.CLEAN] * 6


@pytest.mark.parametrize("edge", list(ProducerEdge))
@pytest.mark.parametrize(
    ("protocol", "outcome"),
    [(CopyProtocol.UNPATCHED, Outcome.OVERWRITTEN), (CopyProtocol.HOLD, Outcome.CLEAN)],
)
def test_an_early_producer_edge_changes_nothing_on_a_stream_of_its_own(
    edge: ProducerEdge, protocol: CopyProtocol, outcome: Outcome
) -> None:
    arm = dataclasses.replace(BASE, producer_edge=edge, protocol=protocol)
    assert outcomes(arm) == [outcome] * 6


def test_a_shared_copy_stream_stands_behind_its_other_work() -> None:
    arm = dataclasses.replace(BASE, front=Front.MATMUL, aliased=True)
    long = SETTINGS.model_copy(update={"matmul_size": 4096})
    assert outcomes(arm, profile="H200", settings=long) == [Outcome.OVERWRITTEN] * 6
    own = dataclasses.replace(arm, aliased=False)
    assert outcomes(own, profile="H200", settings=long) == [Outcome.CLEAN] * 6
    held = dataclasses.replace(arm, protocol=CopyProtocol.HOLD)
    assert outcomes(held, profile="H200", settings=long) == [Outcome.CLEAN] * 6


def test_a_producer_edge_queued_first_stands_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for edge in ProducerEdge:
        bench = TrialBench(open_device("virtual", profile="MI355X", seed=3), SETTINGS, seed=3)
        arm = dataclasses.replace(BASE, producer_edge=edge)
        bench.warm_up(arm)
        order.clear()
        for owner, name, word in (
            (type(bench.copy_stream), "wait_event", "wait"),
            (type(bench.device), "spin", "front"),
        ):
            monkeypatch.setattr(owner, name, _told(getattr(owner, name), order, word))
        bench.run(arm)
        first = ["wait", "front", "wait"]
        assert order == (first if edge is ProducerEdge.WAITED_FIRST else ["front", "wait"])
        monkeypatch.undo()


def _told(method: Callable[..., Any], order: list[str], word: str) -> Callable[..., Any]:
    """``method``, which also says ``word`` when it is called."""

    def told(*arguments: Any, **named: Any) -> Any:
        order.append(word)
        return method(*arguments, **named)

    return told


@pytest.mark.parametrize("step", [NextStep.HALF, NextStep.FEW])
def test_a_smaller_next_tensor_gives_partial(step: NextStep) -> None:
    assert outcomes(dataclasses.replace(BASE, next_step=step)) == [Outcome.PARTIAL] * 6


def test_a_write_in_the_middle_of_the_copy_gives_torn() -> None:
    arm = dataclasses.replace(BASE, next_step=NextStep.MID_COPY, batch_size=CUT_BATCH_SIZE)
    assert Outcome.TORN in outcomes(arm, 4)


def test_tags_catch_stale_counts_that_are_in_range() -> None:
    bench = TrialBench(open_device("virtual", seed=3), SETTINGS, seed=3)
    trials = [bench.run(BASE) for _ in range(8)]
    stale = [trial for trial in trials if trial.outcome is not Outcome.CLEAN]
    assert len(stale) == 8
    assert all(trial.tag_caught for trial in stale)
    # Every other next step is a verdict: legal counts, which no bounds guard can refuse.
    assert sum(trial.in_range for trial in stale) == 4
    assert all(trial.address_reused for trial in stale)


def test_a_traced_stale_trial_writes_before_it_copies() -> None:
    bench = TrialBench(open_device("virtual", seed=3), SETTINGS, seed=3)
    bench.warm_up(BASE)
    trial = bench.run(BASE, traced=True)
    ends = {span.label: span.end_us for span in trial.spans}
    assert trial.outcome is Outcome.OVERWRITTEN
    assert ends["next write"] < ends["copy"]
    clean = bench.run(dataclasses.replace(BASE, front=Front.NOTHING), traced=True)
    ends = {span.label: span.end_us for span in clean.spans}
    assert ends["copy"] <= ends["next write"]
