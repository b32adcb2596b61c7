"""Windows held against each other pair by pair, and the sentences that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from atom.benchmarks.protocol_cost_rows import Clock, CostArm, CostRow, Loop, Pressure
from atom.workbook.engine_speed_analysis import MET, MISSED
from atom.workbook.protocol_cost_analysis import cost_goals, summarise
from atom.workbook.protocol_cost_findings import (
    failure_sentences,
    guard_sentences,
    memory_sentences,
    noise_sentences,
    pooled_table,
    send_sentences,
    zero_copy_sentences,
)
from atom.workbook.protocol_cost_paired import (
    PLAIN_ALONE,
    SEND,
    SEND_ALONE,
    best_ratio,
    failures_table,
    paired_ratio,
    pooled_goals,
    send_floor,
    send_table,
)

#: how much slower the host is in each window of a repeat: other programs run there, too
HOST = (1.0, 1.0, 1.7, 1.0, 1.02, 0.99, 1.4, 1.01)
SENDS = {CostArm.PLAIN: 40.0, CostArm.ZERO_COPY: 2.0}
LIMITS = {
    name: (us, 2 * us)
    for name, us in (("event record", 1.0), ("event wait", 1.0), ("copy call, 256 bytes", 4.0))
}


def frame(
    steps: Mapping[CostArm, float],
    loop: Loop = Loop.BARE,
    pressure: Pressure = Pressure.IDLE,
    failed: Mapping[CostArm, Sequence[int]] | None = None,
) -> pd.DataFrame:
    """A point's rows: each arm's step, slowed down as its repeat's host is."""
    rows = []
    for arm, step in steps.items():
        for repeat, slow in enumerate(HOST):
            same: dict[str, Any] = {
                "point_id": f"{loop}-b8-{pressure}",
                "clock": Clock.ACCELERATOR,
                "loop": loop,
                "arm": arm,
                "batch": 8,
                "lead": 1,
                "pressure": pressure,
                "repeat": repeat,
            }
            if repeat in (failed or {}).get(arm, ()):
                same["left_out"] = "requests failed of stale bytes: request-7: lost (first tag 1)"
            else:
                send = SENDS.get(arm, 8.0) * slow
                same |= {"position": 0, "steps": 9, "step_us": step * slow, "send_us": send}
                same |= {"send_p99_us": 2 * send, "receive_us": 5.0 * slow}
                same |= {"step_p99_us": 2 * step * slow, "stale": 0}
            rows.append(CostRow(**same).model_dump())
    found = pd.DataFrame(rows)
    return found.astype(dict.fromkeys(("loop", "arm", "pressure", "clock"), str))


BARE = {
    CostArm.UNPATCHED: 50.0,
    CostArm.NULL: 50.0,
    CostArm.HOLD: 50.1,
    CostArm.ZERO_COPY: 40.0,
    CostArm.PLAIN: 60.0,
}


def test_a_slow_host_spoils_no_pair() -> None:
    samples = frame(BARE)
    found = paired_ratio(samples, CostArm.HOLD, loop=Loop.BARE)
    assert found == pytest.approx((1.002, 1.002, 1.002))
    assert paired_ratio(samples, CostArm.HOLD, loop=Loop.ENGINE) is None
    # repeats are what pairs them: with the rows of one arm shuffled the interval is wide
    mixed = samples.copy()
    mine = (mixed["arm"] == str(CostArm.HOLD)).to_numpy()
    mixed.loc[mine, "repeat"] = np.roll(mixed.loc[mine, "repeat"].to_numpy(), 1)
    apart = paired_ratio(mixed, CostArm.HOLD, loop=Loop.BARE)
    assert apart is not None
    assert apart[2] - apart[1] > 0.1


@pytest.mark.parametrize(("hold", "outcome"), [(50.1, MET), (51.0, MISSED)])
def test_goals_are_judged_over_all_points(hold: float, outcome: str) -> None:
    samples = frame({**BARE, CostArm.HOLD: hold})
    goals = {goal.name: goal for goal in pooled_goals(samples)}
    assert goals["hold's step over unpatched's"].outcome == outcome
    assert goals["the plain send over hold's"].value == pytest.approx((5.0, 5.0, 5.0))
    assert goals["send of zero_copy, us"].outcome == MET
    table = pooled_table(list(goals.values()), cost_goals(summarise(samples)))
    assert next(iter(table["outcome"])) == outcome
    # by itself the point's slow windows leave it open
    assert next(iter(table["points that meet it alone"])) == "0 of 1"


def test_the_least_that_a_send_costs_bounds_the_goal() -> None:
    samples = frame(BARE)
    assert send_floor(LIMITS) == pytest.approx(7.0)
    assert send_floor({}) is None
    assert best_ratio(samples, LIMITS) == pytest.approx(40.2 / 7, rel=0.02)
    assert "within reach" in send_sentences(samples, LIMITS)[0]
    timed = {**LIMITS, SEND_ALONE: (10.0, 11.0), PLAIN_ALONE: (30.0, 31.0)}
    assert best_ratio(samples, timed) == pytest.approx(3.0)
    assert "out of reach" in send_sentences(samples, timed)[0]
    assert "these four, added up" in set(send_table(samples, LIMITS)["what"])
    assert "these four, one after the other" in set(send_table(samples, timed)["what"])
    assert paired_ratio(samples, CostArm.PLAIN, CostArm.HOLD, SEND, loop=Loop.BARE)


def test_failed_windows_are_a_result() -> None:
    failed = {CostArm.UNPATCHED: range(8), CostArm.NULL: [2]}
    steps = dict.fromkeys((CostArm.UNPATCHED, CostArm.NULL, CostArm.HOLD), 1000.0)
    samples = frame(steps, Loop.ENGINE, Pressure.STUCK, failed)
    table = failures_table(samples)
    assert list(table["failed"]) == [8, 1]
    assert list(table["windows"]) == [8, 8]
    assert table["first reason"].iloc[0].endswith("lost")
    assert failure_sentences(samples)[0].startswith("In 9 of 16 windows")
    fine = frame(steps, Loop.ENGINE)
    assert failures_table(fine).empty
    assert failure_sentences(fine) == ["No request failed in 16 windows of the unpatched engine."]
    wrong = frame(steps, Loop.ENGINE, Pressure.STUCK, {CostArm.HOLD: [1]})
    with pytest.raises(AssertionError, match="1 of 8 windows"):
        failure_sentences(wrong)


def test_sentences_follow_the_rows() -> None:
    engine = {
        **dict.fromkeys((CostArm.UNPATCHED, CostArm.NULL, CostArm.NO_GUARD), 1000.0),
        CostArm.HOLD: 1050.0,
        CostArm.ZERO_COPY: 1100.0,
    }
    busy = frame(engine, Loop.ENGINE, Pressure.STORE)
    samples = pd.concat([frame(BARE), frame(engine, Loop.ENGINE), busy])
    assert "the host itself was slower" in noise_sentences(samples)[0]
    assert "up to 71.7%" in noise_sentences(samples)[0]
    assert "is more than that noise" in noise_sentences(samples)[0]
    level = frame({**engine, CostArm.HOLD: 1000.0}, Loop.ENGINE)
    assert "is no finding" in noise_sentences(level)[0]
    alone = dict.fromkeys(("kernel and wait", "host-writing kernel and wait"), (12.0, 20.0))
    for beside, words in ((14.0, "link alone does not explain"), (60.0, "waits for the store")):
        limits = {
            **alone,
            "kernel and wait, beside a store": (13.0, 20.0),
            "host-writing kernel and wait, beside a store": (beside, 90.0),
        }
        text = " ".join(zero_copy_sentences(samples, limits, summarise(samples)))
        assert words in text
        assert "1.100 [1.100, 1.100] of unpatched's (longer)" in text
    assert "not measured here" in " ".join(zero_copy_sentences(samples, {}, summarise(samples)))
    assert "is open" in " ".join(guard_sentences(samples, 1.01))
    assert "is open" not in " ".join(guard_sentences(samples, 1.2))
    engine[CostArm.HOST_CHECK] = 1010.0
    checked = " ".join(guard_sentences(frame(engine, Loop.ENGINE)))
    assert "over the reporting guard and tag without one, by batch: " in checked
    assert "(shorter)" in checked


def test_memory_is_told_by_place() -> None:
    rows = [
        {"point_id": "deep", "arm": arm, "held_bytes": size, "segments": 1}
        for arm, sizes in (("hold", (1, 4096, 4096)), ("record_stream", (512, 512, 2048)))
        for size in sizes
    ]
    [text] = memory_sentences(pd.DataFrame(rows))
    assert "hold keeps 4,096 bytes at most and 4,096 in the median" in text
    assert "record_stream 2,048 and 512; no segments" in text
