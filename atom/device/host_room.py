"""Host memory that can still be pinned, and the processors next to a GPU.

Pinned pages cannot be swapped. A process that pins more than there is gets no error: the kernel
kills it, or another one. So what is about to be pinned is compared with what is free beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atom.errors import DeviceOutOfMemory

#: left to everything else on the host
SPARE_BYTES = 2**30


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that new allocations can have: the host's, within this container's.

    Args:
        root: of ``proc`` and ``sys``.

    Returns:
        ``None`` where the system does not say.
    """
    found = []
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        found.append(available * 1024)
    for group, limit, used, cache in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        most, now = _number(root / group / limit), _number(root / group / used)
        if most is not None and now is not None:
            # file pages that nobody uses go first
            found.append(most - now + _fields(root / group / "memory.stat").get(cache, 0))
    return max(0, min(found)) if found else None


def check_host_room(nbytes: int, what: str, root: Path = Path("/")) -> None:
    """Refuse to pin what the host has not got.

    Args:
        nbytes: about to be pinned.
        what: the setting that asks for it.
        root: see :func:`free_host_bytes`.

    Raises:
        DeviceOutOfMemory: says how much there is.
    """
    free = free_host_bytes(root)
    if free is not None and nbytes > free - SPARE_BYTES:
        raise DeviceOutOfMemory(
            f"{what}: {nbytes / 2**30:.1f} GiB of host memory are to be pinned, and "
            f"{free / 2**30:.1f} GiB are free on this host or in this container, of which "
            f"{SPARE_BYTES / 2**30:.0f} GiB stay for the rest; lower it, or end what holds memory"
        )


def numa_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """Memory node that a PCI device hangs on; ``None`` where the firmware names none."""
    node = _number(root / "sys/bus/pci/devices" / pci_address / "numa_node")
    return node if node is not None and node >= 0 else None


def processors_near(pci_address: str, root: Path = Path("/")) -> frozenset[int]:
    """Processors of the memory node that a PCI device hangs on; empty where none is named."""
    node = numa_node(pci_address, root)
    if node is None:
        return frozenset()
    found: set[int] = set()
    with suppress(OSError, ValueError):
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
        for part in listed.split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def processors_apart(
    pci_address: str, root: Path = Path("/")
) -> tuple[frozenset[int], frozenset[int]]:
    """Of this process's processors, those near a PCI device, and those of other memory nodes.

    Both are empty where no node is named, or where the system cannot bind processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(), frozenset()
    own = frozenset(os.sched_getaffinity(0))
    near = own & processors_near(pci_address, root)
    return (near, own - near) if near else (frozenset(), frozenset())


@contextmanager
def on_processors(wanted: frozenset[int]) -> Iterator[bool]:
    """Run this thread on some of its processors: what it pins is taken from their node.

    Yields:
        Whether it does: not if it may use none of them, or uses no others.
    """
    can = hasattr(os, "sched_setaffinity")
    before = frozenset(os.sched_getaffinity(0)) if can else frozenset()
    near = before & wanted
    if not near or near == before:
        yield False
        return
    try:
        os.sched_setaffinity(0, near)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        # no such group, or "max": no limit
        return None


def _fields(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, number, *_ = [*line.split(), ""]
            if number.isdigit():
                found[name] = int(number)
    return found
