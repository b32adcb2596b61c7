"""By how much a copy is late: what the traced trials of the matmul arms show."""

from __future__ import annotations

import pandas as pd

from atom.benchmarks.race_plan import DEFAULT_QUEUES
from atom.config import CopyPath, CopyProtocol, Front
from atom.workbook.race_analysis import lateness, queues_text

_PARTS = ["grid", "queues", "protocol", "front", "path"]


def matmul_margins(timeline: pd.DataFrame) -> pd.DataFrame:
    """Traced unpatched trials behind matmuls.

    Returns:
        The columns of ``race_analysis.lateness`` and queues, path, label; ordered by path, then
        by queue setting.
    """
    late = lateness(timeline)
    if late.empty:
        return late
    parts = [_arm_parts(arm) for arm in late["arm"]]
    late = pd.concat([late, pd.DataFrame(parts, columns=_PARTS, index=late.index)], axis=1)
    late = late[
        (late["front"] == str(Front.MATMUL)) & (late["protocol"] == str(CopyProtocol.UNPATCHED))
    ]
    late["order"] = [0 if queues == DEFAULT_QUEUES else int(queues) for queues in late["queues"]]
    late["label"] = [
        f"{path}, {queues_text(queues)}"
        for path, queues in zip(late["path"], late["queues"], strict=True)
    ]
    return late.sort_values(["path", "order", "process", "trial"]).drop(columns="order")


def _arm_parts(arm: str) -> list[str]:
    words = arm.split("/")
    if words[0] == "main":
        return ["main", DEFAULT_QUEUES, *words[1:]]
    if words[0] == "queue":
        return words
    return [words[0], "", *[""] * 3]


def margin_table(margins: pd.DataFrame) -> pd.DataFrame:
    """Medians a label: when matmuls, copy and write ended after the fill, and the margin."""
    found = []
    for label, group in margins.groupby("label", sort=False):
        found.append(
            {
                "copy": label,
                "traced trials": len(group),
                "matmuls end (us)": round(group["front_end_us"].median(), 1),
                "copy ends (us)": round(group["copy_end_us"].median(), 1),
                "write ends (us)": round(group["write_end_us"].median(), 1),
                "copy - write (us)": round(group["margin_us"].median(), 1),
                "ended later in": f"{int((group['margin_us'] > 0).sum())}/{len(group)}",
            }
        )
    return pd.DataFrame(found)


def margin_sentences(margins: pd.DataFrame, who: str) -> list[str]:
    """What the traced trials say, a sentence a copy path, with the numbers in it."""
    sentences = []
    for path, group in margins.groupby("path", sort=False):
        late = int((group["margin_us"] > 0).sum())
        before = int((group["copy_end_us"] < group["front_end_us"] / 2).sum())
        by = "a copy engine" if path == CopyPath.ENGINE else "a kernel"
        sentences.append(
            f"{who}, copy by {by}: it ended in the first half of the matmuls in {before} of "
            f"{len(group)} traced trials, and after the next step's write in {late}."
        )
        if path != CopyPath.KERNEL:
            continue
        by_queues = ", ".join(
            f"{queues}: {int((part['margin_us'] > 0).sum())}/{len(part)} "
            f"(median margin {part['margin_us'].median():.0f} us)"
            for queues, part in group.groupby("queues", sort=False)
        )
        sentences.append(
            f"{who}, kernel copies that ended after the write, by hardware queues: {by_queues}."
        )
    return sentences
