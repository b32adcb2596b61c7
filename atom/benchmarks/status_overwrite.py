"""One forced trial of the fault on a device, with chosen bytes in the next step's tensor.

The arithmetic says what the host reads if a tensor is written over the status block. This trial
lets a device's allocator and queues bring that about: nothing is written over on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atom.device.interface import Device, Kernel


@dataclass(frozen=True)
class OverwriteTrial:
    """What came of one trial.

    Attributes:
        read: the host's copy of the verdict, the verdict's shape and dtype.
        reused: whether the next step's tensor was given the verdict's address.
    """

    read: NDArray[np.generic]
    reused: bool


def _store(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    writes[0].copy_(reads[0])


STORE = Kernel("store", _store)

#: owners of blocks in a labelled timeline
THIS_STEP = "step N's verdict"
NEXT_STEP = "step N+1's tensor"


def overwrite_trial(
    device: Device,
    verdict: NDArray[np.generic],
    written: NDArray[np.generic],
    *,
    hold: bool = False,
    spin_seconds: float = 0.002,
    label: Callable[[Tensor, str], Tensor] | None = None,
) -> OverwriteTrial:
    """Queue a late status copy, drop (or hold) its source, and write the next step's tensor.

    Args:
        device: any device.
        verdict: 1-D, this step's status.
        written: 1-D, the next step's tensor.
        hold: keep the source until the copy was waited on.
        spin_seconds: how long the copy stream is parked in front of the copy.
        label: names a tensor's block in the device's timeline (``VirtualDevice.label``).
    """
    copies = device.new_stream()
    produced, copied = device.new_event(), device.new_event()
    staged, staged_next = _pinned(device, verdict), _pinned(device, written)
    target = device.pinned(verdict.shape, staged.dtype)

    source: Tensor | None = device.empty(verdict.shape, staged.dtype)
    assert source is not None
    if label:
        label(source, THIS_STEP)
    address = device.address(source)
    device.launch(STORE, [device.mapped(staged)], [source])
    produced.record()
    copies.wait_event(produced)
    device.spin(spin_seconds, stream=copies)
    device.copy(target, source, stream=copies)
    copied.record(copies)
    held = source if hold else None
    source = None

    following = device.empty(written.shape, staged_next.dtype)
    if label:
        label(following, NEXT_STEP)
    reused = device.address(following) == address
    device.launch(STORE, [device.mapped(staged_next)], [following])
    copied.synchronize()
    del held
    device.synchronize()
    return OverwriteTrial(target.numpy().copy(), reused)


def _pinned(device: Device, values: NDArray[np.generic]) -> Tensor:
    plain = torch.from_numpy(np.ascontiguousarray(values))
    tensor = device.pinned(tuple(plain.shape), plain.dtype)
    tensor.copy_(plain)
    return tensor
