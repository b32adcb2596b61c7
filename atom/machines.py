"""What a machine is called in a record: its kind and its folder, read without loading torch."""

from __future__ import annotations

import re
from enum import StrEnum

_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|instinct|geforce|radeon|graphics|tesla|quadro|pcie|sxm\d?)\b"
)


class DeviceKind(StrEnum):
    """What stands behind a device."""

    CUDA = "cuda"
    HIP = "hip"
    VIRTUAL = "virtual"
    UNKNOWN = "unknown"  #: a server's, which it alone knows


def machine_slug(device_name: str) -> str:
    """Folder name of a machine, from its marketing name.

    >>> machine_slug("NVIDIA H200"), machine_slug("AMD Instinct MI355X")
    ('h200', 'mi355x')
    """
    words = _VENDOR_WORDS.sub(" ", device_name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "accelerator"
