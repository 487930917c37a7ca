"""NUMA placement: threads that run on the device's node allocate memory on that node.

Copies from or to the memory of another node cross the link between the sockets. The kernel
allocates a page on the node of the CPU that touches it first, unless a policy is set (numactl,
NUMAPolicy= of systemd) or that node is full. Called on the pinning threads and at start.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SYSFS = Path("/sys")


def node_of(pci_address: str) -> int | None:
    """The NUMA node of a PCI device ("0000:3b:00.0"); None if it is unknown."""
    try:
        path = SYSFS / "bus/pci/devices" / pci_address.lower() / "numa_node"
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int) -> frozenset[int]:
    """CPUs of a NUMA node on which this thread may run; empty if they are unknown."""
    try:
        listed = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.partition("-") for part in listed.split(",") if part]
        cpus = [range(int(first), int(last or first) + 1) for first, _, last in ranges]
    except (OSError, ValueError):
        return frozenset()
    return frozenset().union(*cpus) & os.sched_getaffinity(0)


def bind_to_node(node: int | None) -> None:
    """Bind this thread to the CPUs of a node, if it has any and the kernel allows it."""
    with suppress(OSError):
        if node is not None and (cpus := cpus_of(node)):
            os.sched_setaffinity(0, cpus)


def can_bind() -> bool:
    """Whether threads may choose their CPUs. A seccomp profile may deny it."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError:
        return False
    return True
