"""Which recorded runs stand beside the one that a notebook's verdicts are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from atom.workbook.records import Run


def runs_beside(
    chosen: Run | None,
    measured: Sequence[Run],
    asked: Collection[str],
    best: Callable[[Sequence[Run]], Run | None],
) -> tuple[Run, ...]:
    """The best run of each other machine, and ours of the same machine beside one of a user's own.

    Args:
        chosen: what the verdicts are drawn from.
        measured: finished runs on hardware, ``chosen`` among them.
        asked: ids of the runs that were asked for; the others merely lie there.
        best: of some runs of one machine.
    """
    groups: dict[tuple[str, bool], list[Run]] = {}
    for run in measured:
        key = (run.provenance.machine, run.provenance.run_id in asked)
        groups.setdefault(key, []).append(run)
    found = [best(group) for group in groups.values() if chosen not in group]
    return tuple(run for run in found if run is not None)


def newest_whole(runs: Sequence[Run]) -> Run:
    """The last of some runs that was not narrowed with ``only``; the last, where all were."""
    whole = [run for run in runs if not run.provenance.settings.get("only")]
    return (whole or runs)[-1]
