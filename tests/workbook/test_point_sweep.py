"""The sweeps of points: plan, options, Ctrl-C, failure, and going on where they stopped."""

from __future__ import annotations

import json
import signal
import time
import weakref
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from atom.__main__ import main
from atom.benchmarks import engine_fault, greedy_equality
from atom.benchmarks.engine_fault_arms import ARMS
from atom.benchmarks.kernel_rows import KernelArm
from atom.benchmarks.kernel_speed import KernelSpeedSettings, build_points
from atom.config import DeviceChoice
from atom.errors import BadInput, DeviceError
from atom.workbook.point_sweep import Measured, PointSweep
from atom.workbook.records import check_folder, load_run
from atom.workbook.run_writer import RunWriter, read_provenance
from atom.workbook.sweep_control import terminated_like_interrupted
from atom.workbook.sweep_progress import TerminalProgress
from atom.workbook.sweeps import _POINT_SWEEPS

#: options of a run of seconds, and an arm with its reference
SMALL: dict[str, list[str]] = {
    "lifetime": ["--trials", "2", "--only", "spec_status"],
    "engine-fault": ["--quick", "--only", "hold, again", "--only", "unpatched, guard"],
    "greedy-equality": ["--quick", "--only", "MTP-3", "--only", "no drafts, again"],
    "engine-speed": ["--only", "ours again"],
    "protocol-cost": ["--only", "hold"],
}
#: settings that make them smaller
SMALLER: dict[str, dict[str, str]] = {
    "lifetime": {},
    "engine-fault": {"law_budgets": "[]", "requests": "2", "store_bytes": "1048576"},
    "greedy-equality": {"requests": "2", "output_tokens": "4", "prompt_tokens": "8"},
    "engine-speed": {"prefill_tokens": "16"},
    "protocol-cost": {"loops": "[bare]", "pressures": "[idle]", "leads": "[1]", "steps": "8"},
}


pytestmark = pytest.mark.usefixtures("same_commit")


def sweep_of(name: str) -> PointSweep[Any]:
    found: PointSweep[Any] = import_module(f"atom.workbook.{_POINT_SWEEPS[name]}").SWEEP
    return found


def stop_behind(
    monkeypatch: pytest.MonkeyPatch, name: str, points: int, error: BaseException
) -> list[str]:
    """Let the sweep ``name`` end with ``error`` behind so many points; tells which it measured."""
    kind, seen = type(sweep_of(name)), []
    original = kind.measure

    def measure(self: Any, settings: Any, device: Any, ready: Any, done: Collection[str]) -> Any:
        left: Measured = original(self, settings, device, ready, done)
        for number, (record_id, tables) in enumerate(left):
            if number == points:
                raise error
            seen.append(record_id)
            yield record_id, tables

    monkeypatch.setattr(kind, "measure", measure)
    return seen


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("name", SMALL)
def test_it_goes_on_where_ctrl_c_stopped_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", name, "--device", "virtual", "--out", str(tmp_path), *SMALL[name]]
    for setting, value in SMALLER[name].items():
        command += ["-p", setting, value]
    with pytest.MonkeyPatch.context() as patch:
        first = stop_behind(patch, name, 1, KeyboardInterrupt())
        assert main(command) == 130
    printed = capsys.readouterr()
    [folder] = [file.parent for file in tmp_path.rglob("run.json")]
    assert read_provenance(folder).exit_state == "interrupted"
    assert f"go on with: python -m atom sweep {name} --resume" in printed.err
    assert main(["sweep", name, "--resume", str(folder), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    left = [point["point"] for point in plan["points"]]
    assert first[0] not in left
    with pytest.MonkeyPatch.context() as patch:
        second = stop_behind(patch, name, 99, KeyboardInterrupt())
        assert main(["sweep", name, "--resume", str(folder)]) == 0
    assert second == left
    assert left
    assert check_folder(folder) == []
    run = load_run(folder)
    assert run.provenance.exit_state == "finished"
    settings = sweep_of(name).recorded(run.provenance.settings, "here")
    assert [*first, *second] == [point.record_id for point in sweep_of(name).plan(settings)]
    capsys.readouterr()
    assert main(["sweep", name, "--resume", str(folder)]) == 2
    assert "finished" in capsys.readouterr().err


def test_ctrl_c_is_no_failure_of_an_engine_that_closes_in_mid_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = DeviceError("step 36 was neither launched nor discarded")
    error.__context__ = KeyboardInterrupt()
    stop_behind(monkeypatch, "lifetime", 1, error)
    options = ["--device", "virtual", "--out", str(tmp_path), *SMALL["lifetime"]]
    assert main(["sweep", "lifetime", *options]) == 130
    assert "interrupted; finished points are kept" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["finish", "stop"])
def test_a_second_ctrl_c_hides_nothing_that_was_recorded(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = RunWriter if place == "finish" else TerminalProgress
    stop = TerminalProgress.stop

    def again(self: object, *_: object) -> None:
        if isinstance(self, TerminalProgress):
            # its thread would outlive the test
            stop(self)
        raise KeyboardInterrupt

    stop_behind(monkeypatch, "lifetime", 1, KeyboardInterrupt())
    monkeypatch.setattr(owner, place, again)
    options = ["--device", "virtual", "--out", str(tmp_path), *SMALL["lifetime"]]
    assert main(["sweep", "lifetime", *options]) == 130
    assert "interrupted; finished points are kept" in capsys.readouterr().err


def test_a_failure_keeps_what_was_finished_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_behind(monkeypatch, "lifetime", 2, DeviceError("lost"))
    options = ["--device", "virtual", "--out", str(tmp_path), *SMALL["lifetime"]]
    assert main(["sweep", "lifetime", *options]) == 3
    error = capsys.readouterr().err
    assert "2 finished points are kept" in error
    assert "sweep lifetime --resume" in error
    [folder] = [file.parent for file in tmp_path.rglob("run.json")]
    assert read_provenance(folder).exit_state == "failed"
    sweep = sweep_of("lifetime")
    settings = sweep.recorded(read_provenance(folder).settings, "here")
    other = settings.model_copy(update={"device_profile": "H200"})
    from atom.workbook.point_sweep import record_points

    with pytest.raises(BadInput, match="was started on"):
        record_points(sweep, other, tmp_path, resume=folder)
    with pytest.raises(BadInput, match=r"other settings:\n.*seed"):
        record_points(sweep, settings.model_copy(update={"seed": 7}), tmp_path, resume=folder)
    assert main(["sweep", "lifetime", "--resume", str(folder), "--quick"]) == 2
    assert "--resume takes the recorded settings; leave out: quick" in capsys.readouterr().err
    assert main(["sweep", "engine-fault", "--resume", str(folder)]) == 2
    assert "is a run of lifetime" in capsys.readouterr().err


#: sweeps of a device; a model's asks for none
ON_DEVICES = [name for name in _POINT_SWEEPS if name != "capacity"]


@pytest.mark.parametrize("name", ON_DEVICES)
def test_a_dry_run_tells_device_minutes_and_what_spoils_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    minutes = {}
    for quick in ([], ["--quick"]):
        command = ["sweep", name, "--device", "accelerator", "--dry-run", *quick]
        assert main(command) == 0
        printed = capsys.readouterr()
        assert "device minutes" in printed.out
        assert "CUDA_LAUNCH_BLOCKING=1" in printed.err
        assert main([*command, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["device_minutes"] == pytest.approx(plan["seconds"] / 60, abs=0.01)
        minutes[bool(quick)] = plan["device_minutes"]
    assert minutes[True] < minutes[False] or name == "greedy-equality"
    assert 0 < minutes[True] <= 1


def test_what_no_accelerator_means_is_said_of_this_sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("atom.device.accelerator.why_no_accelerator", lambda: "none here")
    assert main(["sweep", "kernels", "--dry-run"]) == 0
    assert "none here, and this sweep needs one" in capsys.readouterr().err
    server = ["--base-url", "http://127.0.0.1:9", "-p", "server_label", "s"]
    for name, options in (("accuracy", []), ("throughput", ["-p", "server_model", "m"])):
        assert main(["sweep", name, "--dry-run", *server, *options]) in (0, 2)
        assert "simulating" not in capsys.readouterr().err
        assert main(["sweep", name, "--dry-run"]) == 0
        assert "none here): simulating on the virtual device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("capacity", ["--traces", "absent"], "--traces absent: no trace there"),
        ("throughput", ["--traces", "absent"], "absent: no trace there; expected a folder"),
        ("throughput", ["-p", "model", "absent"], "absent/config.json: No such file"),
        ("engine-fault", ["-p", "model", "absent"], "absent/config.json: No such file"),
        ("greedy-equality", ["-p", "model", "absent"], "absent/config.json: No such file"),
    ],
)
def test_a_dry_run_names_what_is_not_there(
    name: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if name == "capacity" else ["--device", "virtual"]
    assert main(["sweep", name, *device, "--dry-run", *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, said in printed.err) == ("", True)


def test_ctrl_c_before_anything_is_recorded_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(sweep_of("lifetime")), "open", interrupt)
    command = ["sweep", "lifetime", "--device", "virtual", "--out", str(tmp_path)]
    assert main(command) == 130
    assert "interrupted before anything was recorded" in capsys.readouterr().err


def test_no_sweep_starts_in_surroundings_that_hide_what_it_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    for name in ON_DEVICES:
        assert main(["sweep", name, "--device", "accelerator", "--out", str(tmp_path)]) == 2
        assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in capsys.readouterr().err
    assert not list(tmp_path.rglob("run.json"))


def test_only_some_arms_of_the_kernels_are_timed_beside_their_base() -> None:
    points = build_points(KernelSpeedSettings.parse({"only": ["trap"]}))
    assert {frozenset(point.arms) for point in points} == {
        frozenset({KernelArm.NONE, KernelArm.TRAP})
    }
    points = build_points(KernelSpeedSettings.parse({"only": ["flash-linear-attention"]}))
    assert {frozenset(point.arms) for point in points} == {
        frozenset({KernelArm.FLA, KernelArm.COPY})
    }


def test_references_of_the_resumed_arms_run_again_without_a_row() -> None:
    settings = sweep_of("engine-fault").parse(
        {"only": ["hold, again"], "requests": 1, "token_budgets": [64, 128], "store_bytes": 0}, True
    )
    device = sweep_of("engine-fault").open(settings)
    assert settings.device is DeviceChoice.VIRTUAL
    model = engine_fault.load_fault_model(settings, device)
    done = {"hold/64", "hold, again/64", "hold/128"}
    rows = engine_fault.measure_engine_fault(device, model, settings, None, done)
    [row] = [row for row in rows if row.token_budget in (64, 128)]
    assert (row.point_id, row.changed_requests) == ("hold, again/128", 0)
    assert ARMS[0].name == "hold"
    greedy = sweep_of("greedy-equality").parse(
        {"only": ["MTP-3"], "requests": 2, "output_tokens": 4, "prompt_tokens": 8}, False
    )
    models = greedy_equality.load_models(greedy, device)
    found = greedy_equality.measure_greedy_equality(device, models, greedy, {"no drafts"})
    assert [row.arm for row in found] == ["MTP-3"]


def test_ctrl_c_in_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Owner:
        pass

    def work() -> None:
        owner = Owner()
        reference = weakref.ref(owner, lambda _: signal.raise_signal(signal.SIGINT))
        del owner
        assert reference() is None
        time.sleep(2)

    with terminated_like_interrupted(), pytest.raises(KeyboardInterrupt):
        work()
    assert capsys.readouterr().err == ""
