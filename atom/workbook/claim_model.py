"""A claim: what the source says, where, and how it is judged; and the table of all claims."""

from __future__ import annotations

import functools
from collections import Counter
from enum import StrEnum
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.tables import DATA, read_rows, shown_path

CLAIMS_FILE = DATA / "published" / "claims.csv"


class Predicate(StrEnum):
    """How a claim is judged."""

    EQUALS = "equals"  #: the value is ``expected``
    WITHIN = "within"  #: the value lies within ``tolerance`` of ``expected``
    RATIO_WITHIN = "ratio_within"  #: value / expected lies within ``tolerance`` of 1
    ALWAYS = "always"  #: stale rate at least 1 - tolerance, by its interval's low end
    NEVER = "never"  #: no stale trial, and the interval's high end at most ``tolerance``
    SOMETIMES = "sometimes"  #: some trials are stale and some are not
    HOLDS = "holds"  #: a yes-or-no finding
    ORDER = "order"  #: values stand in strictly increasing order
    RECORDED = "recorded"  #: kept for the record; nothing here can test it
    INCONSISTENT = "inconsistent"  #: arithmetic is expected to show that the source's step fails


_NUMERIC = (Predicate.EQUALS, Predicate.WITHIN, Predicate.RATIO_WITHIN)
_TOLERANT = (
    Predicate.WITHIN,
    Predicate.RATIO_WITHIN,
    Predicate.ALWAYS,
    Predicate.NEVER,
    Predicate.SOMETIMES,
)


class Claim(BaseModel):
    """One claim of the source, or one figure that follows from it. A row of ``claims.csv``."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    id: str = Field(pattern=r"^[a-z]+-\d{2}$")
    group: str = Field(min_length=1)
    claim: str = Field(min_length=1)
    """The claim in this project's words."""

    published_value: str | None = None
    """As printed; blank where the source gives none (a gap, or a figure derived here)."""

    unit: str = Field(min_length=1)
    subject_version: str = Field(min_length=1)
    """Copy protocol, or protocols, that the published value was measured with."""

    machine: str | None = None
    """Slug of the published value's hardware; blank where none matters or none is named."""

    source_place: str = Field(min_length=1)
    evidence: tuple[Evidence, ...] = Field(min_length=1)
    """Kinds that can settle it, each with a verdict of its own. In the file joined by ``|``."""

    predicate: Predicate
    expected: float | None = None
    tolerance: float | None = Field(default=None, ge=0)
    tolerance_reason: str | None = None
    notebook: str = Field(pattern=r"^0[0-7]$")
    """Where it is settled."""

    arithmetic_notebook: str | None = Field(default=None, pattern=r"^0[0-7]$")
    """Where its arithmetic part is settled, if elsewhere."""

    note: str | None = None

    @field_validator("evidence", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split("|")) if isinstance(value, str) else value

    @field_serializer("evidence")
    def _join(self, value: tuple[Evidence, ...]) -> str:
        return "|".join(value)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(set(self.evidence)) < len(self.evidence):
            raise ValueError("evidence names one kind twice")
        if (self.predicate in _NUMERIC) != (self.expected is not None):
            raise ValueError(f"expected is given for {', '.join(_NUMERIC)}, and only for those")
        if (self.predicate in _TOLERANT) != (self.tolerance is not None):
            raise ValueError(f"tolerance is given for {', '.join(_TOLERANT)}, and only for those")
        if (self.tolerance is None) != (self.tolerance_reason is None):
            raise ValueError("a tolerance needs its reason, and a reason its tolerance")
        if (self.predicate is Predicate.RECORDED) != (self.evidence == (Evidence.PUBLISHED,)):
            raise ValueError("'recorded' goes with published evidence alone")
        if self.predicate is Predicate.RECORDED and not self.note:
            raise ValueError("a recorded claim's note says why nothing here can test it")
        if self.predicate is Predicate.INCONSISTENT and Evidence.ARITHMETIC not in self.evidence:
            raise ValueError("'inconsistent' is shown by arithmetic")
        if self.arithmetic_notebook and Evidence.ARITHMETIC not in self.evidence:
            raise ValueError("arithmetic_notebook is given, but no arithmetic evidence")
        return self

    def notebook_for(self, evidence: Evidence) -> str:
        """Number of the notebook that settles the claim with this kind of evidence."""
        if evidence is Evidence.ARITHMETIC and self.arithmetic_notebook:
            return self.arithmetic_notebook
        return self.notebook


@functools.lru_cache(maxsize=1)
def _claims() -> tuple[Claim, ...]:
    claims = read_rows(CLAIMS_FILE, Claim)
    count = Counter(claim.id for claim in claims)
    twice = [name for name, times in count.items() if times > 1]
    if twice:
        raise BadInput(f"{shown_path(CLAIMS_FILE)}: ids that stand twice: {', '.join(twice)}")
    return tuple(claims)


def load_claims() -> dict[str, Claim]:
    """All claims by id, in file order.

    Raises:
        BadInput: naming file, line and column.
    """
    return {claim.id: claim for claim in _claims()}
