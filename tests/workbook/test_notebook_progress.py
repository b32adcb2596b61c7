"""How far a notebook's own sweep is, from the kernel to the runner's lines."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest

from atom.workbook import notebook_progress, progress, sweep_progress
from atom.workbook.notebook_progress import FileProgress, latest, progress_file
from atom.workbook.progress import Progress
from atom.workbook.sweep_progress import NoProgress


def test_the_latest_line_stands_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = progress_file(tmp_path, "02")
    path.parent.mkdir()
    monkeypatch.setattr(notebook_progress, "_EVERY_SECONDS", 0.0)
    told = FileProgress(path)
    told.start(200, 30.0)
    assert latest(path) == "200 trials, about 30 s"
    told.advance(50)
    assert latest(path).startswith("50 of 200 trials, about ")
    told.stop()
    assert latest(path) == ""
    assert list(path.parent.iterdir()) == []


def test_a_sweep_tells_how_far_it_is_also_while_one_point_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep_progress, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(sweep_progress, "_LINE_SECONDS", 0.02)
    stream = io.StringIO()
    told = sweep_progress.TerminalProgress(stream, "race", "points")
    told.start(4, 30.0)
    threads = threading.active_count()
    deadline = time.monotonic() + 10
    while "0 of 4 points after 0 s, about 30 s left" not in stream.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told._end = time.monotonic()
    while "0 of 4 points after 0 s, longer than expected" not in stream.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told.stop()
    while threading.active_count() >= threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told._last_line -= 60
    told.advance(4)
    assert stream.getvalue().splitlines()[-1].endswith("4 of 4 points after 0 s, about 0 s left")


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    told = FileProgress(tmp_path / "nowhere" / "x")
    told.start(1, 1.0)
    told.advance(1)
    told.stop()


def test_without_a_runner_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(notebook_progress.PROGRESS_VARIABLE, raising=False)
    assert isinstance(notebook_progress.notebook_progress(), NoProgress)
    monkeypatch.setenv(notebook_progress.PROGRESS_VARIABLE, "somewhere")
    assert isinstance(notebook_progress.notebook_progress(), FileProgress)


def test_the_runner_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with Progress(["02"], {"02": 60.0}, stream=stream) as shown:
        shown.start("02")
        shown.cells("02", 3, 37)
        shown.sweep("02", "50 of 200 trials, about 9 s left")
        shown.tick()
        shown.sweep("02", "")
        shown.tick()
    lines = stream.getvalue().splitlines()
    assert "02 3 of 37 cells (50 of 200 trials, about 9 s left); about " in lines[-2]
    assert "trials" not in lines[-1]
