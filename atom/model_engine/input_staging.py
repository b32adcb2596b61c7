"""A step's inputs on their way to the device, through pinned slots.

The mirror of the contract of ``async_copy_stream``: a pinned slot is written again only after the
copy that reads it has completed. The copies run on the default stream, in order with the kernels
that read their targets, so a target needs no event of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atom.device.interface import Device
from atom.transfer.pinned_ring import PinnedRing


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
            values: C-contiguous array of as many bytes.

        Raises:
            ValueError: the sizes differ, or ``values`` is not contiguous.
        """
        nbytes = target.numel() * target.element_size()
        if values.nbytes != nbytes or not values.flags.c_contiguous:
            raise ValueError(
                f"{nbytes} contiguous bytes are needed, got {values.nbytes} of {values.dtype}"
            )
        if nbytes == 0:
            return
        slot = self._ring.acquire(nbytes)
        staged = slot.tensor[:nbytes]
        staged.numpy()[:] = values.reshape(-1).view(np.uint8)
        self._device.copy(target, staged.view(target.dtype).view(target.shape))
        slot.event.record(self._device.default_stream)
        self._ring.release(slot)
