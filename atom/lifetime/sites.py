"""Where in the program something happened: the nearest Python lines outside the machinery."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TypeAlias

import torch

from atom.lifetime.findings import Site

#: (file, line, function) of the nearest frames, nearest first
RawSite: TypeAlias = tuple[tuple[str, int, str], ...]

CALLERS = 4
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INTERNAL = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.join(_PACKAGE, "device") + os.sep,
    os.path.join(_PACKAGE, "lifetime") + os.sep,
    "<frozen",
)
_internal: dict[str, bool] = {}
UNKNOWN: RawSite = ()


def is_internal(file: str) -> bool:
    """Whether frames of ``file`` are passed over: torch, the device interface,
    this room, Python's own library."""
    known = _internal.get(file)
    if known is None:
        known = file.startswith(_INTERNAL) or "/site-packages/triton/" in file
        if file.startswith(_LIBRARY) and "-packages" not in file:
            known = True
        _internal[file] = known
    return known


def here(depth: int = 1) -> RawSite:
    """The nearest ``depth`` frames of the program that is watched, without its machinery."""
    frame: FrameType | None = sys._getframe(1)
    known = _internal
    while frame is not None:
        file = frame.f_code.co_filename
        if not (known[file] if file in known else is_internal(file)):
            break
        frame = frame.f_back
    if frame is None:
        return UNKNOWN
    nearest = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    if depth == 1:
        return (nearest,)
    found = [nearest]
    frame = frame.f_back
    while frame is not None and len(found) < depth:
        file = frame.f_code.co_filename
        if not (known[file] if file in known else is_internal(file)):
            found.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def deeper(raw: RawSite) -> RawSite:
    """``raw`` with its callers, if it was taken one frame deep and is still running."""
    if len(raw) != 1:
        return raw
    found = here(CALLERS)
    return found if found[:1] == raw else raw


def called_from(part: str) -> bool:
    """Whether a frame of the stack lies in a file whose path ends with ``part``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(part):
            return True
        frame = frame.f_back
    return False


def as_site(raw: RawSite) -> Site:
    """``raw`` as findings hold it."""
    if not raw:
        return Site()
    file, line, function = raw[0]
    callers = tuple((caller, place) for caller, place, _ in raw[1:])
    return Site(file, line or 0, function, callers)
