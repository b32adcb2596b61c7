"""Errors that reach a user, each with the exit code that its command ends with.

Exit codes: 0 fine, 1 a claim fell, 2 bad input, 3 a notebook or a device failed.
"""

from __future__ import annotations


class AtomError(Exception):
    """Base of every error that is shown to a user as one message, without a traceback."""

    exit_code = 3


class ClaimFell(AtomError):
    """A claim's verdict is worse than the accepted one."""

    exit_code = 1


class BadInput(AtomError):
    """A parameter, file or folder that the user gave cannot be used."""

    exit_code = 2


class NotebookFailed(AtomError):
    """A notebook stopped with an error of its own."""


class DeviceError(AtomError):
    """A device is missing, refused an operation, or failed."""


class DeviceOutOfMemory(DeviceError):
    """An allocation does not fit; the message gives the sizes and what holds the memory."""


class TensorCaptured(DeviceError):
    """Queued work captured a tensor, which would keep the tensor's block alive."""


class FreedPinnedBuffer(DeviceError):
    """Queued work reached a pinned host buffer after its last owner dropped it."""


class WrongDevice(DeviceError):
    """A stream, event or tensor of another device was passed."""


class StalePayload(AtomError):
    """A host-bound payload carries another step's epoch tag; the message names both steps."""
