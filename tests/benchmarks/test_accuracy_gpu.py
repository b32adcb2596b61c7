"""An accuracy point on an accelerator: pressure on other streams reaches unprotected answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.accuracy_point import run_point
from atom.benchmarks.accuracy_settings import AccuracyPoint, AccuracySettings
from atom.benchmarks.seeded_model import make_seeded_model
from atom.config import CopyProtocol
from atom.device.accelerator import why_no_accelerator


@pytest.mark.gpu
@pytest.mark.skipif(why_no_accelerator() is not None, reason=str(why_no_accelerator()))
def test_pressure_damages_unpatched_and_not_hold(tmp_path: Path) -> None:
    model = str(make_seeded_model(tmp_path, 42))
    settings = AccuracySettings.parse(
        {"device": "accelerator", "items": 32, "max_tokens": 48, "concurrency": 32}, where="test"
    )
    told: dict[CopyProtocol, dict[str, Any]] = {}
    for protocol in (CopyProtocol.HOLD, CopyProtocol.UNPATCHED):
        told[protocol] = {}
        point = AccuracyPoint(protocol.value, protocol, False, True, 64.0, 1)
        run_point(settings, point, told[protocol].update, model=model)
    held, bare = told[CopyProtocol.HOLD], told[CopyProtocol.UNPATCHED]
    assert held["outcome"] == "ok"
    assert held["answered"] == 32
    assert held["stale_statuses"] == held["stale_tokens"] == held["stale_drafts"] == 0
    assert held["accepted_tokens"] > 0
    assert bare["stale_statuses"] + bare["stale_tokens"] > 0
