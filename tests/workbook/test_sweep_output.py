"""A sweep's plan and result as text and JSON, and what it names beforehand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from atom.benchmarks import race_environment
from atom.benchmarks.race_environment import clock_limits, look_around, parse_rocm_smi
from atom.device.interface import DeviceKind
from atom.errors import BadInput
from atom.workbook import sweeps
from atom.workbook.records import load_run

_SMALL = ("--trials", "4", "--processes", "2", "--only", "main/*/spin/engine")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweeps.add_arguments(parser)
    return parser.parse_args(["race", *words])


def test_a_plan_has_device_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.run(parse("--device", "accelerator", "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device_minutes"] == pytest.approx(plan["seconds"] / 60, abs=0.01)
    trials = sum(arm["trials_per_process"] * arm["trial_seconds"] for arm in plan["arms"])
    assert 0 < trials * 5 < plan["seconds"]
    assert sweeps.run(parse("--device", "accelerator", "--dry-run")) == 0
    assert "device minutes" in capsys.readouterr().out.splitlines()[-1]
    assert sweeps.run(parse("--device", "virtual", "--dry-run", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["device_minutes"] == 0


def test_quick_takes_at_most_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps.run(parse("--device", "accelerator", "--dry-run", "--json", "--quick"))
    assert json.loads(capsys.readouterr().out)["seconds"] <= 60


def test_a_dry_run_names_what_would_be_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMD_SERIALIZE_KERNEL", "3")
    assert sweeps.run(parse("--device", "accelerator", "--dry-run", "--json")) == 0
    out, errors = capsys.readouterr()
    assert "the sweep would be refused" in errors
    assert "AMD_SERIALIZE_KERNEL=3" in errors
    json.loads(out)


def test_a_result_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "virtual", "--out", str(tmp_path), "--json", *_SMALL)
    assert sweeps.run(parse(*words)) == 0
    out, errors = capsys.readouterr()
    result = json.loads(out)
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert arms["main/unpatched/spin/engine"]["stale"] == 8
    assert arms["main/hold/spin/engine"]["high"] < 0.5
    assert result["exit_state"] == "finished"
    (run,) = tmp_path.glob("*/*")
    assert load_run(run).provenance.run_id == result["run_id"]
    assert "\x1b" not in errors + out


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"power_cap_w": 500.0, "power_default_w": 700.0},
            "the power cap is 500 W, below the default of 700",
        ),
        (
            {"application_clock_mhz": 1200, "application_clock_default_mhz": 1830},
            "the application clock is 1200 MHz, below the default of 1830",
        ),
        ({"clock_limits": ["heat"]}, "holds the clocks down: heat"),
        ({"performance_level": "low"}, "the performance level is 'low'"),
        ({"power_cap_w": 700.0, "power_default_w": 700.0, "performance_level": "auto"}, None),
        ({"power_cap_w": 700.0, "clock_limits": []}, None),
    ],
)
def test_a_cap_is_named(
    facts: dict[str, object], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(index: int) -> dict[str, object]:
        return {"other_gpu_processes": 0, **facts}

    monkeypatch.setattr(race_environment, "_from_nvml", read)
    warnings = look_around(DeviceKind.CUDA).warnings
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_reasons_of_a_lower_clock() -> None:
    # an idle device alone
    assert clock_limits(0x1) == []
    assert clock_limits(0x4 | 0x20) == ["power cap", "heat"]
    assert clock_limits(None) is None
    text = '{"card0": {"Performance Level": "Manual"}}'
    assert parse_rocm_smi(text) == {"performance_level": "manual"}


def test_a_folder_of_runs_that_cannot_be_written_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"folder of runs .*file/runs cannot be written \(Not a dir"):
        sweeps.run(parse("--device", "virtual", "--out", str(tmp_path / "file" / "runs"), *_SMALL))
