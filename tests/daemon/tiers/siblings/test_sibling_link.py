"""A link to a sibling that is honest, silent or hostile."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvferry.daemon.tiers.siblings import sibling_link
from kvferry.daemon.tiers.siblings.key_table import KeyTable, hash_keys
from kvferry.daemon.tiers.siblings.mapped_pool import MappedPool
from kvferry.daemon.tiers.siblings.sibling_link import SiblingLink
from structlog.testing import capture_logs

from kvferry.proto import messages as wire
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError
from kvferry.proto.keys import EventKind
from kvferry.proto.lending import (
    BlocksLocated,
    BorrowNamespace,
    BorrowPool,
    LocateBlocks,
    PoolLent,
    ResetLent,
)
from kvferry.shm.memfd import sealed_memfd
from support.background import in_background
from support.descriptors import count_memfds
from support.eventually import eventually
from support.fake_sibling import CHUNK, Answers, FakeSibling
from support.fuzz import HostileFrames
from support.time_limits import TIMEOUT

GOLDEN = Path(__file__).parents[3] / "proto" / "golden.json"
KEYS = tuple(number.to_bytes(36, "big") for number in range(8))


@pytest.fixture
def sibling(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSibling]:
    monkeypatch.setattr(sibling_link, "ASK_EVERY", 0.02)
    # Both cores may be busy. Tests of silence set less.
    for limit in ("PROMPT_SECONDS", "ANSWER_SECONDS", "RESET_SECONDS"):
        monkeypatch.setattr(sibling_link, limit, TIMEOUT)
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
        assert (await link.locate(KEYS[:2], TIMEOUT)).offsets == (0, 0)
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
        link.note_generation(3)
        assert (link.is_usable, link.keys.is_active) == (False, False)
        link.note_generation(2)
        assert (link.is_usable, link.keys.is_active) == (True, True)
        cleared = wire.KeyEvents(1, (wire.KeyEvent(EventKind.CLEARED, ()),), 3)
        sibling.answer = lambda message: sibling.honest_answer(message)[:1]
        sibling.generation = 3
        sibling.unasked.append(cleared)
        await eventually(lambda: not link.is_usable and not held(link))


async def test_a_silent_sibling_is_not_used_and_then_disconnected(
    sibling: FakeSibling, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_link, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(sibling_link, "PROMPT_SECONDS", 0.2)
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda _: []
        with pytest.raises(KVFerryError, match=r"does not answer within 0\.2 s"):
            await link.locate(KEYS[:1], 0.2)
        assert not link.is_usable
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
        ignore_resets(sibling)
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


async def test_a_reset_is_requested_once_although_its_answer_takes_time(
    sibling: FakeSibling, short_path: Path
) -> None:
    """Each request raises the generation. A sibling that is ahead would reset this daemon."""
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        waiting: list[int] = []

        def answer(message: wire.ClientMessage) -> Answers:
            if isinstance(message, ResetLent):
                waiting.append(message.request_id)
                return []
            return sibling.honest_answer(message)

        sibling.answer = answer
        reset = asyncio.create_task(link.reset())
        await eventually(lambda: waiting)
        borrowed = len(borrows(sibling))
        await eventually(lambda: len(borrows(sibling)) > borrowed)
        assert (link.is_usable, link.keys.is_active) == (False, False)
        sibling.answer = sibling.honest_answer
        sibling.unasked.append(wire.Done(waiting[0]))
        await reset
        await eventually(lambda: link.is_usable)
        assert len(resets(sibling)) == 1


async def test_while_a_reset_is_due_the_generation_resets_nothing(
    sibling: FakeSibling, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the sibling would count one reset twice."""
    monkeypatch.setattr(sibling_link, "RESET_SECONDS", 0.05)
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        ignore_resets(sibling)
        await link.reset()
        link.note_generation(2)
        await eventually(lambda: len(resets(sibling)) > 3)
        assert borrows(sibling)[-1].generation == 0
        sibling.generation = 2
        sibling.answer = sibling.honest_answer
        await eventually(lambda: link.is_usable)
        await eventually(lambda: borrows(sibling)[-1].generation == 2)


async def test_a_sibling_without_the_namespace_has_nothing_to_reset(
    sibling: FakeSibling, short_path: Path
) -> None:
    """Also not later: what it stores then is newer than the reset."""
    sibling.generation = 0
    async with running_link(short_path) as link:
        await eventually(lambda: "no namespace" in link.state)
        await link.reset()
        link.note_generation(2)
        sibling.generation = 2
        await eventually(lambda: link.is_usable)
        assert not resets(sibling)


async def test_the_pool_of_a_namespace_that_was_freed_is_mapped_again(
    sibling: FakeSibling, short_path: Path
) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        before, borrowed = link.window, len(borrows(sibling))
        await eventually(lambda: len(borrows(sibling)) > borrowed + 1)
        assert link.window == before
        sibling.generation = 0
        await eventually(lambda: link.pool is None)
        sibling.generation = 1
        await eventually(lambda: link.is_usable)
        assert link.window > before


async def test_a_reset_that_is_refused_says_why(sibling: FakeSibling, short_path: Path) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        refused = ErrorInfo(Code.UNKNOWN_NAMESPACE, "it was freed")
        sibling.answer = lambda message: (
            [wire.Error(message.request_id, refused)]
            if isinstance(message, ResetLent)
            else sibling.honest_answer(message)
        )
        await link.reset()
        assert not link.is_usable
        await eventually(lambda: "it was freed" in link.state)


def ignore_resets(sibling: FakeSibling) -> None:
    def answer(message: wire.ClientMessage) -> Answers:
        return [] if isinstance(message, ResetLent) else sibling.honest_answer(message)

    sibling.answer = answer


def borrows(sibling: FakeSibling) -> list[BorrowNamespace]:
    return [each for each in sibling.received if isinstance(each, BorrowNamespace)]


def resets(sibling: FakeSibling) -> list[wire.ClientMessage]:
    return [each for each in sibling.received if isinstance(each, ResetLent)]


WRONG: dict[str, Callable[[LocateBlocks], Answers]] = {
    "another reply": lambda m: [wire.Done(m.request_id)],
    "too few blocks": lambda m: [BlocksLocated(m.request_id, (), (), ())],
    "no versions": lambda m: [BlocksLocated(m.request_id, (0,), (0,))],
    "two offsets": lambda m: [BlocksLocated(m.request_id, (0, 0), (0,), (0,))],
    "an offset beyond all pools": lambda m: [BlocksLocated(m.request_id, (1 << 60,), (0,), (0,))],
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
        with pytest.raises(KVFerryError) as error:
            await link.locate(KEYS[:1], TIMEOUT)
        assert link.state == str(error.value)
        await eventually(lambda: link.is_usable)


async def test_the_reason_of_a_disconnect_is_shown_until_it_is_connected_again(
    sibling: FakeSibling, short_path: Path
) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda _: []
        sibling.unasked.append(wire.Goodbye("enough"))
        hellos = len([each for each in sibling.received if isinstance(each, wire.Hello)])
        await eventually(
            lambda: len([e for e in sibling.received if isinstance(e, wire.Hello)]) > hellos
        )
        assert "closed the session: enough" in link.state


async def test_the_reason_of_a_sibling_is_shortened(sibling: FakeSibling, short_path: Path) -> None:
    """The daemon gets it in a datagram, with those of all siblings."""
    why = ErrorInfo(Code.BUSY, "why " * (1 << 18))
    sibling.answer = lambda message: [wire.Error(getattr(message, "request_id", None), why)]
    async with running_link(short_path) as link:
        await eventually(lambda: "why why" in link.state)
        assert len(link.state) == sibling_link.MAX_STATE


async def test_many_messages_at_once_are_all_handled(
    sibling: FakeSibling, short_path: Path
) -> None:
    async with running_link(short_path) as link:
        await eventually(lambda: link.is_usable)
        sibling.answer = lambda _: []
        stored = [wire.KeyEvent(EventKind.STORED, (key,)) for key in many_keys(500)]
        sibling.unasked += [wire.KeyEvents(n + 1, (event,)) for n, event in enumerate(stored)]
        hashes = hash_keys("store", many_keys(500))
        await eventually(lambda: link.keys.contains(hashes).all())


def many_keys(count: int) -> list[bytes]:
    return [number.to_bytes(36, "big") for number in range(100, 100 + count)]


async def test_an_unexpected_error_ends_only_the_session(
    sibling: FakeSibling, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappedPool, "map", lambda _: 1 // 0)
    with capture_logs() as logs:
        async with running_link(short_path) as link:
            await eventually(lambda: "ZeroDivisionError" in link.state)
            monkeypatch.undo()
            await eventually(lambda: link.is_usable)
    assert "1 // 0" in logs[0]["reason"]


async def test_a_sibling_whose_pool_is_not_mapped_yet_is_not_used(
    sibling: FakeSibling, short_path: Path
) -> None:
    sibling.answer = lambda message: (
        [] if isinstance(message, BorrowPool) else sibling.honest_answer(message)
    )
    async with running_link(short_path) as link:
        await eventually(lambda: held(link))
        assert not link.is_usable


WRONG_POOLS: dict[str, Callable[[int], PoolLent]] = {
    "another first chunk": lambda number: PoolLent(number, CHUNK, 1, 2, (7,)),
    "a first chunk far away": lambda number: PoolLent(number, CHUNK, 1 << 40, 1 << 41, (7,)),
    "the same chunk again": lambda number: PoolLent(number, CHUNK, 0, 2, (7,)),
}


@pytest.mark.parametrize("name", WRONG_POOLS)
async def test_a_wrong_pool_is_not_mapped(
    sibling: FakeSibling, short_path: Path, name: str
) -> None:
    sibling.answer = lambda message: (
        [WRONG_POOLS[name](message.request_id)]
        if isinstance(message, BorrowPool)
        else sibling.honest_answer(message)
    )
    async with running_link(short_path) as link:
        await eventually(lambda: "wrong PoolLent" in link.state)
        assert link.pool is None


async def test_the_memory_of_a_lost_sibling_is_closed_at_once(
    sibling: FakeSibling, short_path: Path
) -> None:
    """Also if it is lost before its pool was mapped. It may have most of the host's memory. The
    test has one descriptor of the chunk itself."""

    def lend_in_parts(message: wire.ClientMessage) -> Answers:
        match message:
            case BorrowPool(number, 0):
                return [PoolLent(number, CHUNK, 0, 2, (7,))]
            case BorrowPool():
                return []
        return sibling.honest_answer(message)

    gc.disable()
    try:
        async with running_link(short_path) as link:
            await eventually(lambda: link.is_usable and count_memfds("chunk") == 2)
            sibling.answer = lend_in_parts
            sibling.unasked.append(wire.Goodbye("mapped"))
            await eventually(lambda: BorrowPool in map(type, sibling.received[-1:]))
            await eventually(lambda: link.pool is None and count_memfds("chunk") == 2)
            sibling.answer = lambda _: []
            sibling.unasked.append(wire.Goodbye("not mapped"))
            await eventually(lambda: "not mapped" in link.state)
            await eventually(lambda: count_memfds("chunk") == 1)
    finally:
        gc.enable()


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


@pytest.mark.parametrize("runs", [False, True])
async def test_a_reset_does_not_wait_for_a_daemon_that_is_dead_or_lends_nothing(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    monkeypatch.setattr(sibling_link, "ASK_EVERY", 0.02)
    monkeypatch.setattr(sibling_link, "RESET_SECONDS", 10 * TIMEOUT)
    fake = FakeSibling(short_path, {}) if runs else None
    if fake is not None:
        refused = ErrorInfo(Code.FORBIDDEN, "this daemon lends no blocks")
        fake.answer = lambda message: (
            [wire.Error(message.request_id, refused)]
            if isinstance(message, BorrowNamespace)
            else fake.honest_answer(message)
        )
    async with asyncio.timeout(TIMEOUT), running_link(short_path) as link:
        await link.reset()  # before it is known
        why = "lends no blocks" if runs else "no daemon runs there (No such file or directory)"
        await eventually(lambda: why in link.state)
        assert not link.is_usable
        await link.reset()
    if fake is not None:
        fake.close()


async def test_a_sibling_is_used_once_it_runs(short_path: Path, sibling: FakeSibling) -> None:
    sibling.close()
    for name in ("kvferry.sock", "fds.sock"):
        (short_path / name).unlink()
    async with running_link(short_path) as link:
        await eventually(lambda: "no daemon runs" in link.state)
        started = FakeSibling(short_path, sibling.descriptors)
        await eventually(lambda: link.is_usable)
    started.close()
