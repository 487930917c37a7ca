"""Books are kept of regions, and handed on; stores are sealed together, the last of each block."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry.daemon.core.actions import Amend, Cargo, CopyPlan, Ended, Enter, Start, Strike
from kvferry.daemon.core.deeds import Deed, Found, Resident
from kvferry.daemon.engine.auditor import Auditor, Blocks
from kvferry.daemon.engine.ledger import Ledger
from kvferry.daemon.engine.memory import MappedFiles
from kvferry.daemon.server.archive import Archive
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import Outcome
from kvferry.proto.page import sealed_memfd
from kvferry.proto.specs import Direction
from kvferry.proto.status import Fingerprint

BLOCK, COUNT = 4096, 64
FINGERPRINT = Fingerprint("llama", BLOCK, key_bytes=8)
DEED = Deed(FINGERPRINT.name, 0, COUNT * BLOCK, fingerprint=FINGERPRINT)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Shelf:
    """Keeps descriptors, as a service manager would."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def keep(self, name: str, descriptor: int) -> None:
        self.kept[name] = os.dup(descriptor)

    def forget(self, name: str) -> None:
        os.close(self.kept.pop(name))


class Desk:
    def __init__(self, shelf: Shelf) -> None:
        self.pool = MappedFiles("kvferry-test", COUNT * BLOCK, BLOCK)
        self.shelf = shelf
        self.auditor = Auditor(self.pool.descriptors, BLOCK, 2, lambda error: None)
        self.archive = Archive(self.auditor, shelf, 0.0, lambda reports: None)
        self.serial = 0

    def start(self, numbers: list[int], keys: list[int], **parts: tuple[int, int]) -> int:
        self.serial += 1
        plan = CopyPlan(self.serial, 1, Direction.STORE, (), 0, 0, 0, 0)
        names = tuple(key(number) for number in keys)
        theirs = {int(name[1:]): part for name, part in parts.items()}
        cargo = Cargo(DEED.owner, np.array(numbers, dtype=np.int64), names, theirs)
        self.archive.started(Start(plan, "a", self.serial, cargo))
        return self.serial

    def end(self, serial: int, outcome: Outcome = Outcome.DONE) -> None:
        report = Ended(serial, outcome)
        assert list(self.archive.reported(report)) == [report]

    async def found(self) -> tuple[Resident, ...]:
        """What another daemon finds, once all is sealed."""
        async with asyncio.timeout(20):
            while self.archive.busy:
                await asyncio.sleep(0.001)
        ledger = Ledger(os.dup(self.shelf.kept["ledger-1"]))
        residents = ledger.residents()
        ledger.close()
        return residents


@pytest.fixture
async def desk() -> Any:
    desk = Desk(Shelf())
    desk.archive.write(Enter(DEED))
    yield desk
    desk.archive.close()


async def test_stores_are_found_in_the_order_in_which_they_began(desk: Desk) -> None:
    first, second = desk.start([3, 4], [1, 2]), desk.start([7], [3])
    desk.end(second)
    desk.end(first)
    expected = (Resident(4, key(2)), Resident(3, key(1)), Resident(7, key(3)))
    assert await desk.found() == expected


async def test_of_stores_that_are_sealed_together_the_last_of_a_block_counts(desk: Desk) -> None:
    one = desk.start([1, 2], [1, 2], b1=(0, 1), b2=(1, 2))
    desk.end(one)
    desk.end(desk.start([2], [9]))
    desk.end(desk.start([1], [8], b1=(2, 3)))
    assert await desk.found() == (Resident(2, key(9)), Resident(1, key(8), (2, 3)))


async def test_what_is_being_stored_over_is_not_found(desk: Desk) -> None:
    desk.end(desk.start([1, 2], [1, 2]))
    over = desk.start([2], [3])
    assert await desk.found() == (Resident(1, key(1)),)
    desk.end(over, Outcome.FAILED)
    assert await desk.found() == (Resident(1, key(1)),)


async def test_a_wipe_takes_what_is_not_sealed_yet_along(desk: Desk) -> None:
    desk.end(desk.start([1], [1]))
    late = desk.start([2], [2])
    desk.archive.write(Amend(DEED, wipe=True))
    desk.end(late)
    assert await desk.found() == ()
    desk.end(desk.start([1], [3]))
    assert await desk.found() == (Resident(1, key(3)),)


async def test_a_region_that_is_struck_is_kept_no_more(desk: Desk) -> None:
    desk.end(desk.start([1], [1]))
    other = os.dup(desk.shelf.kept["ledger-1"])
    (ledger,) = (ledger for _, ledger in desk.archive._ledgers.values())
    desk.archive.write(Strike(DEED.owner))
    assert desk.shelf.kept == {}
    assert ledger.closed
    with pytest.raises(Refused):
        Ledger(other)  # a copy of the descriptor somewhere is no ledger any more either
    desk.archive.write(Strike(DEED.owner))
    desk.archive.write(Enter(DEED))
    assert list(desk.shelf.kept) == ["ledger-2"]


@pytest.mark.parametrize("read", [False, True], ids=["before it is read", "while it is read"])
async def test_what_was_to_be_sealed_may_go(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    monkeypatch.setattr("kvferry.daemon.server.seals.SEAL_AFTER", 0)
    asked: list[Any] = []
    monkeypatch.setattr(desk.auditor, "read", lambda blocks, urgent, done: asked.append(done))
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    desk.end(desk.start([1], [1]))
    if read:
        await asyncio.sleep(0.01)
    desk.archive.write(Strike(DEED.owner))
    await asyncio.sleep(0.01)
    assert len(asked) == read
    for done in asked:
        done(np.zeros(1, "<u8"))
    assert not errors
    assert not desk.archive.busy


async def test_more_blocks_than_one_thread_takes_at_once(desk: Desk, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvferry.daemon.engine.auditor.BATCH_BLOCKS", 3)
    desk.end(desk.start(list(range(10)), list(range(100, 110)), b4=(1, 2)))
    found = {resident.block: resident for resident in await desk.found()}
    expected = {n: Resident(n, key(100 + n), (1, 2) if n == 4 else None) for n in range(10)}
    assert found == expected


async def test_stores_that_end_during_a_round_wait_for_the_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they stored over is not read first."""
    monkeypatch.setattr("kvferry.daemon.server.seals.SEAL_AFTER", 0)
    monkeypatch.setattr("kvferry.daemon.server.seals.FOLD", most := 6)
    asked: list[tuple[list[int], Any]] = []

    def read(blocks: Blocks, *, urgent: bool, done: Any) -> None:
        asked.append((blocks.numbers.tolist(), partial(done, np.zeros(blocks.numbers.size, "<u8"))))

    monkeypatch.setattr(desk.auditor, "read", read)
    desk.end(desk.start([1], [1]))
    await asyncio.sleep(0.01)
    for number in range(10):
        desk.end(desk.start([2, 3], [10 + number, 30 + number]))
        assert len(desk.archive._seals._stores) <= most // 2
    assert [numbers for numbers, _ in asked] == [[1]]
    assert desk.archive.busy
    asked.pop()[1]()
    await asyncio.sleep(0.01)
    assert [numbers for numbers, _ in asked] == [[2, 3]]
    asked.pop()[1]()
    assert not desk.archive.busy
    await asyncio.sleep(0.01)
    assert not asked
    assert set(await desk.found()) == {
        Resident(1, key(1)),
        Resident(2, key(19)),
        Resident(3, key(39)),
    }


async def test_stores_of_no_blocks_are_not_kept(desk: Desk) -> None:
    """All of their keys were there already, and there may be any number of them in a round."""
    desk.end(desk.start([], []))
    assert not desk.archive.busy


async def test_an_heir_takes_up_what_it_may_and_gives_up_the_rest(desk: Desk) -> None:
    desk.end(desk.start([1], [1]))
    assert await desk.found()
    junk = os.memfd_create("junk")
    desk.shelf.kept["ledger-7"] = os.dup(junk)
    longer = sealed_memfd("longer", os.fstat(desk.shelf.kept["ledger-1"]).st_size + 1)
    os.pwrite(longer, os.pread(desk.shelf.kept["ledger-1"], 1 << 24, 0), 0)
    desk.shelf.kept["ledger-8"] = longer
    kept = {name: os.dup(descriptor) for name, descriptor in desk.shelf.kept.items()}
    heir = Desk(desk.shelf)
    found: list[Found] = []
    heir.archive.take_up(kept, found.append)
    assert found == [Found(DEED, (Resident(1, key(1)),))]
    assert list(desk.shelf.kept) == ["ledger-1"]
    heir.archive.close()

    def refuse(found: Found) -> None:
        raise Refused(Code.POOL_FULL, "no room", found.deed.name)

    kept = {name: os.dup(descriptor) for name, descriptor in desk.shelf.kept.items()}
    other = Desk(desk.shelf)
    other.archive.take_up(kept, refuse)
    assert desk.shelf.kept == {}
    other.archive.close()
    os.close(junk)


async def test_an_heir_takes_the_oldest_first_and_gives_no_name_twice() -> None:
    shelf = Shelf()
    names = {"ledger-10": "b", "ledger-9": "a"}
    for name, model in names.items():
        fingerprint = Fingerprint(model, BLOCK, key_bytes=8)
        ledger = Ledger.create(Deed(model, 0, COUNT * BLOCK, fingerprint=fingerprint))
        shelf.keep(name, ledger.descriptor)
        ledger.close()
    heir = Desk(shelf)
    found: list[Found] = []
    heir.archive.take_up({name: os.dup(shelf.kept[name]) for name in names}, found.append)
    assert [each.deed.name for each in found] == ["a", "b"]
    heir.archive.write(Enter(DEED))
    assert list(shelf.kept) == [*names, "ledger-11"]
    heir.archive.close()


async def test_a_region_without_a_ledger_serves_all_the_same(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(deed: Deed) -> Ledger:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Ledger, "create", none_left)
    other = Fingerprint("mistral", BLOCK, key_bytes=8)
    deed = Deed(other.name, 0, COUNT * BLOCK, fingerprint=other)
    desk.archive.write(Enter(deed))
    desk.archive.write(Amend(deed, wipe=True))
    plan = CopyPlan(7, 1, Direction.STORE, (), 0, 0, 0, 0)
    desk.archive.started(Start(plan, "a", 7, Cargo(deed.owner, np.array([1]))))
    desk.end(7)
    desk.archive.write(Strike(deed.owner))
    assert list(desk.shelf.kept) == ["ledger-1"]


async def test_a_deed_that_outgrows_its_ledger_ends_the_keeping(desk: Desk) -> None:
    pages = ((1 << 60,) * (1 << 18),)
    desk.archive.write(Amend(Deed(DEED.name, 0, DEED.nbytes, fingerprint=FINGERPRINT, pages=pages)))
    assert desk.shelf.kept == {}
    desk.end(desk.start([1], [1]))
