"""The findings table of the README, made from the recorded rows of one race run."""

from __future__ import annotations

import pandas as pd

from atom.config import CopyProtocol
from atom.workbook.race_analysis import label_of, summarise, tag_coverage
from atom.workbook.race_comparison import published_cells
from atom.workbook.records import Run
from atom.workbook.statistics import exact_interval

BEGIN, END = "<!-- findings: begin -->", "<!-- findings: end -->"

#: arms without their protocol, as a reader would ask for them
ROWS = (
    ("nothing in front of the copy", "main/{}/nothing/engine"),
    ("a 256 MiB store on the copy stream", "main/{}/store_on_copy_stream/engine"),
    ("256 MiB stores on two other streams", "main/{}/store_on_other_streams/engine"),
    ("16 streams of matmuls, copy by a copy engine", "main/{}/matmul/engine"),
    ("the same, one queue, copy by a kernel", "queue/1/{}/matmul/kernel"),
    ("a graph's static output behind a store", "source/graph_output/{}"),
    ("the same, the next replay waits for the copy", "source/graph_output_wait/{}"),
)
PROTOCOLS = (CopyProtocol.UNPATCHED, CopyProtocol.HOLD, CopyProtocol.RECORD_STREAM)


def findings_markdown(run: Run) -> str:
    """The table as Markdown, between its two markers.

    Args:
        run: a finished measured run of the race.
    """
    trials = run.tables["trials"]
    arms = summarise(trials).set_index("arm")
    processes = int(trials["process"].nunique())
    _, alone = exact_interval(0, processes)
    lines = [
        BEGIN,
        f"Stale status reads of trials, measured ({label_of(run)}), in {processes} processes.",
        "The 95% intervals are clustered by process. Where all processes agree they are those of",
        f"independent trials; 0 of {processes} processes alone would leave up to {alone:.0%} open.",
        "",
        "| in front of the status copy | " + " | ".join(map(str, PROTOCOLS)) + " |",
        "|---|" + "---|" * len(PROTOCOLS),
    ]
    for label, name in ROWS:
        cells = [_cell(arms, name.format(protocol)) for protocol in PROTOCOLS]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    coverage = tag_coverage(trials)
    stale, caught = int(coverage["stale"].sum()), int(coverage["tag caught"].sum())
    legal = int(coverage["all counts in range"].sum())
    lines += [
        "",
        f"Of {stale:,} stale reads the epoch tag caught {caught:,}. In {legal:,} every count was",
        "a legal one, which no bounds check can see. Published (MI355X, `unpatched`):",
        f"{_published()}.",
        "The published matmul row needs a copy that takes its turn in a hardware queue, and a copy",
        "by a copy engine takes none: notebook 02 shows which queue models fit which rows.",
        END,
    ]
    return "\n".join(lines)


def _cell(arms: pd.DataFrame, name: str) -> str:
    if name not in arms.index:
        return "no arm"
    arm = arms.loc[name]
    return f"{arm['stale']}/{arm['trials']} [{arm['low']:.1%}, {arm['high']:.1%}]"


def _published() -> str:
    cells = [
        f"{cell['stale']}/{cell['trials']} ({cell['label']})"
        for cell in published_cells()
        if cell["protocol"] == CopyProtocol.UNPATCHED and cell["stale"] is not None
    ]
    return ", ".join(cells[:-1]) + " and " + cells[-1]
