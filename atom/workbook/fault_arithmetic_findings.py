"""The findings of the fault arithmetic in words, each put together from what was found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pandas import DataFrame

from atom.benchmarks.status_overwrite import overwrite_trial
from atom.config import FaultArithmeticSettings
from atom.device.virtual import VirtualDevice
from atom.model_ops.conv_state_layout import (
    ConvStateLayout,
    IntArray,
    Landing,
    landing,
    layers_needed,
)
from atom.model_ops.status_overwrite import Fit, Reading
from atom.workbook.fault_arithmetic import RowReading, grouped_layout, single_layout, triples


@dataclass(frozen=True)
class PublishedLog:
    """The two debug lines of the source.

    Attributes:
        status: first values of the status vector.
        bonus: stale bonus of the bounds line.
        accepted: accepted count of the bounds line.
        slot: state slot of the bounds line.
    """

    status: tuple[int, ...]
    bonus: int
    accepted: int
    slot: int


def published_log(lines: DataFrame) -> PublishedLog:
    """The logged numbers, from the published table of debug lines."""
    status = lines[lines["line"] == "status"].iloc[0]
    bounds = lines[lines["line"] == "bounds"].iloc[0]
    return PublishedLog(
        status=tuple(int(value) for value in str(status["bonus_values"]).split()),
        bonus=int(bounds["num_bonus"]),
        accepted=int(bounds["num_accepted_tokens"]),
        slot=int(bounds["state_slot"]),
    )


def case_text(settings: FaultArithmeticSettings, published: FaultArithmeticSettings) -> str:
    """Words for a stamp: the published numbers (the pool is assumed), or what was changed."""
    changed = [
        f"{name} {getattr(settings, name)}"
        for name in FaultArithmeticSettings.model_fields
        if name not in ("profile", "records")
        and getattr(settings, name) != getattr(published, name)
    ]
    return (
        "published numbers, assumed pool" if not changed else "changed case: " + ", ".join(changed)
    )


def layouts_to_draw(
    settings: FaultArithmeticSettings, readings: list[RowReading]
) -> list[ConvStateLayout]:
    """One slot a request, groups from slot 0, and the first other start that explains the row."""
    layouts = [single_layout(settings)]
    if settings.slots_per_request > 1:
        layouts.append(grouped_layout(settings))
    others = [r.layout for r in readings if r.explained and r.layout not in layouts]
    return layouts + others[:1]


def reading_sentences(settings: FaultArithmeticSettings, readings: list[RowReading]) -> list[str]:
    """The findings of section 2 in words, each from the readings."""
    row, bonus = settings.faulting_row, settings.bonus
    base, tap = readings[0], readings[1]
    sentences = [
        f"As a base row with one slot a request, row {row} leaves {row % base.layout.stride} on "
        f"division by {base.layout.stride} and a bonus of {bonus} leaves "
        f"{bonus % base.layout.stride}: the bonus reaches it at {_places(base.by_bonus)}.",
        f"With taps counted the bonus reaches it at {_places(tap.by_bonus)}, and an honest count "
        f"at {_places(tap.by_valid)}.",
    ]
    grouped = [r for r in readings[2:] if not r.base_only]
    if grouped:
        starts = [r.layout.first_slot for r in grouped if r.explained]
        blind = [r.layout.first_slot for r in grouped if not r.excludes_valid]
        sentences.append(
            f"With groups of {settings.slots_per_request} the bonus reaches it only if the first "
            f"group begins at slot {_listed(starts)}; an honest count only if it begins at slot "
            f"{_listed(blind)}."
        )
        remainder = settings.logged_slot % settings.slots_per_request
        fits = "would fit" if remainder in starts else "would not fit"
        sentences.append(
            f"The logged slot {settings.logged_slot} begins a group if the first one begins at "
            f"slot {remainder}, which {fits} a start that explains the row. The log alone settles "
            f"neither."
        )
    return sentences


def _places(found: IntArray) -> str:
    return triples(found) if len(found) else "no slot"


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values) or "(none does)"


def closest_slots(needed: DataFrame, bonus: int) -> DataFrame:
    """The five slots whose needed bonus is nearest to the stale one, with the difference."""
    table = needed.assign(difference=needed["bonus needed"] - bonus)
    order = table["difference"].abs().sort_values(kind="stable").index[:5]
    return table.loc[order].sort_values("slot")


def landing_sentences(layout: ConvStateLayout, slot: int, bonus: int) -> list[str]:
    """The findings of section 3 in words."""
    count = bonus + 1
    place = Landing(int(landing(layout, 0, slot, count).max()))
    first_bad = Landing(int(landing(layout, 0, slot, layout.highest_valid_count + 1).max()))
    silent = "past the pool" if first_bad is Landing.OUTSIDE else "in mapped memory, in silence"
    row = int(layout.base_row(slot, count))
    whole = layout.rows * layout.row_bytes / 2**20
    return [
        f"The first count past the honest ones ({layout.highest_valid_count + 1}) reads "
        f"{first_bad.label}: {silent}.",
        f"In a pool of {layout.layers} layers x {layout.slots} slots ({whole:,.1f} MiB) the stale "
        f"count {count:,} at slot {slot} reads {place.label} (row {row:,}).",
        f"With {layers_needed(layout, slot, count)} layers or more the first layer's kernel stays "
        f"inside the pool and reads a later layer's state in silence.",
    ]


def puzzle_sentences(readings: list[Reading]) -> list[str]:
    """The findings of section 5 in words."""
    fits = [reading for reading in readings if reading.fit is Fit.FITS]
    alone = [reading for reading in fits if not reading.tensor.mixed_batch]
    mixed = len(fits) - len(alone)
    if not alone:
        return [f"No candidate of a pure prefill step fits; {mixed} of a mixed batch do."]
    largest = max(reading.bytes_written for reading in alone)
    names = ", ".join(dict.fromkeys(f"'{reading.tensor.name}'" for reading in alone))
    return [
        f"{len(alone)} of {len(readings)} combinations of a pure prefill step fit, and all write "
        f"at most {largest} bytes: {names}.",
        f"{mixed} combinations of a mixed batch fit too, with every value written anew.",
        "So the ones behind the first value are the verdict's own, if prefill and decode were "
        "separate batches.",
    ]


def replay(readings: list[Reading], batch_size: int, device_profile: str) -> DataFrame:
    """Bring the fitting combinations of a pure prefill step about on the virtual device.

    Args:
        readings: all combinations.
        batch_size: requests of the verdict; its values are all 1.
        device_profile: virtual profile.

    Returns:
        One line a combination: what the host read, whether the block was reused, whether that is
        the logged start, and the same start with the verdict held.
    """
    lines = []
    for reading in readings:
        if reading.fit is not Fit.FITS or reading.tensor.mixed_batch:
            continue
        verdict = np.ones(batch_size, dtype=reading.verdict_dtype)
        written = np.array(reading.tensor.values, dtype=reading.dtype)
        first = len(reading.read)
        trial = overwrite_trial(VirtualDevice(device_profile), verdict, written)
        held = overwrite_trial(VirtualDevice(device_profile), verdict, written, hold=True)
        lines.append(
            {
                "next step's tensor": reading.tensor.name,
                "its dtype": reading.dtype,
                "verdict's dtype": reading.verdict_dtype,
                "host reads": trial.read[:first].tolist(),
                "block reused": trial.reused,
                "as logged": trial.read[:first].tolist() == list(reading.read),
                "held: host reads": held.read[:first].tolist(),
                "as logged, held": held.read[:first].tolist() == list(reading.read),
            }
        )
    return DataFrame(lines)
