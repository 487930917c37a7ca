"""Lists, verifies or clears the root of a disk tier; `kvferry tier` runs it as a process.

    python -m kvferry.daemon.tiers.disk.command list|verify|check-unused|clear ROOT [NAMESPACE]

Prints a JSON object per line: progress, then the result, or an error. `list` may run while a daemon
uses the root. `verify` changes nothing: a block that it finds bad is a miss when it is fetched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.base import block_checksum
from kvferry.daemon.tiers.block_memory import BounceBuffer
from kvferry.daemon.tiers.disk.hints import FREE, HINTS, UNKNOWN, HintFile, Hints
from kvferry.daemon.tiers.disk.meta import StoreMeta, read_meta
from kvferry.daemon.tiers.disk.root_files import (
    LOCK,
    foreign_entry,
    lock_root,
    move_to_trash,
    namespace_directories,
    remove_trash,
)
from kvferry.daemon.tiers.disk.slab import SlabFile, SlabTruncatedError
from kvferry.daemon.tiers.disk.slabs import slab_number
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError, Refused

# Seconds between two lines of progress.
REPORT_EVERY = 0.2
SLABS = "slab-*"


class NamespaceFiles(msgspec.Struct):
    """A namespace on disk. blocks: None if its files cannot be read. model: empty if not known.

    problem: why blocks are not counted, or not all of them.
    """

    namespace: str
    model: str
    block_bytes: int
    blocks: int | None
    allocated_bytes: int
    # Seconds since the epoch; 0 if nothing was written.
    last_written: float
    problem: str = ""


class Verified(msgspec.Struct):
    """Blocks of a namespace: `bad` ones are torn, overwritten, or cannot be read."""

    namespace: str
    good: int = 0
    bad: int = 0
    problem: str = ""


class Progress(msgspec.Struct):
    done_bytes: int
    total_bytes: int


def list_namespaces(root: Path) -> list[NamespaceFiles]:
    """Raises Refused (BAD_CONFIG) if this is not the root of a disk tier, and OSError."""
    _check_root(root)
    found = []
    for directory in namespace_directories(root):
        entries = [path.lstat() for path in directory.iterdir()]
        written = [path.lstat().st_mtime for path in directory.glob(SLABS)]
        described = NamespaceFiles(
            directory.name,
            model="",
            block_bytes=0,
            blocks=None,
            allocated_bytes=sum(each.st_blocks * 512 for each in entries),
            last_written=max(written, default=0.0),
        )
        try:
            meta = read_meta(directory)
            described.block_bytes, described.model = meta.block_bytes, meta.model
            generations = [
                generation
                for _, hints in _read_hints(directory, meta)
                for generation in hints.generations.tolist()
            ]
            described.blocks = sum(generation > FREE for generation in generations)
            if unknown := generations.count(UNKNOWN):
                described.problem = f"{unknown} slots are counted after the next start of a daemon"
        except (OSError, msgspec.MsgspecError) as error:
            described.problem = str(error)
        found.append(described)
    return found


def check_unused(root: Path, namespace: str | None) -> list[NamespaceFiles]:
    """The files that `clear` deletes. Raises the errors of `clear`."""
    with _locked(root):
        return _find_namespaces(root, namespace)


def verify(root: Path, report: Callable[[Progress], None]) -> list[Verified]:
    """Compare all blocks with their checksums. Raises Refused (BUSY, BAD_CONFIG) and OSError."""
    with _locked(root):
        directories = namespace_directories(root)
        total = sum(path.lstat().st_size for each in directories for path in each.glob(SLABS))
        progress, reported, results = Progress(0, total), 0.0, []
        for directory in directories:
            result = Verified(directory.name)
            try:
                for good, bad, nbytes in _check_slots(directory):
                    result.good += good
                    result.bad += bad
                    progress.done_bytes += nbytes
                    if time.monotonic() >= reported + REPORT_EVERY:
                        reported = time.monotonic()
                        report(progress)
            except (OSError, msgspec.MsgspecError) as error:
                result.problem = str(error)
            results.append(result)
        report(Progress(total, total))
    return results


def clear(root: Path, namespace: str | None) -> list[NamespaceFiles]:
    """Delete one namespace, all of its stores, or everything. Returns the deleted stores.

    Raises Refused (BUSY, BAD_CONFIG, UNKNOWN_NAMESPACE) and OSError.
    """
    with _locked(root):
        found = _find_namespaces(root, namespace)
        for each in found:
            move_to_trash(root / each.namespace)
        remove_trash(root)
    return found


def _find_namespaces(root: Path, namespace: str | None) -> list[NamespaceFiles]:
    """The stores of a namespace, or all. Raises Refused (UNKNOWN_NAMESPACE, BAD_CONFIG)."""
    found = list_namespaces(root)
    if namespace is None:
        return found
    found = [
        each
        for each in found
        if each.namespace == namespace or StoreName.parse(each.namespace).namespace == namespace
    ]
    if not found:
        message = f"no namespace {namespace!r} in {root}; `kvferry tier list` shows them"
        raise Refused(Code.UNKNOWN_NAMESPACE, message, namespace)
    return found


def _check_slots(directory: Path) -> Iterator[tuple[bool, bool, int]]:
    """For each slot: whether it has a good or a bad block, and its bytes."""
    meta = read_meta(directory)
    buffer = BounceBuffer(meta.block_bytes)
    data = buffer.view[: meta.block_bytes]
    for path, hints in _read_hints(directory, meta):
        slab = SlabFile(path, meta.slot_bytes, meta.slots_per_slab)
        try:
            for at, generation in enumerate(hints.generations.tolist()):
                header = None
                if generation > FREE or generation == UNKNOWN:
                    with suppress(OSError, SlabTruncatedError):
                        header = slab.read_slot(at, buffer.address, meta.block_bytes)
                good = (
                    header is not None
                    and header.namespace == directory.name
                    and (generation == UNKNOWN or header.key == hints.keys[at])
                    and header.checksum == block_checksum(header.key, data)
                )
                is_block = generation > FREE or header is not None
                yield good, is_block and not good, meta.slot_bytes
        finally:
            slab.close()


def _read_hints(directory: Path, meta: StoreMeta) -> Iterator[tuple[Path, Hints]]:
    """Each slab file, and what the hint file says about its slots."""
    file = HintFile(directory / HINTS, meta.key_bytes, read_only=True)
    try:
        for slab in sorted(directory.glob(SLABS)):
            if (number := slab_number(slab)) is not None:
                first = number * meta.slots_per_slab
                # A damaged `meta` may state more than the file has.
                slots = min(meta.slots_per_slab, slab.lstat().st_size // meta.slot_bytes)
                yield slab, file.read(range(first, first + slots))
    finally:
        file.close()


def _check_root(root: Path) -> None:
    if not (root / LOCK).is_file() or foreign_entry(root) is not None:
        message = f"no disk tier in {root}; name the directory of tiers.disk.path"
        raise Refused(Code.BAD_CONFIG, message, str(root))


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock on a root, so that no daemon uses it."""
    _check_root(root)
    try:
        descriptor = lock_root(root)
    except BlockingIOError as error:
        message = f"{root} is in use by a daemon; stop that daemon first"
        raise Refused(Code.BUSY, message, str(root)) from error
    try:
        yield
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    verb, root, namespace = arguments[0], Path(arguments[1]), (*arguments[2:], None)[0]
    result: Sequence[Any]
    try:
        match verb:
            case "list":
                result = list_namespaces(root)
            case "check-unused":
                result = check_unused(root, namespace)
            case "verify":
                result = verify(root, lambda progress: _print("progress", progress))
            case _:
                result = clear(root, namespace)
    except KVFerryError as error:
        _print("error", ErrorInfo(error.code, error.message, error.value))
    except OSError as error:
        _print("error", ErrorInfo(Code.BAD_CONFIG, str(error), str(root)))
    else:
        _print("result", result)


def _print(kind: str, value: Any) -> None:
    print(msgspec.json.encode({kind: value}).decode(), flush=True)


if __name__ == "__main__":
    main()
