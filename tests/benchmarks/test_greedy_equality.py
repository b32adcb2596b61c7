"""The greedy-equality experiment on the virtual device, and what it makes of differences."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from atom.__main__ import main
from atom.benchmarks.greedy_equality import (
    ArmTokens,
    Truth,
    compare,
    forced_logits,
    load_models,
    run_greedy_equality,
)
from atom.benchmarks.greedy_equality_rows import (
    AGAIN,
    CONTROL,
    MTP,
    NULL,
    REFERENCE,
    EqualityArm,
    GreedyEqualityRow,
    GreedyEqualitySettings,
    Precision,
    build_arms,
    quick,
)
from atom.device.virtual import VirtualDevice
from atom.errors import BadInput
from atom.workbook.greedy_equality_runs import SWEEP, unexpected
from atom.workbook.records import load_runs

SMALL = GreedyEqualitySettings(
    requests=3, prompt_tokens=20, output_tokens=8, only=(NULL, MTP, "MTP-3, chunks", CONTROL)
)


@pytest.mark.parametrize("precision", Precision)
def test_only_the_wrong_arm_differs_by_more_than_rounding(precision: Precision) -> None:
    settings = SMALL.model_copy(update={"precision": precision})
    rows = {row.arm: row for row in run_greedy_equality(settings)}
    assert list(rows) == [REFERENCE, NULL, MTP, "MTP-3, chunks", CONTROL]
    for row in rows.values():
        assert (row.above_bound > 0) is row.control, row
        # a bound above all margins could not see anything
        assert row.places_above_bound > 0.5
        if precision is Precision.FLOAT32:
            assert row.bound == 0
            assert row.control or row.first_differences == 0
        else:
            assert 0 < row.bound < row.median_margin
    assert rows[MTP].accepted_tokens > 0
    assert rows[REFERENCE].drafted_tokens == 0


def test_forced_logits_choose_the_generated_tokens() -> None:
    models = load_models(SMALL, VirtualDevice("MI355X"))
    text = list(range(40))
    whole = forced_logits(models.exact, text)
    assert whole.shape == (40, models.served.config.vocab_size)
    torch.testing.assert_close(forced_logits(models.exact, text[:17])[-1], whole[16])


def _row(ours: list[int], logits: torch.Tensor, bound: float) -> GreedyEqualityRow:
    truth = Truth([[5, 6, 7]], [logits], bound, torch.tensor([1.0, 0.1, 1.0]))
    settings = GreedyEqualitySettings(requests=2)
    return compare(settings, EqualityArm("arm"), ArmTokens([ours], 0, 0), truth)


def test_a_first_difference_counts_by_how_far_it_falls_short() -> None:
    logits = torch.zeros(3, 10)
    logits[0, 5], logits[1, 6], logits[1, 3], logits[2, 7] = 1.0, 2.0, 1.9, 1.0
    same = _row([5, 6, 7], logits, 0.2)
    assert (same.first_differences, same.tokens_compared, same.largest_shortfall) == (0, 3, None)
    close = _row([5, 3, 9], logits, 0.2)
    # what comes behind the first difference has another prefix
    assert (close.first_differences, close.above_bound, close.tokens_compared) == (1, 0, 2)
    assert close.largest_shortfall == pytest.approx(0.1)
    assert _row([5, 3, 9], logits, 0.05).above_bound == 1
    far = _row([5, 8, 7], logits, 0.2)
    assert (far.above_bound, far.largest_shortfall) == (1, 2.0)


def test_arms_are_known_and_the_reference_always_runs() -> None:
    assert [arm.name for arm in build_arms(SMALL.model_copy(update={"only": (AGAIN,)}))] == [
        REFERENCE,
        AGAIN,
    ]
    with pytest.raises(BadInput, match="no arm 'nothing'"):
        build_arms(SMALL.model_copy(update={"only": ("nothing",)}))
    assert quick(GreedyEqualitySettings(requests=3)).requests == 3
    assert quick(GreedyEqualitySettings()).requests == 8


def test_the_sweep_records_and_its_exit_code_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-p", "requests", "2", "-p", "output_tokens", "8", "-p", "prompt_tokens", "12"]
    command = ["sweep", "greedy-equality", "--device", "virtual", "--out", str(tmp_path), *options]
    assert main([*command, "--only", MTP, "--only", CONTROL]) == 0
    assert "MTP-3" in capsys.readouterr().out
    runs, problems = load_runs([tmp_path], "greedy_equality")
    assert problems == []
    table = runs[0].tables["arms"]
    assert unexpected(table) == []
    changed = table.assign(above_bound=0, first_differences=0)
    assert "wrong on purpose" in unexpected(changed)[0]
    changed = table.assign(above_bound=1, largest_shortfall=0.5)
    assert "MTP-3: 1 requests differ" in unexpected(changed)[-1]
    with pytest.raises(BadInput, match="no --trials"):
        SWEEP.settings_from(Namespace(processes=None, resume=None, trials=3), None)
