"""A neighbour that copies or computes without a pause, as a process of its own.

``python -m atom.benchmarks.colocation_neighbour`` reads its job, one JSON line, from standard
input, works until it is killed, and tells how much it has done as a throughput point does. Its
pinned memory is the device's own buffer pair a direction.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, NoReturn

from atom.benchmarks.colocation_settings import Neighbour
from atom.benchmarks.throughput_process import pass_gate, read_job, run_and_leave
from atom.config import DeviceChoice
from atom.device import Device, open_device
from atom.device.interface import Event, Stream

COMMAND = (sys.executable, "-m", "atom.benchmarks.colocation_neighbour")
#: pieces of work that are queued ahead, so that neither link nor processors wait for the host
_AHEAD = 3
_TELL_SECONDS = 0.25
#: on the virtual device, whose work takes the host no time: leave it the rest of its processor
_PAUSE_SECONDS = 0.002
_DIRECTIONS = ("h2d", "d2h")


class Work:
    """Pieces of one kind of work, queued one behind the other.

    Args:
        device: freshly opened.
        kind: copy or compute.
        copy_bytes: bytes of a copy in one direction.
        matmul_size: rows and columns of a matrix.

    Attributes:
        pieces: how many have ended.
    """

    def __init__(self, device: Device, kind: Neighbour, copy_bytes: int, matmul_size: int) -> None:
        self.pieces = 0
        self._device, self._kind = device, kind
        self._copy_bytes, self._matmul_size = copy_bytes, matmul_size
        # a stream a direction: both directions of the link at once
        self._streams: list[Stream] = [device.new_stream() for _ in _DIRECTIONS]
        self._queued: deque[tuple[Event, ...]] = deque()

    def step(self) -> None:
        """Queue a piece, and wait for the one that was queued so many before."""
        if self._kind is Neighbour.COPY:
            for direction, stream in zip(_DIRECTIONS, self._streams, strict=True):
                self._device.traffic(self._copy_bytes, direction, stream=stream)
            self._queued.append(tuple(stream.record_event() for stream in self._streams))
        else:
            self._device.matmul(self._matmul_size, stream=self._streams[0])
            self._queued.append((self._streams[0].record_event(),))
        if len(self._queued) > _AHEAD:
            for event in self._queued.popleft():
                event.synchronize()
            self.pieces += 1

    def done(self, seconds: float) -> dict[str, Any]:
        """What was done in so many seconds, as a neighbour tells it."""
        copied = self.pieces * self._copy_bytes if self._kind is Neighbour.COPY else 0
        return {
            "seconds": seconds,
            "h2d_bytes": copied,
            "d2h_bytes": copied,
            "matmuls": self.pieces if self._kind is Neighbour.COMPUTE else 0,
        }


def main() -> NoReturn:
    """Work as the job says until somebody ends this process."""
    job, tell = read_job()
    choice = DeviceChoice(job["device"])
    device = open_device(choice, profile=job["device_profile"])
    kind = Neighbour(job["neighbour"])
    work = Work(device, kind, job["copy_bytes"], job["matmul_size"])
    # its buffers are pinned, and its kernels loaded
    for _ in range(2 * _AHEAD):
        work.step()
    pass_gate(job)
    work.pieces = 0
    tell({"setup_seconds": max(0.0, time.time() - job["began"]), **work.done(0.0)})
    began, last = device.host_seconds(), time.monotonic()
    while True:
        work.step()
        if choice is DeviceChoice.VIRTUAL:
            time.sleep(_PAUSE_SECONDS)
        if time.monotonic() - last >= _TELL_SECONDS:
            last = time.monotonic()
            tell(work.done(device.host_seconds() - began))


if __name__ == "__main__":
    run_and_leave(main)
