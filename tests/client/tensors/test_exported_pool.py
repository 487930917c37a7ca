"""The segments of an exported pool, with simulated device memory; tests/gpu shows torch's part."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry.client.tensors import device, exported_pool
from kvferry.client.tensors.device import mapped_memory_at
from kvferry.client.tensors.exported_pool import SegmentAllocator
from kvferry.proto.errors import Code, Failed
from support.simulated_memory import GRANULE, SimulatedMemory


class MemoryDriver:
    """The driver calls for virtual memory."""

    def __init__(self) -> None:
        self._memory = SimulatedMemory()
        # Segments that still fit into the device.
        self.room = 100

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuMemCreate":
            if not self.room:
                raise Failed(Code.DRIVER, "cuMemCreate returned 2: out of memory", 2)
            self.room -= 1
        assert self._memory.call(name, *arguments), name

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        return 0

    @contextmanager
    def visiting(self, ordinal: int) -> Iterator[int]:
        yield 0

    def drain(self, context: int) -> None: ...


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> MemoryDriver:
    simulated = MemoryDriver()
    for module in (device, exported_pool):
        monkeypatch.setattr(module, "driver", lambda: simulated)
    return simulated


def allocate(pool: SegmentAllocator, nbytes: int) -> int:
    address = pool.allocate(nbytes, 0, None)
    assert address is not None
    return address


def bytes_of_descriptor(address: int) -> bytes:
    """The first bytes at an address, as another process reads them."""
    mapped = mapped_memory_at(address)
    assert mapped is not None
    with mmap.mmap(mapped.descriptor, mapped.memory.nbytes) as memory:
        return memory[:4]


def test_a_segment_is_mapped_by_its_descriptor(driver: MemoryDriver) -> None:
    pool = SegmentAllocator(0)
    first, second = allocate(pool, GRANULE), allocate(pool, GRANULE + 1)
    assert pool.nbytes == 3 * GRANULE
    ctypes.memmove(first, b"one!", 4)
    ctypes.memmove(second, b"two!", 4)
    assert bytes_of_descriptor(first) == b"one!"
    assert bytes_of_descriptor(second + GRANULE) == b"two!"  # of any address in it
    descriptor = mapped_memory_at(first)
    assert descriptor is not None
    pool.free(first, GRANULE, 0, None)
    pool.free(second, 2 * GRANULE, 0, None)
    assert mapped_memory_at(first) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor.descriptor)


def test_released_memory_is_new_at_the_same_address(driver: MemoryDriver) -> None:
    pool = SegmentAllocator(0)
    address, other = allocate(pool, GRANULE), allocate(pool, GRANULE)
    ctypes.memmove(address, b"old!", 4)
    for _ in range(2):  # the second call changes nothing
        pool.release_memory()
    assert mapped_memory_at(address) is None
    pool.free(other, GRANULE, 0, None)
    for _ in range(2):
        pool.restore_memory()
    assert mapped_memory_at(other) is None
    assert bytes_of_descriptor(address) == bytes(4)
    ctypes.memmove(address, b"new!", 4)
    assert bytes_of_descriptor(address) == b"new!"
    pool.free(address, GRANULE, 0, None)


def test_a_full_device(driver: MemoryDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.room = 0
    with caplog.at_level(logging.WARNING, "kvferry"):
        assert SegmentAllocator(0).allocate(GRANULE, 0, None) is None
    assert f"cannot allocate {GRANULE} bytes" in caplog.text


def test_a_restore_on_a_full_device_is_repeated(driver: MemoryDriver) -> None:
    """The second restore keeps the bytes of memory that the first one has restored."""
    pool = SegmentAllocator(0)
    addresses = [allocate(pool, GRANULE) for _ in range(3)]
    pool.release_memory()
    driver.room = 1
    with pytest.raises(Failed):
        pool.restore_memory()
    (restored,) = [address for address in addresses if mapped_memory_at(address)]
    ctypes.memmove(restored, b"kept", 4)
    addresses.remove(restored)
    pool.free(addresses.pop(), GRANULE, 0, None)
    driver.room = 1
    pool.restore_memory()
    assert bytes_of_descriptor(restored) == b"kept"
    assert bytes_of_descriptor(addresses[0]) == bytes(4)
    for address in (restored, *addresses):
        pool.free(address, GRANULE, 0, None)
        assert mapped_memory_at(address) is None
