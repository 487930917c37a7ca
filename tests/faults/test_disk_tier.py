"""The disk tier with torn slots and failing file systems: never wrong bytes.

Fetches compare the bytes with those that were put (kvferry.testing.tier_subjects).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from daemon.tiers.disk_fixtures import KillableDisk
from kvferry.daemon.tiers.base import Result
from kvferry.testing.tier_subjects import (
    PoolMemory,
    ProcessSubject,
)
from support.disk_tier_files import allocated_bytes
from support.disk_tier_process import BLOCK, disk_process

OK, MISS, FULL, PRESENT = Result.OK, Result.MISS, Result.FULL, Result.PRESENT
SIZE = 32 << 20
BATCH = 16


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(BLOCK)
    yield pool
    pool.files.close()


def kill(tier: ProcessSubject) -> None:
    """Kill the process, and wait until another one serves."""
    before = tier.client.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    tier.wait_until(lambda: tier.client.pid not in (None, before) and tier.client.is_on)


def fetch_all(tier: ProcessSubject | KillableDisk, numbers: range) -> list[Result]:
    batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
    return [result for batch in batches for result in tier.fetch(batch)]


def put_all(tier: ProcessSubject | KillableDisk, numbers: range) -> list[Result]:
    batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
    return [result for batch in batches for result in tier.put(batch)]


@contextmanager
def small_file_system(folder: Path, mebibytes: int = 16) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    folder.mkdir()
    options = f"size={mebibytes}m,mode=0700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


# Damaged slots


def test_torn_slots_and_flipped_bits(
    pool: PoolMemory, tmp_path: Path, long: bool, seed: int
) -> None:
    """10,000 damaged slots (500 in the short form), with the hints kept or lost."""
    wanted = 10_000 if long else 500
    rng = np.random.default_rng(seed)
    disk = KillableDisk(pool, tmp_path / "tier", 16 << 20)
    numbers = range(900)
    outcomes, damaged = Counter[Result](), 0
    while damaged < wanted:
        put_all(disk, numbers)
        if rng.integers(2):
            disk.lose_hints()
        else:
            disk.kill()
        for path in disk.slabs():
            slots = np.memmap(path, np.uint8, "r+").reshape(-1, 2 * BLOCK)
            for slot in rng.choice(len(slots), len(slots) // 3, replace=False).tolist():
                at, other = int(rng.integers(slots.shape[1])), slots[rng.integers(len(slots))]
                match int(rng.integers(4)):
                    case 0:
                        slots[slot, at] ^= 1 << int(rng.integers(8))
                    case 1:
                        slots[slot, at:] = other[at:]
                    case 2:
                        slots[slot, :at] = other[:at]
                    case _:
                        slots[slot, at : at + 512] = 0
                damaged += 1
        disk.open()
        results = fetch_all(disk, numbers)
        outcomes.update(results)
        # As the tier's process does.
        disk.drop([n for n in numbers if results[n] is Result.CORRUPT])
    disk.close()
    print(f"{damaged} slots damaged; {dict(outcomes)}; 0 wrong bytes")
    assert set(outcomes) <= {OK, MISS, Result.CORRUPT}
    assert outcomes[Result.CORRUPT] > 0
    assert outcomes[OK] > 0.4 * outcomes.total()


# The size limit


def test_the_size_limit_is_kept_at_every_moment(
    pool: PoolMemory, tmp_path: Path, long: bool, seed: int
) -> None:
    """Compare the size with what the file system has allocated below the root."""
    size, largest, root, ended = 8 << 20, 0, tmp_path / "tier", threading.Event()
    rng = random.Random(seed)

    def measure() -> None:
        nonlocal largest
        while not ended.is_set():
            with disk.tier._lock:  # else a slab that another namespace gets may count twice
                largest = max(largest, allocated_bytes(root))

    disk = KillableDisk(pool, root, size)
    thread = threading.Thread(target=measure)
    thread.start()
    try:
        for step in range(4000 if long else 400):
            name = f"namespace{rng.randrange(3)}"
            disk.put(range(step * BATCH, step * BATCH + BATCH), name)
            match rng.randrange(100):
                case 0:
                    disk.drop(None, name)
                case 1:
                    disk.restart()
                case 2:
                    disk.tier.maintain()
                case _:
                    disk.fetch(range(step * BATCH, step * BATCH + 4), name)
    finally:
        ended.set()
        thread.join()
        disk.close()
    print(f"size {size}, at most {largest} allocated")
    assert 0.5 * size < largest <= size


# Failing file systems


def test_a_file_system_that_becomes_full(pool: PoolMemory, tmp_path: Path) -> None:
    """New blocks replace old ones, also after a kill. When there is room, the tier grows again."""
    with (
        small_file_system(tmp_path / "small") as folder,
        disk_process(folder / "tier", pool) as tier,
    ):
        assert put_all(tier, range(128)) == [OK] * 128
        with suppress(OSError), (folder / "other").open("wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
        for restart in (False, True):
            if restart:
                kill(tier)
            assert set(put_all(tier, range(1000, 3000))) <= {OK, PRESENT, FULL}
            assert tier.client.breaker.state == "closed"
            results = fetch_all(tier, range(1000, 3000))
            assert set(results) <= {OK, MISS}
            assert results.count(OK) + fetch_all(tier, range(128)).count(OK) >= 128
        (folder / "other").unlink()
        for _ in range(2000):  # a slab is tried again after a second
            if tier.put([5000]) == [OK]:
                break
        assert tier.fetch([5000]) == [OK]


def test_a_root_that_is_read_only_after_a_kill(pool: PoolMemory, tmp_path: Path) -> None:
    """The tier is off until the file system can be written again."""
    with (
        small_file_system(tmp_path / "small") as folder,
        disk_process(folder / "tier", pool) as tier,
    ):
        assert put_all(tier, range(128)) == [OK] * 128
        before = tier.client.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        tier.wait_until(lambda: tier.client.pid is None)
        remount = ["mount", "-o", "remount,ro", str(folder)]
        subprocess.run(remount, check=True)
        tier.wait_until(lambda: tier.client.counts["deaths"] >= 2)
        assert not tier.client.is_on
        assert (tier.fetch([1]), tier.put([1000])) == ([MISS], [FULL])
        subprocess.run([*remount[:2], "remount,rw", str(folder)], check=True)
        tier.wait_until(lambda: tier.client.is_on)
        assert fetch_all(tier, range(128)) == [OK] * 128
        assert tier.put([1000]) == [OK]
