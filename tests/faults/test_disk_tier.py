"""The disk tier with torn slots, kills, power cuts, and failing file systems: never wrong bytes.

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.tiers.disk_fixtures import KillableDisk
from daemon.tiers.setups import disk_setup
from kvferry.daemon.tiers.base import Result
from kvferry.daemon.tiers.tier_process import TierTimes
from kvferry.testing.tier_subjects import (
    NAMESPACE,
    PoolMemory,
    ProcessSubject,
    content_of,
    key_of,
    open_subject,
)
from support.disk_tier_files import allocated_bytes, pretend_reboot

BLOCK = 4096
OK, MISS, FULL, PRESENT = Result.OK, Result.MISS, Result.FULL, Result.PRESENT
SIZE = 32 << 20
BATCH = 16


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory(BLOCK)
    yield pool
    pool.files.close()


@contextmanager
def disk_process(root: Path, pool: PoolMemory, size: int = SIZE) -> Iterator[ProcessSubject]:
    short_breaks = TierTimes(first_off=0.05, longest_off=0.2)
    with open_subject(replace(disk_setup(root, size), times=short_breaks), pool) as tier:
        assert isinstance(tier, ProcessSubject)
        yield tier


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
    """10,000 damaged slots (500 in the short form), with the index kept or rebuilt."""
    wanted = 10_000 if long else 500
    rng = np.random.default_rng(seed)
    disk = KillableDisk(pool, tmp_path / "tier", 16 << 20)
    numbers = range(900)
    outcomes, damaged = Counter[Result](), 0
    while damaged < wanted:
        put_all(disk, numbers)
        if rng.integers(2):
            disk.cut_power()
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


# Kills


def start_puts(tier: ProcessSubject, numbers: range) -> list[Result]:
    """Put 32 keys in 8 requests at once. Returns their results, which come later."""
    ended: list[Result] = []
    for place in range(32):
        tier.pool.block(place)[:] = content_of(numbers[place], BLOCK)
    for at in range(0, 32, 4):
        keys = [key_of(number) for number in numbers[at : at + 4]]
        sums = [tier.pool.checksum(at + n, key) for n, key in enumerate(keys)]
        blocks = tier.blocks(NAMESPACE, keys, range(at, at + 4))
        tier.client.put(blocks, np.array(sums, np.uint64), ended.extend)
    return ended


def fetch_when_loaded(tier: ProcessSubject, numbers: range) -> list[Result]:
    """Fetch once the index is rebuilt, which happens in the background."""
    for _ in range(1000):
        if tier.usage().keys >= len(numbers):
            break
    return fetch_all(tier, numbers)


def test_kills_under_load(tmp_path: Path, long: bool, seed: int) -> None:
    """SIGKILL of the tier's process, 100 times (6 in the short form), with puts in flight.

    After every second kill the pool is lost and the boot id is another one.
    """
    rounds, rng = 100 if long else 6, random.Random(seed)
    root, put, found, unfinished = tmp_path / "tier", 0, 0, Counter[Result]()
    for number in range(rounds):
        whole = range(number * 1000, number * 1000 + 256)
        in_flight = range(whole.stop, whole.stop + 32)
        with ExitStack() as opened:
            pool = PoolMemory(BLOCK)
            opened.callback(pool.files.close)
            tier = opened.enter_context(disk_process(root, pool))
            assert put_all(tier, whole) == [OK] * 256
            ended, few = start_puts(tier, in_flight), rng.randrange(0, 28, 4)
            tier.wait_until(lambda ended=ended, few=few: len(ended) >= few)  # type: ignore[misc]
            if number % 2:
                assert tier.client.pid is not None
                os.kill(tier.client.pid, signal.SIGKILL)
                tier.close()
                pool = PoolMemory(BLOCK)
                opened.callback(pool.files.close)
                pretend_reboot(root)
                tier = opened.enter_context(disk_process(root, pool))
            else:
                kill(tier)
            results = fetch_when_loaded(tier, whole)
            put, found = put + len(results), found + results.count(OK)
            unfinished.update(fetch_all(tier, in_flight))
            tier.drop()
    print(f"{rounds} kills: {found} of {put} blocks found; puts in flight: {dict(unfinished)}")
    assert found >= 0.99 * put
    assert set(unfinished) <= {OK, MISS, Result.CORRUPT}


@pytest.mark.parametrize("damage", ["garbage", "middle", "truncated"])
def test_an_index_that_is_damaged_while_it_is_used(
    pool: PoolMemory, tmp_path: Path, damage: str
) -> None:
    """Lookups miss or the process dies, and then blocks are found again."""
    numbers = range(512)
    with disk_process(tmp_path / "tier", pool) as tier:
        assert put_all(tier, numbers) == [OK] * 512
        index = tmp_path / "tier" / NAMESPACE / "index"
        with index.open("r+b") as file:
            match damage:
                case "garbage":
                    file.write(b"\xa5" * index.stat().st_size)
                case "middle":
                    file.seek(8192)
                    file.write(b"\xa5" * (index.stat().st_size - 8192))
                case _:
                    file.truncate(4096)
        results = list[Result]()
        for _ in range(600):
            tier.wait_until(lambda: tier.client.is_on)
            results = fetch_all(tier, numbers)
            if results.count(OK) > 500:
                break
            assert set(results) <= {OK, MISS, Result.ERROR}
            tier.put([1000])
            tier.wait_until(lambda: tier.client.in_flight == 0)
        assert results.count(OK) > 500
        assert set(put_all(tier, range(2000, 2064))) == {OK}


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
        tier.wait_until(lambda: tier.client.counters.deaths >= 2)
        assert not tier.client.is_on
        assert (tier.fetch([1]), tier.put([1000])) == ([MISS], [FULL])
        subprocess.run([*remount[:2], "remount,rw", str(folder)], check=True)
        tier.wait_until(lambda: tier.client.is_on)
        assert fetch_all(tier, range(128)) == [OK] * 128
        assert tier.put([1000]) == [OK]


def test_slabs_that_are_truncated_while_they_are_used(pool: PoolMemory, tmp_path: Path) -> None:
    with disk_process(tmp_path / "tier", pool) as tier:
        assert put_all(tier, range(512)) == [OK] * 512
        slabs = sorted(tmp_path.glob("tier/*/slab-*"))
        os.truncate(slabs[0], slabs[0].stat().st_size // 3)
        results = fetch_all(tier, range(512))
        assert set(results) == {OK, MISS}
        for _ in range(200):  # the file is replaced in the background
            assert set(put_all(tier, range(512))) <= {OK, PRESENT, FULL}
            if fetch_all(tier, range(512)) == [OK] * 512:
                break
        assert fetch_all(tier, range(512)) == [OK] * 512
        assert tier.client.breaker.state == "closed"
