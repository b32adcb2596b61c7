"""A step's inputs on their way to the device, through pinned slots.

The mirror of the contract of ``async_copy_stream``: a pinned slot is written again only after the
copy that reads it has completed. The copies run on the default stream, in order with the kernels
that read their targets, so a target needs no event of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atom.device.interface import Device
from atom.transfer.payload import PayloadKind, payload_layout
from atom.transfer.pinned_ring import PinnedRing, PinnedSlot


class StagedInput(NamedTuple):
    """A pinned slot that waits for its values.

    Attributes:
        target: the device tensor that they are for.
        source: the slot's bytes as a tensor of the target's shape and type.
        values: the same bytes for NumPy, to be filled.
        slot: theirs.
    """

    target: Tensor
    source: Tensor
    values: NDArray[Any]
    slot: PinnedSlot


class InputStaging:
    """Copies host arrays into device tensors without waiting.

    Args:
        device: where the targets live.
        max_slots: pinned slots; more are in flight only when the host runs many steps ahead.
    """

    def __init__(self, device: Device, *, max_slots: int = 64) -> None:
        self._device = device
        self._ring = PinnedRing(device, max_slots=max_slots)

    def send(self, target: Tensor, values: NDArray[np.generic]) -> None:
        """Queue a copy of ``values`` into ``target`` on the default stream.

        Args:
            target: contiguous device tensor.
            values: C-contiguous array of its type, of as many bytes.

        Raises:
            ValueError: the sizes differ, or ``values`` is not contiguous.
            TypeError: the types differ.
        """
        nbytes = target.numel() * target.element_size()
        if values.nbytes != nbytes or not values.flags.c_contiguous:
            raise ValueError(
                f"{nbytes} contiguous bytes are needed, got {values.nbytes} of {values.dtype}"
            )
        if nbytes == 0:
            return
        staged = self.open(target)
        np.copyto(staged.values, values.reshape(staged.values.shape), casting="no")
        self.queue(staged)

    def open(self, target: Tensor) -> StagedInput:
        """Take a slot for a contiguous device tensor, to be filled and then given to :meth:`queue`.

        A slot that is not wanted any more goes to :meth:`take_back`.
        What is known early is filled in early: behind a wait little is left to do.
        """
        # the slot keeps the views of a layout
        layout = payload_layout(PayloadKind.OTHER, target.shape, target.dtype, None, False)
        slot = self._ring.acquire(layout.host_bytes)
        source = slot.data(layout)
        return StagedInput(target, source, source.numpy(), slot)

    def take_back(self, staged: StagedInput) -> None:
        """Give up what :meth:`open` gave: nothing of it is sent."""
        # the slot was free when it was handed out, and no work was queued with it since
        self._ring.release(staged.slot, landed=True)

    def queue(self, staged: StagedInput) -> None:
        """Queue the copy of what :meth:`open` gave, on the default stream."""
        self._device.copy(staged.target, staged.source)
        staged.slot.event.record(self._device.default_stream)
        self._ring.release(staged.slot)
