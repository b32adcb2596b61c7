"""What the README says of the engine: its program runs, its commands and defaults are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from atom.__main__ import main
from atom.entrypoints.serve import add_arguments, engine_values
from atom.model_engine.engine_settings import EngineSettings

_TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = _TEXT.split("## The engine\n", 1)[1].split("\n## ", 1)[0]


def commands() -> list[list[str]]:
    """Arguments of each ``python -m atom`` line of the section."""
    lines = re.findall(r"^\.venv/bin/python -m atom (.+)$", SECTION, re.M)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_program_runs_and_both_ways_give_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.+?)```", SECTION, re.S)
    exec(compile(program, "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    first = eval(lines[0])[0]
    assert len(first) == 8
    streamed = [
        int(n) for line in lines[1:] for n in re.findall(r"\d+", line.split("(")[1].split(")")[0])
    ]
    assert streamed == first
    assert lines[-1].endswith("length")


def test_its_sweeps_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = [command for command in commands() if command[0] == "sweep"]
    assert len(sweeps) == 3
    for command in sweeps:
        assert main([*command, "--dry-run"]) == 0
    assert "points on the virtual device" in capsys.readouterr().out


def test_its_server_has_these_options() -> None:
    import argparse

    (serve,) = [command for command in commands() if command[0] == "serve"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    EngineSettings.parse(engine_values(parser.parse_args(serve[1:])), where="serve")


def test_its_defaults_are_those_of_the_settings() -> None:
    settings = EngineSettings()
    shown = dict(re.findall(r"^\| (`.+?) \| (.+?) \|", SECTION, re.M))
    assert len(shown) == 9
    for names, values in shown.items():
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            actual = getattr(settings, name.strip("`"))
            words = {"on": True, "from free memory": None, "none": None}
            plain = value.strip("`")
            assert str(actual) == str(words.get(plain, plain)), name
