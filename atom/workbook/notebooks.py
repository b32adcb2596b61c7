"""The notebooks of this workbook: parameters, time budgets, profiles and order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.config import (
    FaultArithmeticSettings,
    NotebookSettings,
    OffloadCapacitySettings,
    ProtocolCostSettings,
    RaceMicrobenchmarkSettings,
    SourceLifetimeSettings,
    SummarySettings,
    ThroughputNotebookSettings,
)
from atom.errors import BadInput
from atom.workbook.accuracy_parameters import AccuracyNotebookSettings


@dataclass(frozen=True)
class NotebookSpec:
    """What the runner and the tests know of one notebook.

    Attributes:
        stem: file name in ``notebooks/`` without its suffix; its first two digits are its number.
        title: short title, as the site's navigation shows it.
        settings: class that validates its parameters; defaults equal those of its parameters cell.
        budget_seconds: wall time on one core that a run of the ``ci`` profile may take.
        profiles: parameters that a profile (``ci``, ``gpu``) sets before the user's own.
        after: notebooks whose results it reads; they are executed first.
        planned: registered for its budget, file not written yet.
        experiment: whose recorded runs its ``records`` needs; ``None`` if it needs none.
        also: experiments whose runs it reads too, where there are any.
        key_figures: positions, from 0, of the figures that a report's README shows.
    """

    stem: str
    title: str
    settings: type[NotebookSettings]
    budget_seconds: int
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    planned: bool = False
    experiment: str | None = None
    also: tuple[str, ...] = ()
    key_figures: tuple[int, ...] = (0,)

    @property
    def reads(self) -> frozenset[str]:
        """Experiments whose recorded runs its ``records`` may name."""
        return frozenset(self.also) | ({self.experiment} if self.experiment else set())

    @property
    def number(self) -> str:
        """Two digits, ``"00"`` to ``"07"``, as claims name their notebook."""
        return self.stem[:2]


_DEVICE_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "ci": {"device": "virtual"},
    "gpu": {"device": "accelerator"},
}

_SPECS = (
    NotebookSpec(
        "01_fault_arithmetic",
        "Fault arithmetic",
        FaultArithmeticSettings,
        25,
        key_figures=(1,),
    ),
    NotebookSpec(
        "02_race_microbenchmark",
        "Race micro-benchmark",
        RaceMicrobenchmarkSettings,
        90,
        profiles=_DEVICE_PROFILES,
        experiment="race",
        key_figures=(0, 2),
    ),
    NotebookSpec(
        "03_source_lifetime",
        "Source lifetime",
        SourceLifetimeSettings,
        75,
        profiles=_DEVICE_PROFILES,
        experiment="lifetime",
        also=("engine_fault", "foreign"),
        key_figures=(0, 1),
    ),
    NotebookSpec(
        "04_accuracy",
        "Accuracy",
        AccuracyNotebookSettings,
        58,
        also=("accuracy", "greedy_equality"),
        key_figures=(0, 1),
    ),
    NotebookSpec(
        "05_throughput",
        "Throughput",
        ThroughputNotebookSettings,
        75,
        also=("throughput", "race"),
        key_figures=(7, 4),
    ),
    NotebookSpec(
        "06_protocol_cost",
        "Protocol cost",
        ProtocolCostSettings,
        60,
        also=("kernels", "engine_speed", "protocol_cost"),
        key_figures=(2, 3, 5, 7),
    ),
    NotebookSpec(
        "07_offload_capacity",
        "Offload capacity",
        OffloadCapacitySettings,
        75,
        also=("capacity", "throughput"),
        key_figures=(0, 1),
    ),
)

#: every notebook by stem, in reading order; the summary reads the results of all others
NOTEBOOKS: dict[str, NotebookSpec] = {
    spec.stem: spec
    for spec in (
        NotebookSpec(
            "00_summary",
            "Summary",
            SummarySettings,
            20,
            after=tuple(spec.stem for spec in _SPECS),
            key_figures=(0, 1, 2),
        ),
        *_SPECS,
    )
}


def find_notebook(name: str) -> NotebookSpec:
    """The notebook that ``name`` means: a stem, a number (``02``), or a path of its file.

    Raises:
        BadInput: unknown or only planned; names the nearest one.
    """
    stem = name.rsplit("/", 1)[-1].removesuffix(".ipynb")
    matches = [spec for spec in NOTEBOOKS.values() if stem in (spec.stem, spec.number)]
    if not matches:
        near = difflib.get_close_matches(stem, NOTEBOOKS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(NOTEBOOKS)
        raise BadInput(f"no notebook '{name}'; {hint}")
    if matches[0].planned:
        raise BadInput(f"notebook '{matches[0].stem}' is planned and not written yet")
    return matches[0]


def execution_order(specs: Iterable[NotebookSpec]) -> list[NotebookSpec]:
    """``specs`` sorted so that each stands behind all that it reads, else in reading order."""
    rest = sorted(specs, key=lambda spec: spec.stem)
    ordered: list[NotebookSpec] = []
    while rest:
        waiting = {spec.stem for spec in rest}
        ready = next((spec for spec in rest if not waiting.intersection(spec.after)), None)
        if ready is None:
            raise BadInput("notebooks wait for each other in a circle: " + ", ".join(waiting))
        ordered.append(ready)
        rest.remove(ready)
    return ordered
