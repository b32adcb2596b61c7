"""Points of the accuracy sweep: which there are, in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from atom.benchmarks.accuracy_settings import (
    TWIN,
    AccuracyPoint,
    AccuracySettings,
    build_points,
    engine_settings,
)
from atom.config import CopyProtocol, GuardMode
from atom.errors import BadInput
from atom.model_engine.engine_settings import StatusCheck


def settings(**given: Any) -> AccuracySettings:
    return AccuracySettings.parse(given, where="sweep accuracy")


def test_every_arm_runs_with_and_without_pool_and_drafts() -> None:
    points = build_points(settings())
    assert points[0].point_id == "hold/no-pool/plain"
    assert points[0].is_reference
    arms = ("hold", TWIN, "record_stream", "zero_copy", "unpatched")
    grid = {f"{a}/{p}/{d}" for a in arms for p in ("pool", "no-pool") for d in ("mtp", "plain")}
    names = [point.point_id for point in points]
    assert set(names[: len(grid)]) == grid
    assert set(names[len(grid) :]) == {
        *(f"unpatched/no-pool/mtp/{p}" for p in ("2MiB-every-1", "8MiB-every-32")),
        *(f"unpatched/no-pool/mtp/8MiB-every-{n}" for n in (16, 4)),
        "hold/no-pool/mtp/8MiB-every-4",
    }
    assert [point.order for point in points] == list(range(len(points)))
    assert [p.arm for p in points] != [p.arm for p in build_points(settings(seed=1))]
    assert names == [point.point_id for point in build_points(settings())]


def test_only_unpatched_believes_what_it_receives() -> None:
    for point in build_points(settings()):
        engine = engine_settings(settings(), point)
        bare = point.protocol is CopyProtocol.UNPATCHED
        assert point.believes is bare
        assert engine.epoch_tag
        assert engine.guard is GuardMode.REPORT
        assert engine.status_check is (StatusCheck.NONE if bare else StatusCheck.RAISE)
        assert engine.forced_acceptance_length is None
        assert engine.draft_tokens == (3 if point.drafts else 0)
        assert (engine.cpu_pool_bytes is not None) is point.offload


def test_points_are_chosen_by_name() -> None:
    found = build_points(settings(only=["unpatched", "hold/no-pool/plain"], pressure=[[1, 2]]))
    assert {p.arm for p in found} == {"unpatched", "hold"}
    assert sum(p.arm == "hold" for p in found) == 1
    with pytest.raises(BadInput, match=r"only: 'hold/mpt' fits no point; they look like hold/no"):
        build_points(settings(only=["hold/mpt"]))


def test_a_server_is_one_point() -> None:
    found = settings(server_label="vllm 0.12", base_url="http://127.0.0.1:1", client="http")
    (point,) = build_points(found)
    assert (point.point_id, point.protocol, point.believes) == ("vllm 0.12", None, False)
    assert "base_url" not in found.model_dump()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"base_url": "http://127.0.0.1:1"}, "server_label: say in a few words"),
        ({"server_label": "x"}, "a server is asked over http, or by lm-eval"),
        ({"protocol": ["hold", "hold"]}, "protocol: a value stands twice"),
        ({"pressure": [[1, 2], [1, 2]]}, "pressure: a value stands twice"),
        ({"pool_gib": 1e-9}, "cpu_pool_bytes"),
        ({"item": 3}, "did you mean 'items'"),
        ({"pressure": [[0, 1]]}, "greater than 0"),
    ],
)
def test_what_cannot_run_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings(**given)


def test_pressure_stands_in_the_name() -> None:
    point = AccuracyPoint("unpatched", CopyProtocol.UNPATCHED, True, False, 0.5, 3)
    assert point.point_id == "unpatched/pool/plain/0.5MiB-every-3"
