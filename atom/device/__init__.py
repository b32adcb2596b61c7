"""The seam: one device interface, and the two devices behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.config import DeviceChoice
from atom.device.interface import CopyPath, Device, DeviceKind, DeviceProperties, Kernel

__all__ = [
    "CopyPath",
    "Device",
    "DeviceInventory",
    "DeviceKind",
    "DeviceProperties",
    "Kernel",
    "choose_device",
    "describe_devices",
    "open_device",
]


def choose_device(choice: str) -> DeviceChoice:
    """A choice as it is named; ``auto`` is the accelerator where there is one."""
    if choice == "auto":
        from atom.device.accelerator import why_no_accelerator

        choice = "virtual" if why_no_accelerator() is not None else "accelerator"
    return DeviceChoice(choice)


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


@dataclass(frozen=True)
class DeviceInventory:
    """What devices this process can open.

    Attributes:
        accelerators: visible GPUs, in index order.
        reason: why there is none, or ``None``.
        profiles: properties of every virtual profile.
        torch: torch's version.
    """

    accelerators: tuple[DeviceProperties, ...]
    reason: str | None
    profiles: tuple[DeviceProperties, ...]
    torch: str


def describe_devices() -> DeviceInventory:
    """List the accelerators of this machine and the virtual profiles, opening none of them."""
    from atom.device.accelerator import accelerator_properties, why_no_accelerator
    from atom.device.profiles import PROFILES
    from atom.device.virtual import profile_properties

    reason = why_no_accelerator()
    indices = range(torch.cuda.device_count()) if reason is None else range(0)
    return DeviceInventory(
        accelerators=tuple(accelerator_properties(index) for index in indices),
        reason=reason,
        profiles=tuple(profile_properties(profile) for profile in PROFILES.values()),
        torch=torch.__version__,
    )
