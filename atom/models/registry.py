"""Models by number: queued device work names its model by an integer.

A kernel's body never closes over a tensor (that would keep the tensor's block alive), and a model
is made of tensors. So the body gets a handle among its scalars and looks the model up when it runs.
"""

from __future__ import annotations

import itertools
from typing import Any

from atom.errors import DeviceError

_models: dict[int, Any] = {}
_numbers = itertools.count(1)


def register(model: Any) -> int:
    """Keep ``model`` (any object) until :func:`release`.

    Returns:
        A handle of 1 or more that no other registration of this process gets.
    """
    handle = next(_numbers)
    _models[handle] = model
    return handle


def lookup(handle: int) -> Any:
    """The model behind a handle.

    Raises:
        DeviceError: if it was released, or never registered.
    """
    try:
        return _models[handle]
    except KeyError:
        raise DeviceError(
            f"no model has the handle {handle}: released while work was queued? Synchronize the "
            f"device before a model is released"
        ) from None


def release(handle: int) -> None:
    """Forget a model. A handle that is not known is left alone."""
    _models.pop(handle, None)
