"""The files of a disk tier's root: a damaged one costs its namespace, and is never wrong bytes.

A root has two namespaces. The files of one, and those of the root, are changed while the tier runs
and between two runs, with right and wrong checksums. A changed header has the bytes' own checksum
only by chance: who computes it forges a block, which the threat model allows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from fuzz.case import Change, Run, no_log, pick, steps_decoder
from kvferry.daemon.tiers.base import IN_TIER, Result
from kvferry.daemon.tiers.disk import command
from kvferry.daemon.tiers.disk.hints import HintFile
from kvferry.daemon.tiers.disk.slab import MAX_GENERATION, SlotHeader
from kvferry.daemon.tiers.disk.tier import DiskTier
from kvferry.proto.errors import Refused
from kvferry.testing.tier_subjects import NAMESPACE, DirectSubject, PoolMemory, key_of

OTHER = "b" * 16
BLOCK, SIZE = 4096, 1 << 20
SLOT_BYTES = 2 * BLOCK
# A slab has four slots; NAMESPACE has two slabs.
KEYS, OTHER_KEYS, NEW_KEYS = range(7), range(2), range(8, 12)
MAX_STEPS, MAX_FILE_BYTES = 24, 1 << 40
FILES = "meta", "hints", "slab-00000", "slab-00001", "../format", "../lock"


class Overwrite(msgspec.Struct, array_like=True, tag="overwrite"):
    """A file of FILES has other bytes in place of some."""

    file: int
    change: Change


class Replace(msgspec.Struct, array_like=True, tag="replace"):
    """A file has these bytes and no others."""

    file: int
    data: bytes


class Resize(msgspec.Struct, array_like=True, tag="resize"):
    file: int
    nbytes: int


class Exchange(msgspec.Struct, array_like=True, tag="exchange"):
    """A link, a FIFO, a directory or nothing is in place of a file."""

    file: int
    entry: int


class Create(msgspec.Struct, array_like=True, tag="create"):
    """A file of `nbytes` with any name is in the directory of the namespace."""

    name: str
    nbytes: int


class WriteHint(msgspec.Struct, array_like=True, tag="hint"):
    """A record of the hints, with its CRC. key: the number of one."""

    slot: int
    generation: int
    key: int


class WriteHeader(msgspec.Struct, array_like=True, tag="header"):
    """A header of a slot, with its CRC."""

    slot: int
    namespace: str
    key: bytes
    generation: int
    nbytes: int
    checksum: int


class CopySlot(msgspec.Struct, array_like=True, tag="copy"):
    """A slot has the header or the block of another one."""

    source: int
    target: int
    block: bool


class Use(msgspec.Struct, array_like=True, tag="use"):
    """A new process (0), maintenance (1), reads (2), writes (3), a drop (4), a list (5)."""

    kind: int


Step: TypeAlias = (
    Overwrite | Replace | Resize | Exchange | Create | WriteHint | WriteHeader | CopySlot | Use
)
decode_steps = steps_decoder(Step)


def seeds() -> list[bytes]:
    restart, maintain, read, write, drop, listed = map(Use, range(6))
    meta = b'{"block_bytes":4096,"key_bytes":12,"slots_per_slab":%d,"model":""}'
    cases: list[Sequence[Step]] = [
        [restart, maintain, read, write, read, listed],
        *((Exchange(n, n), restart, read, write, read, listed) for n in range(4)),
        *((Exchange(n, 3), restart, maintain, read, write) for n in range(4)),
        *((Overwrite(n, Change(5, b"\xff" * 9)), restart, read, listed) for n in range(6)),
        *((Resize(n, 5000), maintain, read, restart, read, write) for n in range(4)),
        [Replace(0, meta % 8), restart, read, write],
        [Replace(0, meta % 1), restart, read, write, listed],
        [Replace(0, b'{"block_bytes":1,"key_bytes":64,"slots_per_slab":9}'), restart, write],
        [Replace(0, meta % (1 << 20)), listed, restart, write, read],
        [Create("slab-00009", 4 * SLOT_BYTES), restart, maintain, read, write, listed],
        [Create("slab-9", 4 * SLOT_BYTES), Create("x", 3), restart, read, write, listed],
        [WriteHint(0, 5, 3), WriteHint(1, MAX_GENERATION, 3), restart, read, write, read],
        [Exchange(1, 3), WriteHeader(1, NAMESPACE, key_of(0), 9, BLOCK, 1), restart, maintain],
        [WriteHeader(2, OTHER, key_of(2), 1 << 63, 1, 0), read, restart, read, drop, write],
        [CopySlot(1, 2, False), CopySlot(3, 4, True), read, restart, read, drop, restart],
    ]
    return [msgspec.msgpack.encode(case) for case in cases]


class DamagedDisk(DirectSubject):
    """A tier with a copy of an undamaged root. `reopen` is a new process after SIGKILL."""

    tier: DiskTier

    def __init__(self, pool: PoolMemory, root: Path, outside: Path) -> None:
        self._root, self._outside, self._namespace = root, outside, root / NAMESPACE
        self._root_is_damaged = self._takes_room = False
        super().__init__(pool, DiskTier(str(root), SIZE))

    def kill(self) -> None:
        for store in (*self.tier._stores.values(), *self.tier._trash):
            store.close()
        os.close(self.tier._root_lock)

    def perform(self, step: Step) -> None:
        match step:
            case Use(kind):
                self._use(kind % 6)
            case Create(name, nbytes):
                if "/" not in name and name not in ("", ".", "..") and "\0" not in name:
                    self._resize(self._namespace / name[:200], nbytes)
            case _:
                with suppress(OSError):
                    self._damage(step)

    def check_files(self) -> None:
        """Nothing outside of the root has changed."""
        assert self._outside.read_bytes() == b"outside"

    def _use(self, kind: int) -> None:
        match kind:
            case 0:
                self.kill()
                self._open()
            case 1:
                self.tier.maintain()
            case 2:
                self._check_reads()
            case 3:
                for number, result in zip(NEW_KEYS, self.put(NEW_KEYS), strict=True):
                    assert result is not Result.OK or self.contains([number]) == [True]
                self.fetch(NEW_KEYS)
            case 4:
                with suppress(OSError):
                    self.tier.drop(NAMESPACE)
            case _:
                self._list()

    def _open(self) -> None:
        try:
            self.tier = DiskTier(str(self._root), SIZE)
        except Refused:
            assert self._root_is_damaged, "a damaged namespace prevents the start"
            raise
        # A slab of a large part of the tier takes the room of others, as it would undamaged.
        store = self.tier._stores.get(NAMESPACE)
        self._takes_room |= store is not None and SIZE // 8 < store.meta.slab_bytes <= SIZE

    def _check_reads(self) -> None:
        """`fetch` compares the bytes of what it finds."""
        found = set(self.fetch(OTHER_KEYS, OTHER))
        assert found == {Result.OK} or self._takes_room, "another namespace is damaged"
        missing = [n for n in KEYS if self.fetch([n])[0] is not Result.OK]
        for number in missing:
            if self.put([number])[0] in IN_TIER:
                self.fetch([number])

    def _list(self) -> None:
        listed = {each.namespace for each in command.list_namespaces(self._root)}
        self.kill()
        try:
            verified = command.verify(self._root, lambda _: None)
        finally:
            self._open()
        assert {each.namespace for each in verified} == listed
        good = {each.namespace for each in verified if each.good}
        assert OTHER in good or self._takes_room

    def _damage(self, step: Step) -> None:
        """May raise OSError: something else is at the name of the file."""
        match step:
            case WriteHint(slot, generation, key):
                hints = HintFile(self._namespace / "hints", 12)
                generation = max(-(1 << 63), min((1 << 63) - 1, generation))
                hints.write(slot % 64, generation, key_of(key % 16))
                hints.close()
            case WriteHeader(slot, namespace, key, generation, nbytes, checksum):
                first, second, third = (n % (1 << 64) for n in (generation, nbytes, checksum))
                header = SlotHeader(namespace[:250], key[:250], first, second, third)
                self._write_slot(slot, 0, header.encode())
            case CopySlot(source, target, block):
                path, at = self._slot(source)
                data = path.read_bytes()[at : at + SLOT_BYTES]
                self._write_slot(target, BLOCK * block, data[BLOCK:] if block else data[:BLOCK])
            case Use() | Create():
                raise AssertionError(step)
            case _:
                self._damage_file(step)

    def _damage_file(self, step: Overwrite | Replace | Resize | Exchange) -> None:
        name = pick(FILES, step.file)
        path = self._namespace / name
        self._root_is_damaged |= "/" in name
        match step:
            case Overwrite(_, change):
                _write(path, change.offset % max(1, path.stat().st_size), change.data[:SLOT_BYTES])
            case Replace(_, data):
                path.write_bytes(data[:100_000])
            case Resize(_, nbytes):
                self._resize(path, nbytes)
            case Exchange(_, entry):
                path.unlink()
                match entry % 4:
                    case 0:
                        path.symlink_to(self._outside)
                    case 1:
                        os.mkfifo(path)
                    case 2:
                        path.mkdir()

    def _resize(self, path: Path, nbytes: int) -> None:
        with suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
            os.truncate(path, nbytes % MAX_FILE_BYTES)

    def _slot(self, number: int) -> tuple[Path, int]:
        slab, at = divmod(number % 8, 4)
        return self._namespace / f"slab-0000{slab}", at * SLOT_BYTES

    def _write_slot(self, number: int, offset: int, data: bytes) -> None:
        path, at = self._slot(number)
        _write(path, at + offset, data)


def _write(path: Path, at: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.pwrite(descriptor, data, at)
    finally:
        os.close(descriptor)


class DiskRoots:
    """Copies of one undamaged root, below a folder."""

    def __init__(self, pool: PoolMemory, folder: Path) -> None:
        self._pool, self._original, self._root = pool, folder / "original", folder / "root"
        self._outside = folder / "outside"
        self._outside.write_bytes(b"outside")
        disk = DirectSubject(pool, DiskTier(str(self._original), SIZE))
        for numbers, namespace in ((KEYS, NAMESPACE), (OTHER_KEYS, OTHER)):
            for number in numbers:
                assert disk.put([number], namespace) == [Result.OK]
        disk.close()

    def check_steps(self, data: bytes) -> None:
        steps = decode_steps(data)[:MAX_STEPS]
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._original, self._root)
        self._outside.write_bytes(b"outside")
        disk = DamagedDisk(self._pool, self._root, self._outside)
        try:
            for step in steps:
                disk.perform(step)
        except Refused:
            disk.check_files()
            return
        disk.check_files()
        disk.kill()


@contextmanager
def open_root() -> Iterator[Run]:
    in_memory = Path("/dev/shm")  # writes to a disk would be most of the time
    with ExitStack() as stack:
        stack.enter_context(no_log())
        folder = tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None)
        pool = PoolMemory(BLOCK)
        stack.callback(pool.files.close)
        yield DiskRoots(pool, Path(stack.enter_context(folder))).check_steps
