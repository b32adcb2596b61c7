"""Faults put into the real transfer code on purpose: a check that misses one proves nothing.

A mutation rewrites a piece of the source text of a function and compiles it again. If the text is
no longer there, applying it fails: a mutation never passes by changing nothing.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import LifetimeProgram
from atom.config import CopyProtocol
from atom.errors import BadInput


@dataclass(frozen=True)
class Change:
    """A new text in a function, or a new value of a module's constant.

    Attributes:
        owner: class or module.
        name: function, property (its setter) or constant.
        old: text that is there once; ``None`` for a constant.
        new: text in its place, or the value.
        names: further globals that the new text uses.
    """

    owner: type | ModuleType
    name: str
    old: str | None
    new: Any
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutation:
    """A fault put into the real code.

    Attributes:
        name: short and stable.
        edge: the edge or rule that it breaks: a, b, c, or none.
        what: what the code does then.
        changes: to the code.
        paths: paths whose programs should kill it.
        protocols: protocols to try.
        options: options of those programs.
        equivalent: why it changes nothing that can be seen; ``None`` if it must be caught.
    """

    name: str
    edge: str
    what: str
    changes: tuple[Change, ...]
    paths: tuple[LifetimePath, ...]
    protocols: tuple[CopyProtocol, ...] = (CopyProtocol.HOLD,)
    options: tuple[tuple[str, Any], ...] = ()
    equivalent: str | None = None

    def programs(self, depth: int, **more: Any) -> list[LifetimeProgram]:
        """Its programs with ``depth`` steps in flight."""
        options = {**dict(self.options), **more}
        return [
            LifetimeProgram(path, protocol, depth, **options)
            for path in self.paths
            for protocol in self.protocols
        ]


@contextmanager
def changed(changes: tuple[Change, ...]) -> Iterator[None]:
    """Apply all changes for the block.

    Raises:
        BadInput: the text of one is not there exactly once.
    """
    with ExitStack() as stack:
        for change in changes:
            before = inspect.getattr_static(change.owner, change.name)
            setattr(change.owner, change.name, _replacement(change, before))
            stack.callback(setattr, change.owner, change.name, before)
        yield


def _replacement(change: Change, before: Any) -> Any:
    if change.old is None:
        return change.new
    if isinstance(before, property):
        assert isinstance(before.fset, FunctionType)
        return property(before.fget, _rewritten(change, before.fset), before.fdel, before.__doc__)
    assert isinstance(before, FunctionType)
    return _rewritten(change, before)


def _rewritten(change: Change, function: FunctionType) -> FunctionType:
    assert change.old is not None
    # another change of the same function came first: its text is the one to change
    text = getattr(function, "mutated_text", None) or textwrap.dedent(inspect.getsource(function))
    while text.lstrip().startswith("@"):
        text = text.split("\n", 1)[1]
    found = text.count(change.old)
    if found != 1:
        raise BadInput(
            f"the mutation of {change.name} no longer applies: its text {change.old!r} stands "
            f"{found} times in the function; write it anew for the present code"
        )
    text = text.replace(change.old, change.new)
    scope = {**function.__globals__, **change.names}
    flags = __future__.annotations.compiler_flag
    code = compile(text, f"<mutation of {change.name}>", "exec", flags, dont_inherit=True)
    made: dict[str, Any] = {}
    exec(code, scope, made)
    result = made[function.__name__]
    assert isinstance(result, FunctionType)
    result.mutated_text = text  # type: ignore[attr-defined]
    return result
