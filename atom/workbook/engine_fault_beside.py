"""The recorded runs of the engine-fault experiment beside each other: what each of them saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from atom.benchmarks.engine_fault_arms import CHECK_ALONE, GUARD_ALONE, NO_NET, TAG_ALONE
from atom.workbook.engine_fault_analysis import NOTHING, protected, rows_of, settings_of
from atom.workbook.race_analysis import label_of
from atom.workbook.records import Run

#: arms without protection that have all that the fault takes: drafts, a store, and middle chunks
EXPOSED = (TAG_ALONE, CHECK_ALONE, GUARD_ALONE, NO_NET)


@dataclass(frozen=True)
class Seen:
    """What one run saw at one token budget.

    Attributes:
        label: of the run.
        device: its device.
        store_mib: size of a store, MiB.
        tokens: that each request asks for.
        budget: the token budget.
        exposed: arms of ``EXPOSED`` that ran.
        stale: those of them in which the host read a stale status.
        protected: arms with a protocol that orders copy and reuse.
        wrong: those of them with a stale status.
        guard: count that the guard found; ``None`` if it found none or did not run.
    """

    label: str
    device: str
    store_mib: int
    tokens: int
    budget: int
    exposed: int
    stale: int
    protected: int
    wrong: int
    guard: int | None


def seen_by(runs: Sequence[Run]) -> list[Seen]:
    """Every run's budgets, in the order of the runs."""
    return [one for run in runs for one in _budgets(run)]


def _budgets(run: Run) -> Iterator[Seen]:
    settings, rows = settings_of(run), rows_of(run)
    for budget in sorted({int(row["token_budget"]) for row in rows}):
        here = [row for row in rows if row["token_budget"] == budget]
        exposed = [row for row in here if row["arm"] in EXPOSED]
        safe = [row for row in here if protected(row)]
        guard = [row["guard_value"] for row in exposed if row["arm"] == GUARD_ALONE]
        yield Seen(
            label=label_of(run),
            device=run.provenance.device,
            store_mib=settings.store_bytes // 2**20,
            tokens=settings.output_tokens,
            budget=budget,
            exposed=len(exposed),
            stale=sum(row["stale_statuses"] > 0 for row in exposed),
            protected=len(safe),
            wrong=sum(row["stale_statuses"] > 0 for row in safe),
            guard=next((int(value) for value in guard if value is not None), None),
        )


def beside_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row a run and token budget."""
    return pd.DataFrame(
        {
            "run": one.label,
            "a store, MiB": one.store_mib,
            "tokens a request": one.tokens,
            "token budget": one.budget,
            "unpatched arms behind stores that read a stale status": f"{one.stale}/{one.exposed}",
            "guard found": NOTHING if one.guard is None else str(one.guard),
            "protected arms that did": f"{one.wrong}/{one.protected}",
        }
        for one in seen_by(runs)
    )


def store_sentences(runs: Sequence[Run]) -> list[str]:
    """By device and budget, how many exposed arms were stale at each size of the store.

    Said only where runs with stores of several sizes do not agree.
    """
    found = seen_by(runs)
    sentences = []
    for device, budget in sorted({(one.device, one.budget) for one in found}):
        here = [one for one in found if (one.device, one.budget) == (device, budget)]
        counts = []
        for size in sorted({one.store_mib for one in here}):
            own = [one for one in here if one.store_mib == size]
            counts.append((size, sum(one.stale for one in own), sum(one.exposed for one in own)))
        shares = [stale / of for _, stale, of in counts if of]
        if len(shares) < 2 or len(set(shares)) == 1:
            continue
        listed = ", ".join(
            f"{stale} of {of} with stores of {size:,} MiB" for size, stale, of in counts
        )
        sentence = (
            f"{device}, budget {budget}: a stale status was read by these shares of the unpatched "
            f"arms behind stores: {listed}."
        )
        if shares == sorted(shares):
            sentence += (
                " The status waits for as long as the store ahead of it takes, and the next step "
                "has to write within that time: a longer store makes the fault surer."
            )
        sentences.append(sentence)
    return sentences
