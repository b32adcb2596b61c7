"""Where points run and for how long."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from atom.config import Settings


def _no_item_twice(values: tuple[Any, ...]) -> tuple[Any, ...]:
    # as they are named
    if len({f"{one:g}" if isinstance(one, float) else one for one in values}) != len(values):
        raise ValueError("a value stands twice")
    return values


#: of a tuple's type: none of its values stands twice
Once = AfterValidator(_no_item_twice)


class PlaceSettings(Settings):
    """No part of what is measured: not recorded, and given anew when a run goes on."""

    gpus: Annotated[tuple[Annotated[int, Field(ge=0, le=1023)], ...], Once] = Field(
        (), exclude=True
    )
    """GPUs of this host, a point on each side by side; empty: the first one."""

    scheduler: str | None = Field(None, min_length=1, exclude=True)
    """Address of a Dask scheduler whose workers announce GPU=1; empty runs here."""

    budget_seconds: float | None = Field(None, gt=0, exclude=True)
    """No point starts that would not end within it; what is left can be resumed."""

    logs: str | None = Field(None, min_length=1, exclude=True)
    """Folder of the points' logs; empty keeps none."""
