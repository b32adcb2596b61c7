"""Triton launches, which no dispatch mode sees.

Every tensor argument counts as read. Which ones are written comes from torch's analysis of the
kernel's intermediate representation, a private interface that is probed: where it is missing or
fails, the arguments count as reads only, and the report says so. Counting them as writes would
flag two streams that read one weight.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from torch import Tensor

from atom.lifetime.host_watch import put_back, replace
from atom.lifetime.sites import CALLERS, here
from atom.lifetime.torch_front import TorchFront


class TritonLaunches:
    """Patches ``JITFunction.run`` until :meth:`restore`.

    Args:
        front: what it feeds.
    """

    def __init__(self, front: TorchFront) -> None:
        self._front = front
        self._done: list[tuple[type, str, Any]] = []
        self._written: dict[int, frozenset[str] | None] = {}

    def apply(self) -> None:
        """Patch, if Triton is there."""
        if importlib.util.find_spec("triton") is None:
            return
        try:
            from triton.runtime.jit import JITFunction
        except ImportError as error:
            self._front.monitor.report.note(f"Triton launches: {error}")
            return
        run = JITFunction.run
        launches = self

        def watched_run(self: Any, *arguments: Any, **options: Any) -> Any:
            result = run(self, *arguments, **options)
            if not options.get("warmup", False):
                front = launches._front
                try:
                    launches.launched(self, arguments, options)
                except Exception as error:  # the program itself must go on
                    front.monitor.report.note(f"a Triton launch could not be read: {error!r}")
            return result

        replace(self._done, JITFunction, "run", watched_run)

    def restore(self) -> None:
        """Undo it."""
        put_back(self._done)

    def launched(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A kernel was launched with these arguments, on the current stream."""
        front = self._front
        names = list(getattr(kernel, "arg_names", ()))
        values = dict(zip(names, arguments, strict=False))
        values |= {name: value for name, value in options.items() if name in names}
        tensors = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and front.is_device(value)
        }
        if not tensors:
            return
        name = getattr(getattr(kernel, "fn", kernel), "__name__", "kernel")
        written = self._writes_of(kernel, name, values)
        stream, number = front.begin(next(iter(tensors.values())))
        site = here(CALLERS)
        for argument, value in tensors.items():
            write = written is not None and argument in written
            front.do(front.touch, value, write, stream, number, f"Triton {name}", site)

    def _writes_of(self, kernel: Any, name: str, values: dict[str, Any]) -> frozenset[str] | None:
        key = id(kernel)
        if key not in self._written:
            try:
                self._written[key] = frozenset(_mutated(kernel, values))
            except Exception as error:  # a private interface may fail in any way
                self._written[key] = None
                self._front.monitor.report.note(
                    f"Triton kernel {name}: what it writes could not be told "
                    f"({type(error).__name__}); its arguments count as reads only"
                )
        return self._written[key]


def _mutated(kernel: Any, values: dict[str, Any]) -> list[str]:
    from torch._higher_order_ops import triton_kernel_wrap

    analyse = triton_kernel_wrap.identify_mutated_tensors
    # torch 2.11 takes a third argument for descriptors, earlier ones do not
    extra: list[Any] = [{}] * (len(inspect.signature(analyse).parameters) - 2)
    return list(analyse(kernel, values, *extra))
