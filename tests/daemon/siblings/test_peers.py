"""The session at a sibling that answers wrong, late, or not at all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.daemon.core.siblings import NamespaceContents
from kvferry.daemon.memory.pool import HostPool
from kvferry.daemon.siblings import peer_client, peers
from kvferry.daemon.siblings.peers import ON, SiblingPeers
from kvferry.daemon.siblings.windows import MappedWindows
from kvferry.proto import messages as wire
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo
from kvferry.proto.lending import BorrowMemory, MemoryLent
from kvferry.shm.memfd import sealed_memfd
from support.background import in_background
from support.descriptors import count_memfds
from support.eventually import eventually
from support.fake_sibling import FakeSibling, answer_with
from support.lent_region import BLOCK, FINGERPRINT, LentRegion, key

from .test_windows import Registrar

CHUNK, PAGE = 1 << 16, b"the same page..."
LENT = MemoryLent(1, 7, CHUNK, 0, 0, 1, keys=3, page_identity=PAGE)


class PeersFixture:
    """This daemon's windows and peers. used: contents of its namespaces."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder, self._stack = folder, stack
        self.pool, registrar = HostPool(CHUNK, CHUNK), Registrar()
        stack.callback(self.pool.close, registrar)
        self.pool.ready_bytes = self.pool.nbytes
        stack.callback(setattr, self.pool, "ready_bytes", 0)
        self.windows = MappedWindows(registrar, self.pool)
        self.region = LentRegion()
        stack.callback(self.region.close)
        composition = self.region.file.record.composition
        self.contents = NamespaceContents(FINGERPRINT.name, composition, 0, BLOCK, 0)
        self.used = [self.contents]
        self.peers = SiblingPeers(folder / "own", [folder], self.windows, lambda: self.used, PAGE)
        self.chunk = sealed_memfd("chunk", CHUNK)
        stack.callback(os.close, self.chunk)

    def sibling(self, answer: Callable[[Any], list[bytes]]) -> FakeSibling:
        sibling = FakeSibling(self.folder / "sibling", answer)
        table, page = self.region.file.descriptor, self.region.page.descriptor
        sibling.files |= {1: self.chunk, 2: table, 3: page}
        return sibling

    @property
    def state(self) -> str:
        return next((each.state for each in self.peers.status()), "")

    async def until(self, text: str) -> None:
        await eventually(lambda: text in self.state)

    def finds(self, number: int) -> bool:
        return bool(self.windows.find(self.contents, [key(number)])[0, 0] >= 0)


@pytest.fixture
async def fixture(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PeersFixture]:
    monkeypatch.setattr(peers, "ASK_EVERY", 0.05)
    with ExitStack() as stack:
        fixture = PeersFixture(stack, short_path)
        async with in_background(fixture.peers.run()):
            yield fixture


async def test_the_memory_of_a_sibling_is_mapped_once(fixture: PeersFixture) -> None:
    with fixture.sibling(answer_with(LENT)) as sibling:
        await eventually(lambda: fixture.state == ON)
        await eventually(lambda: len(sibling.asked) > 5)
        assert [each.first for each in sibling.asked].count(0) == 1
        (status,) = fixture.peers.status()
        assert (status.keys, status.mapped_bytes) == (3, CHUNK)
        fixture.region.store(1)
        assert fixture.finds(1)
        fixture.used.clear()
        await eventually(lambda: fixture.peers.status()[0].mapped_bytes == 0)
        fixture.used.append(fixture.contents)
        fixture.peers.ask_soon()
        await eventually(lambda: fixture.finds(1))


async def test_a_new_region_replaces_the_old_one(fixture: PeersFixture) -> None:
    with fixture.sibling(answer_with(LENT)) as sibling:
        await eventually(lambda: fixture.state == ON)
        sibling.answer = answer_with(msgspec.structs.replace(LENT, region=8))
        await eventually(lambda: [each.first for each in sibling.asked].count(0) == 2)
        await fixture.until(ON)
        sibling.answer = answer_with(MemoryLent(1))
        await eventually(lambda: fixture.peers.status()[0].mapped_bytes == 0)
        (status,) = fixture.peers.status()
        assert (status.state, status.keys) == (ON, 0)  # it serves other models now


async def test_nothing_of_a_region_that_changes_while_it_is_fetched_stays_open(
    fixture: PeersFixture,
) -> None:
    def answer(request: BorrowMemory) -> list[bytes]:
        lent = msgspec.structs.replace(LENT, request_id=request.request_id, end=2)
        if request.first == 0:
            lent = msgspec.structs.replace(lent, handles=(1,), table=2, page=3)
        elif request.first == 1:
            lent = msgspec.structs.replace(lent, region=8, handles=(1,))
        return [encode(lent)]

    with fixture.sibling(answer) as sibling:
        await fixture.until("its region has changed")
        await eventually(lambda: [each.first for each in sibling.asked].count(0) > 4)
        assert count_memfds("chunk") <= 2  # the test's, and one that is being fetched


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"page_identity": b"another"}, "set the same state directory"),
        ({"page_identity": b""}, "set the same state directory"),
        ({"chunk_bytes": 2 * CHUNK}, "pool.chunk is 128 KiB, and here 64 KiB; make them equal"),
        ({"start": 5 * CHUNK}, "outside of its chunks"),
    ],
)
async def test_why_a_sibling_is_not_used(
    fixture: PeersFixture, change: dict[str, Any], text: str
) -> None:
    with fixture.sibling(answer_with(msgspec.structs.replace(LENT, **change))) as sibling:
        await fixture.until(text)
        asked = len(sibling.asked)
        await eventually(lambda: len(sibling.asked) > asked + 3)
        assert sum(each.first is not None for each in sibling.asked) <= 1
        assert text in fixture.state
        sibling.answer = answer_with(msgspec.structs.replace(LENT, region=9))
        await eventually(lambda: fixture.state == ON)


@pytest.mark.parametrize(
    "messages",
    [
        [b"junk"],
        [encode(wire.Error(None, ErrorInfo(Code.FORBIDDEN, "you may not")))],
        [bytes(1 << 20)],
        [encode(wire.Goodbye("it stops"))],
    ],
)
async def test_a_wrong_message_ends_the_session(
    fixture: PeersFixture, monkeypatch: pytest.MonkeyPatch, messages: list[bytes]
) -> None:
    monkeypatch.setattr(peer_client, "ANSWER_SECONDS", 1e6)
    with fixture.sibling(lambda _: messages) as sibling:
        await eventually(lambda: sibling.sessions > 1)
        assert fixture.state != ON
        sibling.answer = answer_with(LENT)
        await eventually(lambda: fixture.state == ON)


async def test_many_messages_do_not_hold_up_the_event_loop(fixture: PeersFixture) -> None:
    with fixture.sibling(lambda _: [encode(wire.Done(7))] * 20_000) as sibling:
        await eventually(lambda: bool(sibling.asked))
        longest, end = 0.0, time.monotonic() + 1.0
        while time.monotonic() < end:
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begun)
        assert longest < 0.2


async def test_a_sibling_that_stops_answering_lends_on(
    fixture: PeersFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_client, "ANSWER_SECONDS", 0.1)
    with fixture.sibling(answer_with(LENT)) as sibling:
        await eventually(lambda: fixture.state == ON)
        sibling.answer = lambda _: []
        asked = len(sibling.asked)
        await eventually(lambda: len(sibling.asked) > asked + 3)
        fixture.region.store(1)
        assert fixture.finds(1)
        assert fixture.state == ON
    await eventually(lambda: not fixture.finds(1))  # it has died


@pytest.mark.parametrize("kept", [False, True])
async def test_how_long_memory_stays_mapped_after_a_session(
    fixture: PeersFixture, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(peers, "KEPT_SECONDS", 1.0 if kept else 1e6)
    lent = msgspec.structs.replace(LENT, is_kept=kept)
    with fixture.sibling(answer_with(lent)):
        await eventually(lambda: fixture.state == ON)
        fixture.region.store(1)
        lent_until = time.monotonic()
    await eventually(lambda: not fixture.finds(1))
    assert not kept or time.monotonic() - lent_until >= 1.0
    await eventually(lambda: not fixture.peers.status())


async def test_a_sibling_that_restarts_with_its_memory_is_not_mapped_again(
    fixture: PeersFixture,
) -> None:
    lent = msgspec.structs.replace(LENT, is_kept=True)
    fixture.region.store(1)
    with fixture.sibling(answer_with(lent)):
        await eventually(lambda: fixture.state == ON)
    await eventually(lambda: fixture.state != ON)
    assert fixture.finds(1)
    with fixture.sibling(answer_with(lent)) as sibling:
        await eventually(lambda: fixture.state == ON)
        assert {each.first for each in sibling.asked} == {None}
        assert fixture.finds(1)


async def test_uses_are_sent_to_a_sibling_that_answers(fixture: PeersFixture) -> None:
    with fixture.sibling(answer_with(LENT)) as sibling:
        await eventually(lambda: fixture.state == ON)
        fixture.region.store(1, 2)
        names = [key(1), key(2)]
        rows = fixture.windows.find(fixture.contents, names)
        for _ in range(3):
            fixture.windows.note_uses(fixture.contents, rows, names)
        await eventually(lambda: bool(sibling.uses))
        assert [each.keys for each in sibling.uses] == [tuple(names)]
