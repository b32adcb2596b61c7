"""Fixtures that several rooms' tests share, and the reason for skipping GPU tests."""

from __future__ import annotations

import gc
import os

import pytest

# before torch, and for child processes too: two threads on a busy core wait for each other at
# every small operation
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

from atom.device import open_device
from atom.device.interface import Device

# two cores are shared by many tests: a slow example is no failure
settings.register_profile("workbook", deadline=None)
settings.load_profile("workbook")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no GPU, and say so."""
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA or HIP device; torch {torch.__version__} sees none here"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Keep what is imported and collected out of garbage collections: many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    """A quiet device: ``virtual``, or what the test's parameter says (indirectly)."""
    opened = open_device(getattr(request, "param", "virtual"))
    opened.synchronize()
    opened.empty_cache()
    return opened


@pytest.fixture
def same_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that others write here meanwhile makes a run one of other software."""
    from atom.workbook import run_writer

    monkeypatch.setattr(run_writer, "changed_software", lambda _: [])
