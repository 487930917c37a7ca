"""What is read again, what its end waits for, and in which order ends are told."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import Cargo, CopyPlan, Corrupted, Ended, Report, Start, Unmapped
from kvferry.daemon.core.deeds import Deed
from kvferry.daemon.engine.auditor import Auditor
from kvferry.daemon.engine.ledger import Ledger
from kvferry.daemon.engine.memory import MappedFiles
from kvferry.daemon.engine.reader import Pool, Request
from kvferry.daemon.server.audits import Audits
from kvferry.proto.errors import Code
from kvferry.proto.layout import LayoutArrays
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction, KVLayout, TensorLayout, TensorRef
from kvferry.proto.status import Fingerprint

BLOCK, COUNT = 4096, 16
FINGERPRINT = Fingerprint("llama", BLOCK, key_bytes=8)
LAYOUT = KVLayout((TensorLayout(4, BLOCK, BLOCK),), ((TensorRef(0, BLOCK),),))
DEEDS = [
    Deed(FINGERPRINT.name, BLOCK, COUNT * BLOCK, fingerprint=FINGERPRINT),
    Deed("engine", BLOCK, COUNT * BLOCK, layout=LayoutArrays.from_layout(LAYOUT)),
]


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(8, "big") for number in numbers)


class Desk:
    """Audits over real memory, with a ledger in which all blocks are sealed."""

    def __init__(self, deed: Deed, rate: float) -> None:
        self.deed = deed
        self.told: list[Any] = []
        self.memory = MappedFiles("kvferry-test", (COUNT + 1) * BLOCK, BLOCK)
        whole = (ctypes.c_ubyte * self.memory.nbytes).from_address(self.memory.address)
        self.pool = np.ctypeslib.as_array(whole).reshape(COUNT + 1, BLOCK)
        self.pool[:] = np.random.default_rng(1).integers(0, 255, self.pool.shape)
        self.auditor = Auditor(self.memory.descriptors, BLOCK, 2, self.told.append)
        self.ledger = Ledger.create(deed)
        self.audits = Audits(self.auditor, rate, self.told.extend)
        self.store(*range(COUNT))

    def store(self, *numbers: int) -> None:
        blocks = np.array(numbers)
        names = keys(*numbers) if self.deed.key_bytes else ()
        versions = self.ledger.vacate(blocks)
        request = Request(0, False, self.deed.start, BLOCK, blocks.tobytes(), names)
        sums = np.array(Pool(self.memory.descriptors, BLOCK).sums(request), np.uint64)
        self.ledger.seal(blocks, versions, sums, names, {})

    def spoil(self, block: int) -> None:
        self.pool[block + 1, 100] ^= 1

    def start(self, serial: int, *numbers: int, session: str = "a", of: int = 1) -> Start:
        plan = CopyPlan(serial, of, Direction.LOAD, (), 0, 0, 0, 0)
        return Start(plan, session, serial, Cargo(self.deed.owner, np.array(numbers)))

    def load(self, serial: int, *numbers: int, session: str = "a", of: int = 1) -> bool:
        start = self.start(serial, *numbers, session=session, of=of)
        held = self.audits.started(start, self.ledger)
        self.audits.posted(serial)
        return held

    def ended(self, serial: int, session: str = "a", of: int = 1) -> list[Any]:
        start = self.start(serial, session=session, of=of)
        return list(self.audits.ended(start, Ended(serial, Outcome.DONE, 0.5)))

    async def was_read(self, serial: int) -> None:
        """A load whose end was not reported."""
        async with asyncio.timeout(20):
            while self.audits._held[serial].reading:
                await asyncio.sleep(0.001)

    async def settled(self, count: int) -> list[Report]:
        async with asyncio.timeout(20):
            while len(self.told) < count:
                await asyncio.sleep(0.001)
        return self.told

    def close(self) -> None:
        self.auditor.close()
        self.ledger.close()
        self.memory.close()


@pytest.fixture(params=DEEDS, ids=["keys", "numbers"])
async def desk(request: pytest.FixtureRequest) -> Any:
    desk = Desk(request.param, 1.0)
    yield desk
    desk.close()


async def test_a_load_of_good_blocks_is_done_once_they_were_read(desk: Desk) -> None:
    assert desk.load(1, 3, 4, 5)
    assert desk.ended(1) == []
    assert await desk.settled(1) == [Ended(1, Outcome.DONE, 0.5)]


async def test_what_another_read_has_found_corrupt_is_not_loaded(desk: Desk) -> None:
    """However the two come about: it was found between the begin and the end of the load's read."""
    desk.spoil(6)
    desk.audits.verify(desk.ledger)
    desk.load(1, 6)
    assert desk.ended(1) == []
    async with asyncio.timeout(20):
        while not any(isinstance(told, Ended) for told in desk.told):
            await asyncio.sleep(0.001)
    (ended,) = (told for told in desk.told if isinstance(told, Ended))
    assert ended.outcome is Outcome.FAILED
    assert ended.error is not None
    assert ended.error.code == Code.CORRUPT_BLOCK


async def test_what_was_read_before_its_end_is_told_with_it(desk: Desk) -> None:
    desk.spoil(6)
    desk.load(1, 3)
    desk.load(2, 4, 6)
    desk.load(3, 5)
    assert desk.ended(3) == []
    await desk.was_read(1)
    await desk.was_read(2)
    await desk.settled(2)
    assert desk.ended(1) == [Ended(1, Outcome.DONE, 0.5)]
    (failed,) = desk.ended(2)
    assert failed.outcome is Outcome.FAILED
    assert Ended(3, Outcome.DONE, 0.5) in desk.told  # nobody reads of it what was spoiled


async def test_a_load_that_ends_late_is_told_at_once(desk: Desk) -> None:
    desk.load(1, 3)
    desk.load(2, 4, session="b")
    assert desk.ended(2, "b") == []
    await desk.settled(1)
    await desk.was_read(1)
    assert desk.ended(1) == [Ended(1, Outcome.DONE, 0.5)]


async def test_a_load_of_a_spoiled_block_fails_and_names_it(desk: Desk) -> None:
    desk.spoil(4)
    desk.load(1, 3, 4, 5)
    assert desk.ended(1) == []
    corrupted, ended = await desk.settled(2)
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.seconds) == (Outcome.FAILED, 0.0)
    assert ended.error is not None
    assert ended.error.code == Code.CORRUPT_BLOCK
    assert corrupted == Corrupted(desk.deed.owner, keys(4) if desk.deed.key_bytes else ())
    if desk.deed.key_bytes:
        assert desk.ledger.sealed(np.array([3, 4, 5])).tolist() == [True, False, True]
    else:
        assert ended.error.value == "4"


async def test_a_load_of_a_spoiled_block_that_was_cancelled_is_cancelled(desk: Desk) -> None:
    desk.spoil(4)
    desk.load(1, 4)
    cancelled = Ended(1, Outcome.CANCELLED)
    assert list(desk.audits.ended(desk.start(1), cancelled)) == []
    assert (await desk.settled(2))[-1] == cancelled


async def test_ends_are_told_in_the_order_in_which_they_ended(desk: Desk) -> None:
    desk.load(1, *range(COUNT))
    assert desk.ended(9) == [Ended(9, Outcome.DONE, 0.5)]  # before it: at once
    assert desk.ended(1) == []
    assert desk.ended(8) == []  # behind it
    assert desk.ended(7, "b") == [Ended(7, Outcome.DONE, 0.5)]  # somebody else's
    told = await desk.settled(2)
    assert [report.serial for report in told if isinstance(report, Ended)] == [1, 8]
    assert desk.ended(10) == [Ended(10, Outcome.DONE, 0.5)]
    assert not desk.audits._queues  # sessions come and go


async def test_what_was_found_good_stays_so_whatever_is_found_later(desk: Desk) -> None:
    desk.load(1, 3)
    await desk.was_read(1)
    desk.spoil(3)
    desk.load(2, 3)
    await desk.settled(1)
    assert desk.ended(1) == [Ended(1, Outcome.DONE, 0.5)]
    (failed,) = desk.ended(2)
    assert failed.outcome is Outcome.FAILED


async def test_a_spoiled_block_without_a_key_is_read_with_every_load_until_it_is_stored_anew() -> (
    None
):
    desk = Desk(DEEDS[1], 1.0)
    desk.spoil(4)
    desk.load(1, 4)
    await desk.settled(1)
    (failed,) = desk.ended(1)
    assert failed.outcome is Outcome.FAILED
    desk.audits._rate = 0.0
    assert desk.load(2, 3, 4)
    await desk.settled(2)
    (failed,) = desk.ended(2)
    assert failed.outcome is Outcome.FAILED
    assert not desk.load(3, 3)
    desk.store(4)
    assert not desk.load(4, 4)
    desk.close()


async def test_what_was_stored_over_meanwhile_is_not_held_against_the_load(desk: Desk) -> None:
    desk.spoil(2)
    desk.load(1, 2)
    desk.ledger.vacate(np.array([2]))  # a store of it begins before the thread's news are here
    desk.ended(1)
    assert await desk.settled(1) == [Ended(1, Outcome.DONE, 0.5)]


async def test_a_registration_is_gone_when_all_its_loads_were_told(desk: Desk) -> None:
    """Or its host blocks might be somebody else's by then."""
    assert list(desk.audits.unmapped(Unmapped(1))) == [Unmapped(1)]
    desk.load(1, *range(COUNT))
    desk.load(2, 3, session="b")
    desk.load(3, 4, session="c", of=2)
    assert desk.ended(1) == []
    assert desk.ended(2, "b") == []
    assert desk.ended(3, "c", of=2) == []
    assert list(desk.audits.unmapped(Unmapped(1))) == []
    assert list(desk.audits.unmapped(Unmapped(3))) == [Unmapped(3)]
    told = await desk.settled(4)
    of_it = [report for report in told if report != Ended(3, Outcome.DONE, 0.5)]
    assert of_it[-1] == Unmapped(1)
    assert len(of_it) == 3


async def test_what_nobody_had_vouched_for_is_not_loaded_if_it_was_stored_over() -> None:
    """An earlier daemon stored it: whether it was good nobody can tell any more."""
    desk = Desk(DEEDS[1], 0.0)
    desk.ledger.suspect_all()
    desk.load(1, 2, 3)
    desk.ledger.vacate(np.array([2]))
    assert desk.ended(1) == []
    assert await desk.settled(1) == [Ended(1, Outcome.DONE, 0.5)]  # it was read before
    desk.spoil(4)
    desk.load(2, 4)
    desk.ledger.vacate(np.array([4]))
    assert desk.ended(2) == []
    (_, ended) = await desk.settled(2)
    assert isinstance(ended, Ended)
    assert ended.error is not None
    assert (ended.error.code, ended.error.value) == (Code.CORRUPT_BLOCK, "4")
    desk.close()


async def test_a_region_that_went_meanwhile_ends_its_loads_all_the_same(desk: Desk) -> None:
    desk.load(1, 2)
    desk.ended(1)
    desk.ledger.close()
    assert await desk.settled(1) == [Ended(1, Outcome.DONE, 0.5)]
    desk.ledger = Ledger.create(desk.deed)


async def test_blocks_that_are_not_sealed_yet_are_not_read() -> None:
    desk = Desk(DEEDS[0], 1.0)
    desk.ledger.vacate(np.array([2, 3]))
    assert not desk.load(1, 2, 3)
    assert desk.ended(1) == [Ended(1, Outcome.DONE, 0.5)]
    desk.close()


async def test_with_a_rate_of_none_only_what_an_earlier_daemon_left_is_read() -> None:
    desk = Desk(DEEDS[0], 0.0)
    assert not desk.load(1, 2, 3)
    desk.ledger.suspect_all()
    assert desk.load(2, 2, 3)
    desk.ended(2)
    await desk.settled(1)
    assert not desk.load(3, 2, 3)
    assert desk.load(4, 2, 4)
    desk.ended(4)
    await desk.settled(2)
    desk.close()


async def test_beside_what_an_earlier_daemon_left_the_rate_holds_for_the_others() -> None:
    desk = Desk(DEEDS[0], 1.0)
    desk.ledger.suspect_all()
    desk.store(2)
    desk.ledger.vacate(np.array([3]))
    assert desk.load(1, 2)
    assert not desk.load(2, 3)  # stored by this one, and not sealed yet
    desk.ended(1)
    await desk.settled(1)
    desk.close()


async def test_about_as_many_are_read_as_the_rate_says() -> None:
    desk = Desk(DEEDS[1], 0.25)
    read = sum(desk.load(serial, 1) for serial in range(1000))
    assert 150 < read < 350
    desk.close()


async def test_verify_finds_what_was_spoiled_while_nobody_loads() -> None:
    desk = Desk(DEEDS[0], 0.0)
    desk.ledger.suspect_all()
    desk.spoil(7)
    desk.audits.verify(desk.ledger)
    assert await desk.settled(1) == [Corrupted(desk.deed.owner, keys(7), unasked=1)]
    assert desk.ledger.suspect is None
    desk.close()


async def test_an_engines_block_that_nobody_sealed_fails_after_a_restart_only() -> None:
    desk = Desk(DEEDS[1], 0.0)
    desk.ledger.vacate(np.array([5]))
    assert not desk.load(1, 5)
    desk.ledger.suspect_all()
    assert desk.load(2, 5)
    (ended,) = desk.ended(2)
    assert ended.error is not None
    assert ended.error.code == Code.CORRUPT_BLOCK
    desk.close()
