"""Sizes of a launch. Triton has both functions; its own take the host some microseconds a call."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor``, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()
