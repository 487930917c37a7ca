"""Kept tensors in the descriptor store: a later daemon restores them, or drops unusable ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvferry.daemon.core.actions import KeepTensors
from kvferry.daemon.core.records import KeptTensorsRecord, engine_owner
from kvferry.daemon.persistence.kept_tensor_store import KeptTensorStore
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef

from .fd_stores import KeptFds

LAYOUT = KVLayout((TensorLayout(8, 4096, 4096),), ((TensorRef(0, 4096),),), 2)


@pytest.fixture
def manager() -> Iterator[KeptFds]:
    before = len(os.listdir("/proc/self/fd"))
    manager = KeptFds()
    yield manager
    for name in tuple(manager.kept):
        manager.remove_fd(name)
    assert len(os.listdir("/proc/self/fd")) <= before


def record_of(engine: str) -> KeptTensorsRecord:
    return KeptTensorsRecord(engine, LayoutArrays.from_layout(LAYOUT), 32768, engine_owner(engine))


def store_tensors(store: KeptTensorStore, number: int, engine: str) -> None:
    memory = os.memfd_create("tensors")
    os.write(memory, engine.encode())
    store.store_tensors(KeepTensors(number, record_of(engine), (memory,)))
    os.close(memory)


def restore_tensors(manager: KeptFds) -> tuple[KeptTensorStore, dict[str, bytes]]:
    """A new store, and the content of the restored memory by engine."""
    store, restored = KeptTensorStore(manager), list[KeptTensorsRecord]()

    def restore(record: KeptTensorsRecord) -> int:
        if record.engine == "refused":
            raise Refused(Code.NOT_REGISTERED, "the engine has no region", record.engine)
        restored.append(record)
        return 100 + len(restored)

    kept = manager.copies()
    found = store.restore_tensors(kept, restore)
    for name in kept:
        if name.startswith("block-table-"):  # the region store closes it
            os.close(kept[name])
    content = {}
    for number, memory in found.items():
        content[restored[number - 101].engine] = os.pread(memory, 99, 0)
        os.close(memory)
    assert restored == [record_of(engine) for engine in content]
    return store, content


def test_stored_tensors_are_found(manager: KeptFds) -> None:
    first = KeptTensorStore(manager)
    for number, engine in enumerate(("a", "b", "c"), 7):
        store_tensors(first, number, engine)
    first.remove_tensors(8)
    first.remove_tensors(99)
    second, found = restore_tensors(manager)
    assert found == {"a": b"a", "c": b"c"}
    second.remove_tensors(101)  # the tensors of "a"
    store_tensors(second, 1, "d")
    assert restore_tensors(manager)[1] == {"c": b"c", "d": b"d"}


def write_label(manager: KeptFds, name: str, data: bytes) -> None:
    os.truncate(manager.kept[f"{name}.label"], 0)
    os.pwrite(manager.kept[f"{name}.label"], data, 0)


def test_unusable_kept_tensors_are_dropped(manager: KeptFds) -> None:
    first = KeptTensorStore(manager)
    reasons = "refused", "no label", "no memory", "bad label", "no UTF-8", "nested"
    for number, engine in enumerate(("a", *reasons)):
        store_tensors(first, number, engine)
    manager.remove_fd("tensors-3.label")
    manager.remove_fd("tensors-4.memory")
    os.pwrite(manager.kept["tensors-5.label"], b"\xff\xff", 0)
    write_label(manager, "tensors-6", b"\x81\xa6engine\xa1\xff")
    write_label(manager, "tensors-7", b"\x81\xa6layout" + b"\x91" * 5000 + b"\xc0")
    manager.store_fd("block-table-1", 0)
    assert restore_tensors(manager)[1] == {"a": b"a"}
    assert sorted(manager.kept) == ["block-table-1", "tensors-1.label", "tensors-1.memory"]
