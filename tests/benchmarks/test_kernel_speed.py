"""The kernel-speed experiment: right before timed, interleaved, and honest about who is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from atom.__main__ import main
from atom.benchmarks import kernel_arms, kernel_speed
from atom.benchmarks.kernel_arms import Arm, conv_job, outputs_of, recurrent_job
from atom.benchmarks.kernel_rows import CacheState, KernelArm, KernelRow, Operator, Question
from atom.benchmarks.kernel_speed import (
    CONV_SPEED,
    GUARD_ARMS,
    RECURRENT_SPEED,
    KernelSpeedSettings,
    build_points,
    check,
    order,
    quick,
    run_point,
    run_points,
)
from atom.config import GuardMode
from atom.errors import BadInput, DeviceError
from atom.workbook.kernel_analysis import summarise
from atom.workbook.kernel_runs import record_kernels, result_text

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "batch_sizes": [4],
    "channels": [24],
    "key_heads": 2,
    "value_heads": 4,
    "head_size": 16,
    "repeats": 3,
    "guard_launches": 5,
    "replay_ms": 0.001,
}
BATCH = {"batch": 5, "draft_tokens": 3, "device": CPU}
HEADS = {"key_heads": 2, "value_heads": 4, "head_size": 16}


class HostBench:
    """Runs the launches at the time of a replay; the time is that of a clock that ticks."""

    cold_bytes = 8_000
    device = CPU

    def __init__(self) -> None:
        self.replayed: list[Any] = []

    def capture(self, launch: Callable[[int], Any], buffers: int, launches: int) -> Any:
        return launch, buffers, launches

    def milliseconds(self, graph: Any) -> float:
        launch, buffers, launches = graph
        for number in range(launches):
            launch(number % buffers)
        self.replayed.append(graph)
        return 0.01 * launches


def build(operator: Operator, names: tuple[KernelArm, ...], queries: int) -> Any:
    torch.manual_seed(3)
    if operator is Operator.CONV_UPDATE:
        return conv_job(names, channels=24, queries=queries, buffers=lambda _: 2, **BATCH)
    return recurrent_job(names, queries=queries, **HEADS, **BATCH)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(
    ("operator", "names"),
    [
        (Operator.CONV_UPDATE, CONV_SPEED + GUARD_ARMS),
        (Operator.RECURRENT_UPDATE, RECURRENT_SPEED + GUARD_ARMS),
    ],
)
def test_all_arms_do_the_same_job(
    operator: Operator, names: tuple[KernelArm, ...], queries: int
) -> None:
    job = build(operator, names, queries)
    assert {arm.name for arm in job.arms} == set(names)
    checked = 0
    for arm in job.arms:
        if arm.launch is None:
            assert arm.name in (KernelArm.FLA, KernelArm.TRANSFORMERS)
            assert arm.left_out
            continue
        check(arm, job)
        checked += outputs_of(arm.launch(arm.buffers - 1)) is not None
    assert checked >= 4


@pytest.mark.parametrize("operator", Operator)
def test_transformers_is_among_the_arms(operator: Operator) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    job = build(operator, (KernelArm.TRANSFORMERS,), 4)
    assert job.arms[0].left_out is None
    check(job.arms[0], job)


@pytest.mark.parametrize("operator", Operator)
def test_a_wrong_arm_is_not_timed(operator: Operator) -> None:
    job = build(operator, (KernelArm.NONE,), 4)
    launch = job.arms[0].launch
    assert launch is not None
    # a little wrong, shifted by a token, and not a number
    for spoil in (lambda out: out * 1.05, lambda out: out.roll(1, 0), lambda out: out * torch.nan):

        def wrong(i: int, spoil: Any = spoil) -> Any:
            return spoil(launch(i))

        with pytest.raises(DeviceError, match="not timed"):
            check(Arm(KernelArm.NONE, wrong), job)


def test_the_bytes_are_those_of_the_rows() -> None:
    # read 3 rows of history and 4 inputs, write 6 rows and 4 outputs, of 24 bfloat16 channels
    assert build(Operator.CONV_UPDATE, (KernelArm.COPY,), 4).bytes_moved == 5 * 17 * 24 * 2
    assert build(Operator.CONV_UPDATE, (KernelArm.COPY,), 1).bytes_moved == 5 * 8 * 24 * 2
    # read one state and write four, of 4 heads of 16 x 16 float32, beside the tokens and gates
    moved = build(Operator.RECURRENT_UPDATE, (KernelArm.COPY,), 4).bytes_moved
    assert moved == 5 * 5 * 4 * 16 * 16 * 4 + 20 * ((2 * 2 + 2 * 4) * 16 * 2 + 2 * 4 * 2)


def test_a_copy_moves_as_many_bytes_as_the_kernel() -> None:
    job = build(Operator.CONV_UPDATE, (KernelArm.COPY, KernelArm.COPY_KERNEL), 4)
    for arm in job.arms:
        assert arm.launch is not None
        assert arm.buffers == 2
        cells = dict(
            zip(
                arm.launch.__code__.co_freevars,
                (cell.cell_contents for cell in arm.launch.__closure__ or ()),
                strict=True,
            )
        )
        arm.launch(1)
        assert torch.equal(cells["target"][1], cells["source"][1])
        both = cells["target"][1].nbytes + cells["source"][1].nbytes
        assert 0 <= job.bytes_moved - both < 16


def test_every_point_has_its_arms_once_a_repeat_in_mixed_order() -> None:
    settings = KernelSpeedSettings.parse({**SMALL, "repeats": 12})
    point = next(p for p in build_points(settings) if p.question is Question.GUARD)
    rows = run_point(point, settings, HostBench())
    assert Counter((row.arm, row.repeat) for row in rows) == {
        (arm, repeat): 1 for arm in GUARD_ARMS for repeat in range(12)
    }
    firsts = {row.arm for row in rows if row.position == 0}
    assert len(firsts) > 1
    again = list(order(GUARD_ARMS, settings, 0))
    assert again == list(order(GUARD_ARMS, settings, 0))
    assert again != list(order(GUARD_ARMS, settings, 1))


def test_rows_of_all_points_and_what_they_say() -> None:
    settings = KernelSpeedSettings.parse(SMALL)
    rows: list[KernelRow] = []
    for point, found in run_points(settings, HostBench()):
        assert {row.point_id for row in found} == {point.point_id}
        assert {row.arm for row in found} == set(point.arms)
        rows += found
    cold = [row for row in rows if row.cache is CacheState.COLD and row.left_out is None]
    conv = [row for row in cold if row.operator is Operator.CONV_UPDATE]
    assert all((row.buffers or 0) * row.bytes_moved >= HostBench.cold_bytes for row in conv)
    speed = [row for row in conv if row.question is Question.SPEED]
    assert all((row.launches or 0) >= (row.buffers or 0) for row in speed)
    assert all(row.buffers == 1 for row in rows if row.cache is CacheState.WARM and row.buffers)
    assert {row.launches for row in conv if row.question is Question.GUARD} == {5}
    missing = [row for row in rows if row.left_out]
    assert {row.arm for row in missing} <= {KernelArm.FLA, KernelArm.TRANSFORMERS}

    frame = pd.DataFrame([row.model_dump(mode="json") for row in rows])
    summaries = summarise(frame)
    assert len(summaries) == sum(len(point.arms) for point in build_points(settings))
    for summary in summaries:
        if summary.left_out is None:
            assert summary.microseconds == pytest.approx(10)
            # the clock ticks alike for all
            assert (summary.low, summary.ratio, summary.high) == pytest.approx((1, 1, 1))
    text = result_text(summaries)
    assert "time over copy_" in text
    assert "time over unguarded" in text
    assert text.count("left out") == len(missing)


def test_a_ratio_is_of_medians_and_has_an_interval() -> None:
    base = {
        "point_id": "conv_update-guard-b4-c24-q4-cold",
        "operator": "conv_update",
        "question": "guard",
        "batch": 4,
        "channels": 24,
        "queries": 4,
        "cache": "cold",
        "bytes_moved": 3_000_000,
        "left_out": None,
    }
    times = {"none": [1.0, 1.1, 0.9], "report": [2.0, 2.2, 1.8]}
    rows = [
        {**base, "arm": arm, "microseconds": value}
        for arm, values in times.items()
        for value in values
    ]
    none, report = summarise(pd.DataFrame(rows))
    assert none.terabytes_per_s == pytest.approx(3.0)
    assert report.ratio == pytest.approx(2.0)
    assert report.low is not None
    assert report.high is not None
    assert report.low < 2.0 < report.high


def test_a_guard_that_stops_a_valid_batch_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = KernelSpeedSettings.parse(SMALL)
    point = next(p for p in build_points(settings) if p.question is Question.GUARD)
    whole = kernel_speed.build_job

    def spoilt(*arguments: Any) -> Any:
        job = whole(*arguments)
        job.record[:5] = torch.tensor([1, 0, 5, 16385, 0])
        return job

    monkeypatch.setattr(kernel_speed, "build_job", spoilt)
    with pytest.raises(DeviceError, match=r"stopped a valid batch.*16385"):
        run_point(point, settings, HostBench())


def test_a_library_that_is_missing_is_named() -> None:
    assert kernel_arms._imported(["no.such.package"], ["anything"]) is None
    why = kernel_arms._peer(KernelArm.FLA, None, "flash-linear-attention", CPU)
    assert why is not None
    assert "flash-linear-attention is not installed" in why


def test_a_quick_run_keeps_what_was_given() -> None:
    plain = quick(KernelSpeedSettings.parse({}))
    assert (plain.batch_sizes, plain.repeats) == ((32, 256), 7)
    given = quick(KernelSpeedSettings.parse({"batch_sizes": [8]}))
    assert given.batch_sizes == (8,)
    assert len(build_points(plain)) < len(build_points(KernelSpeedSettings.parse({}))) / 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"queries": [5]}, "raise draft_tokens"),
        ({"key_heads": 3}, "multiple of key_heads"),
        ({"batch_sizes": [8, 8]}, "twice"),
        ({"repeat": 3}, "did you mean 'repeats'"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        KernelSpeedSettings.parse(given)


def test_the_guard_arms_are_the_modes_and_a_null() -> None:
    modes = [kernel_arms.GUARDS[arm] for arm in GUARD_ARMS]
    assert set(modes) == set(GuardMode)
    assert modes.count(GuardMode.NONE) == 2


def test_the_command_plans_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "kernels", "--dry-run", "--quick"]) == 0
    assert "conv_update-guard-b256-c8192-q4-cold" in capsys.readouterr().out
    assert main(["sweep", "kernels", "--device", "virtual"]) == 2
    assert "needs an accelerator" in capsys.readouterr().err
    assert main(["sweep", "kernels", "--trials", "3"]) == 2
    assert "no --trials" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_nothing_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no accelerator"):
        record_kernels(KernelSpeedSettings.parse({}), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_small_run_on_hardware(tmp_path: Path) -> None:
    given = {"batch_sizes": [4], "channels": [256], "repeats": 3, "guard_launches": 20}
    run = record_kernels(KernelSpeedSettings.parse({**given, "queries": [4]}), tmp_path)
    samples = run.tables["samples"]
    assert run.provenance.exit_state == "finished"
    for arm in (KernelArm.REPORT, KernelArm.COPY, KernelArm.NONE, KernelArm.TRAP):
        assert (samples.loc[samples["arm"] == arm, "microseconds"] > 0).all()
    assert summarise(samples)
