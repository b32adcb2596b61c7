"""Parameters of notebook 04."""

from __future__ import annotations

from pydantic import Field

from atom.config import Names, NotebookSettings


class AccuracyNotebookSettings(NotebookSettings):
    """Parameters of notebook 04: what is simulated now, and where recorded runs lie."""

    device_profile: str = Field("H200", pattern=r"^[A-Za-z0-9_.-]+$")
    """Profile of the virtual device."""

    items: int = Field(48, ge=2, le=1319)
    """Items put to each arm under the adversarial schedule."""

    pressure_items: int = Field(6, ge=2, le=1319)
    """Items put to each arm of the damage curve."""

    max_tokens: int = Field(24, ge=4, le=4096)
    """Longest answer of the simulated arms."""

    seed: int = Field(42, ge=0, le=2**31 - 1)
    """Seed of the problems, of their examples, and of a model with random weights."""

    measured: Names = ("data/runs",)
    """Recorded hardware runs (run folders or parents of them) to show."""
