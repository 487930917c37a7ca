"""Memory that this process can still use: of the machine, and of its control groups.

Page cache counts as available, as in the kernel's MemAvailable: an engine that has read its weights
leaves gigabytes of it, and the kernel frees them for others. Called by pool.py at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _GroupFiles(NamedTuple):
    """Names of the files of a control group, and of the fields of its memory.stat."""

    folder: str
    limit: str
    used: str
    # Bytes that the kernel frees if the group needs them. Shared memory is in none of these.
    reclaimable: frozenset[str]
    # The least limit of the group and all groups above it.
    least_limit: str = ""


_V2 = _GroupFiles(
    "sys/fs/cgroup",
    "memory.max",
    "memory.current",
    frozenset({"inactive_file", "active_file", "slab_reclaimable"}),
)
_V1 = _GroupFiles(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    frozenset({"total_inactive_file", "total_active_file"}),
    "hierarchical_memory_limit",
)


def available_memory(spare: int = 0, root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of memory available to this process, and what limits them.

    spare: bytes that are in use now and will be freed. root: of /proc and /sys.
    """
    available = _fields(root / "proc/meminfo")["MemAvailable:"] * 1024 + spare, "the free memory"
    for group, files in _control_groups(root):
        stat = _fields(group / "memory.stat")
        limits = [_limit(group / files.limit), stat.get(files.least_limit)]
        limit = min((each for each in limits if each is not None), default=None)
        if limit is None:
            continue
        cache = sum(stat.get(name, 0) for name in files.reclaimable)
        used = int((group / files.used).read_text()) - cache - spare
        left = limit - max(0, used)
        available = min(available, (left, f"the memory limit of control group {group}"))
    return available


def _control_groups(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """The control groups that bound the memory of this process, with all their parents.

    Of both versions: a kernel has the memory of a process in one of them. In a container the paths
    of the process may be those of the host, and the topmost directory is the container's group.
    """
    paths = {"": "/", "memory": "/"}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for files, controller in ((_V2, ""), (_V1, "memory")):
        top = root / files.folder
        own = top / paths[controller].lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(top) and (group / files.limit).exists():
                yield group, files


def _limit(path: Path) -> int | None:
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line. Empty if there is no file."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: int(number) for name, number, *_ in map(str.split, lines)}
