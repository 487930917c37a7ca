"""The tray: what is laid is taken once, in order, and nothing that lies there is trusted."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto.errors import Code, Refused
from kvferry.proto.tray import CAPACITY, MAX_BYTES, NBYTES, SKIP, SLOT_BYTES, SLOTS, Tray, new_tray

FIRST, TAKEN, HEADER = 128, 64, 16


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = new_tray()
    yield descriptor
    os.close(descriptor)


def test_what_is_laid_is_taken_once_and_in_order(page: int) -> None:
    here, there = Tray(page), Tray(page)
    assert there.take(0) is None
    for data in (b"one", b"", b"x" * SLOT_BYTES):
        assert here.lay(data, 0)
    assert [there.take(0) for _ in range(4)] == [b"one", b"", b"x" * SLOT_BYTES, None]


def test_it_waits_for_what_went_by_the_socket_before(page: int) -> None:
    here, there = Tray(page), Tray(page)
    here.lay(b"first", 1)
    here.lay(b"second", 2)
    assert there.take(0) is None
    assert there.take(1) == b"first"
    assert there.take(1) is None
    assert there.take(5) == b"second"


def test_it_holds_so_many_and_then_no_more_until_some_are_taken(page: int) -> None:
    here, there = Tray(page), Tray(page)
    assert [here.lay(b"small", 0) for _ in range(SLOTS)] == [True] * SLOTS
    assert not here.lay(b"small", 0)
    assert there.take(0) == b"small"
    assert here.lay(b"small", 0)
    assert not here.lay(b"small", 0)


@pytest.mark.parametrize(("nbytes", "fits"), [(MAX_BYTES - HEADER, True), (MAX_BYTES, False)])
def test_what_is_too_large_goes_by_the_socket(page: int, nbytes: int, fits: bool) -> None:
    assert Tray(page).lay(bytes(nbytes), 0) is fits


sizes = st.one_of(st.integers(0, 200), st.integers(SLOT_BYTES - 40, MAX_BYTES + 40))


@given(st.lists(st.one_of(sizes, st.none()), max_size=300))
def test_it_is_a_queue_with_an_end(steps: list[int | None]) -> None:
    """None: take one."""
    page = new_tray()
    try:
        here, there, queue = Tray(page), Tray(page), deque[bytes]()
        for number, step in enumerate(steps):
            if step is None:
                assert there.take(0) == (queue.popleft() if queue else None)
                continue
            data = bytes([number % 256]) * step
            if here.lay(data, 0):
                queue.append(data)
            else:
                assert step + HEADER > MAX_BYTES or queue
        while queue:
            assert there.take(0) == queue.popleft()
        assert there.take(0) is None
    finally:
        os.close(page)


@pytest.mark.parametrize(
    ("laid", "header"),
    [
        (1, None),
        (CAPACITY + SLOT_BYTES, None),
        (SLOT_BYTES, (SLOT_BYTES, 0)),
        (SLOT_BYTES, (MAX_BYTES, 0)),
        (SLOT_BYTES, (SKIP, 0)),
        (SLOT_BYTES, (SKIP - 1, 0)),
        (CAPACITY, (CAPACITY - HEADER, 0)),
        ((1 << 64) - SLOT_BYTES, (0, 0)),
    ],
)
def test_nonsense_is_told(page: int, laid: int, header: tuple[int, int] | None) -> None:
    os.pwrite(page, struct.pack("=Q", laid), 0)
    if header is not None:
        os.pwrite(page, struct.pack("=QQ", *header), FIRST)
    with pytest.raises(Refused) as refusal:
        Tray(page).take(0)
    assert refusal.value.code == Code.BAD_MESSAGE


def test_a_skip_that_leads_nowhere_is_nonsense(page: int) -> None:
    here, there = Tray(page), Tray(page)
    for _ in range(SLOTS - 1):
        here.lay(b"", 0)
        there.take(0)
    os.pwrite(page, struct.pack("=QQ", SKIP, 0), FIRST + CAPACITY - SLOT_BYTES)
    os.pwrite(page, struct.pack("=Q", CAPACITY), 0)
    with pytest.raises(Refused):
        there.take(0)
    os.pwrite(page, struct.pack("=QQ", SKIP, 0), FIRST)
    os.pwrite(page, struct.pack("=Q", CAPACITY + SLOT_BYTES), 0)
    with pytest.raises(Refused):
        Tray(page).take(0)


@given(st.binary(max_size=64), st.integers(0, 2 * CAPACITY), st.integers(0, 3))
def test_any_bytes_are_messages_or_nonsense(junk: bytes, laid: int, slot: int) -> None:
    page = new_tray()
    try:
        os.pwrite(page, struct.pack("=Q", laid // SLOT_BYTES * SLOT_BYTES), 0)
        os.pwrite(page, junk, FIRST + slot * SLOT_BYTES)
        tray = Tray(page)
        for _ in range(SLOTS + 1):
            try:
                data = tray.take(0)
            except Refused:
                break
            if data is None:
                break
            assert len(data) <= MAX_BYTES
    finally:
        os.close(page)


def test_what_was_taken_cannot_change_any_more(page: int) -> None:
    here, there = Tray(page), Tray(page)
    here.lay(b"as it was", 0)
    data = there.take(0)
    os.pwrite(page, b"another w", FIRST + HEADER)
    assert data == b"as it was"


def test_a_page_that_could_shrink_is_none() -> None:
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, NBYTES)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (loose, null):
        with pytest.raises(Refused) as refusal:
            Tray(descriptor)
        assert refusal.value.code == Code.NOT_SHAREABLE
        os.close(descriptor)


def test_a_small_page_is_none() -> None:
    import fcntl

    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.ftruncate(small, NBYTES - 4096)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(Refused):
        Tray(small)
    os.close(small)
