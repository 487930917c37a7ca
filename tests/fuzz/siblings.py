"""A hostile sibling: what it answers, and the bytes of its table, its page and its chunks.

The daemon maps them or says why not. What it finds then lies in the mapped memory and has the key
that was searched, and nothing stays mapped or open after the end.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from fuzz.case import Change, Run, apply_changes, case_decoder, no_log, pick
from kvferry.daemon.core.block_lines import line_type
from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.daemon.persistence.table_file import LINES_AT
from kvferry.daemon.siblings.peers import SiblingPeer
from kvferry.daemon.siblings.windows import MappedWindows
from kvferry.proto.codec import decode_daemon_message, encode
from kvferry.proto.errors import Code, Gone, KVFerryError, Refused
from kvferry.proto.lending import BorrowMemory, MemoryLent
from kvferry.shm.memfd import sealed_memfd
from support.descriptors import count_memfds
from support.lent_region import BLOCK, FINGERPRINT, LentRegion, key
from support.time_limits import TIMEOUT

CHUNK, BLOCKS, SIBLING = 1 << 16, 36, Path("/run/sibling")
FIRST, START = 1, CHUNK + 3 * BLOCK
# Files of a case: the table, the page, and the chunks.
TABLE, PAGE_FILE, CHUNKS = 0, 1, (2, 3, 4)
MAX_FILE_BYTES, MAX_REPLIES, MAX_ASKED = 4 << 20, 8, 100
NIL = msgspec.Raw(b"\xc0")


class HostileFile(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A descriptor. kind: one of the honest files. sealed: see KINDS. nbytes: more than it has."""

    kind: int
    changes: tuple[Change, ...] = ()
    sealed: int = 0
    nbytes: int = 0
    # Of the table, in place of the honest record, with its CRC; nil: the honest one.
    record: msgspec.Raw = NIL


class LentCase(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """replies: to BorrowMemory, in order. files: behind the handles, by number. later: changes of
    the files while they are mapped, as (file, offset, data). keys: that are searched, too."""

    replies: tuple[msgspec.Raw, ...]
    files: tuple[HostileFile, ...]
    later: tuple[tuple[int, int, bytes], ...] = ()
    keys: tuple[bytes, ...] = ()


decode_case = case_decoder(LentCase)


def seeds() -> list[bytes]:
    described = MemoryLent(1, 5, CHUNK, START, FIRST, FIRST + 3, keys=4)
    first = msgspec.structs.replace(described, handles=(2, 3, 4), table=0, page=1)
    two = msgspec.structs.replace(described, handles=(2, 3), table=0, page=1)
    replies = [encode(described), encode(first)]
    in_parts = [encode(described), encode(two), encode(msgspec.structs.replace(two, handles=(4,)))]
    honest = tuple(HostileFile(kind) for kind in range(5))
    record = msgspec.Raw(msgspec.msgpack.encode({"name": "a", "start": 0, "nbytes": 1 << 40}))
    size = line_type(8).itemsize

    def table(**changed: Any) -> tuple[HostileFile, ...]:
        return (HostileFile(TABLE, **changed), *honest[1:])

    bucket = LINES_AT + -(-size * BLOCKS // 128) * 128
    cases = [
        (replies, honest),
        (in_parts, honest),
        ([encode(MemoryLent(1))], honest),
        ([encode(described), encode(two)], honest),
        ([encode(described), encode(msgspec.structs.replace(first, region=6))], honest),
        ([encode(msgspec.structs.replace(described, start=0)), replies[1]], honest),
        (replies, table(changes=(Change(0, b"other"),))),
        (replies, table(changes=(Change(LINES_AT + 32, b"\0" * 4),))),
        (replies, table(changes=(Change(bucket, b"\xff" * 128),))),
        (replies, table(changes=(Change(bucket + 4, b"\xff\xff\xff\xff"),))),
        (replies, table(record=record)),
        (replies, table(nbytes=-128)),
        (replies, table(sealed=1)),
        (replies, (*honest[:2], HostileFile(2, (), 0, -8), *honest[3:])),
        (replies, (honest[0], HostileFile(PAGE_FILE, (Change(0, b"\7"),)), *honest[2:])),
    ]
    later = (0, LINES_AT + 32, b"\2\0\0\0"), (1, 0, b"\7")
    encoded = [LentCase(tuple(map(msgspec.Raw, r)), f, (), (key(3),)) for r, f in cases]
    encoded += [msgspec.structs.replace(encoded[0], later=(change,)) for change in later]
    return [msgspec.msgpack.encode(case) for case in encoded]


class CheckedRegistrar:
    """Registers nothing."""

    numa_node: int | None = None

    def __init__(self) -> None:
        self.pinned = set[int]()

    def pin(self, address: int, nbytes: int, *, writable: bool = True) -> None:
        assert nbytes > 0
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


class HostileClient:
    """The session at the sibling: satisfies PeerClient as far as SiblingPeer uses it."""

    def __init__(self, replies: list[MemoryLent], files: list[int]) -> None:
        self._replies, self._files, self.asked = replies, files, 0
        self.sent = set[int]()
        self.connected = True

    async def borrow_memory(self, contents: NamespaceContents, first: int | None = None) -> Any:
        encode(BorrowMemory(1, contents.namespace, contents.composition, first))
        self.asked += 1
        if self.asked > MAX_ASKED:
            raise Gone(Code.DAEMON_GONE, "the sibling has ended")
        return self._replies[min(self.asked, len(self._replies)) - 1]

    async def receive_fd(self, handle: int) -> int:
        self.sent.add(file := pick(self._files, handle))
        return os.dup(file)


class HostileSiblings:
    """The own daemon, and the honest files of a sibling."""

    def __init__(self, stack: ExitStack) -> None:
        self._runner = stack.enter_context(asyncio.Runner())
        self._registrar = CheckedRegistrar()
        self._pool = HostPool(CHUNK, CHUNK)
        stack.callback(self._pool.close, self._registrar)
        self._pool.ready_bytes = self._pool.nbytes
        stack.callback(setattr, self._pool, "ready_bytes", 0)
        region = LentRegion(START, BLOCKS)
        region.store(*range(BLOCKS))
        composition = region.file.record.composition
        self._contents = NamespaceContents(FINGERPRINT.name, composition, 0, BLOCK, 1)
        files = region.file.descriptor, region.page.descriptor
        self._honest = [os.pread(file, MAX_FILE_BYTES, 0) for file in files]
        self._honest += [bytes([n]) * size for n, size in ((2, CHUNK), (3, CHUNK), (4, CHUNK // 2))]
        region.close()

    def check_case(self, data: bytes) -> None:
        case = decode_case(data)
        self._runner.run(self._check(case))
        end, generation = time.monotonic() + TIMEOUT, 1
        while count_memfds("hostile"):  # the traceback of an error has mappings, in two threads
            gc.collect(generation)
            generation = 2
            assert time.monotonic() < end, "descriptors are left open"
        assert not self._registrar.pinned

    async def _check(self, case: LentCase) -> None:
        replies = list[MemoryLent]()
        for raw in case.replies[:MAX_REPLIES]:
            try:
                reply = decode_daemon_message(bytes(raw))
            except Refused:
                continue
            if isinstance(reply, MemoryLent):
                replies.append(reply)
        if not replies or not case.files:
            return
        windows = MappedWindows(cast(Any, self._registrar), self._pool)
        windows.uses_noted = lambda: None
        peer = SiblingPeer(SIBLING, windows, lambda: [self._contents], b"")
        files = [self._make_file(file) for file in case.files[:8]]
        try:
            client = HostileClient(replies, files)
            try:
                await peer._ask(cast(Any, client))
            except KVFerryError as error:
                peer._lose(error)
            if windows.mapped_bytes(str(SIBLING)):
                for file in client.sent:  # else a read could end the daemon
                    assert fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            self._check_found(windows, case, files)
            encode_status(peer)
        finally:
            for file in files:
                os.close(file)
            peer._expire()
            await windows.wait_unmapped()

    def _make_file(self, file: HostileFile) -> int:
        memory = bytearray(pick(self._honest, file.kind))
        size = max(0, min(len(memory) + file.nbytes, MAX_FILE_BYTES))
        if bytes(file.record) != bytes(NIL) and file.kind % 5 == TABLE:
            data = bytes(file.record)[: PAGE * 16]
            head = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
            memory[PAGE : PAGE + 8 + len(data)] = head + data
        memory = apply_changes(memory, file.changes)
        if file.sealed % 3 == 0:
            descriptor = sealed_memfd("hostile", size)
        else:
            descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            if file.sealed % 3 == 2:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(descriptor, memory[:size], 0)
        return descriptor

    def _check_found(self, windows: MappedWindows, case: LentCase, files: list[int]) -> None:
        own = self._contents
        keys = [key(n) for n in range(BLOCKS)]
        keys += [each for each in case.keys[:64] if len(each) == 8]
        rows = windows.find(own, keys)
        found = np.flatnonzero(rows[0] >= 0)
        for window in windows._windows.values():
            low, high = window.memory.address, window.memory.address + window.memory.nbytes
            at = self._pool.address + rows[1, found]
            assert ((at >= low) & (at + BLOCK <= high)).all(), "beyond the mapped memory"
            blocks = rows[2, found]
            assert ((blocks >= 0) & (blocks < window.table.num_blocks)).all()
        assert (rows[3, found] % 2 == 1).all(), "a block without contents"
        mine = rows[:, found]
        windows.hold(mine)
        for file, offset, data in case.later[:16]:
            descriptor = pick(files, file)
            size = os.fstat(descriptor).st_size
            os.pwrite(descriptor, data[: max(0, size - offset % (size + 1))], offset % (size + 1))
        assert windows.unchanged(mine).shape == (found.size,)
        windows.find(own, keys)
        windows.note_uses(own, mine, [keys[n] for n in found.tolist()])
        list(windows.take_uses(str(SIBLING)))
        windows.release(mine, BLOCK)


def encode_status(peer: SiblingPeer) -> None:
    """The status of a sibling can be sent."""
    msgspec.msgpack.encode(peer.status())


@contextmanager
def open_siblings() -> Iterator[Run]:
    with no_log(), ExitStack() as stack:
        yield HostileSiblings(stack).check_case
