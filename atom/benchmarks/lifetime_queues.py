"""What hides the fault: the unpatched paths where the copy stream shares the default one's queue.

One hardware queue runs its work in the order in which it was queued. The copy then precedes the
next step's write, whatever the streams say: the host gets the right bytes, and the source is still
dropped while its copy is queued. So a queue setting that shows no stale read is no fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import LifetimeProgram
from atom.config import CopyProtocol
from atom.lifetime.explore import Exploration, Method, explore
from atom.lifetime.explore_device import OWN_QUEUES


@dataclass(frozen=True)
class QueueRow:
    """One unpatched path under every schedule of two mappings, from every reachable state.

    Attributes:
        path: which.
        own: a hardware queue a stream.
        shared: one hardware queue for all streams.
    """

    path: LifetimePath
    own: Exploration
    shared: Exploration


def explore_queues(
    paths: Iterable[LifetimePath] = tuple(LifetimePath), *, depth: int = 1
) -> list[QueueRow]:
    """Explore the unpatched paths with and without queues of their own.

    Args:
        paths: which.
        depth: steps in flight.
    """
    rows = []
    for path in paths:
        program = LifetimeProgram(path, CopyProtocol.UNPATCHED, depth, again=False, epoch_tag=False)
        own, shared = (
            explore(program, method=Method.STATES, hardware_queues=queues)
            for queues in (OWN_QUEUES, 1)
        )
        rows.append(QueueRow(path, own, shared))
    return rows
