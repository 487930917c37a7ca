"""The books of the host pool: what is in which block, so that a restart loses nothing.

The core says which regions there are, this keeps a ledger of each, and hands its descriptor to
whoever keeps descriptors while no daemon runs (systemd). A store's blocks are vacated before the
lane hears of it, and sealed some time after its end (seals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

import structlog

from kvferry.daemon.core.actions import (
    Amend,
    Ended,
    Enter,
    Record,
    Report,
    Start,
    Strike,
    Unmapped,
)
from kvferry.daemon.core.deeds import Deed, Found, Owner
from kvferry.daemon.engine.auditor import Auditor
from kvferry.daemon.engine.ledger import Ledger, Versions
from kvferry.daemon.server.audits import Audits
from kvferry.daemon.server.seals import Seals, Store
from kvferry.proto.errors import KVFerryError
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction

LEDGER = "ledger-"
"""What the names of ledgers' descriptors begin with."""

log = structlog.get_logger()


class Keeper(Protocol):
    """Who keeps descriptors while no daemon runs."""

    def keep(self, name: str, descriptor: int) -> None: ...

    def forget(self, name: str) -> None: ...


class Nobody:
    """Keeps nothing: the cache goes with the daemon."""

    def keep(self, name: str, descriptor: int) -> None:
        """It goes with the process."""

    def forget(self, name: str) -> None:
        """It was not kept."""


class Archive:
    """Called by the loop alone. `tell` takes reports that come when something was read.

    check_loads: which part of the blocks that are loaded is read again, from 0 to 1.
    """

    def __init__(
        self,
        auditor: Auditor,
        keeper: Keeper,
        check_loads: float,
        tell: Callable[[list[Report]], None],
    ) -> None:
        self._auditor = auditor
        self._keeper = keeper
        self._audits = Audits(auditor, check_loads, tell)
        self._ledgers: dict[Owner, tuple[str, Ledger]] = {}
        self._under_way: dict[int, Start] = {}
        self._stores: dict[int, tuple[Ledger, Versions]] = {}
        """Those under way, and the versions of their blocks while they are the last."""
        self._seals = Seals(auditor)
        self._names = count(1)

    @property
    def busy(self) -> bool:
        """Whether something was stored that is not sealed yet."""
        return self._seals.busy

    def take_up(self, kept: Mapping[str, int], restore: Callable[[Found], None]) -> None:
        """Open the ledgers of an earlier daemon, the oldest first; `restore` raises Refused where
        a region is not to be had any more. What is no use is given up, and said."""
        names = sorted((name for name in kept if name.startswith(LEDGER)), key=number_of)
        for name in names:
            try:
                ledger = Ledger(kept[name])
            except KVFerryError as error:
                log.warning("a ledger is given up", name=name, reason=str(error))
                self._keeper.forget(name)
                continue
            found = Found(ledger.deed, ledger.residents())
            try:
                restore(found)
            except KVFerryError as error:
                log.warning("a region is given up", region=ledger.deed.name, reason=str(error))
                self._drop(name, ledger)
                continue
            ledger.suspect_all()
            self._ledgers[ledger.deed.owner] = name, ledger
            log.info(
                "a region is back",
                region=ledger.deed.name,
                keys=len(found.residents),
                blocks=ledger.deed.num_blocks,
            )
        self._names = count(1 + max(map(number_of, names), default=0))

    def verify(self) -> None:
        """Have everything read that an earlier daemon stored, behind all else that is to do."""
        for _, ledger in self._ledgers.values():
            self._audits.verify(ledger)

    def write(self, record: Record) -> None:
        match record:
            case Enter(deed):
                self._enter(deed)
            case Amend(deed, wipe):
                if deed.owner in self._ledgers:
                    self._amend(deed, wipe=wipe)
            case Strike(owner):
                if owner in self._ledgers:
                    self._drop(*self._ledgers.pop(owner))

    def started(self, start: Start) -> None:
        """Called before the lane hears of it."""
        cargo, serial = start.cargo, start.plan.serial
        self._under_way[serial] = start
        entry = self._ledgers.get(cargo.owner)
        if entry is None:
            return
        _, ledger = entry
        if start.plan.direction is Direction.LOAD:
            self._audits.started(start, ledger)
        else:
            self._stores[serial] = ledger, ledger.vacate(cargo.blocks)

    def posted(self, start: Start) -> None:
        """Called once the lane has it: what a load need not wait for."""
        entry = self._ledgers.get(start.cargo.owner)
        if entry is not None and start.plan.direction is Direction.LOAD:
            entry[1].used(start.cargo.blocks)
            self._audits.posted(start.plan.serial)

    def reported(self, report: Report) -> Sequence[Report]:
        """What the core is to hear now of what the lane says."""
        match report:
            case Ended():
                return self._ended(report)
            case Unmapped():
                return self._audits.unmapped(report)
            case _:
                return (report,)

    def _ended(self, report: Ended) -> Sequence[Report]:
        start = self._under_way.pop(report.serial)
        store = self._stores.pop(report.serial, None)
        if store is not None and report.outcome is Outcome.DONE:
            self._seals.stored(Store(store[0], start.cargo, store[1]))
        return self._audits.ended(start, report)

    def close(self) -> None:
        self._auditor.close()
        for _, ledger in self._ledgers.values():
            ledger.close()

    def _enter(self, deed: Deed) -> None:
        """A region for which no ledger can be had serves as well; but nobody keeps it."""
        try:
            ledger = Ledger.create(deed)
        except (KVFerryError, OSError) as error:
            log.warning("a region is not kept over a restart", region=deed.name, reason=str(error))
            return
        name = f"{LEDGER}{next(self._names)}"
        self._ledgers[ledger.deed.owner] = name, ledger
        self._keeper.keep(name, ledger.descriptor)

    def _amend(self, deed: Deed, *, wipe: bool) -> None:
        name, ledger = self._ledgers[deed.owner]
        if wipe:
            ledger.wipe()
        try:
            ledger.amend(deed)
        except KVFerryError as error:
            log.warning("a region is kept no more", region=deed.name, reason=str(error))
            del self._ledgers[deed.owner]
            self._drop(name, ledger)

    def _drop(self, name: str, ledger: Ledger) -> None:
        ledger.void()
        self._keeper.forget(name)
        ledger.close()


def number_of(name: str) -> int:
    """The number in a descriptor's name, 0 where there is none."""
    return int("0" + "".join(filter(str.isdecimal, name)))
