"""The virtual device's host costs, fitted to recorded rows, and their error on arms left out.

The virtual device charges each call of its interface a fixed host time (the ``*_seconds`` of a
profile) and Python nothing. So the host time of making, sending and receiving a payload is a sum of
calls times costs. The calls are counted on the virtual device itself, by letting one kind of call
cost one second and all else nothing; the costs then come from least squares without negative values
over some arms and the single calls of the limits, residuals relative to what was measured. The
other arms were not looked at: their error says what a simulated host time is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize

from atom.benchmarks.protocol_cost_rows import BARE_ARMS, PROTOCOLS, CostArm, Pressure
from atom.benchmarks.transfer_loop import CopyStreamWork, TransferLoop
from atom.device.profiles import DeviceProfile, find_profile
from atom.device.virtual import VirtualDevice
from atom.workbook.protocol_cost_analysis import ArmCost, choose, limits_by_name
from atom.workbook.protocol_cost_paired import SEND_ALONE

#: fields of a profile that a step of the loop can be charged
FIELDS = (
    "launch_seconds",
    "copy_submit_seconds",
    "record_seconds",
    "wait_submit_seconds",
    "query_seconds",
    "synchronize_seconds",
    "allocate_seconds",
)
SECTIONS = ("make", "send", "receive")
#: limit to the one call that it is
LIMITS = {
    "kernel launch": "launch_seconds",
    "copy call, 256 bytes": "copy_submit_seconds",
    "event record": "record_seconds",
    "event wait": "wait_submit_seconds",
    "event query": "query_seconds",
    "wait for a completed event": "synchronize_seconds",
    "block from the allocator": "allocate_seconds",
}
#: arms that the costs are fitted to; the others are held out
FITTED = (CostArm.UNPATCHED, CostArm.RECORD_STREAM)
#: ``unpatched`` once more: the fit saw its calls, so that it is no held-out arm
SEEN = (*FITTED, CostArm.NULL)
#: their sends wait for the device, or make calls that no profile charges
NOT_PREDICTED = {(CostArm.BLOCKING, "send"), (CostArm.PLAIN, "send"), (CostArm.PLAIN, "receive")}
_FREE = 1e30
_STEPS = 6


@dataclass(frozen=True)
class HostFit:
    """Fitted costs.

    Attributes:
        costs: microseconds by field of the profile.
        rows: sums that they were fitted to.
        asked: whether the ring of the recorded code asked a slot's event in every send.
    """

    costs: dict[str, float]
    rows: int
    asked: bool = False

    def profile(self, base: str) -> DeviceProfile:
        """The profile ``base`` with these costs."""
        changed: dict[str, Any] = {name: us / 1e6 for name, us in self.costs.items()}
        return replace(find_profile(base), **changed)


def asked_events(limits: pd.DataFrame) -> bool:
    """Whether a run is of code whose ring asked a slot's event before it handed the slot out.

    Such runs do not have the calls of a send among their limits. Today's ring knows of a slot that
    was waited on, and does not ask; calls are counted with today's.
    """
    return SEND_ALONE not in set(limits["limit"])


def profile_costs(profile: str, *, asked: bool = False) -> HostFit:
    """The host costs that a profile has."""
    found = find_profile(profile)
    return HostFit({name: getattr(found, name) * 1e6 for name in FIELDS}, 0, asked)


@dataclass(frozen=True)
class Prediction:
    """One host time of an arm: as measured, and as the costs give it, in microseconds."""

    arm: str
    section: str
    point_id: str
    held_out: bool
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_us / self.measured_us - 1


@lru_cache(maxsize=8)
def call_counts(lead: int) -> dict[tuple[CostArm, str], tuple[float, ...]]:
    """Calls of each field in each section of an arm's step, counted on the virtual device."""
    free: tuple[str, ...] = (*FIELDS, "kernel_seconds", "copy_latency_seconds", "wait_seconds")
    free += ("full_dispatch_seconds", "segment_seconds", "graph_launch_seconds", "jitter")
    changed: dict[str, Any] = dict.fromkeys(free, 0.0)
    rates = ("d2h_bytes_per_second", "device_bytes_per_second")
    base = replace(find_profile("H200"), **{**changed, **dict.fromkeys(rates, _FREE)})
    found: dict[tuple[CostArm, str], list[float]] = {}
    for name in FIELDS:
        for arm in BARE_ARMS:
            charged: dict[str, Any] = {name: 1.0}
            device = VirtualDevice(replace(base, **charged))
            work = CopyStreamWork(Pressure.IDLE, 1, 1e-3, 1)
            loop = TransferLoop(device, device.new_stream(), arm, 4, lead, work)
            loop.window(lead + 1)
            times = loop.window(lead + _STEPS)
            for section in SECTIONS:
                value = float(np.median(getattr(times, section)))
                found.setdefault((arm, section), []).append(value)
    return {key: tuple(values) for key, values in found.items()}


def _calls(arm: CostArm, section: str, lead: int, asked: bool) -> NDArray[np.float64]:
    """Calls of each field, with the ring's question where the recorded code had it."""
    counts = np.asarray(call_counts(lead)[arm, section])
    takes_slot = "make" if arm is CostArm.ZERO_COPY else "send"
    if asked and arm in PROTOCOLS and section == takes_slot:
        counts = counts + np.asarray([float(name == "query_seconds") for name in FIELDS])
    return counts


def fit_costs(summaries: Sequence[ArmCost], limits: pd.DataFrame) -> HostFit | None:
    """Fit the costs to the bare loop's rows with an idle copy stream; ``None`` without any."""
    counts: list[Sequence[float] | NDArray[np.float64]] = []
    measured: list[float] = []
    asked = asked_events(limits)
    for name, (median, _) in limits_by_name(limits).items():
        if name in LIMITS and median > 0:
            counts.append([float(field == LIMITS[name]) for field in FIELDS])
            measured.append(median)
    for arm in FITTED:
        for one in _idle(summaries, arm):
            for section, value in _sections(one):
                counts.append(_calls(arm, section, one.lead, asked))
                measured.append(value)
    if not measured:
        return None
    values = np.asarray(measured)
    matrix = np.asarray(counts) / values[:, None]
    costs, _ = optimize.nnls(matrix, np.ones(len(values)))
    return HostFit(dict(zip(FIELDS, map(float, costs), strict=True)), len(values), asked)


def predictions(fit: HostFit, summaries: Sequence[ArmCost]) -> list[Prediction]:
    """Every host time of the bare loop with an idle copy stream that the costs say something of."""
    costs = np.asarray([fit.costs[name] for name in FIELDS])
    found = []
    for arm in BARE_ARMS:
        for one in _idle(summaries, arm):
            for section, value in _sections(one):
                if (arm, section) in NOT_PREDICTED:
                    continue
                predicted = float(np.dot(_calls(arm, section, one.lead, fit.asked), costs))
                found.append(
                    Prediction(arm, section, one.point_id, arm not in SEEN, value, predicted)
                )
    return found


def predicted_steps(
    fit: HostFit, base: str, summaries: Sequence[ArmCost], seed: int = 0
) -> list[Prediction]:
    """Step times of the loop on a virtual device with the fitted costs, beside the measured."""
    found = []
    for arm in BARE_ARMS:
        for one in _idle(summaries, arm):
            device = VirtualDevice(fit.profile(base), seed=seed)
            work = CopyStreamWork(Pressure.IDLE, 1, 1e-3, 1)
            loop = TransferLoop(device, device.new_stream(), arm, one.batch, one.lead, work)
            loop.window(one.lead + 1)
            step = float(np.median(loop.window(one.lead + _STEPS).step)) * 1e6
            if fit.asked and arm in PROTOCOLS:
                step += fit.costs["query_seconds"]
            assert one.step_us is not None
            found.append(Prediction(arm, "step", one.point_id, arm not in SEEN, one.step_us, step))
    return found


def errors_table(found: Sequence[Prediction]) -> pd.DataFrame:
    """One row an arm and section: its error over all points."""
    table = []
    for arm, section in dict.fromkeys((one.arm, one.section) for one in found):
        own = [one for one in found if (one.arm, one.section) == (arm, section)]
        errors = np.asarray([one.error for one in own])
        table.append(
            {
                "arm": str(arm),
                "what": section,
                "held out": "yes" if own[0].held_out else "no",
                "measured, us": f"{np.median([one.measured_us for one in own]):.2f}",
                "predicted, us": f"{np.median([one.predicted_us for one in own]):.2f}",
                "median error": f"{np.median(errors):+.1%}",
                "largest": f"{errors[np.argmax(np.abs(errors))]:+.1%}",
            }
        )
    return pd.DataFrame(table)


def held_out_error(found: Sequence[Prediction]) -> float | None:
    """Median size of the error over arms that the fit did not see, nor saw the twin of."""
    errors = [abs(one.error) for one in found if one.held_out]
    return float(np.median(errors)) if errors else None


def costs_table(fit: HostFit, base: str) -> pd.DataFrame:
    """Fitted costs beside those of the profile."""
    profile = find_profile(base)
    return pd.DataFrame(
        {
            "host cost": name.removesuffix("_seconds").replace("_", " "),
            "fitted, us": f"{us:.2f}",
            f"profile {profile.name}, us": f"{getattr(profile, name) * 1e6:.2f}",
        }
        for name, us in fit.costs.items()
    )


def _idle(summaries: Sequence[ArmCost], arm: CostArm) -> list[ArmCost]:
    return [
        one
        for one in choose(summaries, arm, pressure=Pressure.IDLE)
        if one.point_id.startswith("bare-")
    ]


def _sections(one: ArmCost) -> list[tuple[str, float]]:
    values = [(section, getattr(one, f"{section}_us")) for section in SECTIONS]
    return [(section, value) for section, value in values if value]
