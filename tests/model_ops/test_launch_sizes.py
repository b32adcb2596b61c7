"""Sizes of a launch: Triton's own functions say the same."""

from __future__ import annotations

import pytest

from atom.model_ops.launch_sizes import ceil_div, next_power_of_2


def test_sizes_are_those_of_triton() -> None:
    triton = pytest.importorskip("triton")
    for number in (1, 2, 3, 4, 5, 63, 64, 65, 4032, 2**20 + 1):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        for divisor in (1, 7, 64):
            assert ceil_div(number, divisor) == triton.cdiv(number, divisor)
