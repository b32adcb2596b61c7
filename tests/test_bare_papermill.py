"""The notebooks without our runner: papermill's options and operators, and JupyterLab."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from atom.errors import BadInput
from atom.workbook.kernels import REPORT_FOLDER_VARIABLE, write_kernel_spec
from atom.workbook.notebooks import NOTEBOOKS
from atom.workbook.results import extract_result
from atom.workbook.session import open_notebook

_ROOT = Path(__file__).resolve().parents[1]
_WRITTEN = [stem for stem, spec in NOTEBOOKS.items() if not spec.planned]
_ONE = "01_fault_arithmetic"
#: edits that a reader makes in the parameters cell; the whole sizes are executed by make report
_SMALLER: dict[str, dict[str, Any]] = {
    "02_race_microbenchmark": {
        "trials": 4,
        "processes": 4,
        "model_draws": 1,
        "model_trials": 1,
    },
    "03_source_lifetime": {"trials": 4, "explore_depth": 1, "mutation_depth": 1},
    "04_accuracy": {"items": 4, "pressure_items": 4},
    "05_throughput": {"concurrency": [2], "pool_gib": [0.003], "duration_seconds": 0.1},
    "06_protocol_cost": {"batch": 2, "steps": 2},
}


@pytest.fixture(autouse=True)
def _our_kernel_and_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kernel_spec(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv(REPORT_FOLDER_VARIABLE, raising=False)


@pytest.mark.parametrize("stem", _WRITTEN)
def test_help_explains_every_parameter(stem: str) -> None:
    from papermill.inspection import inspect_notebook

    found = inspect_notebook(str(_ROOT / "notebooks" / f"{stem}.ipynb"))
    defaults = NOTEBOOKS[stem].settings.parse({}).model_dump(mode="json")
    assert set(found) == set(defaults)
    for name, parameter in found.items():
        value = defaults[name]
        expected = type(value).__name__
        assert parameter["inferred_type_name"].split("[")[0] == expected, name
        assert len(parameter["help"]) > 8, f"{name}: say what it is"


def base64_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def injected(words: list[str], tmp_path: Path) -> dict[str, Any]:
    """Names after the parameters cell and the cell that papermill injects for ``words``."""
    out = tmp_path / "out.ipynb"
    source = _ROOT / "notebooks" / f"{_ONE}.ipynb"
    command = [sys.executable, "-m", "papermill", str(source), str(out), "--prepare-only", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {"In": [""]}
    for cell in nbformat.read(out, as_version=4).cells:
        if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", ())):
            names["In"].append(cell.source)
            exec(cell.source, names)
    assert len(names["In"]) == 3
    return names


@pytest.mark.parametrize(
    ("good", "wrong", "message"),
    [
        (["-p", "bonus", "3"], ["-p", "bonus", "x"], "bonus: input should be a valid integer"),
        (["-y", "bonus: 3"], ["-y", "bonus: [3]"], "bonus: input should be a valid integer"),
        (["-f", "good.yaml"], ["-f", "wrong.yaml"], "bonsu: no such parameter; did you mean"),
        (
            ["-b", base64_of("bonus: 3")],
            ["-b", base64_of("conv_width: 1")],
            "conv_width: input should be greater than or equal to 2",
        ),
        (["-p", "bonus", "3", "-r", "profile", "mine"], ["-r", "bonus", "3"], "got '3'"),
        (["-y", "{bonus: 3}"], ["-y", "{bonus:3}"], "blank after the colon, as in 'bonus: 3'"),
        (["-y", "{bonus: 3}"], ["-y", "{bonsu:3}"], "blank after the colon, as in 'bonsu: 3'"),
    ],
)
def test_every_option_is_validated(
    good: list[str], wrong: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.yaml").write_text("bonus: 3\n")
    (tmp_path / "wrong.yaml").write_text("bonsu: 3\n")
    monkeypatch.chdir(tmp_path)
    book = open_notebook(_ONE, injected(good, tmp_path))
    assert book.settings.bonus == 3
    with pytest.raises(BadInput) as caught:
        open_notebook(_ONE, injected(wrong, tmp_path))
    assert message in str(caught.value)


def test_a_wrong_parameter_fails_the_command(tmp_path: Path) -> None:
    source = _ROOT / "notebooks" / f"{_ONE}.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "papermill", str(source), "out.ipynb", "-p", "bonsu", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "did you mean 'bonus'?" in done.stderr


def test_a_plain_call_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what Airflow's and other operators do
    import papermill
    from papermill.exceptions import PapermillExecutionError

    monkeypatch.chdir(tmp_path)
    source = str(_ROOT / "notebooks" / f"{_ONE}.ipynb")
    raised = ["ClaimFell"]
    try:
        papermill.execute_notebook(source, "out.ipynb", parameters={"bonus": 3, "batch_size": 8})
    except PapermillExecutionError as error:
        raised.append(error.ename)
    # a claim that nobody accepted yet fails the task, behind a whole notebook; nothing else does
    assert set(raised) == {"ClaimFell"}
    notebook = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    result = extract_result(notebook)
    assert result["settings"]["bonus"] == 3
    assert result["verdicts"]


@pytest.mark.parametrize("stem", _WRITTEN)
def test_runs_top_to_bottom_in_jupyterlab(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    folder = _ROOT / "notebooks"
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(folder / f"{stem}.ipynb", as_version=4)
    for name, value in _SMALLER.get(stem, {}).items():
        cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
        cell.source, changed = re.subn(
            rf"(?m)^{name} = .+?(?=  #)", f"{name} = {value}", cell.source
        )
        assert changed == 1
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=240,
        # a kernel starts in its notebook's folder; whether a claim fell is the report's to say
        resources={"metadata": {"path": str(folder)}},
        allow_error_names=["ClaimFell"],
    )
    client.execute()
    result = extract_result(notebook)
    defaults = NOTEBOOKS[stem].settings.parse({}).model_dump(mode="json")
    assert result["settings"] == {**defaults, **_SMALLER.get(stem, {})}
    assert result["verdicts"]
