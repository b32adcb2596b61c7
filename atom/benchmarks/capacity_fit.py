"""Fits what is unknown of a published machine on simulated rows, and predicts what was left out.

Four numbers are free: how fast the machine is, how many bytes its model keeps (both KV and states,
over a nominal model's), how much KV its device holds, and at which rate loads come back. The first
comes from hours without offload, the others from offload hours. Simulated rows over a grid of the
three are interpolated: so a fit takes no simulation, and can be repeated from a record.

Two baselines know nothing of caches: a line in pool per session, and a hit rate that is the share
of a working set that the pool holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import minimize_scalar

from atom.benchmarks.capacity_rows import CapacityRow
from atom.errors import BadInput

#: sessions, and pool in GiB or ``None``
Setup = tuple[int, float | None]
_Array = np.ndarray[Any, np.dtype[np.float64]]
#: places that a fit looks at beside the simulated ones, of bytes, device memory and load rate
_LATTICE = (31, 16, 21)


@dataclass(frozen=True)
class Observation:
    """What was published of one setup.

    Attributes:
        setup: sessions and pool.
        throughput: tokens a second, a run each.
        failed: least and largest share of state loads that failed; ``None`` without offload.
        itl_p90_seconds, ttft_seconds: means over the runs, ``None`` where not published. The first
            may be fitted, the second is only shown: it grows with the tokens of a request, and the
            sessions simulated here have fewer.
        tokens_per_request: prompt and output, mean over the runs; shown, and not fitted.
    """

    setup: Setup
    throughput: tuple[float, ...]
    failed: tuple[float, float] | None = None
    itl_p90_seconds: float | None = None
    ttft_seconds: float | None = None
    tokens_per_request: float | None = None

    @property
    def mean_throughput(self) -> float:
        """Over the runs."""
        return sum(self.throughput) / len(self.throughput)

    @property
    def middle_failed(self) -> float:
        """Middle of the range."""
        assert self.failed is not None
        return sum(self.failed) / 2


@dataclass(frozen=True)
class Noise:
    """How much two runs of one setup differ.

    Attributes:
        throughput: relative.
        failed: relative; ``failed_least`` is the least absolute difference that counts.
        itl: relative: twice what the runs differ by, as the costs of a decode step are assumed.
    """

    throughput: float = 0.08
    failed: float = 0.2
    failed_least: float = 0.01
    itl: float = 0.16


@dataclass(frozen=True)
class Prediction:
    """Figures of a setup by a model, as in :class:`Observation`; ``None`` where it says nothing."""

    throughput: float
    failed: float | None = None
    itl_p90_seconds: float | None = None
    ttft_seconds: float | None = None
    tokens_per_request: float | None = None


@dataclass(frozen=True)
class Fit:
    """Free numbers that fit.

    Attributes:
        slowness: time of the machine over the simulated one's.
        byte_scale: bytes over the nominal model's.
        device_gb: KV on the device.
        load_gb_per_second: rate of loads as simulated; the machine's is slower by ``slowness``.
        misfit: sum of squares over the noise, of what was fitted.
        numbers: how many figures were fitted beside those without offload.
        at_edge: whether a number lies at the edge of the simulated grid.
    """

    slowness: float
    byte_scale: float
    device_gb: float
    load_gb_per_second: float
    misfit: float
    numbers: int
    at_edge: bool


class Surface:
    """Simulated figures of each setup over byte scale, device memory and rate of loads.

    Args:
        rows: of one arm, every setup with a pool at every place of the grid, those without at every
            device memory: without a pool nothing is found again, and bytes and loads count little.
            Repeats are averaged.

    Raises:
        BadInput: the grid has holes, or fewer than two places on an axis.
    """

    def __init__(self, rows: Sequence[CapacityRow]) -> None:
        offload = [row for row in rows if row.pool_gib is not None]
        self.axes: tuple[list[float], ...] = tuple(
            sorted({place for row in offload if (place := axis(row)) is not None}) for axis in _AXES
        )
        if min(map(len, self.axes)) < 2:
            raise BadInput("a fit needs two byte scales, device memories and load rates or more")
        found: dict[tuple[Setup, float | None, float | None, float | None], list[CapacityRow]] = {}
        for row in rows:
            setup, with_pool = (row.concurrency, row.pool_gib), row.pool_gib is not None
            scale, memory, rate = (axis(row) for axis in _AXES)
            key = (setup, scale, memory, rate) if with_pool else (setup, None, memory, None)
            found.setdefault(key, []).append(row)
        self.setups = list(dict.fromkeys(key[0] for key in found))
        self._figures: dict[Setup, dict[str, RegularGridInterpolator]] = {}
        for setup in self.setups:
            cells = [
                found.get((setup, scale, memory, rate) if setup[1] else (setup, None, memory, None))
                for scale, memory, rate in product(*self.axes)
            ]
            if not all(cells):
                raise BadInput(f"the grid has holes at {setup[0]} sessions, pool {setup[1]}")
            shape = tuple(map(len, self.axes))
            self._figures[setup] = {
                name: RegularGridInterpolator(
                    tuple(map(np.log, self.axes)),
                    np.reshape([np.mean([f(row) for row in cell or ()]) for cell in cells], shape),
                    bounds_error=False,
                    # a place on the edge may lie a rounding beyond it
                    fill_value=None,
                )
                for name, f in _FIGURES.items()
            }

    def on_lattice(self, setup: Setup, figure: str, lattice: Sequence[_Array]) -> _Array:
        """``throughput`` and ``itl`` (their logarithms), or ``failed``.

        Args:
            setup: one of ``setups``.
            figure: which.
            lattice: byte scales, device memories, load rates.
        """
        places = np.stack(np.meshgrid(*map(np.log, lattice), indexing="ij"), axis=-1)
        values: _Array = self._figures[setup][figure](places)
        return values

    def predict(self, setup: Setup, fit: Fit) -> Prediction:
        """Figures of a setup with the fitted numbers."""
        place = np.log([fit.byte_scale, fit.device_gb, fit.load_gb_per_second])
        figures = {name: values(place).item() for name, values in self._figures[setup].items()}
        return Prediction(
            math.exp(figures["throughput"]) / fit.slowness,
            figures["failed"] if setup[1] is not None else None,
            math.exp(figures["itl"]) * fit.slowness,
            math.exp(figures["ttft"]) * fit.slowness,
            figures["tokens"],
        )


_AXES: tuple[Callable[[CapacityRow], float | None], ...] = (
    lambda row: row.byte_scale,
    lambda row: row.device_gb,
    lambda row: row.load_gb_per_second,
)
_FIGURES: Mapping[str, Callable[[CapacityRow], float]] = {
    "throughput": lambda row: math.log(row.effective_total_throughput),
    "failed": lambda row: row.state_failure_rate or 0.0,
    "itl": lambda row: math.log(row.itl_p90_seconds or 1e-6),
    "ttft": lambda row: math.log(row.ttft_mean_seconds or 1e-6),
    "tokens": lambda row: row.tokens_per_request or 0.0,
}


def fit(
    surface: Surface,
    bare: Sequence[Observation],
    offload: Sequence[Observation],
) -> Fit:
    """The free numbers that fit.

    Args:
        surface: simulated figures.
        bare: hours without offload: they give the speed.
        offload: hours with offload that may be looked at.
    """
    noise = Noise()
    lattice = _lattice(surface)
    slow: _Array = np.zeros(tuple(map(len, lattice)))
    for one in bare:
        logs = surface.on_lattice(one.setup, "throughput", lattice)
        slow += (logs - math.log(one.mean_throughput)) / len(bare)
    misfit: _Array = np.zeros_like(slow)
    numbers = 0
    for one in offload:
        logs = surface.on_lattice(one.setup, "throughput", lattice) - slow
        misfit += ((logs - math.log(one.mean_throughput)) / noise.throughput) ** 2
        numbers += 1
        if one.failed is not None:
            failed = surface.on_lattice(one.setup, "failed", lattice)
            width = max(noise.failed * one.middle_failed, noise.failed_least)
            misfit += ((failed - one.middle_failed) / width) ** 2
            numbers += 1
        if one.itl_p90_seconds is not None:
            logs = surface.on_lattice(one.setup, "itl", lattice) + slow
            misfit += ((logs - math.log(one.itl_p90_seconds)) / noise.itl) ** 2
            numbers += 1
    best = np.unravel_index(int(misfit.argmin()), misfit.shape)
    scale, memory, rate = (float(axis[at]) for axis, at in zip(lattice, best, strict=True))
    return Fit(
        slowness=math.exp(slow[best]),
        byte_scale=scale,
        device_gb=memory,
        load_gb_per_second=rate,
        misfit=float(misfit[best]),
        numbers=numbers,
        at_edge=any(at in (0, len(a) - 1) for at, a in zip(best, lattice, strict=True)),
    )


def _lattice(surface: Surface) -> list[_Array]:
    return [
        np.unique([*axis, *np.geomspace(axis[0], axis[-1], n)[1:-1]])
        for axis, n in zip(surface.axes, _LATTICE, strict=True)
    ]


def nearest_failures(surface: Surface, offload: Sequence[Observation]) -> dict[Setup, float]:
    """Failure shares of each setup at the place whose shares lie nearest to all published ones.

    In the mean absolute error, whatever the throughput there: no prediction, but a bound on what
    any numbers of the model could reach.
    """
    lattice = _lattice(surface)
    shares = {one.setup: surface.on_lattice(one.setup, "failed", lattice) for one in offload}
    off = sum(np.abs(shares[one.setup] - one.middle_failed) for one in offload)
    best = np.unravel_index(int(np.argmin(off)), np.shape(off))
    return {setup: float(values[best]) for setup, values in shares.items()}


def line_baseline(known: Sequence[Observation], setup: Setup) -> Prediction:
    """Throughput and failures on a line over pool per session, least squares."""
    throughput = _line([(_share(o.setup), o.mean_throughput) for o in known], _share(setup))
    pairs = [(_share(o.setup), o.middle_failed) for o in known if o.failed is not None]
    failed = None
    if setup[1] is not None and pairs:
        failed = min(max(_line(pairs, _share(setup)), 0.0), 1.0)
    return Prediction(max(throughput, 1.0), failed)


def working_set_baseline(known: Sequence[Observation], setup: Setup) -> Prediction:
    """A hit rate that is the share of the working set that the pool holds; loads fail else.

    A token that is hit costs nothing; the working set of a session is fitted to the throughputs.
    """
    bare = [o.mean_throughput for o in known if o.setup[1] is None]
    base = sum(bare) / len(bare) if bare else min(o.mean_throughput for o in known)

    def throughput(place: Setup, gib: float) -> float:
        held = min(_share(place) / gib, 0.99)
        return base / (1 - held)

    def misfit(log_gib: float) -> float:
        return sum(
            math.log(throughput(o.setup, math.exp(log_gib)) / o.mean_throughput) ** 2 for o in known
        )

    found = minimize_scalar(misfit, bounds=(math.log(0.5), math.log(100)), method="bounded")
    gib = math.exp(float(found.x))
    failed = None if setup[1] is None else 1 - min(_share(setup) / gib, 1.0)
    return Prediction(throughput(setup, gib), failed)


def _share(setup: Setup) -> float:
    return (setup[1] or 0.0) / setup[0]


def _line(pairs: Sequence[tuple[float, float]], at: float) -> float:
    x, y = np.array(pairs).T
    if len(set(x.tolist())) < 2:
        return float(y.mean())
    slope, start = np.polyfit(x, y, 1)
    return float(start + slope * at)


@dataclass(frozen=True)
class Errors:
    """How far predictions lie from what was published.

    Attributes:
        throughput: root mean square of relative errors (of logarithms).
        failed: mean absolute error of the shares; ``None`` where nothing was predicted.
    """

    throughput: float
    failed: float | None


def errors(pairs: Sequence[tuple[Prediction, Observation]]) -> Errors:
    """Errors over several setups."""
    logs = [math.log(found.throughput / wanted.mean_throughput) for found, wanted in pairs]
    shares = [
        abs(found.failed - wanted.middle_failed)
        for found, wanted in pairs
        if found.failed is not None and wanted.failed is not None
    ]
    return Errors(
        math.sqrt(sum(one * one for one in logs) / len(logs)),
        sum(shares) / len(shares) if shares else None,
    )
