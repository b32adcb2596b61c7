"""An eager decode loop to measure what a detector costs: many small operations a step.

A transformer-like step without weights of interest: norms, projections, attention over a cache, a
gated MLP, greedy sampling. Each step's ids go to the host by a side-stream copy whose source is
held, so that streams, events and pinned memory are part of what is measured.

``python -m atom.lifetime.decode_loop --steps 40`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from atom.device.interface import Device, DeviceKind


class DecodeLoop:
    """A loop on ``device``; on a virtual device it computes on the host and copies nothing.

    Args:
        device: where it runs.
        batch, width, layers, heads, context: sizes.
    """

    def __init__(
        self,
        device: Device,
        *,
        batch: int = 32,
        width: int = 1024,
        layers: int = 16,
        heads: int = 8,
        context: int = 512,
    ) -> None:
        self._device = device
        self._real = device.properties.kind is not DeviceKind.VIRTUAL
        if not self._real:
            torch.set_num_threads(1)
        place = "cuda" if self._real else "cpu"
        kind = torch.bfloat16 if self._real else torch.float32
        self._heads = heads

        def weight(*shape: int) -> Tensor:
            return torch.full(shape, 0.01, dtype=kind, device=place)

        self._layers = [
            (
                weight(width),
                weight(3 * width, width),
                weight(width, width),
                weight(width),
                weight(2 * width, width),
                weight(width, width),
                weight(2, batch, heads, context, width // heads),
            )
            for _ in range(layers)
        ]
        self._table = weight(2048, width)
        self._ids = torch.zeros(batch, dtype=torch.int64, device=place)
        self._position = 0
        self._context = context
        self._side = device.new_stream()
        self._done = device.new_event()
        self._host = device.pinned((batch,), torch.int64)
        self._held: Tensor | None = None

    def step(self) -> None:
        """One token for each row of the batch."""
        hidden = functional.embedding(self._ids, self._table)
        batch, width = hidden.shape
        slot = self._position % self._context
        for norm, qkv, out, norm_again, gate_up, down, cache in self._layers:
            normed = functional.rms_norm(hidden, (width,), norm)
            query, key, value = functional.linear(normed, qkv).chunk(3, dim=-1)
            shape = (batch, self._heads, 1, width // self._heads)
            cache[0, :, :, slot : slot + 1] = key.view(shape)
            cache[1, :, :, slot : slot + 1] = value.view(shape)
            mixed = functional.scaled_dot_product_attention(query.view(shape), cache[0], cache[1])
            hidden = hidden + functional.linear(mixed.reshape(batch, width), out)
            normed = functional.rms_norm(hidden, (width,), norm_again)
            gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, down)
        ids = functional.linear(hidden, self._table).argmax(dim=-1)
        if self._real:
            self._send(ids)
        self._ids = ids
        self._position += 1

    def _send(self, ids: Tensor) -> None:
        if self._held is not None:
            self._done.synchronize()
            self._host.sum()
        self._side.wait_stream(self._device.default_stream)
        self._device.copy(self._host, ids, stream=self._side)
        self._done.record(self._side)
        self._held = ids


def measure(device: Device, steps: int, **sizes: int) -> list[float]:
    """Seconds of each of ``steps`` steps, after five that are not counted."""
    loop = DecodeLoop(device, **sizes)
    times = []
    for number in range(steps + 5):
        device.synchronize()
        started = time.perf_counter()
        loop.step()
        device.synchronize()
        if number >= 5:
            times.append(time.perf_counter() - started)
    return times


def summary(times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"steps": len(times), "low": 1e3 * low, "median": 1e3 * middle, "high": 1e3 * high}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="accelerator", choices=["virtual", "accelerator"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument(
        "--watch", default="off", choices=["off", "on", "stopped"], help="our sanitizer"
    )
    options = parser.parse_args(arguments)
    from atom.device import open_device
    from atom.lifetime.sanitizer import Sanitizer

    device = open_device(options.device)
    watch = Sanitizer()
    if options.watch != "off":
        watch.start()
    if options.watch == "stopped":
        watch.stop()
    before = watch.report.operations
    times = measure(device, options.steps, layers=options.layers, width=options.width)
    result = summary(times)
    result["operations"] = (watch.report.operations - before) // (options.steps + 5)
    result["findings"] = len(watch.report.findings)
    watch.stop()
    for finding in watch.report.findings:
        print(finding.text(), file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
