"""The host pool: sealed memfds, one a chunk, touched and registered in turn in the background, and
in memory that is near the device (numa.py).

Registering memory takes seconds for tens of GiB, so nobody waits for all of it: `ready_bytes`
grows chunk by chunk from the front, and a transfer waits only for the chunk that it touches. A
chunk that cannot be registered ends the daemon: serving from pageable memory would be slow in
silence.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from kvferry.daemon.engine.base import CopyEngine
from kvferry.daemon.engine.memory import PAGE, MappedFiles, empty
from kvferry.daemon.engine.numa import stay_near
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.process import SPARE_ADDRESS_SPACE, check_address_space

TOUCHERS = min(16, os.cpu_count() or 1)
AHEAD = 2 * TOUCHERS
"""Chunks touched before they are registered, at most: what a stop has to wait for."""


def whole_pages(nbytes: int) -> int:
    """What a pool, or a chunk, of so many bytes has."""
    return -(-nbytes // PAGE) * PAGE


class HostPool:
    """Pinned host memory of one device. `address` is where this process has it mapped.

    kept: the descriptors of an earlier pool of the same size, whose bytes are taken over. Raises
    Refused (POOL_TOO_LARGE; BAD_LAYOUT, NOT_SHAREABLE: what was kept is not such a pool).
    """

    def __init__(self, nbytes: int, chunk_bytes: int, kept: Sequence[int] | None = None) -> None:
        self.nbytes, self.chunk_bytes = whole_pages(nbytes), whole_pages(chunk_bytes)
        self.ready_bytes = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        check_address_space(self.nbytes + SPARE_ADDRESS_SPACE, "the pool", Code.POOL_TOO_LARGE)
        try:
            self._memory = MappedFiles("kvferry-pool", self.nbytes, self.chunk_bytes, kept)
        except OSError as error:
            raise Refused(Code.POOL_TOO_LARGE, f"no such pool can be made: {error}", nbytes) from (
                error
            )
        self.address = self._memory.address
        self.descriptors = tuple(self._memory.descriptors)

    def fill(
        self,
        engine: CopyEngine,
        progress: Callable[[int], None],
        failed: Callable[[KVFerryError], None],
    ) -> None:
        """Touch and register everything, in a thread of its own that calls back from there."""
        self._thread = threading.Thread(
            target=self._fill, args=(engine, progress, failed), name="kvferry-pool", daemon=True
        )
        self._thread.start()

    def close(self, engine: CopyEngine) -> None:
        """Let the memory go; no copy uses it any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for start in range(0, self.ready_bytes, self.chunk_bytes):
            engine.unpin(self.address + start)
        self._memory.close()

    def _fill(
        self,
        engine: CopyEngine,
        progress: Callable[[int], None],
        failed: Callable[[KVFerryError], None],
    ) -> None:
        starts = range(0, self.nbytes, self.chunk_bytes)
        try:
            stay = partial(stay_near, engine.numa_node)
            with ThreadPoolExecutor(TOUCHERS, "kvferry-touch", stay) as touchers:
                touching = deque[list[Future[None]]]()
                upcoming = iter(starts)
                for start in starts:
                    for ahead in islice(upcoming, AHEAD - len(touching)):
                        touching.append(self._touch(touchers, ahead))
                    if self._stopping.is_set():
                        return
                    for touched in touching.popleft():
                        touched.result()
                    size = self._size(start)
                    engine.pin(self.address + start, size)
                    self.ready_bytes = start + size
                    progress(self.ready_bytes)
        except KVFerryError as error:
            failed(error)
        except OSError as error:
            message = f"memory for the host pool ran out at byte {self.ready_bytes}: {error}"
            failed(Failed(Code.POOL_TOO_LARGE, message, self.nbytes))

    def _touch(self, touchers: ThreadPoolExecutor, start: int) -> list[Future[None]]:
        """First touch ahead of registering: one chunk a thread, all threads in the first one."""
        size = self._size(start)
        step = size if start else -(-size // (TOUCHERS * PAGE)) * PAGE
        return [
            touchers.submit(self._memory.populate, at, min(step, start + size - at))
            for at in range(start, start + size, step)
        ]

    def _size(self, start: int) -> int:
        return min(self.chunk_bytes, self.nbytes - start)


def give_back(chunks: Sequence[int]) -> None:
    """Have the memory of an earlier pool at once: who else holds it lets go of it in its own time.

    Pages are freed by all threads together; a file that cannot be emptied is freed when it is let
    go of.
    """

    def give(descriptor: int) -> None:
        with suppress(OSError):
            empty(descriptor)

    with ThreadPoolExecutor(TOUCHERS, "kvferry-free") as freers:
        list(freers.map(give, chunks))


def taken_bytes(chunk: int) -> int:
    """Memory that `give_back` frees."""
    return os.fstat(chunk).st_blocks * 512


def check_fits(nbytes: int, *, locked: bool, spare: int = 0) -> None:
    """Refuse a pool that the machine cannot hold; `locked`: nor lock into memory.

    Memory is what is available now, in this control group, and `spare`, which is taken and will be
    given back; the lock limit does not bind root.
    """
    available = available_bytes(spare)
    if nbytes > available:
        raise Refused(
            Code.POOL_TOO_LARGE,
            f"the host pool does not fit into the {available} bytes of memory available: "
            "make pool.size smaller",
            nbytes,
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked and os.geteuid() != 0 and limit != resource.RLIM_INFINITY and nbytes > limit:
        raise Refused(
            Code.POOL_TOO_LARGE,
            f"the host pool does not fit into the memlock limit of {limit} bytes: set "
            "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited",
            nbytes,
        )


def available_bytes(spare: int = 0) -> int:
    """Memory that can be had now: the system's, or what the control group leaves of it; `spare` is
    of what is taken, and not counted as that."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024 + spare
    for group in _control_groups():
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            available = min(available, int(text) - max(0, int(used.read_text()) - spare))
    return available


def _control_groups() -> list[Path]:
    """This process's control group and those above it (cgroup v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            own = Path("/sys/fs/cgroup" + line[3:])
            return [
                group for group in (own, *own.parents) if group.is_relative_to("/sys/fs/cgroup")
            ]
    return []
