"""Profiles of the virtual device: what a GPU's queues, copy engines and clocks are taken to be.

A profile is a set of parameters, not a claim about a card. Where a value comes from stands beside
each field: *first look* means a figure measured once on an NVIDIA H200 with throw-away scripts,
*datasheet* the vendor's public page, *published* the source's own text, *assumed* that nobody
measured it and that an analysis should vary it. Use :func:`dataclasses.replace` to vary one.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from enum import StrEnum

from atom.device.interface import CopyPath, DeviceKind, DeviceProperties
from atom.errors import BadInput
from atom.evidence import Evidence

GIBIBYTE = 2**30


class QueueMapping(StrEnum):
    """How a stream gets its hardware queue."""

    MODULO = "modulo"  #: by order of creation: stream i goes to queue i modulo the count
    LEAST_LOAD = "least_load"  #: at its first work, the queue with the fewest streams on it
    OWN_DEFAULT = "own_default"  #: the default stream has queue 0 alone, the others share the rest
    RANDOM = "random"  #: drawn once a stream from the device's seed


class QueueOrder(StrEnum):
    """When the next operation of a hardware queue may start."""

    SERIAL = "serial"  #: when the one ahead in the queue has finished
    ISSUE = "issue"  #: when the one ahead in the queue was issued (its own waits are over)


class BarrierScope(StrEnum):
    """What an event wait that is not over yet holds up."""

    QUEUE = "queue"  #: its whole hardware queue
    STREAM = "stream"  #: its own stream; work of other streams in the queue passes it


class CopyLane(StrEnum):
    """Whether a copy by an engine takes a turn in its stream's hardware queue."""

    QUEUE = "queue"  #: it does, so it waits behind other streams' kernels in that queue
    OWN = "own"  #: it does not: it waits for its stream and its engine only


@dataclass(frozen=True)
class DeviceProfile:
    """Parameters of a virtual device. Times in seconds, rates per second, sizes in bytes.

    Attributes:
        name: shown as the device's name. MI355X: published; H200: first look.
        machine: slug of record folders; starts with ``virtual-`` so that no simulated row can pass
            for a measured one.
        memory_bytes: memory of the card. Datasheet (both). The virtual device offers less of it
            unless told otherwise, see ``VirtualDevice``.
        hardware_queues: queues that streams are mapped to. MI355X: published
            (``GPU_MAX_HW_QUEUES`` defaults to 4); H200: CUDA's documented default of
            ``CUDA_DEVICE_MAX_CONNECTIONS``, 8.
        queue_variable: environment variable that sets it on hardware. Vendors' documents.
        mapping: how streams get their queue. MI355X: assumed, public sources disagree. H200:
            assumed, with ``order`` and ``full_dispatch_seconds``: of the combinations tried, these
            gave the shape of the first look behind matmuls for copies by a kernel (stale values at
            1 connection, none at 4 and 8, few at 32). Not its rate at 1: about 46 of 100 for 75.
        order: when a queue's next operation may start. Assumed; H200: see ``mapping``.
        barrier: what an unresolved event wait holds up. Assumed.
        wait_seconds: device time of an event wait after its event is done. Assumed.
        engine_copy_lane: whether engine copies take a turn in the hardware queue. H200: own,
            inferred from the first look (no stale value behind matmuls); MI355X: assumed.
        small_copy_bytes: copies of at most this size with ``CopyPath.ENGINE`` take
            ``small_copy_path``. MI355X: assumed (the HIP runtime's blit limit); H200: 0, none.
        small_copy_path: who moves small copies. MI355X: assumed; H200: no effect.
        copy_engines: engines for each direction; a busy one delays other streams' copies of that
            direction. Assumed 1 (an H200's store on another stream delays the status copy: first
            look).
        copy_latency_seconds: from the start of an engine copy to its first byte. Assumed.
        d2h_bytes_per_second: device to host. H200: first look, 54.9 GB/s; MI355X: assumed, the
            usual share of PCIe gen5 x16.
        h2d_bytes_per_second: host to device. As for ``d2h_bytes_per_second``.
        device_bytes_per_second: device memory traffic, reads plus writes. H200: first look, 4.18
            TB/s; MI355X: assumed, the H200's share of its datasheet bandwidth (87% of 8 TB/s).
        matmul_flops_per_second: dense bfloat16. Assumed, 65% of the datasheet peak of each.
        matmul_occupancy: share of the machine that a large matmul fills. Assumed 1.
        kernel_seconds: shortest kernel. Assumed.
        full_dispatch_seconds: mean delay of a small kernel that is dispatched while the machine
            is full; 0 starts it at once. MI355X: assumed 0; H200: assumed, see ``mapping``.
        full_dispatch_spread: half-width of that delay as a share of it, drawn uniformly. Assumed.
        launch_seconds: host time of a kernel launch. MI355X: assumed; H200: measured, fitted to
            the recorded protocol-cost run 1051fe, whose host it is of. Notebook 06 fits these
            costs again and shows their error on arms that the fit did not see.
        copy_submit_seconds: host time of queuing a copy. As for ``launch_seconds``.
        record_seconds: host time of an event record. As for ``launch_seconds``.
        wait_submit_seconds: host time of queuing an event wait. As for ``launch_seconds``.
        query_seconds: host time of an event or stream query. As for ``launch_seconds``.
        synchronize_seconds: host time of a host wait beyond the wait itself. As for
            ``launch_seconds``.
        allocate_seconds: host time of an allocation that the cache serves. As for
            ``launch_seconds``.
        segment_seconds: host time of getting or returning a segment. Assumed.
        graph_launch_seconds: host time of a graph replay. Assumed.
        jitter: half-width of every host cost as a share of it, drawn uniformly. Assumed.
    """

    name: str
    machine: str
    memory_bytes: int
    hardware_queues: int
    queue_variable: str | None
    matmul_flops_per_second: float
    d2h_bytes_per_second: float
    h2d_bytes_per_second: float
    device_bytes_per_second: float
    mapping: QueueMapping = QueueMapping.MODULO
    order: QueueOrder = QueueOrder.SERIAL
    barrier: BarrierScope = BarrierScope.QUEUE
    wait_seconds: float = 1e-6
    engine_copy_lane: CopyLane = CopyLane.OWN
    small_copy_bytes: int = 0
    small_copy_path: CopyPath = CopyPath.ENGINE
    copy_engines: int = 1
    copy_latency_seconds: float = 3e-6
    matmul_occupancy: float = 1.0
    kernel_seconds: float = 2e-6
    full_dispatch_seconds: float = 0.0
    full_dispatch_spread: float = 1.0
    launch_seconds: float = 5e-6
    copy_submit_seconds: float = 7.5e-6
    record_seconds: float = 1e-6
    wait_submit_seconds: float = 1e-6
    query_seconds: float = 0.5e-6
    synchronize_seconds: float = 8e-6
    allocate_seconds: float = 1.5e-6
    segment_seconds: float = 1e-4
    graph_launch_seconds: float = 8e-6
    jitter: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values that no device can have.

        Raises:
            BadInput: naming the field, its value and what is allowed.
        """
        for name, kind in _CHOICES.items():
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError:
                known = ", ".join(kind)
                raise BadInput(
                    f"profile {self.name}: {name}={getattr(self, name)!r}; allowed: {known}"
                ) from None
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type not in ("int", "float"):
                continue
            kinds = int if field.type == "int" else int | float
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise BadInput(
                    f"profile {self.name}: {field.name}={value!r}; expected a "
                    f"{'whole ' if kinds is int else ''}number"
                )
            least = 1 if field.name in _AT_LEAST_ONE else 0
            share = field.name in ("jitter", "full_dispatch_spread", "matmul_occupancy")
            rate = field.name.endswith("_per_second")
            # `not (a <= b)` also refuses nan
            if not (least <= value) or value == float("inf") or (rate and value == 0):
                raise BadInput(
                    f"profile {self.name}: {field.name}={value!r}; "
                    f"expected a finite number {'above 0' if rate else f'of at least {least}'}"
                )
            if share and value > 1:
                raise BadInput(f"profile {self.name}: {field.name}={value!r}; allowed: 0 to 1")


_AT_LEAST_ONE = frozenset({"memory_bytes", "hardware_queues", "copy_engines"})
_CHOICES: dict[str, type[StrEnum]] = {
    "mapping": QueueMapping,
    "order": QueueOrder,
    "barrier": BarrierScope,
    "engine_copy_lane": CopyLane,
    "small_copy_path": CopyPath,
}

PROFILES: dict[str, DeviceProfile] = {
    "MI355X": DeviceProfile(
        name="MI355X",
        machine="virtual-mi355x",
        memory_bytes=288 * 10**9,
        hardware_queues=4,
        queue_variable="GPU_MAX_HW_QUEUES",
        matmul_flops_per_second=0.65 * 2.5e15,
        d2h_bytes_per_second=55e9,
        h2d_bytes_per_second=55e9,
        device_bytes_per_second=0.87 * 8e12,
        small_copy_bytes=16 * 2**10,
        small_copy_path=CopyPath.KERNEL,
    ),
    "H200": DeviceProfile(
        name="H200",
        machine="virtual-h200",
        memory_bytes=141 * 10**9,
        hardware_queues=8,
        queue_variable="CUDA_DEVICE_MAX_CONNECTIONS",
        matmul_flops_per_second=0.65 * 989e12,
        d2h_bytes_per_second=54.9e9,
        h2d_bytes_per_second=54.9e9,
        device_bytes_per_second=4.18e12,
        mapping=QueueMapping.LEAST_LOAD,
        order=QueueOrder.ISSUE,
        barrier=BarrierScope.STREAM,
        full_dispatch_seconds=5e-6,
        launch_seconds=7.3e-6,
        copy_submit_seconds=9.9e-6,
        record_seconds=1.2e-6,
        wait_submit_seconds=0.86e-6,
        query_seconds=2.0e-6,
        synchronize_seconds=4.35e-6,
        allocate_seconds=5.7e-6,
    ),
}


def find_profile(profile: DeviceProfile | str) -> DeviceProfile:
    """The profile itself, or the one of that name (any case).

    Raises:
        BadInput: no such profile; the message lists those there are.
    """
    if isinstance(profile, DeviceProfile):
        return profile
    by_name = {name.lower(): value for name, value in PROFILES.items()}
    found = by_name.get(str(profile).lower())
    if found is None:
        near = difflib.get_close_matches(str(profile).lower(), by_name, n=1)
        hint = f"; did you mean {by_name[near[0]].name}?" if near else ""
        raise BadInput(f"no device profile {profile!r}; known: {', '.join(PROFILES)}{hint}")
    return found


def profile_properties(
    profile: DeviceProfile | str, *, memory_bytes: int | None = None
) -> DeviceProperties:
    """Properties of a virtual device of ``profile``; the card's memory unless told otherwise."""
    found = find_profile(profile)
    return DeviceProperties(
        name=found.name,
        kind=DeviceKind.VIRTUAL,
        evidence=Evidence.SIMULATED,
        machine=found.machine,
        memory_bytes=found.memory_bytes if memory_bytes is None else memory_bytes,
        hardware_queues=found.hardware_queues,
        queue_variable=found.queue_variable,
        driver=None,
        runtime="virtual",
    )
