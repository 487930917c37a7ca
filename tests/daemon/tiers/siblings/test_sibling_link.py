"""A link to a sibling that is honest, silent or hostile."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry.daemon.tiers.siblings import sibling_link
from kvferry.daemon.tiers.siblings.key_table import KeyTable, hash_keys
from kvferry.daemon.tiers.siblings.sibling_link import ON, SiblingLink
from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, KVFerryError
from kvferry.proto.keys import EventKind
from kvferry.proto.lending import BlocksLocated, LocateBlocks, ResetLent
from kvferry.shm.memfd import sealed_memfd
from support.background import in_background
from support.eventually import eventually
from support.fake_sibling import CHUNK, Answers, FakeSibling
from support.fuzz import HostileFrames

GOLDEN = Path(__file__).parents[3] / "proto" / "golden.json"
KEYS = tuple(number.to_bytes(36, "big") for number in range(8))


@pytest.fixture
def sibling(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSibling]:
    monkeypatch.setattr(sibling_link, "ASK_EVERY", 0.02)
    descriptor = sealed_memfd("chunk", CHUNK)
    made = FakeSibling(short_path, {7: descriptor})
    made.keys = KEYS[:4]
    yield made
    made.close()
    os.close(descriptor)


@asynccontextmanager
async def running_link(directory: Path) -> AsyncIterator[SiblingLink]:
    link = SiblingLink(directory, "store", KeyTable())
    link.note_generation(1)
    async with in_background(link.run()):
        yield link


def held(link: SiblingLink) -> list[bytes]:
    found = link.keys.contains(hash_keys("store", KEYS)).tolist()
    return [key for key, is_held in zip(KEYS, found, strict=True) if is_held]


async def test_an_honest_sibling_is_used(sibling: FakeSibling, short_path: Path) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable and held(link) == [*KEYS[:4]])
        assert (await link.locate(KEYS[:2])).offsets == (0, 0)
        assert link.pool is not None
        sibling.unasked.append(wire.KeyEvents(1, (wire.KeyEvent(EventKind.STORED, KEYS[4:]),)))
        sibling.unasked.append(wire.KeyEvents(2, (wire.KeyEvent(EventKind.REMOVED, KEYS[:2]),)))
        sibling.answer = lambda message: sibling.honest_answer(message)[:1]
        await eventually(lambda: held(link) == [*KEYS[2:]])
    assert link.pool is None
    assert not (link.is_usable)
    assert not (held(link))


async def test_missing_events_are_made_up_for(sibling: FakeSibling, short_path: Path) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda message: (
            sibling.honest_answer(message)
            if getattr(message, "snapshot", True)
            else sibling.honest_answer(message)[:1]
        )
        sibling.keys = KEYS[6:]
        sibling.unasked.append(wire.KeyEvents(9, (wire.KeyEvent(EventKind.STORED, KEYS[7:]),)))
        await eventually(lambda: held(link) == [*KEYS[6:]])


async def test_a_sibling_of_another_generation_is_not_used(
    sibling: FakeSibling, short_path: Path
) -> None:
    sibling.generation = 2
    async with running_link(short_path) as link:
        await eventually(lambda: "was reset" in link.state)
        assert not link.is_usable
        link.note_generation(2)
        await eventually(lambda: link.is_usable)
        cleared = wire.KeyEvents(1, (wire.KeyEvent(EventKind.CLEARED, ()),), 3)
        sibling.answer = lambda message: sibling.honest_answer(message)[:1]
        sibling.generation = 3
        sibling.unasked.append(cleared)
        await eventually(lambda: not link.is_usable and not held(link))


async def test_a_silent_sibling_is_not_used_and_then_disconnected(
    sibling: FakeSibling, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda _: []
        with pytest.raises(KVFerryError, match="does not answer within"):
            await link.locate(KEYS[:1])
        assert not link.is_usable
        monkeypatch.setattr(sibling_link, "ANSWER_SECONDS", 0.05)
        await eventually(lambda: link.pool is None)
        assert "it may be stopped" in link.state
        monkeypatch.undo()
        sibling.answer = sibling.honest_answer
        await eventually(lambda: link.is_usable)


async def test_a_reset_that_is_not_confirmed_is_repeated_before_use(
    sibling: FakeSibling, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_link, "RESET_SECONDS", 0.05)
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda message: (
            [] if isinstance(message, ResetLent) else sibling.honest_answer(message)
        )
        await link.reset()
        link.note_generation(1)
        await eventually(lambda: len(resets(sibling)) > 2)
        assert not link.is_usable
        sibling.answer = sibling.honest_answer
        await eventually(lambda: link.is_usable)
        count = len(resets(sibling))
        asked = len(sibling.received)
        await eventually(lambda: len(sibling.received) > asked + 2)
        assert len(resets(sibling)) == count


def resets(sibling: FakeSibling) -> list[wire.ClientMessage]:
    return [each for each in sibling.received if isinstance(each, ResetLent)]


WRONG: dict[str, Callable[[LocateBlocks], Answers]] = {
    "another reply": lambda m: [wire.Done(m.request_id)],
    "too few blocks": lambda m: [BlocksLocated(m.request_id, (), (), ())],
    "no message": lambda _: [b"\xc1"],
    "a farewell": lambda _: [wire.Goodbye("enough")],
    "finished jobs": lambda _: [wire.Finished(()), b""],
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_ends_the_session(
    sibling: FakeSibling, short_path: Path, name: str
) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda message: (
            WRONG[name](message)
            if isinstance(message, LocateBlocks)
            else sibling.honest_answer(message)
        )
        with pytest.raises(KVFerryError):
            await link.locate(KEYS[:1])
        await eventually(lambda: link.is_usable)


async def test_memory_that_may_shrink_is_not_mapped(sibling: FakeSibling, short_path: Path) -> None:
    descriptor = os.memfd_create("chunk", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CHUNK)
    sibling.descriptors = {7: descriptor}
    async with running_link(short_path) as link:
        await eventually(lambda: Code.NOT_SHAREABLE in link.state)
        assert link.pool is None
    os.close(descriptor)


async def test_hostile_frames_end_sessions_and_nothing_else(
    sibling: FakeSibling, short_path: Path
) -> None:
    golden = json.loads(GOLDEN.read_text())
    honest = [bytes.fromhex(data) for name, data in golden.items() if name.startswith("daemon/")]
    frames = HostileFrames(1, honest)
    async with running_link(short_path) as link:
        for _ in range(40):
            await eventually(lambda: link.is_usable)
            sibling.unasked += [frames.frame() for _ in range(25)]
            await eventually(lambda: not sibling.unasked)
        sibling.generation = 1
        await eventually(lambda: link.is_usable)


async def test_a_directory_without_a_daemon_is_asked_again(short_path: Path) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.state == "connecting")
        assert not link.is_usable
    assert link.state != ON
