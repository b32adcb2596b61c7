"""A graph's static output as a program for the exploration: holding is no help, a wait is.

The output lives on in the graph's own pool and the next replay writes it again. So nothing is freed
that a reference could keep; the next writer has to wait on the copy's event.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from atom.benchmarks.lifetime_paths import FILL, value_of
from atom.benchmarks.lifetime_watch import section, watching
from atom.benchmarks.source_lifetime import STEP_IN_GRAPH
from atom.config import CopyProtocol
from atom.device.interface import Event, Graph
from atom.lifetime.explore import Exploration, explore
from atom.lifetime.explore_device import ExploredDevice
from atom.transfer.d2h_queue import D2HQueue
from atom.transfer.payload import Payload

BATCH = 4


@dataclass(frozen=True)
class GraphOutputProgram:
    """Steps that replay a graph and send its static output, under ``hold``.

    Attributes:
        waits: the default stream waits on the copy's event before the next replay.
        depth: copies in flight.
    """

    waits: bool
    depth: int = 1

    def __call__(self, device: ExploredDevice) -> Hashable:
        """Run once; returns what the host read."""
        device.may_wait = frozenset({"capture", "receive", "drain"})
        with watching(device) as watch:
            queue = D2HQueue(device, device.new_stream(), CopyProtocol.HOLD, epoch_tag=False)
            values = device.empty((BATCH,), torch.int64)
            with section(device, "capture"), device.capture() as graph:
                output = queue.new_payload(0, (BATCH,), torch.int64)
                device.launch(STEP_IN_GRAPH, (values,), (output.data,))
            copied: Event | None = None
            for step in range(1, self.depth + 2):
                if self.waits and copied is not None:
                    device.default_stream.wait_event(copied)
                self._replay(device, graph, values, step)
                if step > self.depth:
                    break
                copied = self._send(device, queue, output, step)
                watch.sent(queue._slots[-1].target, step, output.layout)
            for step in range(1, self.depth + 1):
                with section(device, "receive"), watch.reading(step):
                    queue.receive()
            with section(device, "drain"):
                queue.drain()
                device.synchronize()
        return watch.outcome()

    def _replay(
        self, device: ExploredDevice, graph: Graph, values: torch.Tensor, step: int
    ) -> None:
        device.launch(FILL, (), (values,), scalars=(value_of(step),))
        graph.replay()

    def _send(self, device: ExploredDevice, queue: D2HQueue, output: Payload, step: int) -> Event:
        with section(device, "send"):
            return queue.send(output)


def explore_graph_output(*, waits: bool, depth: int = 1) -> Exploration:
    """Every schedule of :class:`GraphOutputProgram`."""
    return explore(GraphOutputProgram(waits, depth))
