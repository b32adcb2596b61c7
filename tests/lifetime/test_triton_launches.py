"""What a Triton kernel writes, told without a GPU: the analysis needs a target's name only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atom.lifetime.triton_launches import _defaults, written_arguments

pytest.importorskip("triton")
import triton
import triton.language as tl


@triton.jit
def copying(source, target, BLOCK: tl.constexpr, BACK: tl.constexpr = False):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, BLOCK)
    values = tl.load(source + offsets)
    tl.store(target + offsets, values)
    if BACK:
        tl.store(source + offsets, values)


@pytest.fixture
def target() -> Iterator[None]:
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    config = triton.runtime.driver
    before = config._active
    config.set_active(Driver())
    yield
    config._active = before


def values(**more: Any) -> dict[str, Any]:
    pair = {"source": torch.ones(64), "target": torch.ones(64), "BLOCK": 64}
    return _defaults(copying) | pair | more


@pytest.mark.usefixtures("target")
def test_only_what_is_stored_to_counts_as_written() -> None:
    assert written_arguments(copying, values()) == ["target"]


@pytest.mark.usefixtures("target")
def test_a_constant_that_switches_a_store_on_counts() -> None:
    assert sorted(written_arguments(copying, values(BACK=True))) == ["source", "target"]


@pytest.mark.usefixtures("target")
def test_an_analysis_that_gives_up_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    missing = values()
    del missing["BLOCK"]
    # torch itself would log a traceback and call every argument written
    with pytest.raises(ValueError, match="arguments"):
        written_arguments(copying, missing)
    assert "Traceback" not in capsys.readouterr().err


def test_defaults_are_part_of_the_arguments() -> None:
    assert _defaults(copying) == {"BACK": False}
