"""The claims that the workbook settles, and everything that callers need to judge them."""

from __future__ import annotations

from atom.workbook.accepted import accept, compare, load_accepted
from atom.workbook.claim_model import CLAIMS_FILE, Claim, Predicate, load_claims
from atom.workbook.verdicts import Settled, Verdict, judge, unsettled

__all__ = [
    "CLAIMS_FILE",
    "Claim",
    "Predicate",
    "Settled",
    "Verdict",
    "accept",
    "compare",
    "judge",
    "load_accepted",
    "load_claims",
    "unsettled",
]
