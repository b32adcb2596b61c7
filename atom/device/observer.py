"""What a virtual device tells an observer: the events that a happens-before analysis needs.

Everything is said at the host call that makes it so, in program order. An observer that is not
there costs one comparison a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from atom.device.operations import Operation


class DeviceObserver(Protocol):
    """Receives a device's events. ``block`` is a ``Block`` or a ``PinnedBuffer``."""

    def owned(self, block: Any) -> None:
        """A tensor owns ``block`` from now on."""

    def died(self, block: Any) -> None:
        """The last view of ``block`` died, at this very place of the program."""

    def stream_recorded(self, block: Any, stream_id: int) -> None:
        """``record_stream`` was called."""

    def queued(self, operation: Operation, stream_id: int) -> None:
        """Work was queued (also by the replay of a graph)."""

    def event_recorded(self, event: object, stream_id: int) -> None:
        """``event`` marks the present end of the stream."""

    def event_waited_by(self, event: object, stream_id: int) -> None:
        """The stream waits for the latest record of ``event``."""

    def event_observed(self, event: object) -> None:
        """The host knows that the latest record of ``event`` has completed."""

    def stream_waited(self, stream_id: int) -> None:
        """The host knows that everything queued on the stream has run."""

    def device_waited(self) -> None:
        """The host knows that everything has run."""
