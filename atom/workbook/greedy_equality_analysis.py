"""Greedy tokens of several engines beside those of one without drafts: tables and sentences."""

from __future__ import annotations

import pandas as pd

from atom.workbook.accuracy_analysis import NOTHING
from atom.workbook.records import Run


def greedy_table(run: Run) -> pd.DataFrame:
    """A line an engine: where its tokens differ, and by how much."""
    lines = []
    for row in run.tables["arms"].to_dict("records"):
        gap = row["largest_shortfall"]
        lines.append(
            {
                "engine": row["arm"],
                "tokens compared": f"{row['tokens_compared']:,}",
                "requests that differ": f"{row['first_differences']}/{row['requests']}",
                "by more than rounding": int(row["above_bound"]),
                "largest logit gap": NOTHING if pd.isna(gap) else f"{gap:.4f}",
            }
        )
    return pd.DataFrame(lines)


def greedy_beside(run: Run) -> str:
    """One sentence on what a run saw that is not the one shown."""
    arms = run.tables["arms"]
    equal = arms[~arms["control"]]
    drafts = equal[equal["drafted_tokens"] > 0]
    return (
        f"Run {run.provenance.run_id}, commit {(run.provenance.commit or 'unknown')[:8]}: "
        f"{int(equal['first_differences'].sum())} of {int(equal['requests'].sum())} part "
        f"({int(drafts['first_differences'].sum())} of {int(drafts['requests'].sum())} with "
        f"drafts), {int(equal['above_bound'].sum())} by more than rounding."
    )
