"""The host pool: one sealed memfd per chunk, on the NUMA node of the device (numa.py).

Chunks are touched and registered with the device in the background, in order. Registering tens of
GiB takes seconds, so `ready_bytes` grows chunk by chunk, and a transfer waits only for the chunks
that it uses. If a chunk cannot be registered, the daemon ends: copies from pageable memory would be
slow, and no one would notice why. Created at start and closed on the event loop; other threads
touch and register it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Protocol

from kvferry.daemon.memory.available_memory import available_memory
from kvferry.daemon.memory.numa import bind_to_node
from kvferry.daemon.memory.shared_memory import PAGE, MappedFiles, free_file
from kvferry.proto.errors import Code, Failed, KVFerryError, Refused
from kvferry.proto.process import SPARE_ADDRESS_SPACE, check_address_space
from kvferry.proto.sizes import format_size

# Threads that touch chunks.
TOUCH_THREADS = min(16, os.cpu_count() or 1)
# Maximum of chunks that are touched before their registration. A stop waits for these.
MAX_TOUCHED_AHEAD = 2 * TOUCH_THREADS


class HostRegistrar(Protocol):
    """Registers host memory with a device. Any thread."""

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the device; None if it has none."""

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Register a chunk of host memory. Raises Failed (POOL_TOO_LARGE)."""

    def unpin(self, address: int) -> None:
        """Undo `pin` of the chunk at `address`."""


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole OS pages, as for the sizes of pool and chunks."""
    return -(-nbytes // PAGE) * PAGE


class HostPool:
    """Pinned host memory of one device, mapped at `address`.

    kept: descriptors of the chunks of an earlier pool of the same size, which keep their bytes.
    ready_bytes: registered so far, from the start. Raises Refused (POOL_TOO_LARGE; BAD_LAYOUT or
    NOT_SHAREABLE if `kept` is not such a pool).
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
            message = f"cannot create the host pool ({error}); reduce pool.size"
            raise Refused(Code.POOL_TOO_LARGE, message, nbytes) from error
        self.address = self._memory.address
        self.descriptors = tuple(self._memory.descriptors)

    def start_filling(
        self,
        engine: HostRegistrar,
        progress: Callable[[int], None],
        failed: Callable[[KVFerryError], None],
    ) -> None:
        """Start a thread that touches and registers all chunks, in order.

        progress, failed: called in that thread, with the bytes registered so far or the error.
        """
        self._thread = threading.Thread(
            target=self._fill, args=(engine, progress, failed), name="kvferry-pool", daemon=True
        )
        self._thread.start()

    def close(self, engine: HostRegistrar) -> None:
        """Unregister and unmap the memory. No copy may be in flight."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for start in range(0, self.ready_bytes, self.chunk_bytes):
            engine.unpin(self.address + start)
        self._memory.close()

    def _fill(
        self,
        engine: HostRegistrar,
        progress: Callable[[int], None],
        failed: Callable[[KVFerryError], None],
    ) -> None:
        starts = range(0, self.nbytes, self.chunk_bytes)
        try:
            bind = partial(bind_to_node, engine.numa_node)
            with ThreadPoolExecutor(TOUCH_THREADS, "kvferry-touch", bind) as touchers:
                touching = deque[list[Future[None]]]()
                upcoming = iter(starts)
                for start in starts:
                    for ahead in islice(upcoming, MAX_TOUCHED_AHEAD - len(touching)):
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
            message = (
                f"memory for the host pool of {format_size(self.nbytes)} ran out after "
                f"{format_size(self.ready_bytes)} ({error}); reduce pool.size"
            )
            failed(Failed(Code.POOL_TOO_LARGE, message, self.nbytes))

    def _touch(self, touchers: ThreadPoolExecutor, start: int) -> list[Future[None]]:
        """Touch a chunk: on one thread, but on all threads for the first chunk."""
        size = self._size(start)
        step = size if start else -(-size // (TOUCH_THREADS * PAGE)) * PAGE
        return [
            touchers.submit(self._memory.populate, at, min(step, start + size - at))
            for at in range(start, start + size, step)
        ]

    def _size(self, start: int) -> int:
        return min(self.chunk_bytes, self.nbytes - start)


def free_chunks(chunks: Sequence[int]) -> None:
    """Free the memory of an earlier pool now, although other processes have its descriptors.

    A memfd for which this fails is freed when its last descriptor is closed.
    """

    def free_one(descriptor: int) -> None:
        with suppress(OSError):
            free_file(descriptor)

    with ThreadPoolExecutor(TOUCH_THREADS, "kvferry-free") as freers:
        list(freers.map(free_one, chunks))


def used_bytes(chunk: int) -> int:
    """Bytes of memory that `free_chunks` frees of a chunk."""
    return os.fstat(chunk).st_blocks * 512


def check_fits(nbytes: int, *, spare: int = 0) -> None:
    """Raise Refused (POOL_TOO_LARGE) if a pool of `nbytes` does not fit into this machine.

    spare: bytes that are in use now and will be freed before the pool takes memory. The limit of
    locked memory does not count: NVIDIA's driver does not apply it to memory that it pins.
    """
    available, limit = available_memory(spare)
    if nbytes > available:
        raise Refused(
            Code.POOL_TOO_LARGE,
            f"a host pool of {format_size(nbytes)} does not fit into the "
            f"{format_size(available)} that {limit} allows; reduce pool.size, or allow more memory",
            nbytes,
        )
