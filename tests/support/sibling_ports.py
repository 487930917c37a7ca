"""What the daemons of test_sibling_cores_against_a_model.py get from outside."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from kvferry.daemon.siblings.windows import LentMemory, MappedWindows
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import DeviceInfo, Limits

PAGE, CHUNK, POOL = 1024, 8192, 3 * 8192
GPU_BLOCKS = 96
# Of a host block, and so of a part of it.
PARTS = 2
# Compositions of a host block of two pages: with one tensor, or with two.
LAYOUTS = (
    KVLayout((TensorLayout(GPU_BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),), PARTS),
    KVLayout(
        (TensorLayout(GPU_BLOCKS, PAGE // 2, PAGE // 2),) * 2,
        ((TensorRef(0, PAGE // 2), TensorRef(1, PAGE // 2)),),
        PARTS,
    ),
)
FINGERPRINTS = tuple(Fingerprint(name, PARTS * PAGE, key_bytes=12) for name in ("llama", "qwen"))
KEYS = tuple(bytes([number]) * 12 for number in range(1, 9))
QUOTAS = 8192, 12288, 16384, None
LIMITS = Limits(1 << 20, 1 << 10, 64)
DEVICE = DeviceInfo("cpu", "cpu", "host memory")


class KeptDescriptors:
    """The descriptor store of a service manager: keeps descriptors while no daemon runs."""

    has_fd_store = True

    def __init__(self) -> None:
        self.fds: dict[str, int] = {}
        # Copies for the daemon that starts.
        self.stored_fds: dict[str, int] = {}

    def start(self) -> None:
        self.stored_fds = {name: os.dup(descriptor) for name, descriptor in self.fds.items()}
        self._inodes = {each: os.fstat(each).st_ino for each in self.stored_fds.values()}

    def close_stored(self) -> None:
        """The daemon was killed at its start: close its copies, unless they are closed."""
        for descriptor, inode in self._inodes.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)

    def store_fd(self, name: str, descriptor: int) -> None:
        self.fds[name] = os.dup(descriptor)

    def remove_fd(self, name: str) -> None:
        if (descriptor := self.fds.pop(name, None)) is not None:
            os.close(descriptor)

    def send_queued(self) -> bool:
        return True

    def clear(self) -> None:
        for name in [*self.fds]:
            self.remove_fd(name)


class NoDevice:
    """Satisfies HostRegistrar."""

    numa_node = None

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Host memory needs nothing."""

    def unpin(self, address: int) -> None:
        """Host memory needs nothing."""


class DirectWindows(MappedWindows):
    """Maps and unmaps at once, on this thread."""

    def map_now(self, lent: LentMemory) -> None:
        """Raises KVFerryError or OSError."""
        try:
            self.map(lent).send(None)
        except StopIteration:
            return
        raise AssertionError("mapping waits")

    async def _finish(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    def _unmap_if_unused(self, window: Any) -> None:
        if window.closed and not window.holds and window.number in self._windows:
            del self._windows[window.number]
            self._unmap(window)


class PassedFds:
    """In place of the server of descriptors: passes them on as they are."""

    def holds_any(self, _: str) -> bool:
        return False

    def hold_fd(self, _: str, descriptor: int) -> int:
        return descriptor
