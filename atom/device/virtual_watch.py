"""How a virtual device is driven by hand and looked at: schedule mode, observers, the timeline."""

from __future__ import annotations

from atom.device.caching_allocator import Block
from atom.device.interface import Device
from atom.device.observer import DeviceObserver
from atom.device.operations import Part
from atom.device.queue_model import QueueModel
from atom.device.timeline import Recorder, Timeline
from atom.device.virtual_host import VirtualHost
from atom.device.virtual_memory import VirtualMemory
from atom.errors import DeviceError


class WatchedDevice(Device):
    """The part of :class:`atom.device.virtual.VirtualDevice` that no engine uses.

    Attributes:
        memory, model, host: the device's parts.
        observer: sees what is queued, owned and waited for; ``None`` costs nothing.
    """

    memory: VirtualMemory
    model: QueueModel
    host: VirtualHost
    observer: DeviceObserver | None = None
    _recorder: Recorder | None = None

    # -- schedule mode
    def ready(self) -> list[Part]:
        """Schedule mode: what may run now, in order of submission."""
        self.memory.collect()
        return self.model.ready()

    def step(self, part: Part) -> None:
        """Schedule mode: run one part.

        Raises:
            DeviceError: it is not ready.
        """
        self.memory.collect()
        self.model.step(part)

    # -- observers
    def observe(self, observer: DeviceObserver | None) -> None:
        """Tell ``observer`` of everything that is queued, owned and waited for from now on."""
        self.observer = self.memory.observer = observer

    # -- timeline
    def _block_died(self, block: Block) -> None:
        if self._recorder is not None:
            self._recorder.block(block, self.memory.device.address(block.offset), self.host.seconds)

    def trace(self, on: bool = True) -> None:
        """Start (afresh) or stop keeping records for :meth:`timeline`."""
        self.memory.collect()
        self._recorder = Recorder() if on else None
        self.model.on_finished = self._recorder.operation if self._recorder else None

    def timeline(self) -> Timeline:
        """What ran and who owned which block since :meth:`trace`.

        Raises:
            DeviceError: tracing is off.
        """
        self.memory.collect()
        if self._recorder is None:
            raise DeviceError("tracing is off: call trace(True) before the work")
        living = [
            Recorder.describe(block, self.memory.device.address(block.offset), None)
            for block in self.memory.blocks.live.values()
        ]
        blocks = sorted(
            [*self._recorder.blocks, *living], key=lambda record: record.allocated_seconds
        )
        return Timeline(tuple(self._recorder.work), tuple(blocks))
