"""What every sweep does about Ctrl-C, another device, and surroundings that would spoil it."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from atom.benchmarks.race_environment import look_around, refuse_hiding_settings
from atom.device import DeviceKind
from atom.device.interface import DeviceProperties
from atom.errors import AtomError, BadInput, DeviceError
from atom.workbook.provenance import Provenance
from atom.workbook.tables import shown_path

INTERRUPTED = 130
#: after that long an interrupt that was swallowed strikes again
_AGAIN_SECONDS = 0.05


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; what was finished is recorded in ``path``."""

    def __init__(self, path: Path | None) -> None:
        super().__init__("the sweep was interrupted")
        self.path = path


def refuse_no_accelerator(*, or_virtual: bool = True) -> None:
    """Raise unless this machine has an accelerator.

    Args:
        or_virtual: whether the sweep runs on a virtual device as well, which the error then says.

    Raises:
        DeviceError: with the reason.
    """
    from atom.device.accelerator import why_no_accelerator

    reason = why_no_accelerator()
    if reason is not None:
        advice = "; --device virtual needs none" if or_virtual else ", and this sweep needs one"
        raise DeviceError(f"no accelerator: {reason}{advice}")


def refuse_other_device(known: Provenance, path: Path, properties: DeviceProperties) -> None:
    """Refuse to go on with a run of another device, driver or runtime.

    Raises:
        BadInput: naming both.
    """
    now = (properties.name, properties.driver, properties.runtime)
    then = (known.device, known.driver, known.runtime)
    if now != then:
        raise BadInput(
            f"{shown_path(path)} was started on {then[0]} (driver {then[1]}, {then[2]}); "
            f"this is {now[0]} (driver {now[1]}, {now[2]}): start a new run"
        )


def name_what_spoils(kind: DeviceKind | None = None, *, or_virtual: bool = True) -> None:
    """Say on standard error what a sweep of the accelerator would refuse or warn of here.

    Args:
        kind: of the accelerator; ``None`` asks torch.
        or_virtual: see :func:`refuse_no_accelerator`.
    """
    try:
        refuse_hiding_settings(os.environ)
        refuse_no_accelerator(or_virtual=or_virtual)
    except AtomError as error:
        print(f"the sweep would be refused: {error}", file=sys.stderr)
        return
    for warning in look_around(kind or this_kind()).warnings:
        print(f"warning: {warning}", file=sys.stderr)


def this_kind() -> DeviceKind:
    """Kind of accelerator that this torch drives."""
    return DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA


def resume_text(command: str, path: Path) -> str:
    """How to go on with an unfinished run."""
    return f"python -m atom sweep {command} --resume {shown_path(path)}"


def began_with_ctrl_c(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what an error came from, e.g. that of an engine closed in mid-step."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a stopped job still seals what it has.

    Either one that strikes in a destructor, which swallows what is raised there, strikes again.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def not_raised(missed: sys.UnraisableHookArgs) -> None:
        if missed.exc_type is not KeyboardInterrupt:
            hook(missed)
            return
        again = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main, (signal.SIGTERM,))
        again.daemon = True
        again.start()

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        # not the main thread
        yield
        return
    hook, sys.unraisablehook = sys.unraisablehook, not_raised
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, previous)
