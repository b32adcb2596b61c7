"""Finds tensors that queued work would keep alive.

A closure that captures a tensor owns the tensor's block until it has run. Work that owns its
memory cannot race with the next owner, so one such capture would hide the fault under study.

Two nets. At the launch everything that the body reaches is looked through, with the garbage
collector's own view of what an object refers to. When work has run and is let go, no block may
die with it (``QueueModel``): that catches what an object of compiled code hides, and what was put
into the body after the launch. What neither sees: a hidden capture that something else, a
reference cycle or a graph also keeps alive when the work is let go, and what is put into the
annotations of a module's function after its first launch.
"""

from __future__ import annotations

import datetime
import functools
import gc
import operator
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from atom.errors import BadInput, TensorCaptured

#: objects looked at for one body; a body that reaches more is refused
MAXIMUM_OBJECTS = 20_000
_NUMBERS = (int, float, bool)
# exact types: a subclass may carry attributes
_PLAIN = frozenset(
    {*_NUMBERS, str, bytes, complex, type(None), type(...), type(NotImplemented)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_CAPSULE = type(datetime.datetime_CAPI)
_MEMORY = (
    *(torch.Tensor, torch.UntypedStorage, torch.TypedStorage),
    *(np.ndarray, np.void, np.flatiter, np.nditer, np.broadcast, _CAPSULE),
)
_HEAP_TYPE = 1 << 9
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
# bodies of modules: what they refer to, each kept so that its id stays its own
_checked: dict[int, tuple[Any, list[Any]]] = {}


def refuse_captured_tensors(kernel: str, body: Any, scalars: tuple[Any, ...]) -> None:
    """Refuse a kernel body or scalars that reach a tensor, an array or their storage.

    Looks at closures, default arguments, attributes, classes, containers, iterators, bound
    methods and all else that the garbage collector sees. Modules, their globals, and classes of
    libraries are not looked at: a queued body does not keep them alive.

    Raises:
        TensorCaptured: naming the kernel and the variable, or a body that reaches too much.
        BadInput: a scalar that is not exactly an int, float or bool.
    """
    for index, scalar in enumerate(scalars):
        if type(scalar) not in _NUMBERS:
            _refuse(kernel, _find(scalar, f"scalars[{index}]"))
            raise BadInput(
                f"scalars[{index}] of kernel {kernel!r} is a {type(scalar).__name__}; allowed: "
                "int, float, bool"
            )
    known = _checked.get(id(body))
    if known is not None:
        found = _parts(body)
        if len(found) == len(known[1]) and all(map(operator.is_, found, known[1])):
            return
        del _checked[id(body)]
    _refuse(kernel, _find(body, "body"))
    if _of_a_module(body):
        _checked[id(body)] = (body, _parts(body))


def _refuse(kernel: str, found: str | None) -> None:
    if found is not None:
        raise TensorCaptured(
            f"kernel {kernel!r} captures a tensor: {found}. Queued work must not own memory; pass "
            "the tensor in reads or writes"
        )


def refuse_let_go(name: str, died: list[Any]) -> None:
    """Refuse work whose end let a block die: the work had been its only owner.

    Raises:
        TensorCaptured: naming the work and where the blocks came from.
    """
    places = ", ".join(sorted({reference.block.site for reference in died}))
    raise TensorCaptured(
        f"kernel {name!r} captures a tensor: {len(died)} block(s), from {places}, lived only "
        "because this work was queued. Queued work must not own memory; pass the tensor in reads "
        "or writes"
    )


def _parts(function: Any) -> list[Any]:
    return gc.get_referents(function, function.__dict__, function.__kwdefaults__)


def _of_a_module(body: Any) -> bool:
    """Whether ``body`` is a module's function all of whose parts are fixed."""
    if not isinstance(body, types.FunctionType) or body.__closure__ is not None:
        return False
    of_module: object = getattr(sys.modules.get(body.__module__), body.__name__, None)
    if of_module is not body:
        return False
    values = [*body.__dict__.values(), *(body.__kwdefaults__ or {}).values()]
    return all(type(value) in _PLAIN for value in (*values, *(body.__defaults__ or ())))


def _find(value: Any, path: str) -> str | None:
    """Where a tensor is reached from ``value``, breadth first, or ``None``."""
    seen = {id(value)}
    # values stay referenced while their ids are in use
    kept: list[Any] = []
    queue: deque[tuple[Any, str]] = deque([(value, path)])
    while queue:
        value, path = queue.popleft()
        kept.append(value)
        if isinstance(value, torch.Tensor):
            return f"{path} is a tensor of shape {tuple(value.shape)}"
        if isinstance(value, np.ndarray):
            return f"{path} is an array of shape {value.shape}"
        if isinstance(value, _MEMORY):
            return f"{path} is a {type(value).__name__}, which holds memory"
        if _stays_by_itself(value):
            continue
        if len(kept) > MAXIMUM_OBJECTS:
            return f"{path} is one of more than {MAXIMUM_OBJECTS} objects that it reaches"
        inside = f"the {type(value).__name__} {path}"
        unnamed = [(inner, f"an item of {inside}") for inner in _referents(value)]
        for inner, name in [*_named(value, path), *unnamed]:
            if type(inner) not in _PLAIN and id(inner) not in seen:
                seen.add(id(inner))
                queue.append((inner, name))
    return None


def _referents(value: Any) -> list[Any]:
    if isinstance(value, types.CodeType):
        return list(value.co_consts)
    return gc.get_referents(value)


def _stays_by_itself(value: Any) -> bool:
    if isinstance(value, type):
        library = str(value.__module__).partition(".")[0] in _LIBRARIES
        return library or not value.__flags__ & _HEAP_TYPE
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    if type(value) is dict:
        name = value.get("__name__")
        module = sys.modules.get(name) if type(name) is str else None
        return module is not None and module.__dict__ is value
    return False


def _named(value: Any, path: str) -> list[tuple[Any, str]]:
    """What ``value`` refers to by a name that a user knows."""
    if isinstance(value, functools.partial):
        return [
            (value.func, f"{path}.func"),
            *((inner, f"{path}.args[{i}]") for i, inner in enumerate(value.args)),
            *((inner, f"{path}.keywords[{key!r}]") for key, inner in value.keywords.items()),
        ]
    if isinstance(value, types.MethodType):
        return [(value.__self__, f"{path}.__self__"), (value.__func__, f"{path}.__func__")]
    if isinstance(value, types.FunctionType):
        return _of_function(value, path)
    if type(value) is dict:
        return [(inner, f"{path}[{key!r}]") for key, inner in list(value.items())]
    if type(value) in (list, tuple):
        return [(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict | types.MappingProxyType):
        return [(inner, f"{path}.{name}") for name, inner in list(attributes.items())]
    return []


def _of_function(function: types.FunctionType, path: str) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            found.append((cell.cell_contents, f"{path}'s closure variable {name!r}"))
        except ValueError:
            # a cell that is not filled yet
            continue
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    start = len(arguments) - len(defaults)
    for name, value in zip(arguments[start:], defaults, strict=False):
        found.append((value, f"{path}'s default of argument {name!r}"))
    for name, value in (function.__kwdefaults__ or {}).items():
        found.append((value, f"{path}'s default of argument {name!r}"))
    found += [(value, f"{path}.{name}") for name, value in function.__dict__.items()]
    return found
