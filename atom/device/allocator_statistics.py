"""Counters of the virtual device's caching allocator, by PyTorch's names."""

from __future__ import annotations

_NAMES = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "active",
    "active_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
_PARTS = ("current", "peak", "allocated", "freed")


class _Statistic:
    __slots__ = _PARTS

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount


class AllocatorStatistics:
    """See ``torch.cuda.memory_stats``. ``allocated`` falls at the free, ``active`` when the block
    is back in its pool.

    Attributes:
        retries: allocations that first had to give cached segments back.
        failures: allocations that did not fit even then.
    """

    def __init__(self) -> None:
        self.retries = 0
        self.failures = 0
        self._all = {name: _Statistic() for name in _NAMES}
        self._small = {name: _Statistic() for name in _NAMES}
        self._large = {name: _Statistic() for name in _NAMES}

    def count(self, name: str, small: bool, amount: int) -> None:
        """Add ``amount`` to counter ``name`` of the small or large pool and of all."""
        self._all[name].add(amount)
        (self._small if small else self._large)[name].add(amount)

    def figures(self) -> dict[str, int]:
        """All counters, flat."""
        pools = {"all": self._all, "small_pool": self._small, "large_pool": self._large}
        figures = {
            f"{name}.{pool}.{part}": getattr(statistic, part)
            for pool, statistics in pools.items()
            for name, statistic in statistics.items()
            for part in _PARTS
        }
        return {**figures, "num_alloc_retries": self.retries, "num_ooms": self.failures}
