"""Block tables and records that a daemon finds at its start: a damaged one is dropped.

The daemon restores two tables; the second one is damaged. Then it verifies all blocks. A key is
loadable only at the block that has its bytes, and the first table is restored whole.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from fuzz.case import Change, Run, apply_changes, case_decoder, complete, no_log
from fuzz.served_core import POOL, ServedCore
from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.block_table import UNCHECKED
from kvferry.daemon.core.records import (
    KeptTensorsRecord,
    RegionOwner,
    RegionRecord,
    decode_record,
    encode_record,
)
from kvferry.daemon.core.region import Region
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.persistence.block_checks import check_blocks
from kvferry.daemon.persistence.checksum_client import Purpose
from kvferry.daemon.persistence.kept_tensor_store import LABEL, MEMORY, TENSORS, KeptTensorStore
from kvferry.daemon.persistence.region_store import TABLE, RegionStore
from kvferry.daemon.persistence.table_file import (
    LINES_AT,
    MAGIC,
    OLD_MAGIC,
    TableFile,
    _file_bytes,
    _old_file_bytes,
)
from kvferry.proto import messages as wire
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.results import Outcome
from kvferry.proto.specs import (
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    TensorLayout,
    TensorRef,
)
from kvferry.shm.memfd import sealed_memfd
from support.old_table import old_table

BLOCK, BLOCKS = 4096, 6
LAYOUT = KVLayout((TensorLayout(8, BLOCK, BLOCK),), ((TensorRef(0, BLOCK),),))
FINGERPRINT, OTHER = Fingerprint("llama", BLOCK, key_bytes=4), Fingerprint("other", BLOCK)
COMPOSED: dict[str, Any] = {"pages": ((BLOCK,),), "factor": 1}
OTHER_RECORD = RegionRecord(OTHER.name, 32 * BLOCK, BLOCKS * BLOCK, fingerprint=OTHER, **COMPOSED)
RECORD = RegionRecord(FINGERPRINT.name, BLOCK, BLOCKS * BLOCK, fingerprint=FINGERPRINT, **COMPOSED)
RAW_RECORD = RegionRecord(
    "engine", BLOCK, BLOCKS * BLOCK, layout=LayoutArrays.from_layout(LAYOUT), uid=1000
)
KEPT_RECORD = KeptTensorsRecord(
    "engine", LayoutArrays.from_layout(LAYOUT), 8 * BLOCK, RegionOwner("engine", "engine"), 1000
)
# A larger file is not made.
MAX_FILE_BYTES = 8 << 20
CONTENT = np.random.default_rng(1).integers(0, 256, POOL, np.uint8)


class TableCase(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """record: of the damaged table. kept: of kept tensors. changes: of the file, from the lines on.

    head: of its first page. crc: an error of that of the record. more: bytes of the file beyond
    those that the record needs. is_old: it has the format before.
    """

    record: msgspec.Raw
    kept: msgspec.Raw
    changes: tuple[Change, ...] = ()
    head: tuple[Change, ...] = ()
    crc: int = 0
    more: int = 0
    is_old: bool = False


decode_case = case_decoder(TableCase)


def key_of(number: int, nbytes: int = 4) -> bytes:
    return number.to_bytes(nbytes, "big")


def seeds() -> list[bytes]:
    kept, empty = msgspec.Raw(encode_record(KEPT_RECORD)), msgspec.Raw(b"\xc0")
    named, raw = (msgspec.Raw(encode_record(each)) for each in (RECORD, RAW_RECORD))
    fields = msgspec.msgpack.decode(named)
    lines = TableFile.create(RECORD).lines
    size, version = lines.itemsize, 32

    def other(**changed: Any) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode({**fields, **changed}))

    def word(value: int, nbytes: int = 8) -> bytes:
        return value.to_bytes(nbytes, "little")

    cases = [
        TableCase(named, kept),
        TableCase(raw, kept),
        TableCase(raw, empty, (Change(0, word(1 << 63)), Change(size + 24, b"\1\0\0\0\2"))),
        TableCase(
            named, empty, (Change(version, b"\xff" * 8), Change(size + version + 5, b"\7\7"))
        ),
        TableCase(named, empty, (Change(16, word(5)), Change(size + 24, b"\0\0\0\0\1"))),
        TableCase(named, empty, (Change(size + 37, b"\0\0\0\0"), Change(8, word(0)))),
        TableCase(named, empty, (), (Change(0, MAGIC[:-1] + b"1"),)),
        TableCase(named, empty, (), (Change(8, b"\1"),)),
        TableCase(named, empty, crc=1),
        TableCase(named, empty, more=-8),
        TableCase(other(epoch=7), empty, tuple(Change(n * size + 16, word(7)) for n in range(6))),
        TableCase(other(start=0, nbytes=16 * BLOCK), kept),
        TableCase(other(start=32 * BLOCK), kept),
        TableCase(other(nbytes=-8 * BLOCK), empty),
        TableCase(other(policy="none", threshold=-1), empty),
        TableCase(other(pages=[[1 << 60] * 3, []], factor=-1), empty),
        TableCase(named, empty, is_old=True),
        TableCase(raw, empty, (Change(0, b"\1"),), is_old=True),
    ]
    return [msgspec.msgpack.encode(case) for case in cases]


class TableFds:
    """The descriptor store: what is removed is closed."""

    def __init__(self) -> None:
        self.fds = dict[str, int]()

    def store_fd(self, name: str, descriptor: int) -> None:
        self.fds[name] = os.dup(descriptor)

    def remove_fd(self, name: str) -> None:
        os.close(self.fds.pop(name))


class PoolChecksums:
    """The checksum process: reads the bytes of the pool."""

    window = 4

    async def read_checksums(self, region: Region, blocks: Any, _purpose: Purpose) -> Any:
        nbytes, keys = region.block_bytes, region.table.lines.keys(blocks)
        numbers = blocks.tolist()
        seeds = [xxhash.xxh3_64_intdigest(key) for key in keys] or numbers
        starts = [region.start + number * nbytes for number in numbers]
        return np.array(
            [
                xxhash.xxh3_64_intdigest(CONTENT[at : at + nbytes].tobytes(), seed)
                for at, seed in zip(starts, seeds, strict=True)
            ],
            np.uint64,
        )


def make_table(record: RegionRecord) -> bytes:
    """The file of a table whose blocks are all committed; block n has key n."""
    file = TableFile.create(record)
    lines, keys = file.lines, record.key_bytes
    for number in range(record.num_blocks):
        at = record.start + number * BLOCK
        key = key_of(number, keys) if keys else b"\0"
        seed = xxhash.xxh3_64_intdigest(key) if keys else number
        lines["checksum"][number] = xxhash.xxh3_64_intdigest(
            CONTENT[at : at + BLOCK].tobytes(), seed
        )
        lines["stamp"][number], lines["version"][number] = number + 1, 2 * number + 1
        lines["key"][number] = np.void(key)
        lines["committed"][number] = True
    data = os.pread(file.descriptor, MAX_FILE_BYTES, 0)
    file.close()
    file.unmap()
    return data


class DamagedTables:
    """Makes the files of cases."""

    def __init__(self) -> None:
        self._good = make_table(OTHER_RECORD)
        self._lines = {
            key: make_table(each)[LINES_AT:] for key, each in ((4, RECORD), (0, RAW_RECORD))
        }
        self._old = {4: _old_lines(RECORD), 0: _old_lines(RAW_RECORD)}

    def check_case(self, data: bytes) -> None:
        case = decode_case(data)
        fds, served = TableFds(), ServedCore()
        fds.fds[f"{TABLE}1"] = _memfd(self._good[:LINES_AT], self._good[LINES_AT:])
        fds.fds[f"{TABLE}2"] = self._damaged(case)
        kept = {f"{TENSORS}1{MEMORY}": os.memfd_create("tensors")}
        kept[f"{TENSORS}1{LABEL}"] = _file(bytes(case.kept))
        store = RegionStore(cast(Any, PoolChecksums()), fds, lambda _: None, 0, 5, lends=True)
        try:
            _check_restored(served, store, fds.fds, kept)
        finally:
            store.close()
            for descriptor in fds.fds.values():
                os.close(descriptor)

    def _damaged(self, case: TableCase) -> int:
        """The descriptor of a damaged table, with the size that its record needs."""
        record, key_bytes = bytes(case.record), 4
        try:
            decoded = decode_record(record, RegionRecord)
            nbytes = (_old_file_bytes if case.is_old else _file_bytes)(decoded)
            key_bytes = decoded.key_bytes
        except Exception:  # it is no record: the size is that of a small table
            nbytes = LINES_AT + 4096
        lines = (self._old if case.is_old else self._lines).get(key_bytes, b"")
        nbytes = max(0, min(nbytes + case.more, MAX_FILE_BYTES))
        tail = bytearray(lines[: max(0, nbytes - LINES_AT)].ljust(max(0, nbytes - LINES_AT), b"\0"))
        crc = (zlib.crc32(record) + case.crc) % (1 << 32)
        packed = len(record).to_bytes(4, "little") + crc.to_bytes(4, "little") + record
        magic = OLD_MAGIC if case.is_old else MAGIC
        head = apply_changes(bytearray(magic.ljust(PAGE, b"\0") + packed), case.head)
        return _memfd(bytes(head[:LINES_AT]), bytes(apply_changes(tail, case.changes)), nbytes)


def _old_lines(record: RegionRecord) -> bytes:
    lines = make_table(record)
    new = np.frombuffer(lines, TableFile.create(record).lines.dtype, BLOCKS, LINES_AT)
    fields = "stamp", "checksum", "part", "version", "committed", "key"
    descriptor = old_table(record, {n: tuple(new[n][f] for f in fields) for n in range(BLOCKS)})
    data = os.pread(descriptor, MAX_FILE_BYTES, LINES_AT)
    os.close(descriptor)
    return data


def _memfd(head: bytes, tail: bytes, nbytes: int | None = None) -> int:
    descriptor = sealed_memfd("table", LINES_AT + len(tail) if nbytes is None else nbytes)
    size = os.fstat(descriptor).st_size
    os.pwrite(descriptor, head[:size], 0)
    if size > LINES_AT:
        os.pwrite(descriptor, tail, LINES_AT)
    return descriptor


def _file(data: bytes) -> int:
    descriptor = os.memfd_create("label")
    os.write(descriptor, data)
    return descriptor


def _check_restored(
    served: ServedCore, store: RegionStore, fds: Mapping[str, int], kept: Mapping[str, int]
) -> None:
    core, regions = served.core, list[Region]()

    def restore(found: Any) -> Region:
        regions.append(region := core.restore_region(found))
        served.records.regions[region.owner] = found.record, region
        return region

    served.persist = store.apply_change

    store.restore_regions({name: os.dup(fd) for name, fd in fds.items()}, restore)
    assert regions, "a damaged table prevents that another is restored"
    assert regions[0].table.count(*UNCHECKED) == BLOCKS
    in_order = sorted(regions, key=lambda region: region.start)
    assert all(one.end <= other.start for one, other in pairwise(in_order)), "regions overlap"
    tensors = KeptTensorStore(TensorFds(kept))
    found = tensors.restore_tensors(kept, core.restore_kept_tensors)
    for descriptor in found.values():
        os.close(descriptor)

    def report(reports: list[Report]) -> None:
        for each in reports:
            served.report(each)

    served.perform(core.advance(served.now))
    for region in regions:
        blocks = region.table.find(*UNCHECKED)
        if blocks.size and not region.table.closed:
            checksums = cast(Any, PoolChecksums())
            complete(check_blocks(checksums, report, (region, blocks), Purpose.VERIFY))
    _check_use(served, OTHER, OTHER_RECORD.start, whole=True)
    _check_use(served, FINGERPRINT, RECORD.start, whole=False)
    served.finish()


class TensorFds:
    """A descriptor store whose descriptors are closed by their reader."""

    def __init__(self, fds: Mapping[str, int]) -> None:
        self.fds = fds

    def store_fd(self, name: str, descriptor: int) -> None:
        raise AssertionError(name)

    def remove_fd(self, name: str) -> None:
        assert name in self.fds


def _check_use(served: ServedCore, fingerprint: Fingerprint, start: int, *, whole: bool) -> None:
    """An engine opens the namespace, and loads and stores its keys."""
    session = fingerprint.model
    served.connect(session, session)
    served.receive(session, wire.OpenNamespace(1, fingerprint))
    served.receive(session, wire.AllocateKVCaches(2, LAYOUT))
    while served.mapping:
        served.end_mapping(0, works=True)
    loadable = 0
    for number in range(BLOCKS):
        key = key_of(number, fingerprint.key_bytes)
        served.receive(
            session, wire.Submit(number, KeyLoadStoreSpec((key,)), GPULoadStoreSpec([0]))
        )
        for plan in served.plans:
            (extent,) = plan.extents
            assert extent.host_offsets.tolist() == [start + number * BLOCK], "wrong bytes"
            loadable += 1
        while served.plans:
            served.end_transfer(0, Outcome.DONE)
    assert not whole or loadable == BLOCKS
    new = tuple(key_of(99 + n, fingerprint.key_bytes) for n in range(3))
    served.receive(session, wire.Submit(90, GPULoadStoreSpec([0, 1, 2]), KeyLoadStoreSpec(new)))
    while served.plans:
        served.end_transfer(0, Outcome.DONE)


@contextmanager
def open_tables() -> Iterator[Run]:
    with no_log():
        yield DamagedTables().check_case
