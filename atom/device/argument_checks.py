"""Checks of arguments that both devices share: what was given, and what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from atom.device.interface import CopyPath, Kernel
from atom.errors import BadInput

_Choice = TypeVar("_Choice")
_INFINITE = float("inf")


def check_amount(name: str, value: Any) -> float:
    """``value`` as a float that is finite and at least 0.

    Raises:
        BadInput: naming ``name``.
    """
    if type(value) is float and 0 <= value < _INFINITE:
        return value
    # the comparison also refuses nan
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < _INFINITE:
        raise BadInput(f"{name}={value!r}; expected a finite number of at least 0")
    return float(value)


def check_count(name: str, value: Any, least: int | None = None) -> int:
    """``value`` as a whole number, of at least ``least`` if that is given.

    Raises:
        BadInput: naming ``name``.
    """
    whole = _whole(value)
    if whole is None or (least is not None and whole < least):
        bound = "" if least is None else f" of at least {least}"
        raise BadInput(f"{name}={value!r}; expected a whole number{bound}")
    return whole


def _whole(value: Any) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, bool | Tensor):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    """``shape`` as a tuple of extents, each a whole number of at least 0; also checks ``dtype``.

    Raises:
        BadInput: naming the extent, or the type.
    """
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"dtype={dtype!r}; expected a torch.dtype such as torch.int32")
    if type(shape) is not tuple:
        if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
            raise BadInput(f"shape={shape!r}; expected a sequence of whole numbers, e.g. (3, 4)")
        shape = tuple(shape)
    for extent in shape:
        if type(extent) is not int or extent < 0:
            return tuple(check_count(f"shape[{i}]", given, 0) for i, given in enumerate(shape))
    return shape


def check_tensor(name: str, value: Any) -> Tensor:
    """``value``, which has to be a tensor.

    Raises:
        BadInput: naming ``name``.
    """
    if not isinstance(value, Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}; expected a tensor")
    return value


def check_lists(kernel: str, **arguments: Any) -> None:
    """Refuse what is not a list or tuple, such as a lone tensor, which would be taken row by row.

    Raises:
        BadInput: naming the argument.
    """
    for name, given in arguments.items():
        if not isinstance(given, tuple | list):
            raise BadInput(
                f"{name} of kernel {kernel!r} is a {type(given).__name__}; expected a tuple or list"
            )


def check_kernel(value: Any) -> Kernel:
    """``value``, which has to be a kernel.

    Raises:
        BadInput: naming its type.
    """
    if not isinstance(value, Kernel):
        raise BadInput(f"kernel is a {type(value).__name__}; expected a Kernel(name, body)")
    return value


def check_path(value: Any) -> CopyPath:
    """``value`` as a copy path.

    Raises:
        BadInput: with the paths there are.
    """
    if type(value) is CopyPath:
        return value
    try:
        return CopyPath(value)
    except ValueError:
        raise BadInput(f"path={value!r}; allowed: {', '.join(CopyPath)}") from None


def check_traffic(nbytes: Any, direction: Any) -> int:
    """The bytes of a bulk transfer, at least 1; also checks the direction.

    Raises:
        BadInput: naming the argument.
    """
    if direction not in ("d2h", "h2d"):
        raise BadInput(f"traffic: direction={direction!r}; allowed: d2h, h2d")
    return check_count("traffic: nbytes", nbytes, 1)
