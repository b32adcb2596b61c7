"""Source notebooks: clean, registered, and with the parameters that their settings class has."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from atom.workbook.notebooks import NOTEBOOKS

_ROOT = Path(__file__).resolve().parents[1]
_FILES = sorted((_ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=_FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_files_and_registry_agree() -> None:
    written = {stem for stem, spec in NOTEBOOKS.items() if not spec.planned}
    assert {path.stem for path in _FILES} == written


def test_budgets_fit_two_cores() -> None:
    # planned notebooks count: their time is promised already
    assert len(NOTEBOOKS) == 8
    assert sum(spec.budget_seconds for spec in NOTEBOOKS.values()) / 2 < 240


def test_readme_shows_the_budgets() -> None:
    rows = re.findall(r"^\| (0\d) [^|]*\| *(\d+) \|", (_ROOT / "README.md").read_text(), re.M)
    assert dict(rows) == {s.number: str(s.budget_seconds) for s in NOTEBOOKS.values()}


def test_source_is_clean(notebook: Any) -> None:
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert set(cell.metadata) <= {"tags"}
    kernel = notebook.metadata["kernelspec"]
    assert kernel == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.get("language_info", {})) <= {"name"}


def test_one_heading_of_the_first_level(notebook: Any) -> None:
    headings = [
        line
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in re.sub(r"```.*?```", "", cell.source, flags=re.S).splitlines()
        if re.match(r"# \S", line)
    ]
    assert len(headings) == 1
    assert notebook.cells[0].source.startswith(headings[0])


def test_parameters_equal_the_settings(path: Path, notebook: Any) -> None:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1
    assert tagged[0] is code_cells(notebook)[0]
    given: dict[str, Any] = {}
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign), "a parameters cell only assigns plain values"
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        given[target.id] = ast.literal_eval(statement.value)
    defaults = json.loads(NOTEBOOKS[path.stem].settings.parse({}).model_dump_json())
    assert given == defaults
    kinds = {name: type(value) for name, value in given.items()}
    assert kinds == {name: type(value) for name, value in defaults.items()}


def test_opens_and_closes_its_session(path: Path, notebook: Any) -> None:
    cells = code_cells(notebook)
    assert f'open_notebook("{path.stem}", globals())' in cells[1].source
    assert cells[-1].source.strip() == "book.close()"


def test_functions_live_in_the_package(notebook: Any) -> None:
    for cell in code_cells(notebook):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [node.name for node in ast.walk(ast.parse(cell.source)) if isinstance(node, kinds)]
        assert not found, "move them to atom/"


def test_ruff(path: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", str(path)],
            cwd=_ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
