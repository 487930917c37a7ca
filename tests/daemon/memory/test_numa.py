"""The pool is touched first by CPUs near its device."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import pytest

from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.daemon.memory import numa
from kvferry.daemon.memory.numa import bind_to_node, cpus_of, node_of
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles

ADDRESS = "0000:3B:00.0"
OURS = frozenset(os.sched_getaffinity(0))


class Machine:
    """As its kernel describes it."""

    def __init__(self, root: Path) -> None:
        self._device = root / "bus/pci/devices" / ADDRESS.lower()
        self._nodes = root / "devices/system/node"
        self._device.mkdir(parents=True)

    def hangs_on(self, node: object) -> None:
        (self._device / "numa_node").write_text(f"{node}\n")

    def has(self, node: int, cpus: str) -> None:
        place = self._nodes / f"node{node}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpulist").write_text(f"{cpus}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("said", "node"), [("0", 0), ("1", 1), ("-1", None), ("", None), ("?", None)]
)
def test_the_node_of_a_device(machine: Machine, said: str, node: int | None) -> None:
    machine.hangs_on(said)
    assert node_of(ADDRESS) == node


def test_a_device_that_the_kernel_does_not_know(machine: Machine) -> None:
    assert node_of(ADDRESS) is None
    assert node_of("0000:00:00.0") is None


@pytest.mark.parametrize("said", ["0-1023", "0,1,2-4095", ",".join(map(str, sorted(OURS)))])
def test_the_cpus_of_a_node_are_those_that_we_may_use(machine: Machine, said: str) -> None:
    machine.has(1, said)
    assert cpus_of(1) == OURS


@pytest.mark.parametrize("said", ["", "4000-4095", "none", "-"])
def test_a_node_without_cpus_for_us(machine: Machine, said: str) -> None:
    """One that has memory only, or that a container was not given: anywhere will do."""
    machine.has(1, said)
    assert cpus_of(1) <= OURS
    bind_to_node(1)
    assert os.sched_getaffinity(0) == OURS


def test_the_pool_is_touched_near_its_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = {min(OURS)}
    machine.has(1, str(min(OURS)))
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
    while (size := sizes.get(timeout=10)) != pool.nbytes:
        assert size > 0
    pool.close(engine)
    where = [seen.get() for _ in range(seen.qsize())]
    assert len(where) >= 8
    assert all(cpus == near for cpus in where)
    assert os.sched_getaffinity(0) == OURS
