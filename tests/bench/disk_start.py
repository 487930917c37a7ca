"""The start of a disk tier with many keys: seconds until they are found, and memory.

    python tests/bench/disk_start.py [--keys 1000000] [--reps 3] [--path /tmp]

Writes the hints of a namespace with blocks of 4 KiB, and slabs that have no data. Then processes
open the tier and look all keys up, with the hint file in the page cache, and (as root) without.
Seconds are from the start of the interpreter. CPU seconds and memory are those of opening the tier.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import structlog

from kvferry.daemon.tiers.disk.hints import HINTS, HintFile
from kvferry.daemon.tiers.disk.meta import META, StoreMeta
from kvferry.daemon.tiers.disk.tier import DiskTier
from support.process_usage import ProcessUsage

NAMESPACE, KEY_BYTES, BATCH = "bench", 36, 1000
META_OF = StoreMeta(4096, KEY_BYTES, 1 << 15)


def keys_from(start: int, count: int) -> list[bytes]:
    """Keys with random bytes, like block hashes, and always the same for a number."""
    data = np.random.default_rng(start).bytes(count * KEY_BYTES)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def size_of(count: int) -> int:
    """A bound on the tier that so many keys do not reach."""
    return 2 * count * META_OF.slot_bytes


def make_root(root: Path, count: int) -> None:
    DiskTier(str(root), size_of(count)).close()
    directory = root / NAMESPACE
    directory.mkdir()
    (directory / META).write_bytes(msgspec.json.encode(META_OF))
    file = HintFile(directory / HINTS, KEY_BYTES)
    for first in range(0, count, META_OF.slots_per_slab):
        file.add_slots(range(first, first + META_OF.slots_per_slab))
        slab = directory / f"slab-{first // META_OF.slots_per_slab:05}"
        slab.touch()
        os.truncate(slab, META_OF.slab_bytes)
    for first in range(0, count, BATCH):
        for at, key in enumerate(keys_from(first, BATCH), first):
            file.write(at, at + 1, key)
    file.sync()
    file.close()


def open_root(root: Path, count: int) -> None:
    """In a process of its own."""
    before, cpu = ProcessUsage.of(os.getpid()).private, time.process_time()
    tier = DiskTier(str(root), size_of(count))
    private, cpu = ProcessUsage.of(os.getpid()).private - before, time.process_time() - cpu
    first = tier.contains(NAMESPACE, keys_from(0, BATCH))
    # The first field that follows the name counts clock ticks since the boot.
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    found = sum(first) + sum(
        sum(tier.contains(NAMESPACE, keys_from(at, BATCH))) for at in range(BATCH, count, BATCH)
    )
    assert found == count, found
    print(f"{seconds:.2f} s, CPU {cpu:.2f} s, {private / count:.0f} bytes per key", flush=True)
    tier.close()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--path", type=Path, default=Path("/tmp"))
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        open_root(options.open, options.keys)
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-disk-start-", dir=options.path) as name:
        root = Path(name) / "tier"
        make_root(root, options.keys)
        for cache in ("warm", "cold") if os.geteuid() == 0 else ("warm",):
            for _ in range(options.reps):
                if cache == "cold":
                    os.sync()
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                print(f"{options.keys} keys, {cache} page cache: ", end="", flush=True)
                command = [
                    sys.executable,
                    __file__,
                    "--keys",
                    str(options.keys),
                    "--open",
                    str(root),
                ]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
