"""The table of a sibling's keys against a set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from kvferry.daemon.tiers.siblings import key_table
from kvferry.daemon.tiers.siblings.key_table import (
    RUNS_SECONDS,
    TABLES_BYTES,
    WAYS,
    HeldKeys,
    KeyTable,
    KeyTables,
    hash_keys,
)

from kvferry.shm.memfd import sealed_memfd
from support.writing_process import READS, writing_process


def names(numbers: range) -> list[bytes]:
    return [number.to_bytes(36, "big") for number in numbers]


def hashes(numbers: range) -> key_table.Hashes:
    return hash_keys("store", names(numbers))


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = sealed_memfd("keys", TABLES_BYTES)
    yield descriptor
    os.close(descriptor)


def test_what_is_added_is_found_until_it_is_removed() -> None:
    table = KeyTable()
    table.add(hashes(range(1000)))
    table.add(hashes(range(500, 1500)))
    assert table.count == 1500
    assert table.contains(hashes(range(3000))).tolist() == [True] * 1500 + [False] * 1500
    table.remove(hashes(range(100, 200)))
    table.remove(hashes(range(100, 300)))
    assert table.count == 1300
    found = table.contains(hashes(range(400))).tolist()
    assert found == [True] * 100 + [False] * 200 + [True] * 100
    table.clear()
    assert table.count == 0
    assert not table.contains(hashes(range(1500))).any()


def test_a_key_that_occurs_twice_counts_once() -> None:
    table, twice = KeyTable(), np.concatenate((hashes(range(5)), hashes(range(5))))
    table.add(twice)
    assert table.count == 5
    table.remove(twice[:7])
    assert table.count == 0
    assert not table.contains(twice).any()


def test_no_key_looks_like_an_empty_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _data, _seed=0: 0)
    assert not KeyTable().contains(hashes(range(1))).any()


def test_a_million_keys_are_found() -> None:
    """Except where a bucket is full: of one key in a thousand nothing is known."""
    table = KeyTable()
    for begin in range(0, 1 << 20, 1 << 12):
        table.add(hashes(range(begin, begin + (1 << 12))))
    sample = table.contains(hashes(range(1 << 18)))
    assert np.count_nonzero(sample) > 0.999 * sample.size
    others = table.contains(hashes(range(1 << 20, (1 << 20) + (1 << 16))))
    assert not others.any()


def test_keys_of_a_full_bucket_replace_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "BUCKETS", 1)
    table = KeyTable()
    many = hashes(range(10 * WAYS))
    table.add(many)
    assert table.count == np.count_nonzero(table.contains(many)) == WAYS
    table.add(hashes(range(1000, 1001)))
    assert table.contains(hashes(range(1000, 1001))).all()
    assert table.count == WAYS


def test_thousands_of_keys_of_one_bucket_take_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile sibling can choose such keys."""
    monkeypatch.setattr(key_table, "BUCKETS", 1)
    begun = time.process_time()
    KeyTable().add(hashes(range(1 << 17)))
    assert time.process_time() - begun < 10


def test_the_store_is_part_of_a_key() -> None:
    table = KeyTable()
    table.add(hash_keys("one", names(range(9))))
    assert not table.contains(hash_keys("two", names(range(9)))).any()


def test_another_process_finds_the_keys_of_active_tables(descriptor: int) -> None:
    tables = KeyTables(descriptor)
    tables.show_running()
    written = tables.tables
    written[0].add(hashes(range(5)))
    written[3].add(hashes(range(3, 8)))
    read = HeldKeys(descriptor)
    assert read.find("store", names(range(9))) == set()
    written[3].is_active = True
    assert read.find("store", names(range(9))) == set(names(range(3, 8)))
    written[0].is_active = True
    assert read.find("store", names(range(9))) == set(names(range(8)))
    assert read.find("other", names(range(9))) == set()


def test_if_the_process_does_not_run_no_keys_are_found(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could be loaded, so the daemon must store all keys."""
    tables = KeyTables(descriptor)
    tables.tables[0].add(hashes(range(5)))
    tables.tables[0].is_active = True
    read = HeldKeys(descriptor)
    assert read.find("store", names(range(9))) == set()
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    tables.show_running()
    now += RUNS_SECONDS * 10**9
    assert read.find("store", names(range(9))) == set(names(range(5)))
    now += 1
    assert read.find("store", names(range(9))) == set()


def test_what_a_killed_process_wrote_is_freed(descriptor: int) -> None:
    killed = KeyTables(descriptor).tables[0]
    killed.add(hashes(range(5)))
    killed.is_active = True
    tables = KeyTables(descriptor)
    assert os.fstat(descriptor).st_blocks == 0
    tables.show_running()
    table = tables.tables[0]
    assert not table.is_active
    table.is_active = True
    assert HeldKeys(descriptor).find("store", names(range(9))) == set()


def test_a_table_takes_the_keys_of_another() -> None:
    table, other = KeyTable(), KeyTable()
    table.add(hashes(range(5)))
    other.add(hashes(range(3, 8)))
    table.replace_by(other)
    assert table.contains(hashes(range(9))).tolist() == [False] * 3 + [True] * 5 + [False]
    assert table.count == 5


def test_the_tables_can_be_read_while_the_process_writes_them(descriptor: int) -> None:
    """Sessions with siblings begin and end at any time. An error would end the daemon."""
    KeyTables(descriptor).tables[5].add(hashes(range(5)))
    prepare = "\n".join(
        (
            "flags = np.frombuffer(mmap.mmap(descriptor, 4096), np.uint64, 64)",
            "all_on, all_off = np.ones(64, np.uint64), np.zeros(64, np.uint64)",
        )
    )
    read, some = HeldKeys(descriptor), names(range(2))
    with writing_process(descriptor, prepare, "flags[:] = all_on; flags[:] = all_off"):
        for _ in range(READS):
            read.find("store", some)
