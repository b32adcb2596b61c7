"""The transfers under test with values that are their steps, and an event that tells of waits."""

from __future__ import annotations

from atom.benchmarks import lifetime_paths
from atom.benchmarks.lifetime_paths import BATCH, PARK_SECONDS, TransferPath, own_queue_stream
from atom.device.interface import Event

__all__ = ["BATCH", "PARK_SECONDS", "PATHS", "SpyEvent", "TransferPath", "own_queue_stream"]


class Numbered(TransferPath):
    """A step writes its own number, so that any two steps can be told apart."""

    def value_of(self, step: int) -> int:
        return step


class SpecStatus(Numbered, lifetime_paths.SpecStatus):
    pass


class DraftIds(Numbered, lifetime_paths.DraftIds):
    pass


class TokenIds(Numbered, lifetime_paths.TokenIds):
    pass


class Logprobs(Numbered, lifetime_paths.Logprobs):
    pass


class EllSlot(Numbered, lifetime_paths.EllSlot):
    pass


class EllOneOff(Numbered, lifetime_paths.EllOneOff):
    pass


PATHS: tuple[type[Numbered], ...] = (
    SpecStatus,
    DraftIds,
    TokenIds,
    Logprobs,
    EllSlot,
    EllOneOff,
)


class SpyEvent:
    """Runs ``seen`` just after the wait on the event has ended; may leave the wait out."""

    def __init__(self, event: Event, seen: object, *, waits: bool = True) -> None:
        self._event, self._seen, self._waits = event, seen, waits

    def synchronize(self) -> None:
        if self._waits:
            self._event.synchronize()
        if callable(self._seen):
            self._seen()

    def query(self) -> bool:
        return self._event.query() if self._waits else True
