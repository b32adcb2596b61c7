"""Finds tensors that queued work would keep alive.

A closure that captures a tensor owns the tensor's block until it has run. Work that owns its
memory cannot race with the next owner, so one such capture would hide the fault under study.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from atom.errors import TensorCaptured

_MAXIMUM_DEPTH = 6
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, type, types.ModuleType)
_checked: set[int] = set()
_kept: list[Any] = []


def refuse_captured_tensors(kernel: str, body: Any, scalars: tuple[Any, ...]) -> None:
    """Refuse a kernel body or scalars that reach a tensor or an array.

    Looks at closures, default arguments, the arguments of a ``functools.partial``, the object of
    a bound method, and containers and attributes of all of these. Module globals are not
    looked at: a queued body does not keep them alive.

    Raises:
        TensorCaptured: naming the kernel and the variable.
    """
    for index, scalar in enumerate(scalars):
        if type(scalar) not in (int, float, bool):
            _refuse(kernel, _find(scalar, f"scalars[{index}]", 0, set()))
    if id(body) in _checked:
        return
    _refuse(kernel, _find(body, "body", 0, set()))
    if _cannot_change(body):
        # its id stays its own while it is kept
        _kept.append(body)
        _checked.add(id(body))


def _refuse(kernel: str, found: str | None) -> None:
    if found is not None:
        raise TensorCaptured(
            f"kernel {kernel!r} captures a tensor: {found}. Queued work must not own memory; pass "
            "the tensor in reads or writes"
        )


def _cannot_change(body: Any) -> bool:
    return (
        isinstance(body, types.FunctionType)
        and body.__closure__ is None
        and not body.__kwdefaults__
        and not body.__dict__
        and all(isinstance(value, _PLAIN) for value in body.__defaults__ or ())
        and body.__name__ != "<lambda>"
        and "<locals>" not in body.__qualname__
    )


def _find(value: Any, path: str, depth: int, seen: set[int]) -> str | None:
    if isinstance(value, torch.Tensor):
        return f"{path} is a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{path} is an array of shape {value.shape}"
    if isinstance(value, _PLAIN) or id(value) in seen or depth > _MAXIMUM_DEPTH:
        return None
    seen.add(id(value))
    for name, inner in _reachable(value, path):
        found = _find(inner, name, depth + 1, seen)
        if found is not None:
            return found
    return None


def _reachable(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        return [
            (f"{path}.func", value.func),
            *((f"{path}.args[{i}]", inner) for i, inner in enumerate(value.args)),
            *((f"{path}.keywords[{key!r}]", inner) for key, inner in value.keywords.items()),
        ]
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__), (f"{path}.__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        return _of_function(value, path)
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", inner) for key, inner in list(value.items())]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{path}[{i}]", inner) for i, inner in enumerate(list(value))]
    attributes = list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(name, str) and hasattr(value, name):
                attributes.append((name, getattr(value, name)))
    return [(f"{path}.{name}", inner) for name, inner in attributes]


def _of_function(function: types.FunctionType, path: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            found.append((f"{path}'s closure variable {name!r}", cell.cell_contents))
        except ValueError:
            # a cell that is not filled yet
            continue
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    start = len(arguments) - len(defaults)
    for name, value in zip(arguments[start:], defaults, strict=False):
        found.append((f"{path}'s default of argument {name!r}", value))
    for name, value in (function.__kwdefaults__ or {}).items():
        found.append((f"{path}'s default of argument {name!r}", value))
    found += [(f"{path}.{name}", value) for name, value in function.__dict__.items()]
    return found
