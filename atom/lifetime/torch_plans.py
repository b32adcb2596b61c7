"""What a torch operation reads and writes, from its schema; worked out once an operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_METADATA_ONLY = re.compile(r"^(new_.*|.*_like)$")
_UNWRITTEN = re.compile(r"^(empty.*|new_empty.*)$")
#: the host has the result when they return
_SYNCHRONOUS = {"_local_scalar_dense", "item"}
_VIEWS = {"_unsafe_view", "record_stream", "is_pinned"}
_COPIES = {"copy_", "_to_copy", "copy", "_copy_from", "_copy_from_and_resize"}


class Plan(NamedTuple):
    """How to look at one operation.

    Attributes:
        name: without namespace, e.g. ``mm``.
        arguments: name and whether it is written, of each argument that may hold tensors, with
            its position; arguments that are only looked at as metadata are left out.
        writes_output: whether fresh outputs are written.
        has_output: whether there are fresh outputs.
        nothing: views and the like, which touch no bytes.
        copy: copies, which may be asynchronous.
        non_blocking: position of the argument of that name, or -1.
        synchronous: whether the host waits for the result.
        call: runs the operation.
    """

    name: str
    arguments: tuple[tuple[int, str, bool], ...]
    writes_output: bool
    has_output: bool
    nothing: bool
    copy: bool
    non_blocking: int
    synchronous: bool
    call: Callable[..., Any]


def plan_of(operation: Any) -> Plan | None:
    """The plan of an overload, or ``None`` for what has no schema (higher-order operators)."""
    if not isinstance(operation, torch._ops.OpOverload):
        return None
    schema = operation._schema
    name = schema.name.split("::")[-1]
    metadata_only = bool(_METADATA_ONLY.match(name))
    arguments = []
    aliased = written = False
    non_blocking = -1
    for position, argument in enumerate(schema.arguments):
        if argument.name == "non_blocking":
            non_blocking = position
        if "Tensor" not in str(argument.type):
            continue
        alias = argument.alias_info
        write = alias is not None and alias.is_write
        aliased = aliased or (alias is not None and not write)
        written = written or write
        if metadata_only and not write:
            continue
        if alias is not None and not write:
            continue
        arguments.append((position, argument.name, write))
    fresh = [
        result
        for result in schema.returns
        if "Tensor" in str(result.type) and result.alias_info is None
    ]
    # a list of views has no alias of its own in some schemas
    view = (aliased and not written) or name in _VIEWS
    return Plan(
        name,
        tuple(arguments),
        writes_output=bool(fresh) and not _UNWRITTEN.match(name),
        has_output=bool(fresh),
        nothing=view,
        copy=name in _COPIES,
        non_blocking=non_blocking,
        synchronous=name in _SYNCHRONOUS
        or (bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns)),
        # past a method of Python's that only hands its arguments on
        call=operation._op if type(operation) is torch._ops.OpOverload else operation,
    )
