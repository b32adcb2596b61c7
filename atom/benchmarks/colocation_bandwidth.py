"""Bandwidths over time, as far as they can be read without privileges.

A GPU's PCIe counters come from NVML (bytes of 20 ms, both directions). Counters of a host's memory
controllers need privileges; in their place a small copy of our own within host memory is timed: it
is slower where others take the bandwidth. It takes the same from all points.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from atom.benchmarks.race_environment import nvml_handle
from atom.device.interface import DeviceKind

TO_DEVICE, FROM_DEVICE, HOST = "pcie to device", "pcie from device", "host copy"
#: no counters of memory controllers without privileges
NO_COUNTERS = "counters of the host's memory controllers need privileges"
_KILO = 1000
#: bytes of the host's own copy; beyond the caches of a core
_COPY_BYTES = {True: 2**20, False: 2**26}


@dataclass(frozen=True)
class Sample:
    """One bandwidth at one moment: seconds from the beginning, and bytes a second."""

    second: float
    what: str
    gpu_index: int | None
    bytes_per_second: float


@dataclass
class Bandwidths:
    """Samples bandwidths in a thread of its own, as a context manager.

    Args:
        kind: of the device.
        gpus: indices of the GPUs, with the names by which NVML finds them.
        period: seconds from one sample to the next.

    Attributes:
        samples: so far.
        began: when sampling began, by ``time.monotonic``.
    """

    kind: DeviceKind
    gpus: Mapping[int, str]
    period: float
    samples: list[Sample] = field(default_factory=list)
    began: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        source = np.ones(_COPY_BYTES[self.kind is DeviceKind.VIRTUAL], np.uint8)
        # pages that are there: the first copy is timed as those after it
        target = np.ones_like(source)
        self.began = began = time.monotonic()
        with _Counters(self.kind, self.gpus) as counters:
            while True:
                second = time.monotonic() - began
                for gpu, what, rate in counters.read():
                    self.samples.append(Sample(second, what, gpu, rate))
                before = time.perf_counter()
                np.copyto(target, source)
                taken = time.perf_counter() - before
                if taken > 0:
                    # read once and written once
                    self.samples.append(Sample(second, HOST, None, 2 * source.nbytes / taken))
                if self._over.wait(max(0.0, self.period - (time.monotonic() - began - second))):
                    return


def between(samples: Iterable[Sample], start: float, end: float) -> tuple[Sample, ...]:
    """Samples of a stretch, with seconds from its start."""
    return tuple(
        replace(one, second=one.second - start) for one in samples if start <= one.second <= end
    )


class _Counters:
    """NVML's PCIe counters; none where there is no NVML."""

    def __init__(self, kind: DeviceKind, gpus: Mapping[int, str]) -> None:
        self._library: Any = None
        self._handles: dict[int, Any] = {}
        if kind is not DeviceKind.CUDA:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml
            self._handles = {gpu: nvml_handle(name) for gpu, name in gpus.items()}
        except Exception:
            # why_none says the reason, once a run
            self._handles = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()

    def read(self) -> list[tuple[int, str, float]]:
        """GPU, what, and bytes a second, of the counters that can be read."""
        found = []
        for gpu, handle in self._handles.items():
            # NVML names them as the GPU sees them: it receives what goes to the device
            for what, counter in ((TO_DEVICE, "RX"), (FROM_DEVICE, "TX")):
                try:
                    number = getattr(self._library, f"NVML_PCIE_UTIL_{counter}_BYTES")
                    rate = self._library.nvmlDeviceGetPcieThroughput(handle, number)
                except self._library.NVMLError:
                    continue
                found.append((gpu, what, float(rate) * _KILO))
        return found


def why_none(kind: DeviceKind, gpus: Sequence[str]) -> str | None:
    """Why PCIe counters cannot be read here; ``None`` where they can."""
    if kind is not DeviceKind.CUDA:
        return f"PCIe counters are read by NVML; this device is {kind}"
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            for name in gpus:
                handle = nvml_handle(name)
                pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # whatever it is, the run goes on and says it
        return f"NVML: {type(error).__name__}: {error}"[:200]
    return None
