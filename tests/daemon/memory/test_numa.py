"""NUMA: a thread on the node of the device touches the pool first."""

from __future__ import annotations

import errno
import os
import queue
from pathlib import Path

import pytest

from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory import numa
from kvferry.daemon.memory.numa import bind_to_node, cpus_of, node_of
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles
from support.denied_calls import call_with_denied, on_x86_64
from support.time_limits import TIMEOUT

ADDRESS = "0000:3B:00.0"
OWN_CPUS = frozenset(os.sched_getaffinity(0))


class FakeSysfs:
    """Files that describe a device and its NUMA nodes."""

    def __init__(self, root: Path) -> None:
        self._device = root / "bus/pci/devices" / ADDRESS.lower()
        self._nodes = root / "devices/system/node"
        self._device.mkdir(parents=True)

    def write_node(self, node: object) -> None:
        (self._device / "numa_node").write_text(f"{node}\n")

    def write_cpus(self, node: int, cpus: str) -> None:
        directory = self._nodes / f"node{node}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cpulist").write_text(f"{cpus}\n")


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSysfs:
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    return FakeSysfs(tmp_path)


@pytest.mark.parametrize(
    ("text", "node"), [("0", 0), ("1", 1), ("-1", None), ("", None), ("?", None)]
)
def test_the_node_of_a_device_is_read(sysfs: FakeSysfs, text: str, node: int | None) -> None:
    assert node_of(ADDRESS) is None  # it is not known
    sysfs.write_node(text)
    assert node_of(ADDRESS) == node


@pytest.mark.parametrize("text", ["0-1023", "0,1,2-4095", ",".join(map(str, sorted(OWN_CPUS)))])
def test_the_cpus_of_a_node_are_those_that_the_process_may_use(sysfs: FakeSysfs, text: str) -> None:
    sysfs.write_cpus(1, text)
    assert cpus_of(1) == OWN_CPUS


@pytest.mark.parametrize("text", ["", "4000-4095", "none", "-"])
def test_without_usable_cpus_of_a_node_the_affinity_stays(sysfs: FakeSysfs, text: str) -> None:
    """The node has only memory, or the container may not use its CPUs."""
    sysfs.write_cpus(1, text)
    assert cpus_of(1) <= OWN_CPUS
    bind_to_node(1)
    assert os.sched_getaffinity(0) == OWN_CPUS


def test_the_pool_is_touched_near_its_device(
    sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_cpus = {min(OWN_CPUS)}
    sysfs.write_cpus(1, str(min(OWN_CPUS)))
    seen: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    populate = MappedFiles.populate

    def touch(memory: MappedFiles, start: int, nbytes: int) -> None:
        seen.put(os.sched_getaffinity(0))
        populate(memory, start, nbytes)

    monkeypatch.setattr(MappedFiles, "populate", touch)
    engine, pool = ReferenceEngine(), HostPool(64 * PAGE, 8 * PAGE)
    engine.numa_node = 1
    sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
    pool.start_filling(engine, sizes.put, lambda error: sizes.put(-1))
    while (size := sizes.get(timeout=TIMEOUT)) != pool.nbytes:
        assert size > 0
    pool.close(engine)
    affinities = [seen.get() for _ in range(seen.qsize())]
    assert len(affinities) >= 8
    assert all(cpus == node_cpus for cpus in affinities)
    assert os.sched_getaffinity(0) == OWN_CPUS


@on_x86_64
@pytest.mark.parametrize("call", ["sched_setaffinity", "sched_getaffinity"])
def test_a_pool_is_filled_if_its_threads_may_not_choose_their_cpus(
    sysfs: FakeSysfs, call: str
) -> None:
    sysfs.write_cpus(1, str(min(OWN_CPUS)))
    engine, pool = ReferenceEngine(), HostPool(64 * PAGE, 64 * PAGE)
    engine.numa_node = 1
    sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
    call_with_denied(
        {call: errno.EPERM},
        lambda: pool.start_filling(engine, sizes.put, lambda error: sizes.put(-1)),
    )
    assert sizes.get(timeout=TIMEOUT) == pool.nbytes
    pool.close(engine)
