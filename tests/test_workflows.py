"""Workflow files: their shape, what starts the GPU, and that their commands exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom.__main__ import build_parser
from atom.workbook.sweeps import _POINT_SWEEPS, EXPERIMENT

_ROOT = Path(__file__).resolve().parents[1]
_FILES = sorted((_ROOT / ".github" / "workflows").glob("*.yml"))
_TOP = {"name", "on", "permissions", "concurrency", "env", "jobs"}
_JOB = {"if", "runs-on", "timeout-minutes", "strategy", "steps", "needs", "env"}
_STEP = {"name", "if", "uses", "with", "run", "env", "id"}


def load(name: str) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true
    text = re.sub(r"(?m)^on:", '"on":', (_ROOT / ".github" / "workflows" / name).read_text())
    return dict(yaml.safe_load(text))


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_shape(path: Path) -> None:
    workflow = load(path.name)
    assert set(workflow) <= _TOP
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert set(job) <= _JOB
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert set(step) <= _STEP
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
            # text of an event in a shell command is a command of whoever wrote it
            assert "github.event" not in step.get("run", "")
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
        kept = [s for s in job["steps"] if s.get("uses", "").startswith("actions/upload")]
        assert [step["if"] for step in kept] == ["${{ always() }}"] or name == "workflow-files"


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    lines = [
        line
        for job in load(path.name)["jobs"].values()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]
    assert lines
    for line in lines:
        for words in re.findall(r"-m atom ([^;\n]+)", line):
            build_parser().parse_args(shlex.split(words))
        for target in re.findall(r"\bmake (\w+)", line):
            done = subprocess.run(["make", "-n", target], cwd=_ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_workflow_files_are_linted_on_every_push() -> None:
    runs = [step.get("run", "") for step in load("workbook.yml")["jobs"]["workflow-files"]["steps"]]
    tools = [re.search(r"^pipx run (\S+)==[\d.]+ ", run) for run in runs if run]
    assert [tool and tool[1] for tool in tools] == ["check-jsonschema", "zizmor"]
    for run in runs[1:]:
        assert ".github" in run


def test_the_readmes_commands_run_on_every_push() -> None:
    workflow = load("workbook.yml")
    assert set(workflow["on"]) == {"push", "pull_request"}
    assert not any(workflow["on"].values())
    commands = [step.get("run") for step in workflow["jobs"]["workbook"]["steps"]]
    assert {"make test", "make report"} <= set(commands)


# -- what starts the GPU


def evaluate(condition: str, event: dict[str, Any]) -> bool:
    """The few operators of a workflow's expression that the condition uses, on ``event``."""
    text = re.sub(r"\s+", " ", condition)
    text = re.sub(r"contains\(fromJSON\('(\[[^']*\])'\), ?([\w.]+)\)", r"(value('\2') in \1)", text)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"(?<![\w'])github(\.\w+)+", lambda m: f"value('{m[0]}')", text)

    def value(name: str) -> Any:
        found: Any = event
        for part in name.split(".")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    return bool(eval(text, {"__builtins__": {}}, {"value": value}))


def labelled(label: str, repository: str) -> dict[str, Any]:
    head = {"repo": {"full_name": repository}, "sha": "abc"}
    return {
        "event_name": "pull_request",
        "repository": "a/workbook",
        "event": {"label": {"name": label}, "pull_request": {"head": head}},
    }


def reviewed(state: str, association: str, commit: str, repository: str) -> dict[str, Any]:
    return {
        "event_name": "pull_request_review",
        "repository": "a/workbook",
        "event": {
            "review": {"state": state, "author_association": association, "commit_id": commit},
            "pull_request": {"head": {"repo": {"full_name": repository}, "sha": "abc"}},
        },
    }


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    return load("gpu.yml")


def test_who_starts_the_gpu(gpu: dict[str, Any]) -> None:
    condition = gpu["jobs"]["gpu"]["if"]
    labels = ("ci:gpu", "ci:full", "ci:other")
    for label, repository in itertools.product(labels, ("a/workbook", "b/fork")):
        expected = label != "ci:other" and repository == "a/workbook"
        assert evaluate(condition, labelled(label, repository)) == expected
    states = ("approved", "commented", "changes_requested")
    people = ("OWNER", "MEMBER", "COLLABORATOR", "CONTRIBUTOR", "NONE")
    repositories = ("a/workbook", "b/fork")
    for state, who, commit, repository in itertools.product(
        states, people, ("abc", "older"), repositories
    ):
        # a review of an older commit says nothing of the latest
        expected = state == "approved" and who in people[:3] and commit == "abc"
        assert evaluate(condition, reviewed(state, who, commit, repository)) == expected
    assert evaluate(condition, {"event_name": "workflow_dispatch"})
    assert not evaluate(condition, {"event_name": "push"})


def test_the_gpu_runs_one_reviewed_commit_at_a_time(gpu: dict[str, Any]) -> None:
    # with the secrets of pull_request_target, unreviewed code could read them
    assert set(gpu["on"]) == {"pull_request", "pull_request_review", "workflow_dispatch"}
    assert gpu["on"]["pull_request"] == {"types": ["labeled"]}
    assert gpu["on"]["pull_request_review"] == {"types": ["submitted"]}
    assert gpu["concurrency"] == {"group": "gpu", "cancel-in-progress": False}
    (checkout,) = (s for s in gpu["jobs"]["gpu"]["steps"] if "checkout" in s.get("uses", ""))
    assert checkout["with"]["ref"].startswith("${{ github.event.review.commit_id || github.event.")
    assert checkout["with"]["persist-credentials"] is False
    assert "self-hosted" in gpu["jobs"]["gpu"]["runs-on"]


def test_the_gpu_job_runs_every_sweep_and_the_tests(gpu: dict[str, Any]) -> None:
    runs = [step["run"] for step in gpu["jobs"]["gpu"]["steps"] if "run" in step]
    assert any(line.endswith("-m pytest -m gpu") for line in runs)
    sweeps = [line.split(" sweep ")[1] for line in runs if " sweep " in line]
    # a model of time has nothing to do on a device
    on_devices = [name for name in (EXPERIMENT, *_POINT_SWEEPS) if name != "capacity"]
    assert sweeps == [f"{name} --device accelerator --quick" for name in on_devices]
    # what is recorded is checked behind the last of them, and one that failed stops no other
    checked = next(number for number, line in enumerate(runs) if "records check" in line)
    assert checked > max(number for number, line in enumerate(runs) if " sweep " in line)
    for step in gpu["jobs"]["gpu"]["steps"]:
        if " sweep " in step.get("run", ""):
            assert step["if"] == "${{ !cancelled() }}"
