"""The kinds of evidence that every figure, table and verdict is labelled with."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """Where a number comes from. Kinds are never mixed in one series."""

    PUBLISHED = "published"  #: the source's own text
    MEASURED = "measured"  #: hardware, named beside the number
    SIMULATED = "simulated"  #: the virtual device or a model; its profile is named
    ARITHMETIC = "arithmetic"  #: follows from published numbers alone
