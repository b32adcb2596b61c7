"""Sentences on the state kernels follow from the rows, and are left out where they do not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atom.benchmarks.kernel_rows import KernelArm
from atom.workbook.kernel_analysis import ArmSummary
from atom.workbook.kernel_findings import conv_sentences, copy_sentences, guard_sentences


def summary(arm: str, microseconds: float, ratio: float = 1.0, **changes: Any) -> ArmSummary:
    plain = ArmSummary(
        point_id="conv_update-speed-b256-c4096-q4-cold",
        operator="conv_update",
        question="speed",
        arm=arm,
        batch=256,
        channels=4096,
        queries=4,
        cache="cold",
        microseconds=microseconds,
        terabytes_per_s=36.0 / microseconds,
        ratio=ratio,
        low=ratio - 0.001,
        high=ratio + 0.001,
        left_out=None,
    )
    return replace(plain, **changes)


def point(copy: float, kernel: float, ours: float, **changes: Any) -> list[ArmSummary]:
    arms = ((KernelArm.COPY, copy), (KernelArm.COPY_KERNEL, kernel), (KernelArm.REPORT, ours))
    return [summary(str(arm), time, **changes) for arm, time in arms]


WARM: dict[str, Any] = {"cache": "warm", "point_id": "conv_update-speed-b256-c4096-q4-warm"}


def test_shares_are_given_for_either_cache() -> None:
    cold, warm = conv_sentences([*point(9.0, 9.5, 10.0), *point(8.9, 9.0, 10.0, **WARM)])
    assert "cold cache" in cold
    assert "0.900 of copy_'s rate" in cold
    assert "0.950 of the rate of a copy by an elementwise kernel" in cold
    assert "warm cache" in warm
    assert "0.890" in warm


def test_a_launch_that_lies_in_the_cache_is_named() -> None:
    found = conv_sentences([*point(9.0, 9.5, 10.0), *point(6.0, 6.0, 7.5, **WARM)])
    assert len(found) == 3
    assert "36 MB of a launch stay in the L2 cache" in found[-1]
    assert "copy_ is 1.50 times as fast" in found[-1]
    assert "share is 0.800" in found[-1]


def test_small_batches_and_other_kernels_have_no_share() -> None:
    assert conv_sentences(point(9.0, 9.5, 10.0, batch=32)) == []
    assert conv_sentences(point(9.0, 9.5, 10.0, operator="recurrent_update")) == []
    assert conv_sentences([summary(KernelArm.REPORT, 10.0)]) == []


def test_a_slow_copy_is_no_yardstick() -> None:
    assert copy_sentences(point(10.0, 9.5, 10.5)) == []
    (sentence,) = copy_sentences(point(15.0, 10.0, 11.0, operator="recurrent_update", queries=1))
    assert "1.50 times as long" in sentence
    assert "1 point (recurrent, 256 rows of 4096 channels and 1 token, cold)" in sentence
    assert "takes 1.100" in sentence


def test_a_guard_that_seems_to_save_time_is_told() -> None:
    def guarded(ratio: float) -> list[ArmSummary]:
        return [
            summary(KernelArm.REPORT, 10.0, ratio, question="guard"),
            summary(KernelArm.NULL, 10.0, 1.0, question="guard"),
        ]

    assert guard_sentences(guarded(0.995)) == []
    assert guard_sentences(guarded(1.02)) == []
    (sentence,) = guard_sentences(guarded(0.95))
    assert "At 1 point " in sentence
    assert "0.950, 256 rows of 4096 channels and 4 tokens" in sentence
