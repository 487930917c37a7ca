"""What the disk tier finds at start: whether it can trust its indexes, and what they contain.

A process that dies leaves its writes to the kernel, so indexes are trusted if the root was closed
cleanly, or if the system has not booted since. Otherwise a power cut may have damaged them, and
they are rebuilt from the slot headers. The same happens if the tier's process dies again and again,
since a damaged index may be the reason.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from kvferry.daemon.tiers.disk.index import INDEX, Entry, Index
from kvferry.daemon.tiers.disk.namespace_store import NamespaceStore
from kvferry.daemon.tiers.disk.slab import SlabTruncatedError
from kvferry.daemon.tiers.durable_files import write_file

STATE = "state"
# In a namespace's directory, as long as its index is being rebuilt.
REBUILDING = "rebuilding"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Starts in a row without a clean end, until the indexes are suspected.
MAX_STARTS = 3
# Entries handled at a time, between other work.
CHUNK = 2048

log = structlog.get_logger()


class RootState(msgspec.Struct, frozen=True):
    """starts: in a row, since the last clean end or long run."""

    boot_id: str
    clean: bool
    starts: int = 0


def read_state(root: Path) -> RootState | None:
    """None if there is none, or one that cannot be decoded. Raises OSError."""
    try:
        return msgspec.json.decode((root / STATE).read_bytes(), type=RootState)
    except (FileNotFoundError, IsADirectoryError, msgspec.MsgspecError):
        return None


def begin(root: Path) -> str:
    """Note the start. Returns why indexes must be rebuilt; empty if they can be trusted."""
    boot_id = BOOT_ID.read_text().strip()
    before = read_state(root)
    if before is None:
        torn = (root / STATE).exists()
        before = RootState("" if torn else boot_id, clean=not torn)
    starts = 0 if before.clean else before.starts
    _write_state(root, RootState(boot_id, False, starts + 1))
    if before.clean:
        return ""
    if before.boot_id != boot_id:
        return "the system ended without closing the tier"
    if starts >= MAX_STARTS:
        return f"the tier ended unexpectedly {starts} times in a row"
    return ""


def note_state(root: Path, *, clean: bool) -> None:
    """Note that the tier was closed cleanly, or that it runs well."""
    _write_state(root, RootState(BOOT_ID.read_text().strip(), clean))


def _write_state(root: Path, state: RootState) -> None:
    """Replace the state; in place if the file system is full. Raises OSError."""
    data = msgspec.json.encode(state)
    try:
        write_file(root / STATE, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Torn by a power cut it cannot be decoded, so that indexes are rebuilt.
        try:
            descriptor = os.open(root / STATE, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise error from None
        try:
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_index(directory: Path) -> None:
    """Remove an index, which `load_store` rebuilds, also if this process ends before."""
    (directory / REBUILDING).touch(0o600)
    for name in (INDEX, f"{INDEX}-lock"):
        with suppress(FileNotFoundError):
            (directory / name).unlink()


def is_rebuilding(directory: Path) -> bool:
    """Whether `load_store` fills the index from the slot headers."""
    return (directory / REBUILDING).exists()


def load_store(store: NamespaceStore) -> None:
    """Fill the slot table from the index, or both from the slot headers.

    Runs beside fetches. Raises OSError and lmdb.Error.
    """
    rebuild = is_rebuilding(store.directory)
    if rebuild:
        for found in _chunks(_headers(store)):
            with store.lock:
                _insert_newest(store.catalog.index, found)
        (store.directory / REBUILDING).unlink(missing_ok=True)  # it may have been dropped
    after = b""
    while True:
        with store.lock:
            entries = store.catalog.index.read_from(after, CHUNK)
            if entries:
                store.catalog.restore(entries)
                after = entries[-1][0]
                continue
            store.catalog.end_restore()
            store.loaded = True
        break
    log.info(
        "disk tier loaded",
        namespace=store.name,
        blocks=store.catalog.table.used,
        slots=store.slabs.num_slots,
        source="slot headers" if rebuild else "index",
    )


def _headers(store: NamespaceStore) -> Iterator[tuple[bytes, Entry]]:
    for number in store.slabs.numbers:
        for slot in store.slabs.slots_of(number):
            slab, at = store.slabs.place(slot)
            try:
                header = slab.read_header(at)
            except (OSError, SlabTruncatedError):
                continue
            meta = store.meta
            if (
                header is not None
                and header.namespace == store.name
                and header.nbytes == meta.block_bytes
                and len(header.key) == meta.key_bytes
            ):
                yield header.key, Entry(slot, header.generation)


def _chunks(
    found: Iterator[tuple[bytes, Entry]],
) -> Iterator[list[tuple[bytes, Entry]]]:
    chunk: list[tuple[bytes, Entry]] = []
    for each in found:
        chunk.append(each)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    yield chunk


def _insert_newest(index: Index, found: Sequence[tuple[bytes, Entry]]) -> None:
    """Insert entries. If a key occurs twice, the one with the larger generation wins."""
    newest: dict[bytes, Entry] = {}
    for key, entry in found:
        if key not in newest or newest[key].generation < entry.generation:
            newest[key] = entry
    known = index.find(list(newest))
    index.insert(
        (key, entry)
        for (key, entry), before in zip(newest.items(), known, strict=True)
        if before is None or before.generation < entry.generation
    )
