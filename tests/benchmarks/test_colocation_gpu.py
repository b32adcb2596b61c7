"""Neighbours on an accelerator: they copy and compute at a rate, and the link's counters see it."""

from __future__ import annotations

import time

import pytest

from atom.benchmarks.colocation_bandwidth import FROM_DEVICE, TO_DEVICE, Bandwidths, why_none
from atom.benchmarks.colocation_neighbour import Work
from atom.benchmarks.colocation_settings import Neighbour
from atom.device import Device, open_device
from atom.device.accelerator import why_no_accelerator
from atom.workbook.throughput_dask import visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_accelerator() is not None, reason=str(why_no_accelerator())),
]


def work_for(device: Device, kind: Neighbour, seconds: float) -> dict[str, float]:
    work = Work(device, kind, 2**26, 4096)
    for _ in range(6):
        work.step()
    work.pieces = 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        work.step()
    return work.done(time.monotonic() - began)


def test_they_keep_link_and_processors_busy() -> None:
    device = open_device("accelerator")
    # the counters' name of the GPU that is this process's first
    gpu = next(iter(visible(0, "CUDA_VISIBLE_DEVICES").values()))
    reason = why_none(device.properties.kind, [gpu])
    with Bandwidths(device.properties.kind, {0: gpu}, 0.2) as bandwidths:
        copied = work_for(device, Neighbour.COPY, 1.5)
    for name in ("h2d_bytes", "d2h_bytes"):
        # both directions at once, well above what one core copies from pageable memory
        assert copied[name] / copied["seconds"] > 5e9
    for what in (TO_DEVICE, FROM_DEVICE):
        rates = [one.bytes_per_second for one in bandwidths.samples if one.what == what]
        assert reason is not None or max(rates) > 1e9, what
    computed = work_for(device, Neighbour.COMPUTE, 0.5)
    assert computed["matmuls"] / computed["seconds"] > 100
