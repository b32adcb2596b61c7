"""The seam: one device interface, and the two devices behind it."""

from __future__ import annotations

from atom.config import DeviceChoice
from atom.device.interface import CopyPath, Device, DeviceKind, DeviceProperties, Kernel

__all__ = ["CopyPath", "Device", "DeviceKind", "DeviceProperties", "Kernel", "open_device"]


def open_device(
    choice: DeviceChoice | str,
    *,
    profile: str = "MI355X",
    seed: int = 0,
    hardware_queues: int | None = None,
    index: int = 0,
) -> Device:
    """Open a device.

    Args:
        choice: ``virtual`` or ``accelerator``.
        profile: profile of the virtual device.
        seed: seed of the virtual device's jitter.
        hardware_queues: queues of the virtual device (``None``: the profile's). An accelerator
            reads its queue variable once, before its context exists: set it in the environment.
        index: which accelerator.

    Raises:
        DeviceError: no accelerator.
        BadInput: no such profile.
    """
    if DeviceChoice(choice) is DeviceChoice.VIRTUAL:
        from atom.device.virtual import VirtualDevice

        return VirtualDevice(profile, seed=seed, hardware_queues=hardware_queues)
    from atom.device.accelerator import Accelerator

    return Accelerator(index)
