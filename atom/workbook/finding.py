"""A table of checks: claim id to the function that computes its finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: keyword arguments of ``judge``
Finding = dict[str, Any]
Check = Callable[[], Finding]


class Checks(dict[str, Check]):
    """Checks by claim id, filled by a decorator: ``@checks.of("thr-13")``."""

    def of(self, claim: str) -> Callable[[Check], Check]:
        """Register the decorated function as the one check of ``claim``."""

        def register(function: Check) -> Check:
            if claim in self:
                raise ValueError(f"claim {claim} has a check already")
            self[claim] = function
            return function

        return register
