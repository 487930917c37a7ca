"""Device memory that is shared by descriptor: what the driver is asked for, and what is undone."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, cast

import pytest

from kvferry.cuda.driver import Driver, MemoryLocation
from kvferry.cuda.virtual_memory import VirtualMemory
from kvferry.proto.errors import Code, Failed, Refused
from support.descriptors import count_memfds

NBYTES, DESCRIPTOR, DEVICE_MEMORY = 2 << 20, 5, 1


class CountingDriver:
    """A driver that counts the calls that succeed. device: of all memory. failing: a function."""

    def __init__(self, device: int = 0, failing: str = "") -> None:
        self.succeeded = Counter[str]()
        self._device, self._failing = device, failing

    def device_attribute(self, attribute: int, ordinal: int) -> int:
        return 0

    def device_uuid(self, ordinal: int) -> str:
        return f"GPU-{ordinal}"

    def call(self, name: str, *arguments: Any) -> None:
        if name == self._failing:
            raise Failed(Code.DRIVER, "out of memory", name)
        self.succeeded[name] += 1
        if name == "cuMemGetAllocationPropertiesFromHandle":
            arguments[0]._obj.location = MemoryLocation(DEVICE_MEMORY, self._device)
        elif name == "cuMemExportToShareableHandle":
            arguments[0]._obj.value = os.memfd_create("device-memory")

    def check_balance(self, *, mapped: bool) -> None:
        """What was taken is given back; addresses and mappings only if nothing is mapped."""
        calls = self.succeeded
        taken = calls["cuMemCreate"] + calls["cuMemImportFromShareableHandle"]
        assert calls["cuMemRelease"] == taken
        assert calls["cuMemMap"] - calls["cuMemUnmap"] == mapped
        assert calls["cuMemAddressReserve"] - calls["cuMemAddressFree"] == mapped


def virtual_memory(driver: CountingDriver) -> VirtualMemory:
    return VirtualMemory(cast(Driver, driver), 0)


def test_memory_of_another_gpu_is_refused_and_not_mapped() -> None:
    driver = CountingDriver(device=1)
    with pytest.raises(Refused) as refused:
        virtual_memory(driver).import_memory(DESCRIPTOR, NBYTES)
    assert refused.value.code == Code.DEVICE_MISMATCH
    assert "register tensors on GPU-0" in refused.value.message
    assert not driver.succeeded["cuMemMap"]
    driver.check_balance(mapped=False)


def test_a_mapping_alone_keeps_the_memory() -> None:
    driver = CountingDriver()
    virtual_memory(driver).import_memory(DESCRIPTOR, NBYTES)
    driver.check_balance(mapped=True)
    driver = CountingDriver()
    memory, descriptor = virtual_memory(driver).create_memory(NBYTES)
    driver.check_balance(mapped=True)
    memory.close()
    os.close(descriptor)
    driver.check_balance(mapped=False)


MAPPING = "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"


@pytest.mark.parametrize("failing", [*MAPPING, "cuMemCreate", "cuMemExportToShareableHandle"])
def test_nothing_stays_allocated_if_memory_cannot_be_created(failing: str) -> None:
    driver = CountingDriver(failing=failing)
    with pytest.raises(Failed):
        virtual_memory(driver).create_memory(NBYTES)
    driver.check_balance(mapped=False)
    assert count_memfds("device-memory") == 0


@pytest.mark.parametrize("failing", [*MAPPING, "cuMemGetAllocationPropertiesFromHandle"])
def test_nothing_stays_mapped_if_memory_cannot_be_imported(failing: str) -> None:
    driver = CountingDriver(failing=failing)
    with pytest.raises(Failed) as failed:
        virtual_memory(driver).import_memory(DESCRIPTOR, NBYTES)
    assert failed.value.code == Code.MAP_FAILED
    driver.check_balance(mapped=False)
