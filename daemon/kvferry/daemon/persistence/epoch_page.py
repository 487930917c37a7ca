"""The file with the epochs of all namespaces, which all daemons of a host and user map.

    word 0      MAGIC
    words 1, 2  the identity of the file, random
    word 3      changes: grows after each change of an epoch
    word 4      number of slots in use
    word 5      the floor: the epoch of namespaces without a slot
    PAGE        slots of four words: name, epoch, unpublished epoch, label

A namespace gets a slot with its first reset. A reset writes the epoch as one aligned word, which
every daemon sees at once, whether it runs, is stopped or starts later. If there is no free slot,
the reset raises the floor: then all namespaces without a slot lose their blocks, and none keeps an
old one. Names and labels are hashes; namespaces with equal hashes lose their blocks together.

Writers hold a lock on the file. A writer that is killed leaves a slot that is not counted yet, or
an epoch without its change of `changes`, so all daemons compare the epochs four times per second,
too. No reset was confirmed then, and its label is not there yet. The file is allocated completely
before it is mapped, so no access can fail unless somebody shortens it. Event loop only, except
`sync`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from kvferry.daemon.core.actions import Report
from kvferry.daemon.core.epochs import NEVER_RESET
from kvferry.daemon.core.tier_actions import EpochsSynced
from kvferry.daemon.directories import sync_directory
from kvferry.daemon.memory.foreign_memory import SharedWords
from kvferry.daemon.memory.shared_memory import PAGE
from kvferry.proto.errors import Code, Refused
from kvferry.proto.lending import PAGE_IDENTITY_BYTES

NAME = "epochs"
# The last character is the version of the format.
MAGIC = int.from_bytes(b"kvepoch1", "little")
MAX_SLOTS = 4096
SLOT_WORDS = 4
NBYTES = PAGE + MAX_SLOTS * SLOT_WORDS * 8
# Bits of an epoch below its microseconds.
RANDOM_BITS = 10
END_OF_EPOCHS = 1 << 62
# An epoch whose time is so far ahead of the clock is damaged, in microseconds.
MAX_AHEAD = 24 * 3600 * 1_000_000
_MAGIC, _IDENTITY, _CHANGES, _COUNT, _FLOOR, _FIRST_SLOT = 0, 1, 3, 4, 5, PAGE // 8

log = structlog.get_logger()


class EpochPage:
    """The epochs in the file `epochs` of a directory, which is created. Satisfies Epochs.

    identity: of the file: daemons that have another file do not see its resets.

    Raises Refused (BAD_CONFIG) if the file cannot be used, and OSError.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            self._check_owner()
            with self._locked():
                self._map, self._words = self._map_file()
            sync_directory(directory)
        except BaseException:
            os.close(self._descriptor)
            raise
        words = range(_IDENTITY, _IDENTITY + PAGE_IDENTITY_BYTES // 8)
        self.identity = b"".join(self._words.read(at).to_bytes(8, "little") for at in words)
        # The first word of each namespace's slot, by its hash, and how many slots were read.
        self._slots, self._read = dict[int, int](), 0

    @property
    def changes(self) -> int:
        return self._words.read(_CHANGES)

    def current(self, namespace: str) -> int:
        slot = self._find_slot(namespace)
        return self._words.read(_FLOOR if slot is None else slot + 1)

    def draw(self, namespace: str, label: str = "", above: int = 0) -> int:
        if not is_plausible(above):
            log.warning("damaged epoch ignored", namespace=namespace, epoch=above)
            return self.current(namespace)
        with self._locked():
            labelled = _hash_of(label) if label else 0
            slot, words = self._find_slot(namespace), self._words
            if labelled and slot is not None and words.read(slot + 3) == labelled:
                return words.read(slot + 1)
            epoch = next_epoch(max(self.current(namespace), above))
            if slot is None:
                slot = self._add_slot(namespace)
            if slot is None:
                words.write(_FLOOR, epoch)
            else:
                words.write(slot + 3, 0)  # first: the last reset is another one
                words.write(slot + 2, epoch)  # before it: nobody may miss that it is unpublished
                words.write(slot + 1, epoch)
            self._note_change(words)
            if slot is not None:
                words.write(slot + 3, labelled)  # last: a reset with it is confirmed
        if slot is None:
            log.warning("no free slot for an epoch; other namespaces lose their blocks, too")
        return epoch

    def raise_to(self, namespace: str, epoch: int) -> None:
        if epoch <= self.current(namespace):
            return
        if not is_plausible(epoch):
            log.warning("damaged epoch ignored", namespace=namespace, epoch=epoch)
            return
        with self._locked():
            if epoch <= self.current(namespace):
                return
            slot = self._find_slot(namespace)
            if slot is None:
                slot = self._add_slot(namespace)
            if slot is not None:
                self._words.write(slot + 3, 0)  # first: the last reset is another one
            self._words.write(_FLOOR if slot is None else slot + 1, epoch)
            self._note_change(self._words)

    def is_unpublished(self, namespace: str) -> bool:
        # Without a slot it counts as published: the larger epoch of two hosts wins. Otherwise each
        # host would draw one above the other's, for ever.
        slot = self._find_slot(namespace)
        return slot is not None and self._words.read(slot + 2) == self._words.read(slot + 1)

    def mark_published(self, namespace: str, epoch: int) -> None:
        slot = self._find_slot(namespace)
        if slot is None or self._words.read(slot + 2) != epoch:
            return
        with self._locked():
            if self._words.read(slot + 2) == epoch:
                self._words.write(slot + 2, NEVER_RESET)

    def sync(self) -> None:
        """Make all epochs durable. Blocks; any thread. Raises OSError."""
        os.fdatasync(self._descriptor)  # mmap.flush would hold the GIL

    def find_problem(self) -> str | None:
        """Why daemons that start now do not see this file; else None. Called once a second."""
        try:
            found = self._path.stat()
        except OSError as error:
            return f"{self._path} cannot be read ({error.strerror}); restart all daemons"
        same = os.path.samestat(found, os.fstat(self._descriptor))
        return None if same else f"{self._path} was replaced; restart all daemons"

    def close(self) -> None:
        os.close(self._descriptor)

    def _find_slot(self, namespace: str) -> int | None:
        """The first word of the slot of a namespace, if it has one."""
        if (count := min(self._words.read(_COUNT), MAX_SLOTS)) > self._read:
            for number in range(self._read, count):
                at = _FIRST_SLOT + number * SLOT_WORDS
                self._slots.setdefault(self._words.read(at), at)
            self._read = count
        return self._slots.get(_hash_of(namespace))

    def _add_slot(self, namespace: str) -> int | None:
        """A slot for a namespace that has none; None if all are in use. With the lock."""
        count = self._words.read(_COUNT)
        if count >= MAX_SLOTS:
            return None
        at = _FIRST_SLOT + count * SLOT_WORDS
        for place, value in enumerate((_hash_of(namespace), self._words.read(_FLOOR), 0, 0)):
            self._words.write(at + place, value)
        self._words.write(_COUNT, count + 1)
        return self._find_slot(namespace)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of writers, for microseconds."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _check_owner(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise self._wrong_file("is not a regular file")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            message = (
                f"{self._path} belongs to user {found.st_uid} with mode "
                f"{found.st_mode & 0o7777:04o}; give it to user {os.geteuid()} alone (chown, chmod "
                "600), or set another state_dir"
            )
            raise Refused(Code.BAD_CONFIG, message, str(self._path))

    def _map_file(self) -> tuple[mmap.mmap, SharedWords]:
        """Map the file; a new one is filled first. With the lock."""
        size = os.fstat(self._descriptor).st_size
        if size not in (0, NBYTES):
            raise self._wrong_file(f"has {size} bytes, not {NBYTES}")
        os.posix_fallocate(self._descriptor, 0, NBYTES)
        memory = mmap.mmap(self._descriptor, NBYTES)
        words = SharedWords(memory, 0, NBYTES // 8)
        found = words.read(_MAGIC)
        if found == 0:
            for at in range(_IDENTITY, _IDENTITY + PAGE_IDENTITY_BYTES // 8):
                words.write(at, secrets.randbits(64))
            words.write(_MAGIC, MAGIC)
        elif found != MAGIC:
            raise self._wrong_file(f"begins with {found:016x}, not {MAGIC:016x}")
        self._repair(words)
        return memory, words

    def _repair(self, words: SharedWords) -> None:
        """Replace damaged epochs by new ones: their namespaces lose their blocks."""
        count = min(words.read(_COUNT), MAX_SLOTS)
        words.write(_COUNT, count)
        places = [_FLOOR, *(_FIRST_SLOT + slot * SLOT_WORDS + 1 for slot in range(count))]
        for at in places:
            if not is_plausible(words.read(at)):
                log.warning("damaged epoch replaced", file=str(self._path), epoch=words.read(at))
                words.write(at, next_epoch(NEVER_RESET))
                self._note_change(words)

    def _note_change(self, words: SharedWords) -> None:
        """After an epoch. With the lock."""
        words.count_up(_CHANGES)

    def _wrong_file(self, what: str) -> Refused:
        message = (
            f"{self._path} {what}: it is no file of this build; delete it while no daemon runs"
        )
        return Refused(Code.BAD_CONFIG, message, str(self._path))


class EpochSync:
    """Makes epochs durable on another thread. report: called with EpochsSynced."""

    def __init__(self, page: EpochPage, report: Callable[[list[Report]], None]) -> None:
        self._page, self._report = page, report

    def start(self) -> None:
        """Begin a sync. Event loop only; the core begins one at a time."""
        syncing = asyncio.get_running_loop().run_in_executor(None, self._page.sync)
        syncing.add_done_callback(self._end)

    def _end(self, syncing: asyncio.Future[None]) -> None:
        """Of the daemons of this host, all have the epoch; only a power cut could undo it."""
        if not syncing.cancelled() and (error := syncing.exception()) is not None:
            log.warning("epochs not synced", reason=str(error))
        self._report([EpochsSynced(now=time.monotonic())])


def open_epoch_page(directory: Path) -> EpochPage:
    """Raises Refused (BAD_CONFIG) with what to change."""
    try:
        return EpochPage(directory)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        change = "free disk space" if full else f"create it for user {os.geteuid()} (mode 700)"
        message = (
            f"state_dir {directory} cannot be used: {error.strerror}; {change}, or name another"
        )
        raise Refused(Code.BAD_CONFIG, message, str(directory)) from error


def next_epoch(known: int) -> int:
    """An epoch above a known one."""
    microseconds = max(time.time_ns() // 1000, (known >> RANDOM_BITS) + 1)
    return microseconds << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


def is_plausible(epoch: int) -> bool:
    """Whether a number can be an epoch: it is not damaged."""
    latest = time.time_ns() // 1000 + MAX_AHEAD
    return 0 <= epoch < END_OF_EPOCHS and epoch >> RANDOM_BITS <= latest


def _hash_of(name: str) -> int:
    """Not zero."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
