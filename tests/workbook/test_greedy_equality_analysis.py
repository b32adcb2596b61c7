"""What is said of greedy tokens, on rows made up by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pandas as pd

from atom.workbook.accuracy_analysis import NOTHING
from atom.workbook.greedy_equality_analysis import greedy_beside, greedy_table
from atom.workbook.records import Run


def run(*rows: tuple[str, bool, int, int, int, float | None]) -> Run:
    names = ("arm", "control", "drafted_tokens", "first_differences", "above_bound")
    lines: list[dict[str, Any]] = [
        {**dict(zip(names, row[:5], strict=True)), "largest_shortfall": row[5]}
        | {"requests": 32, "tokens_compared": 2048}
        for row in rows
    ]
    provenance = SimpleNamespace(run_id="one", commit="0123456789")
    return cast(Run, SimpleNamespace(tables={"arms": pd.DataFrame(lines)}, provenance=provenance))


RUN = run(
    ("no drafts", False, 0, 0, 0, None),
    ("MTP-3", False, 90, 5, 1, 0.0285),
    ("wrong", True, 90, 32, 30, 0.9),
)


def test_a_line_an_engine() -> None:
    table = greedy_table(RUN)
    assert table["requests that differ"].tolist() == ["0/32", "5/32", "32/32"]
    assert table["by more than rounding"].tolist() == [0, 1, 30]
    assert table["largest logit gap"].tolist() == [NOTHING, "0.0285", "0.9000"]


def test_the_control_is_not_counted_among_the_engines() -> None:
    assert greedy_beside(RUN) == (
        "Run one, commit 01234567: 5 of 64 part (5 of 32 with drafts), 1 by more than rounding."
    )
