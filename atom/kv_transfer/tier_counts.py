"""What a CPU tier did, and what it could not do and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from atom.kv_transfer.pool_entry import EntryKind, Refusal


class Cause(StrEnum):
    """Why something was not loaded or not stored."""

    ABSENT = "absent"  #: it was never stored; not counted as a failure
    EVICTED = "evicted"  #: it was stored, and went to make room
    NOT_LANDED = "not landed"  #: its store is still on its way
    WITHDRAWN = "withdrawn"  #: the step that computed it was found faulty during the load
    NO_SLOT = "no checkpoint slot"  #: all state checkpoints of the device are held
    DEVICE = "device"  #: the device refused the copy
    BACK_PRESSURE = "back-pressure"  #: too many bytes of stores are in flight
    PRESENT = Refusal.PRESENT.value  #: the pool has it already
    TOO_LARGE = Refusal.TOO_LARGE.value  #: larger than the pool, or its kind's share
    PINNED = Refusal.PINNED.value  #: too much of the pool is in use by copies
    NO_PREFIX = Refusal.NO_PREFIX.value  #: paired: the pool lost what it goes on from


def count_name(what: str, kind: EntryKind, cause: Cause) -> str:
    """Name of a count among the engine's statistics; ``what`` is ``failed`` or ``dropped``."""
    name = cause.value.replace(" ", "_").replace("-", "_")
    return f"offload_{what}_{kind}_{name}"


@dataclass
class TierCounts:
    """Totals since the start.

    Attributes:
        stored_chunks, stored_states: stores that have ended.
        loads: loads begun, one a request.
        loaded_chunks, loaded_states: what they brought.
        pin_waits: how often the host waited for a copy because its pins were in the way.
        state_pairs: admitted requests whose KV reached a place at which the pool has, or had
            evicted, a state.
        state_pairs_failed: those of them whose last such state was evicted.
        failures: by kind and cause, one for each time a request was admitted.
        drops: stores that were not made, by kind and cause.
    """

    stored_chunks: int = 0
    stored_states: int = 0
    loads: int = 0
    loaded_chunks: int = 0
    loaded_states: int = 0
    pin_waits: int = 0
    state_pairs: int = 0
    state_pairs_failed: int = 0
    failures: Counter[tuple[EntryKind, Cause]] = field(default_factory=Counter)
    drops: Counter[tuple[EntryKind, Cause]] = field(default_factory=Counter)

    def failed(self, kind: EntryKind, cause: Cause) -> None:
        """Count a load that could not be."""
        self.failures[kind, cause] += 1

    def asked(self, failures: Iterable[tuple[EntryKind, Cause]], state_loaded: bool) -> None:
        """Count what an admitted request asked of the pool.

        Args:
            failures: loads that could not be; states from the last place of its KV down.
            state_loaded: whether a state came.
        """
        failures = list(failures)
        for kind, cause in failures:
            self.failed(kind, cause)
        failed = (EntryKind.STATE, Cause.EVICTED) in failures
        self.state_pairs += failed or state_loaded
        self.state_pairs_failed += failed

    def dropped(self, kind: EntryKind, cause: Cause) -> None:
        """Count a store that was not made."""
        self.drops[kind, cause] += 1

    def by_name(self) -> dict[str, float]:
        """Everything as numbers with names."""
        counts: dict[str, float] = {
            "offload_stored_chunks": self.stored_chunks,
            "offload_stored_states": self.stored_states,
            "offload_loads": self.loads,
            "offload_loaded_chunks": self.loaded_chunks,
            "offload_loaded_states": self.loaded_states,
            "offload_pin_waits": self.pin_waits,
            "offload_state_pairs": self.state_pairs,
            "offload_state_pairs_failed": self.state_pairs_failed,
        }
        for what, counter in (("failed", self.failures), ("dropped", self.drops)):
            for (kind, cause), count in counter.items():
                counts[count_name(what, kind, cause)] = count
        return counts
