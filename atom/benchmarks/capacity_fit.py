"""Fits what is unknown of a published machine on simulated rows, and predicts what was left out.

Three numbers are free: how fast the machine is, how many bytes its model keeps (both KV and states,
over a nominal model's), and how much KV its device holds. The first comes from hours without
offload, the others from offload hours. Simulated rows over a grid of the two are interpolated: so a
fit takes no simulation, and can be repeated from a record.

Two baselines know nothing of caches: a line in pool per session, and a hit rate that is the share
of a working set that the pool holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import minimize_scalar

from atom.benchmarks.capacity_rows import CapacityRow
from atom.errors import BadInput

#: sessions, and pool in GiB or ``None``
Setup = tuple[int, float | None]
_Array = np.ndarray[Any, np.dtype[np.float64]]
#: places of each free number that a fit looks at
_LATTICE = 41


@dataclass(frozen=True)
class Observation:
    """What was published of one setup.

    Attributes:
        setup: sessions and pool.
        throughput: tokens a second, a run each.
        failed: least and largest share of state loads that failed; ``None`` without offload.
    """

    setup: Setup
    throughput: tuple[float, ...]
    failed: tuple[float, float] | None = None

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
    """

    throughput: float = 0.08
    failed: float = 0.2
    failed_least: float = 0.01


@dataclass(frozen=True)
class Prediction:
    """Figures of a setup by a model; ``None`` where it says nothing."""

    throughput: float
    failed: float | None = None


@dataclass(frozen=True)
class Fit:
    """Free numbers that fit.

    Attributes:
        slowness: time of the machine over the simulated one's.
        byte_scale: bytes over the nominal model's.
        device_gb: KV on the device.
        misfit: sum of squares over the noise, of what was fitted.
        numbers: how many figures were fitted beside those without offload.
        at_edge: whether a number lies at the edge of the simulated grid.
    """

    slowness: float
    byte_scale: float
    device_gb: float
    misfit: float
    numbers: int
    at_edge: bool


class Surface:
    """Simulated figures of each setup over byte scale and device memory.

    Args:
        rows: of one arm, every setup with a pool at every pair of the grid, those without once;
            repeats are averaged.

    Raises:
        BadInput: the grid has holes, or fewer than two places on an axis.
    """

    def __init__(self, rows: Sequence[CapacityRow]) -> None:
        offload = [row for row in rows if row.pool_gib is not None]
        self.scales = sorted({row.byte_scale for row in offload if row.byte_scale is not None})
        self.memories = sorted({row.device_gb for row in offload if row.device_gb is not None})
        if min(len(self.scales), len(self.memories)) < 2:
            raise BadInput("a fit needs two byte scales and two device memories or more")
        found: dict[tuple[Setup, float | None, float | None], list[CapacityRow]] = {}
        bare: dict[Setup, list[CapacityRow]] = {}
        for row in rows:
            setup = (row.concurrency, row.pool_gib)
            if row.pool_gib is None:
                bare.setdefault(setup, []).append(row)
            else:
                found.setdefault((setup, row.byte_scale, row.device_gb), []).append(row)
        self.setups = [*bare, *dict.fromkeys(key[0] for key in found)]
        self._figures: dict[Setup, dict[str, RegularGridInterpolator]] = {}
        for setup in self.setups:
            # without a pool nothing is found again, whatever the sizes
            same = bare.get(setup)
            grid = [
                [same or found.get((setup, scale, memory), []) for memory in self.memories]
                for scale in self.scales
            ]
            if not all(cell for line in grid for cell in line):
                raise BadInput(f"the grid has holes at {setup[0]} sessions, pool {setup[1]}")
            self._figures[setup] = {
                name: RegularGridInterpolator(
                    (self.scales, self.memories),
                    np.array([[float(np.mean([f(r) for r in cell])) for cell in g] for g in grid]),
                )
                for name, f in _FIGURES.items()
            }

    def on_lattice(self, setup: Setup, figure: str, scales: _Array, memories: _Array) -> _Array:
        """``throughput`` (its logarithm) or ``failed``, ``[scales, memories]``."""
        places = np.stack(np.meshgrid(scales, memories, indexing="ij"), axis=-1)
        values: _Array = self._figures[setup][figure](places)
        return values

    def predict(self, setup: Setup, fit: Fit) -> Prediction:
        """Figures of a setup with the fitted numbers."""
        place = (fit.byte_scale, fit.device_gb)
        figures = self._figures[setup]
        throughput, failed = (figures[name](place).item() for name in _FIGURES)
        return Prediction(
            math.exp(throughput) / fit.slowness,
            failed if setup[1] is not None else None,
        )


_FIGURES: Mapping[str, Callable[[CapacityRow], float]] = {
    "throughput": lambda row: math.log(row.effective_total_throughput),
    "failed": lambda row: row.state_failure_rate or 0.0,
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
    scales = np.linspace(surface.scales[0], surface.scales[-1], _LATTICE)
    memories = np.linspace(surface.memories[0], surface.memories[-1], _LATTICE)
    slow: _Array = np.zeros((_LATTICE, _LATTICE))
    for one in bare:
        logs = surface.on_lattice(one.setup, "throughput", scales, memories)
        slow += (logs - math.log(one.mean_throughput)) / len(bare)
    misfit: _Array = np.zeros_like(slow)
    for one in offload:
        logs = surface.on_lattice(one.setup, "throughput", scales, memories) - slow
        misfit += ((logs - math.log(one.mean_throughput)) / noise.throughput) ** 2
        if one.failed is not None:
            failed = surface.on_lattice(one.setup, "failed", scales, memories)
            width = max(noise.failed * one.middle_failed, noise.failed_least)
            misfit += ((failed - one.middle_failed) / width) ** 2
    row, column = np.unravel_index(int(misfit.argmin()), misfit.shape)
    edge = bool(row in (0, _LATTICE - 1) or column in (0, _LATTICE - 1))
    return Fit(
        math.exp(slow[row, column]),
        float(scales[row]),
        float(memories[column]),
        float(misfit[row, column]),
        2 * len(offload),
        edge,
    )


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
