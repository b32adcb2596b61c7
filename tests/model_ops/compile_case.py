"""One specialisation of a Triton kernel that is to compile for every target.

A room lists its own in ``compile_cases_<name>.py`` beside this file, as ``CASES``; the test
collects those files. Every kernel of ``atom/model_ops/*_triton.py`` whose name ends with
``_kernel`` needs a case: what is launched is named so, and what only other kernels call is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """See the module's text.

    Attributes:
        name: shown as the test's parameter, unique.
        module: e.g. ``atom.model_ops.causal_conv1d_triton``.
        kernel: name of the ``@triton.jit`` function.
        signature: argument name to Triton type (``*bf16``, ``*i32``, ``i32``, ``fp32``), without
            the constexprs. Integers that a launch specialises to 1 belong into ``constexprs``.
        constexprs: argument name to value. ``None`` stands for an optional pointer that is absent.
        divisible_by_16: arguments that a launch finds so; by default all pointers.
        options: ``num_warps``, ``num_stages``, ``debug``.
        most_stack: bytes a thread may spill on sm_90; any by default.
    """

    name: str
    module: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    most_stack: int | None = None

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments that are taken to be divisible by 16."""
        if self.divisible_by_16 is not None:
            return self.divisible_by_16
        return tuple(name for name, kind in self.signature.items() if kind.startswith("*"))
