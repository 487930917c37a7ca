"""The memory that control groups of both versions leave to a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.daemon.memory import pool
from kvferry.daemon.memory.available_memory import available_memory
from kvferry.proto.errors import Refused

MIB = 1 << 20
FREE = 64 << 10


class FakeMachine:
    """/proc and /sys of a machine. In MiB."""

    def __init__(self, root: Path, cgroup: str) -> None:
        self.root = root
        self._write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {FREE << 10} kB\nHugePages: 0")
        self._write("proc/self/cgroup", cgroup)

    def add_v2(self, group: str, limit: int | None, used: int, stat: dict[str, int]) -> Path:
        text = "max" if limit is None else str(limit * MIB)
        files = {"memory.max": text, "memory.current": str(used * MIB)}
        return self._add(f"sys/fs/cgroup{group}", files, stat)

    def add_v1(self, group: str, limit: int, used: int, stat: dict[str, int]) -> Path:
        files = {
            "memory.limit_in_bytes": str(limit * MIB),
            "memory.usage_in_bytes": str(used * MIB),
        }
        return self._add(f"sys/fs/cgroup/memory{group}", files, stat)

    def available(self, spare: int = 0) -> tuple[int, str]:
        nbytes, limit = available_memory(spare * MIB, self.root)
        return nbytes // MIB, limit.removeprefix("the memory limit of control group ")

    def _add(self, group: str, files: dict[str, str], stat: dict[str, int]) -> Path:
        for name, text in files.items():
            self._write(f"{group}/{name}", text + "\n")
        lines = [f"{name} {number * MIB}\n" for name, number in stat.items()]
        self._write(f"{group}/memory.stat", "".join(lines))
        return self.root / group

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("used", "available"), [(6, 7), (1, 8)], ids=["charged here", "charged elsewhere"]
)
def test_a_control_group_has_at_most_its_limit(
    tmp_path: Path, used: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the old pool may be charged to another group."""
    machine = FakeMachine(tmp_path, "0::/unit\n")
    group = machine.add_v2("/unit", 8, used, {})
    assert machine.available() == (8 - used, str(group))
    assert machine.available(5) == (available, str(group))
    monkeypatch.setattr(pool, "available_memory", lambda _: available_memory(0, tmp_path))
    with pytest.raises(Refused, match=f"the memory limit of control group {group} allows; reduce"):
        pool.check_fits(9 * MIB)


def test_the_page_cache_of_a_group_is_available(tmp_path: Path) -> None:
    """But not shared memory, which is in `file`, too."""
    machine = FakeMachine(tmp_path, "0::/pod/daemon\n")
    cache = {"inactive_file": 500, "active_file": 200, "slab_reclaimable": 50}
    stat = {"anon": 100, "file": 900, "shmem": 200, **cache}
    pod = machine.add_v2("/pod", 1024, 1000, stat)
    machine.add_v2("/pod/daemon", None, 100, {"inactive_file": 10})
    assert machine.available() == (1024 - 1000 + 750, str(pod))
    assert machine.available(100) == (1024 - 1000 + 850, str(pod))


def test_the_limit_of_a_group_of_version_1_counts(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, "4:cpu,memory:/pod/daemon\n1:name=systemd:/\n0::/\n")
    pod = machine.add_v1("/pod", 512, 300, {"total_inactive_file": 100, "total_active_file": 50})
    machine.add_v1("/pod/daemon", 1 << 42, 20, {"inactive_file": 5})
    assert machine.available() == (512 - 300 + 150, str(pod))


def test_a_limit_above_the_visible_groups_of_version_1_counts(tmp_path: Path) -> None:
    """In a container its group is the topmost directory, and its path is that of the host."""
    machine = FakeMachine(tmp_path, "4:memory:/docker/0123\n")
    top = machine.add_v1("", 1 << 42, 100, {"hierarchical_memory_limit": 256})
    assert machine.available() == (156, str(top))


def test_a_group_without_a_limit_leaves_what_is_free(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, "4:memory:/a\n0::/b\n")
    machine.add_v1("/a", 1 << 42, 20, {"hierarchical_memory_limit": 1 << 42})
    machine.add_v2("/b", None, 20, {})
    assert machine.available() == (FREE, "the free memory")
    assert machine.available(5) == (FREE + 5, "the free memory")
