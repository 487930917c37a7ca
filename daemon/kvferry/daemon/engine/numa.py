"""Which CPUs are near a device: memory that these touch first is near it, too.

Where a machine has several NUMA nodes, what a device copies from and to the others' memory crosses
the link between sockets. Memory is had from the node of whoever touches it first, unless somebody
said otherwise (numactl, systemd's NUMAPolicy=), and from another one where that has no more.
"""

from __future__ import annotations

import os
from pathlib import Path

SYSFS = Path("/sys")


def node_of(pci_address: str) -> int | None:
    """The NUMA node that a PCI device ("0000:3b:00.0") hangs on; None where nobody knows."""
    try:
        place = SYSFS / "bus/pci/devices" / pci_address.lower() / "numa_node"
        node = int(place.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int) -> frozenset[int]:
    """Those of a NUMA node that this thread may run on."""
    try:
        listed = (SYSFS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [part.partition("-") for part in listed.split(",") if part]
        cpus = [range(int(first), int(last or first) + 1) for first, _, last in ranges]
    except (OSError, ValueError):
        return frozenset()
    return frozenset().union(*cpus) & os.sched_getaffinity(0)


def stay_near(node: int | None) -> None:
    """Have this thread run on the CPUs of a node, if there are any."""
    if node is not None and (cpus := cpus_of(node)):
        os.sched_setaffinity(0, cpus)
