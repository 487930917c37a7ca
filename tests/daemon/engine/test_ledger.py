"""A ledger says what is good, also to whoever opens its descriptor later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.core.deeds import Deed, Resident
from kvferry.daemon.engine.ledger import DEED_ROOM, LINES, Ledger
from kvferry.proto.errors import Code, Refused
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.page import sealed_memfd
from kvferry.proto.specs import KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import Fingerprint

KEY = 5
BLOCKS = 6
NAMESPACE = Fingerprint("llama", 4096, key_bytes=KEY)
LAYOUT = KVLayout((TensorLayout(4, 4096, 4096),), ((TensorRef(0, 4096),),))
OF_KEYS = Deed(NAMESPACE.name, 8192, BLOCKS * 4096 + 100, fingerprint=NAMESPACE)
ARRAYS = LayoutArrays.from_layout(LAYOUT)
OF_NUMBERS = Deed("engine", 0, BLOCKS * 4096, layout=ARRAYS)


@contextmanager
def opened(deed: Deed = OF_KEYS) -> Iterator[Ledger]:
    ledger = Ledger.create(deed)
    yield ledger
    ledger.close()


def found(ledger: Ledger) -> tuple[Resident, ...]:
    """What another daemon finds."""
    other = Ledger(os.dup(ledger.descriptor))
    assert other.deed == ledger.deed
    residents = other.residents()
    other.close()
    return residents


def blocks(*numbers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def store(ledger: Ledger, numbers: list[int], keys: list[bytes], **parts: tuple[int, int]) -> None:
    versions = ledger.vacate(blocks(*numbers))
    sums = np.array([7 * n for n in numbers], dtype=np.uint64)
    ledger.seal(blocks(*numbers), versions, sums, keys, {int(n[1:]): p for n, p in parts.items()})


def test_a_new_one_takes_no_memory_for_blocks_that_were_never_stored() -> None:
    many = 1 << 20
    with opened(Deed("engine", 0, many * 4096, layout=ARRAYS)) as ledger:
        store(ledger, [many - 1], [])
        assert os.fstat(ledger.descriptor).st_blocks * 512 < 64 << 10


def test_it_is_found_as_it_was_left() -> None:
    with opened() as ledger:
        store(ledger, [4, 0, 2], [b"bbbbb", b"aa\0\0\0", b"ccccc"], b0=(1, 2))
        assert found(ledger) == (
            Resident(2, b"ccccc"),
            Resident(0, b"aa\0\0\0", (1, 2)),
            Resident(4, b"bbbbb"),
        )
        assert ledger.sums(blocks(0, 2, 4)).tolist() == [0, 14, 28]
        ledger.used(blocks(2))
        assert [resident.block for resident in found(ledger)] == [0, 4, 2]


def test_a_part_is_forgotten_with_the_next_store() -> None:
    with opened() as ledger:
        store(ledger, [0, 1], [b"aaaaa", b"bbbbb"], b0=(1, 2), b1=(0, 1))
        store(ledger, [0], [b"aaaaa"])
        assert found(ledger) == (Resident(1, b"bbbbb", (0, 1)), Resident(0, b"aaaaa"))


def test_an_engines_blocks_have_no_keys() -> None:
    with opened(OF_NUMBERS) as ledger:
        store(ledger, [3, 1], [])
        assert ledger.keys(blocks(3, 1)) == ()
        assert ledger.sealed_blocks().tolist() == [1, 3]
        assert found(ledger) == ()


def test_deeds_follow_each_other() -> None:
    with opened() as ledger:
        for generation in range(2, 6):
            deed = Deed(
                OF_KEYS.name,
                OF_KEYS.start,
                OF_KEYS.nbytes,
                fingerprint=NAMESPACE,
                generation=generation,
                pages=((4096,),) * generation,
            )
            ledger.amend(deed)
            assert found(ledger) == ()
            assert ledger.deed == deed


def test_a_deed_that_is_too_long_is_refused_and_the_old_one_counts() -> None:
    long = Deed(
        "engine",
        0,
        4096,
        layout=ARRAYS,
        pages=((1 << 60,) * (DEED_ROOM // 8),),
    )
    with opened() as ledger:
        with pytest.raises(Refused) as refused:
            ledger.amend(long)
        assert refused.value.code == Code.BAD_LAYOUT
        assert ledger.deed == OF_KEYS
        assert found(ledger) == ()


def test_void_it_is_none() -> None:
    with opened() as ledger:
        store(ledger, [1], [b"aaaaa"])
        ledger.void()
        with pytest.raises(Refused):
            found(ledger)


@pytest.mark.parametrize("nbytes", [1, 4096, (4 << 20) + 1])
def test_other_memory_is_refused_and_closed(nbytes: int) -> None:
    descriptor = sealed_memfd("other", nbytes)
    with pytest.raises(Refused) as refused:
        Ledger(descriptor)
    assert refused.value.code == Code.BAD_LAYOUT
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_that_can_shrink_is_refused(tmp_path: Any) -> None:
    for descriptor in (os.memfd_create("open"), os.open(tmp_path, os.O_RDONLY), os.pipe()[0]):
        with pytest.raises(Refused) as refused:
            Ledger(descriptor)
        assert refused.value.code == Code.NOT_SHAREABLE


@pytest.mark.parametrize("less", [8, 48, -1])
def test_a_ledger_with_other_slots_than_its_deed_says_is_refused(less: int) -> None:
    with opened() as ledger:
        data = os.pread(ledger.descriptor, 1 << 24, 0)
    other = sealed_memfd("other", len(data) - less)
    os.pwrite(other, data[: len(data) - less], 0)
    with pytest.raises(Refused) as refused:
        Ledger(other)
    assert refused.value.code == Code.BAD_LAYOUT


@pytest.mark.parametrize("stamp", [1 << 62, 1 << 63, (1 << 64) - 1])
def test_a_stamp_that_is_damaged_changes_only_the_order_of_its_block(stamp: int) -> None:
    with opened() as ledger:
        store(ledger, [4, 0, 2], [b"aaaaa", b"bbbbb", b"ccccc"])
        ledger._stamps[2] = stamp
        other = Ledger(os.dup(ledger.descriptor))
        assert [resident.block for resident in other.residents()] == [0, 4, 2]
        other.used(blocks(0, 4))
        assert [resident.block for resident in other.residents()] == [2, 4, 0]
        other.close()


def test_what_an_earlier_daemon_left_is_suspect_until_read_or_stored_over() -> None:
    with opened() as ledger:
        store(ledger, [0, 1, 2], keys := [b"aaaaa", b"bbbbb", b"ccccc"])
        ledger.suspect_all()
        assert ledger.suspect is not None
        assert np.flatnonzero(ledger.suspect).tolist() == [0, 1, 2]
        store(ledger, [3, 4, 5], keys)
        ledger.suspect_all()
        ledger.trust(blocks(0, 1, 2))
        ledger.vacate(blocks(3, 4))
        assert np.flatnonzero(ledger.suspect).tolist() == [5]
        ledger.trust(blocks(5))
        assert ledger.suspect is None
        ledger.distrust(blocks(2))
        assert np.flatnonzero(ledger.suspect).tolist() == [2]


NUMBERS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["vacate", "seal", "seal", "wipe", "used"]), NUMBERS, st.integers(0, 3)
    ),
    max_size=40,
)


@given(STEPS)
def test_only_the_last_store_of_a_block_seals_it(steps: list[tuple[str, list[int], int]]) -> None:
    """Against a dictionary: stores that end late, or after a wipe, seal nothing of theirs."""
    keys = (number.to_bytes(KEY, "big") for number in range(1, 1000))
    with opened() as ledger:
        under_way: list[tuple[list[int], Any]] = []
        last: dict[int, object] = {}
        good: dict[int, bytes] = {}
        for what, numbers, which in steps:
            if what == "vacate":
                versions = ledger.vacate(blocks(*numbers))
                under_way.append((numbers, versions))
                for number in numbers:
                    last[number] = versions
                    good.pop(number, None)
            elif what == "seal" and under_way:
                stored, versions = under_way.pop(which % len(under_way))
                names = [next(keys) for _ in stored]
                sums = np.zeros(len(stored), dtype=np.uint64)
                ledger.seal(blocks(*stored), versions, sums, names, {})
                mine = [n for n in stored if last.get(n) is versions]
                for number in mine:
                    good.pop(number, None)
                good.update({n: name for n, name in zip(stored, names, strict=True) if n in mine})
            elif what == "wipe":
                ledger.wipe()
                last, good = {}, {}
            elif what == "used" and set(numbers) <= good.keys():
                ledger.used(blocks(*numbers))
                for number in reversed(numbers):
                    good[number] = good.pop(number)
        assert {r.block: r.key for r in found(ledger)} == good


def test_a_wipe_is_of_all_blocks() -> None:
    """However many lines are wiped at a time."""
    numbers = [0, LINES - 1, LINES, 2 * LINES, 2 * LINES + 2]
    with opened(Deed("engine", 0, (2 * LINES + 3) * 4096, layout=ARRAYS)) as ledger:
        store(ledger, numbers, [])
        late = ledger.versions(blocks(*numbers))
        ledger.wipe()
        assert ledger.sealed_blocks().size == 0
        assert not ledger.current(blocks(*numbers), late).any()
