"""The accuracy sweep: recorded, resumed, and what is said of its points."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.__main__ import main
from atom.benchmarks.accuracy_settings import AccuracySettings
from atom.benchmarks.seeded_model import shipped_model
from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook import accuracy_runs
from atom.workbook.accuracy_analysis import examples, load_set, points_table
from atom.workbook.accuracy_claims import same_answers, simulated_arguments
from atom.workbook.accuracy_runs import SWEEP, estimate_seconds, result_text, unexpected
from atom.workbook.accuracy_simulation import SWEEP as SIMULATED
from atom.workbook.accuracy_simulation import SimulatedSettings
from atom.workbook.figures_accuracy import damage_figure, published_scores, scores_figure
from atom.workbook.point_sweep import record_points
from atom.workbook.records import Run, check_folder, load_run

#: what a server's point knows
_OF_A_SERVER = ("point_id", "arm", "order", "model", "outcome", "items", "strict")
_ONLY = ("hold/no-pool/plain", "hold/pool/mtp", "unpatched/pool/mtp")


def small(only: Sequence[str] = _ONLY, **given: Any) -> SimulatedSettings:
    return SimulatedSettings.parse(
        {
            "schedule": "latest",
            "items": 3,
            "shots": 1,
            "examples": 2,
            "sampling": "first_n",
            "max_tokens": 8,
            "concurrency": 3,
            "protocol": ["hold", "unpatched"],
            "only": list(only),
            **given,
        },
        where="test",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_points(SIMULATED, small(), tmp_path_factory.mktemp("runs"))


def test_a_sweep_is_recorded_whole(run: Run) -> None:
    assert run.provenance.exit_state == "finished"
    assert run.provenance.evidence is Evidence.SIMULATED
    assert check_folder(run.path) == []
    points, items = run.tables["points"], run.tables["items"]
    assert set(points["point_id"]) == set(_ONLY)
    assert set(points["model"]) <= {"seeded words1", "words8"}
    assert len(items) == 9
    assert points["task_hash"].nunique() == 1
    assert len(run.tables["texts"]) >= 3
    assert "gsm8k" not in run.provenance.settings


def test_hold_equals_the_reference_and_unpatched_does_not(run: Run) -> None:
    found = load_set(run, "H200")
    held, bare = (found.find(arm, pool=True, drafts=True) for arm in ("hold", "unpatched"))
    assert held is not None
    assert bare is not None
    assert held.against is not None
    assert bare.against is not None
    assert (held.against.damaged, held.stale) == (0, 0)
    assert bare.against.damaged == 3
    assert bare.stale
    assert same_answers(found)
    assert held.mean_length == pytest.approx(1 + 3 * (held.acceptance or 0))
    assert simulated_arguments(found)["acc-12"]["holds"] is True
    assert {example.item for example in examples(found)} <= {0, 1, 2}
    assert all(example.right != example.damaged for example in examples(found))


def test_what_it_prints(run: Run) -> None:
    text = result_text(run)
    assert "hold/pool/mtp" in text
    assert "0/3" in text
    assert "3/3" in text
    assert unexpected(run) == []
    wrong = run.tables["points"].assign(believes=False)
    changed = replace(run, tables={**run.tables, "points": wrong})
    assert any("unpatched/pool/mtp: ok" in line for line in unexpected(changed))
    blank = {str(name): None for name in wrong if name not in _OF_A_SERVER}
    bare = replace(run, tables={**run.tables, "points": wrong.assign(**blank)})
    assert result_text(bare).count(" - ") > 3
    assert unexpected(bare) == []
    table = points_table(load_set(run, "H200").points, noise=True)
    assert "strict-match, 95%" not in table.columns
    assert "strict-match, 95%" in points_table(load_set(run, "x").points, noise=False).columns


def test_figures_are_drawn_with_and_without_own_scores(run: Run) -> None:
    published = published_scores()
    assert len(published) == 5
    found = load_set(run, "H200")
    empty = scores_figure(published, None)
    assert "not measured yet" in {text.get_text() for text in empty.axes[1].texts}
    both = scores_figure(published, found)
    assert len(both.axes[1].get_yticks()) == len(found.points)
    assert damage_figure([found]).axes


def test_a_run_that_was_cut_goes_on(tmp_path: Path, same_commit: None) -> None:
    class Cut(type(SIMULATED)):  # type: ignore[misc]
        def measure(self, *arguments: Any) -> Any:
            yield next(super().measure(*arguments))
            raise KeyboardInterrupt

    settings = small(only=_ONLY[:2], items=1, max_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        record_points(Cut(), settings, tmp_path)
    (folder,) = tmp_path.glob("*/*accuracy*")
    assert load_run(folder).provenance.exit_state == "interrupted"
    whole = record_points(SIMULATED, settings, tmp_path, resume=folder)
    assert whole.provenance.exit_state == "finished"
    assert len(whole.tables["points"]) == 2


def test_a_process_a_point_on_the_virtual_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command itself, one point of it, in a process of its own."""
    options = ["--device", "virtual", "--quick", "--only", "hold/no-pool/plain", "--json"]
    small_task = [("items", "2"), ("shots", "1"), ("max_tokens", "4")]
    given = [word for name, value in small_task for word in ("-p", name, value)]
    assert main(["sweep", "accuracy", *options, *given, "--out", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    (row,) = shown["rows"]
    assert (row["point_id"], row["outcome"], row["answered"]) == ("hold/no-pool/plain", "ok", 2)
    assert row["exit_code"] == 0
    (folder,) = tmp_path.glob("*/*accuracy*")
    assert check_folder(folder) == []


def test_the_plan_is_shown_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "accelerator", "--dry-run", "--out", str(tmp_path), "--gpus", "0,1"]
    assert main(["sweep", "accuracy", *options]) == 0
    text = capsys.readouterr().out
    assert "unpatched/no-pool/mtp/256MiB-every-64" in text
    assert "26 points on an accelerator" in text
    assert not list(tmp_path.iterdir())
    assert main(["sweep", "accuracy", *options, "--gsm8k", str(tmp_path)]) == 2
    assert "gsm8k: test.jsonl cannot be read" in capsys.readouterr().err


def test_points_of_the_fault_have_their_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that stands twice is shared, but not where timing decides."""
    calls: list[tuple[int, dict[str, int]]] = []

    def started(places: Sequence[Any], next_job: Any, *_: Any) -> Iterator[Any]:
        jobs = []
        while (job := next_job()) is not None:
            jobs.append(job)
        calls.append((len(places), {job["point_id"]: job["beside"] for job in jobs}))
        return iter(())

    monkeypatch.setattr(accuracy_runs, "run_on_host", started)
    only = ["hold/no-pool/plain", "unpatched/no-pool/plain", "*-every-32", "*MiB-every-1"]
    for gpus in ((0, 0, 0, 1, 1), (0, 1)):
        settings = AccuracySettings.parse(
            {"gpus": gpus, "only": only, "pressure": [[8, 32], [16, 1]]}, where="test"
        )
        points = accuracy_runs.build_points(settings)
        queue = accuracy_runs._Queue(settings, points, accuracy_runs.Ready("", "", ((), ())))
        assert not list(SWEEP._ends(settings, queue))
    (shared, first), (alone, rest), (each, all_of_them) = calls
    assert (shared, first) == (5, {"hold/no-pool/plain": 2})
    assert (alone, set(rest.values())) == (2, {0})
    assert "unpatched/no-pool/plain" in rest
    assert "hold/no-pool/mtp/16MiB-every-1" in rest
    assert each == 2
    assert set(all_of_them) == {*first, *rest}
    assert set(all_of_them.values()) == {0}


def options(**given: Any) -> argparse.Namespace:
    names = ("processes", "trials", "gpus", "scheduler", "traces", "gsm8k", "seed", "device")
    more = ("server_command", "base_url", "client", "resume")
    values = dict.fromkeys((*names, *more)) | {"only": [], "parameters": [], "quick": False}
    return argparse.Namespace(**{**values, "out": "runs", **given})


def test_accelerator_settings_ask_every_item_of_the_task() -> None:
    settings = SWEEP.settings_from(options(device="accelerator"))
    assert (settings.items, settings.shots, settings.max_tokens) == (1319, 5, 12288)
    assert settings.concurrency == 64
    assert estimate_seconds(settings) < 60
    quick = SWEEP.settings_from(options(device="accelerator", quick=True))
    assert quick.items == 96


def test_a_server_is_asked_over_http_unless_told_otherwise() -> None:
    given = {"base_url": "http://127.0.0.1:1", "parameters": [("server_label", "peer 1")]}
    settings = SWEEP.settings_from(options(**given))
    assert (settings.client, settings.items) == ("http", 1319)
    with pytest.raises(BadInput, match="cannot be read"):
        SWEEP.prepare(settings.model_copy(update={"gsm8k": "none"}), SWEEP.open(settings))
    known = AccuracySettings.parse(
        {"server_label": "peer 1", "client": "http", "items": 2}, where="record"
    )
    with pytest.raises(BadInput, match="give --base-url; no record has it"):
        SWEEP.prepare(known, SWEEP.open(known))


def test_options_of_other_sweeps_are_refused() -> None:
    with pytest.raises(BadInput, match="sweep accuracy has no --traces"):
        SWEEP.settings_from(options(traces="x"))


def test_what_cannot_be_asked_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = shipped_model()
    assert folder is not None
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    given = {"model": str(tmp_path), "items": 1}
    settings = AccuracySettings.parse(given, where="test")
    device = SIMULATED.open(small())
    assert SWEEP.prepare(settings, device).model == str(tmp_path)
    longer = AccuracySettings.parse(given | {"max_model_len": 2**15}, where="test")
    with pytest.raises(BadInput, match="max_model_len 32768: the model was made for 16384 pos"):
        SWEEP.prepare(longer, device)
    (tmp_path / "config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(BadInput, match="the model has 200; expected the tokenizer"):
        SWEEP.prepare(settings, device)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadInput, match="no file model-00002"):
        SWEEP.prepare(settings, device)
    given = {"base_url": "http://127.0.0.1:1", "server_label": "x", "client": "http", "items": 1}
    with pytest.raises(BadInput, match=r"no server answers there \(ConnectError\); start it"):
        SWEEP.prepare(AccuracySettings.parse(given, where="test"), device)
