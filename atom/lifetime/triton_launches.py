"""Triton launches, which no dispatch mode sees.

Every tensor argument counts as read. Which ones are written comes from torch's analysis of the
kernel's intermediate representation, a private interface that is probed (it has two names): where
it is missing or fails, the arguments count as reads only, and the report says so. Counting them as
writes would flag two streams that read one weight.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
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
        # a kernel is kept with its entry: the number of a dead one may be given out again
        self._written: dict[Any, tuple[Any, frozenset[str] | None]] = {}

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
        values = _defaults(kernel) | dict(zip(names, arguments, strict=False))
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
        # a constant may switch a store on or off
        key = (id(kernel), *(repr(values.get(each)) for each in _constants(kernel)))
        if key not in self._written:
            found: frozenset[str] | None = None
            try:
                found = frozenset(written_arguments(kernel, values))
            except Exception as error:  # a private interface may fail in any way
                self._front.monitor.report.note(
                    f"Triton kernel {name}: what it writes could not be told "
                    f"({type(error).__name__}); its arguments count as reads only"
                )
            self._written[key] = (kernel, found)
        return self._written[key][1]


def _constants(kernel: Any) -> list[str]:
    return [each.name for each in getattr(kernel, "params", ()) if each.is_constexpr]


def _defaults(kernel: Any) -> dict[str, Any]:
    signature = getattr(kernel, "signature", None)
    if signature is None:
        return {}
    return {
        name: each.default
        for name, each in signature.parameters.items()
        if each.default is not inspect.Parameter.empty
    }


class _Failures(logging.Filter):
    """Keeps what an analysis logs when it gives up, and keeps it off the program's output."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or record.exc_info[1] is None:
            return True
        self.error = record.exc_info[1]
        return False


def written_arguments(kernel: Any, values: dict[str, Any]) -> list[str]:
    """Names of the tensor arguments that a Triton kernel writes.

    Args:
        kernel: a ``JITFunction``.
        values: every argument by name, constants and defaults included.

    Raises:
        Exception: of any kind, where torch's analysis is missing or gives up. By itself it would
            then call every argument written.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    failures = _Failures()
    triton_kernel_wrap.log.addFilter(failures)
    try:
        accessed = getattr(triton_kernel_wrap, "identify_accessed_tensors", None)
        if accessed is not None:
            found = [each.name for each in accessed(kernel, dict(values), {}).read_writes.writes]
        else:
            analyse = triton_kernel_wrap.identify_mutated_tensors
            # older ones take no third argument, which is for descriptors
            extra: list[Any] = [{}] * (len(inspect.signature(analyse).parameters) - 2)
            found = list(analyse(kernel, dict(values), *extra))
    finally:
        triton_kernel_wrap.log.removeFilter(failures)
    if failures.error is not None:
        raise failures.error
    return [name for name in found if isinstance(values.get(name), Tensor)]
