"""The protocol-cost experiment: loops that can tell arms apart, and controls that must fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from atom.benchmarks import engine_cost, protocol_cost
from atom.benchmarks.engine_arms import Prompts, RequestFailed
from atom.benchmarks.engine_cost import CostEngineArm, EngineCostBench, agreement
from atom.benchmarks.protocol_cost import run_points, turns, work_of
from atom.benchmarks.protocol_cost_rows import (
    BARE_ARMS,
    ENGINE_ARMS,
    GUARD_ARMS,
    PROTOCOLS,
    Clock,
    CostArm,
    CostRow,
    Loop,
    Pressure,
)
from atom.benchmarks.protocol_cost_settings import (
    CostPoint,
    PointKind,
    ProtocolSweepSettings,
    build_points,
    sized,
)
from atom.benchmarks.transfer_loop import CopyStreamWork, TransferLoop, kept_seconds
from atom.config import CopyProtocol
from atom.device import open_device
from atom.device.accelerator import why_no_accelerator
from atom.device.plain_copy import counted_events, plain_host_copy
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput, DeviceError
from atom.transfer.copy_protocol import STRATEGIES

SMALL: dict[str, Any] = {
    "device": "virtual",
    "device_profile": "H200",
    "leads": [2],
    "steps": 16,
    "watched_steps": 16,
    "warmup_steps": 6,
    "engine_pressures": ["idle"],
    "engine_steps": 3,
    "engine_watched_steps": 2,
    "engine_warmup_steps": 1,
    "counted_steps": 2,
}


def small(**values: Any) -> ProtocolSweepSettings:
    return sized({**SMALL, **values}, quick=False)


def rows_of(settings: ProtocolSweepSettings) -> dict[str, dict[CostArm, CostRow]]:
    """First repeat's rows by point and arm."""
    found: dict[str, dict[CostArm, CostRow]] = {}
    for point, tables in run_points(settings, VirtualDevice("H200", seed=3)):
        for row in tables.get("samples", []):
            assert isinstance(row, CostRow)
            if row.repeat == 0:
                found.setdefault(point.point_id, {})[row.arm] = row
    return found


@pytest.fixture(scope="module")
def bare() -> dict[str, dict[CostArm, CostRow]]:
    return rows_of(small(loops=["bare"]))


def test_every_arm_is_timed_under_every_pressure(
    bare: dict[str, dict[CostArm, CostRow]],
) -> None:
    assert set(bare) == {f"bare-b4-l2-{pressure}" for pressure in Pressure}
    for arms in bare.values():
        assert set(arms) == set(BARE_ARMS)
        assert {row.clock for row in arms.values()} == {Clock.SIMULATION}


def test_unprotected_arms_go_stale_behind_other_work_and_no_others(
    bare: dict[str, dict[CostArm, CostRow]],
) -> None:
    unprotected = {CostArm.UNPATCHED, CostArm.NULL, CostArm.PLAIN}
    for pressure in Pressure:
        stale = {arm for arm, row in bare[f"bare-b4-l2-{pressure}"].items() if row.stale}
        assert stale == (set() if pressure is Pressure.IDLE else unprotected)


def test_only_the_plain_send_makes_events(bare: dict[str, dict[CostArm, CostRow]]) -> None:
    made = {arm: row.events_created for arm, row in bare["bare-b4-l2-idle"].items()}
    # one for the wait, one behind the copy
    assert made == {arm: 2 * 2 if arm is CostArm.PLAIN else 0 for arm in BARE_ARMS}


def test_blocks_are_kept_as_the_protocols_say(bare: dict[str, dict[CostArm, CostRow]]) -> None:
    idle, store = bare["bare-b4-l2-idle"], bare["bare-b4-l2-store"]
    for arm in (CostArm.UNPATCHED, CostArm.BLOCKING, CostArm.ZERO_COPY):
        assert idle[arm].kept_us == 0
        assert idle[arm].held_peak_bytes == 0
    hold, told = idle[CostArm.HOLD], idle[CostArm.RECORD_STREAM]
    # two under way, and the one just sent
    assert hold.held_peak_bytes == 3 * 512
    # the copy is over long before the host looks at it
    assert 0 < (told.kept_us or 0) < (hold.kept_us or 0)
    # behind a store both wait for it
    assert store[CostArm.RECORD_STREAM].kept_us == pytest.approx(
        store[CostArm.HOLD].kept_us, rel=0.2
    )


def test_a_store_holds_up_copies_and_not_zero_copy(
    bare: dict[str, dict[CostArm, CostRow]],
) -> None:
    store = bare["bare-b4-l2-store"]
    seconds = 2**24 / 54.9e9
    assert (store[CostArm.HOLD].step_us or 0) > 0.9e6 * seconds
    assert (store[CostArm.BLOCKING].send_us or 0) > 0.9e6 * seconds
    assert (store[CostArm.ZERO_COPY].step_us or 0) < 0.2e6 * seconds


def test_a_protocol_that_does_not_protect_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, CopyProtocol.HOLD, STRATEGIES[CopyProtocol.UNPATCHED])
    with pytest.raises(DeviceError, match="another step arrived under hold"):
        rows_of(small(loops=["bare"], pressures=["store"]))


def test_record_stream_waits_for_what_stands_behind_its_copy_and_hold_does_not() -> None:
    kept = {}
    for behind in (False, True):
        for arm in (CostArm.HOLD, CostArm.RECORD_STREAM):
            device = VirtualDevice("H200", seed=1)
            work = CopyStreamWork(Pressure.STUCK, 1, 2e-3, 12)
            loop = TransferLoop(device, device.new_stream(), arm, 4, 2, work, behind=behind)
            loop.window(4)
            times = loop.window(12, watch=True)
            kept[arm, behind] = kept_seconds(times, loop.base())
    assert kept[CostArm.RECORD_STREAM, True] > kept[CostArm.HOLD, True] + 1e-4
    assert kept[CostArm.RECORD_STREAM, False] == pytest.approx(kept[CostArm.HOLD, False], rel=0.2)


def test_limits_and_the_memory_story_are_recorded() -> None:
    tables = dict(run_points(small(loops=["bare"], pressures=["idle"]), VirtualDevice("H200")))
    by_kind = {point.kind: found for point, found in tables.items()}
    limits = {row.limit: row.median_us for row in by_kind[PointKind.LIMITS]["limits"]}  # type: ignore[attr-defined]
    assert limits["event record"] < limits["record, wait, copy, record"] < limits["plain send"]
    # the store is under way and not timed
    assert limits["host-writing kernel and wait, beside a store"] < 0.3e6 * 2**24 / 54.9e9
    held = by_kind[PointKind.MEMORY]["held"]
    assert len(held) == 5 * 48
    assert sum(row.stuck for row in held if row.arm is CostArm.HOLD) == 1  # type: ignore[attr-defined]


# -- the engine
def test_the_engines_arms_differ_by_what_sends_alone() -> None:
    some = ["hold", "zero_copy", "blocking", "no guard", "trap", "no epoch tag", "host check"]
    settings = small(loops=["engine"], engine_repeats=1, engine_batch_sizes=[2], only=some)
    [arms] = rows_of(settings).values()
    assert set(arms) == {CostArm.UNPATCHED, *some}
    assert {row.agreement for row in arms.values()} == {1.0}
    assert {row.events_created for row in arms.values()} == {0}
    send = {arm: row.send_us or 0.0 for arm, row in arms.items()}
    assert send[CostArm.ZERO_COPY] < 0.3 * send[CostArm.HOLD]
    assert send[CostArm.BLOCKING] > 1.2 * send[CostArm.HOLD]
    step = {arm: row.step_us or 0.0 for arm, row in arms.items()}
    # a read-back and its wait; the other nets add no call at all
    assert step[CostArm.HOST_CHECK] > step[CostArm.NO_GUARD] + 10
    for arm in (CostArm.HOLD, CostArm.TRAP, CostArm.NO_TAG):
        assert step[arm] == pytest.approx(step[CostArm.NO_GUARD], rel=0.15)


def test_a_host_check_finds_an_impossible_count() -> None:
    settings = small(loops=["engine"])
    with EngineCostBench(settings, VirtualDevice("H200")) as bench:
        bench._batch = 4
        engine = bench.ready(CostArm.HOST_CHECK)
        engine.start(bench._prompts(0))
        engine.step()
        runner = engine.runner
        fill = protocol_cost.WRITE_STATUS
        runner.device.launch(
            fill, (), (runner.buffers.num_bonus.view(torch.uint8),), scalars=(16384,)
        )
        with pytest.raises(DeviceError, match="impossible counts"):
            runner._check_counts(4)


def test_unpatched_under_a_store_is_left_out_and_says_why() -> None:
    settings = small(loops=["engine"], engine_pressures=["store"], only=["hold"], engine_repeats=1)
    [arms] = rows_of(settings).values()
    assert arms[CostArm.HOLD].left_out is None
    assert "stale bytes" in (arms[CostArm.UNPATCHED].left_out or "")
    assert arms[CostArm.UNPATCHED].step_us is None


def rows_with_a_failed_start(
    monkeypatch: pytest.MonkeyPatch, protocol: CopyProtocol, number: int
) -> dict[CostArm, CostRow]:
    """A point on an accelerator, so to say: warm-up, then one repeat; a start fails."""
    real, starts = CostEngineArm.start, Counter[CopyProtocol]()

    def start(self: CostEngineArm, prompts: Prompts) -> None:
        real(self, prompts)
        mine = self.runner.processor.protocol
        starts[mine] += 1
        if mine is protocol and starts[mine] == number:
            raise RequestFailed("request-0: tokens were lost")

    monkeypatch.setattr(CostEngineArm, "start", start)
    settings = small(
        loops=["engine"], only=["hold"], guards=False, engine_repeats=1, engine_batch_sizes=[2]
    )
    point = build_points(settings)[-1]
    with EngineCostBench(settings, VirtualDevice("H200", seed=3)) as bench:
        bench.clock = Clock.ACCELERATOR
        rows = list(bench.run(point, work_of(settings, point), 0, lambda: None))
    return {row.arm: row for row in rows}


@pytest.mark.parametrize("number", [1, 2], ids=["warm-up", "repeat"])
def test_a_failed_start_ends_no_sweep_if_nothing_protects_it(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    arms = rows_with_a_failed_start(monkeypatch, CopyProtocol.UNPATCHED, number)
    assert set(arms) == {CostArm.UNPATCHED, CostArm.HOLD}
    assert "stale bytes: request-0" in (arms[CostArm.UNPATCHED].left_out or "")
    assert arms[CostArm.HOLD].step_us is not None


def test_a_failed_start_of_a_protocol_that_protects_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(RequestFailed, match="request-0"):
        rows_with_a_failed_start(monkeypatch, CopyProtocol.HOLD, 1)


def test_an_engine_is_not_changed_under_a_transfer() -> None:
    settings = small(loops=["engine"])
    with EngineCostBench(settings, VirtualDevice("H200")) as bench:
        bench._batch = 4
        engine = bench.ready(CostArm.HOLD)
        engine.start(bench._prompts(0))
        with pytest.raises(DeviceError, match="must be empty"):
            bench.ready(CostArm.BLOCKING)


def test_agreement_is_over_what_both_have() -> None:
    assert agreement([[1, 2, 3], [4]], [[1, 2], [5, 6]]) == pytest.approx(2 / 3)
    assert agreement([[]], [[1]]) == 1.0


# -- settings, points and rows
def test_points_and_orders() -> None:
    settings = ProtocolSweepSettings()
    points = build_points(settings)
    kinds = Counter(point.kind for point in points)
    assert kinds == {
        PointKind.LIMITS: 1,
        PointKind.BARE: 36,
        PointKind.MEMORY: 2,
        PointKind.ENGINE: 12,
    }
    assert len({point.point_id for point in points}) == len(points)
    first = list(turns(BARE_ARMS, 42, 0, 5))
    assert first == list(turns(BARE_ARMS, 42, 0, 5))
    assert first != list(turns(BARE_ARMS, 43, 0, 5))
    assert all(sorted(order) == sorted(BARE_ARMS) for _, order in first)
    assert settings.steps_of(32) == 64
    assert settings.steps_of(512) == 16
    some = sized({"only": ["rec*"]}, quick=False)
    assert [arm for arm in CostArm if some.wants(arm)] == [CostArm.UNPATCHED, CostArm.RECORD_STREAM]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"leads": [300]}, "leads"),
        ({"deep_lead": 200, "memory_steps": 100}, "deep_lead"),
        ({"batch_sizes": [4, 4]}, "batch_sizes"),
        ({"only": ["record*", "noth*"]}, "noth.* fits no arm; there are unpatched"),
        ({"preset": "nope"}, "no model size has that name; known: tiny"),
    ],
)
def test_what_cannot_run_is_refused(values: dict[str, Any], name: str) -> None:
    with pytest.raises(BadInput, match=name):
        sized(values, quick=False)


def test_a_row_is_timed_or_says_why_not() -> None:
    same: dict[str, Any] = {
        "point_id": "p",
        "clock": Clock.ACCELERATOR,
        "loop": Loop.BARE,
        "arm": CostArm.HOLD,
        "batch": 1,
        "lead": 1,
        "pressure": Pressure.IDLE,
        "repeat": 0,
    }
    with pytest.raises(ValueError, match="has a place"):
        CostRow(**same)
    with pytest.raises(ValueError, match="has no time"):
        CostRow(**same, left_out="gone", step_us=1.0)


def test_only_some_steps_are_stuck() -> None:
    work = work_of(ProtocolSweepSettings(), CostPoint(PointKind.BARE, pressure=Pressure.STUCK))
    assert [step for step in range(120) if work.is_stuck(step)] == [20, 60, 100]


# -- the plain way
def test_events_are_counted_whoever_makes_them() -> None:
    device = VirtualDevice("H200")
    with counted_events(device) as made:
        device.new_event()
        device.new_stream().wait_stream(device.default_stream)
    assert made == [2]
    device.new_event()
    assert made == [2]


def test_a_plain_copy_arrives() -> None:
    device = VirtualDevice("H200")
    source = device.empty((64,), torch.uint8)
    device.launch(protocol_cost.WRITE_STATUS, (), (source,), scalars=(7,))
    host, done = plain_host_copy(device, source, device.new_stream())
    done.synchronize()
    assert host.view(torch.int32).tolist() == [7] * 16


# -- hardware
@pytest.mark.gpu
def test_all_arms_run_on_an_accelerator() -> None:
    reason = why_no_accelerator()
    if reason is not None:
        pytest.skip(reason)
    settings = sized(
        {**SMALL, "device": "accelerator", "preset": "tiny", "engine_repeats": 2, "repeats": 2}
        | {"batch_sizes": [4], "engine_batch_sizes": [4], "steps": 60, "limit_calls": 40}
        | {"deep_lead": 8, "memory_steps": 32, "engine_pressures": ["idle", "stuck"]},
        quick=False,
    )
    found = {}
    for point, tables in run_points(settings, open_device("accelerator")):
        for row in tables.get("samples", []):
            assert isinstance(row, CostRow)
            assert row.clock is Clock.ACCELERATOR
            found[point.point_id, row.arm] = row
            protected = PROTOCOLS.get(row.arm, CopyProtocol.UNPATCHED) is not CopyProtocol.UNPATCHED
            assert not (protected and row.stale)
    idle = {arm: row for (point, arm), row in found.items() if point == "bare-b4-l2-idle"}
    assert set(idle) == set(BARE_ARMS)
    assert (idle[CostArm.PLAIN].send_us or 0) > (idle[CostArm.HOLD].send_us or 0)
    stuck = found["bare-b4-l2-stuck", CostArm.UNPATCHED]
    assert stuck.stale
    assert {arm for (point, arm) in found if point == "engine-b4-idle"} == {
        *ENGINE_ARMS,
        *GUARD_ARMS,
    }
    assert engine_cost.agreement([[1]], [[1]]) == 1.0
