"""Choosing the arms of an experiment by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from atom.errors import BadInput


def is_wanted(only: Sequence[str], *names: str) -> bool:
    """Whether one of the names is among ``only`` or fits a shell pattern there (empty: all)."""
    return not only or any(fnmatchcase(name, pattern) for name in names for pattern in only)


def refuse_unknown(only: Sequence[str], names: Sequence[str]) -> None:
    """Raise ``ValueError`` at a pattern that fits none of the names: settings call it."""
    for pattern in only:
        if not any(is_wanted((pattern,), name) for name in names):
            raise ValueError(f"only: {pattern!r} fits no arm; there are {', '.join(names)}")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Arm = TypeVar("Arm", bound=_Named)


def choose_arms(arms: Sequence[Arm], only: Sequence[str], reference: str) -> list[Arm]:
    """The arms that ``only`` names (empty: all), the reference among them, in their order.

    Raises:
        BadInput: an unknown arm.
    """
    known = [arm.name for arm in arms]
    for name in only:
        if name not in known:
            raise BadInput(f"only: no arm {name!r}; known: {', '.join(known)}")
    wanted = {*(only or known), reference}
    return [arm for arm in arms if arm.name in wanted]
