"""Loads whose host blocks are read again: nobody hears that one is done before its bytes are good.

They are read while the blocks are copied, and the end of the load waits for both. The ends of a
session's jobs are told in the order in which they ended, so those behind it wait too. So does the
end of the registration that they are of: until then their host blocks are not anybody else's.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import structlog

from kvferry.daemon.core.actions import Corrupted, Ended, Report, Start, Unmapped
from kvferry.daemon.core.geometry import Bools, Int64s
from kvferry.daemon.engine.auditor import Auditor, Blocks
from kvferry.daemon.engine.ledger import Ledger, Sums, Versions
from kvferry.proto.errors import Code, ErrorInfo, KVFerryError
from kvferry.proto.messages import Outcome

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Held:
    """A job whose end is not told yet."""

    start: Start
    reading: int = 0
    """Batches of it that are yet to be read."""
    ended: Ended | None = None
    error: ErrorInfo | None = None
    due: tuple[Ledger, Int64s] | None = None
    """What is to be read once the lane has the load."""
    blocks: tuple[Ledger, Int64s] | None = None
    """What is being read."""

    @property
    def registration(self) -> int:
        return self.start.plan.registration

    @property
    def ready(self) -> bool:
        return self.ended is not None and not self.reading

    def reads(self, ledger: Ledger, some: Int64s) -> bool:
        """Whether any of these blocks is being read for it."""
        mine = self.blocks
        return mine is not None and mine[0] is ledger and bool(np.isin(mine[1], some).any())

    @property
    def report(self) -> Ended:
        assert self.ended is not None
        if self.error is None or self.ended.outcome is not Outcome.DONE:
            return self.ended
        return Ended(self.ended.serial, Outcome.FAILED, 0.0, self.error)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Blocks that are being read, for a load or for nobody, and what the ledger said of them."""

    ledger: Ledger
    held: _Held | None
    blocks: Int64s
    versions: Versions
    sums: Sums
    suspect: Bools

    @classmethod
    def of(cls, ledger: Ledger, held: _Held | None, blocks: Int64s) -> _Reading:
        versions, sums = ledger.versions(blocks), ledger.sums(blocks)
        return cls(ledger, held, blocks, versions, sums, ledger.suspected(blocks))

    def cut(self, part: slice) -> _Reading:
        versions, sums, suspect = self.versions[part], self.sums[part], self.suspect[part]
        return _Reading(self.ledger, self.held, self.blocks[part], versions, sums, suspect)


class Audits:
    """Called by the loop alone. rate: which part of loaded blocks is read, from 0 to 1."""

    def __init__(self, auditor: Auditor, rate: float, tell: Callable[[list[Report]], None]) -> None:
        self._auditor = auditor
        self._rate = rate
        self._tell = tell
        self._before_next = 0.0
        """Blocks that pass unread before the next one is read."""
        self._held: dict[int, _Held] = {}
        """Loads that are copied and read."""
        self._being_read: set[_Held] = set()
        self._queues: defaultdict[str, deque[_Held]] = defaultdict(deque)
        """For each session what has ended, from the first on that is still being read."""
        self._untold: Counter[int] = Counter()
        """How many of these there are of each registration."""
        self._unmapped: dict[int, Unmapped] = {}
        """Of registrations that have some."""

    def started(self, start: Start, ledger: Ledger) -> bool:
        """Choose what is to be read of a load's blocks. Whether that is any."""
        blocks = self._chosen(start.cargo.blocks, ledger)
        if not blocks.size:
            return False
        self._held[start.plan.serial] = held = _Held(start)
        sealed = ledger.sealed(blocks)
        if not sealed.all():
            held.error = _never_sealed(blocks[~sealed])
        held.due = ledger, blocks[sealed]
        return True

    def posted(self, serial: int) -> None:
        """The lane has a load: read along."""
        held = self._held.get(serial)
        if held is not None and held.due is not None:
            held.blocks, held.due = held.due, None
            self._read(*held.blocks, held)
            if held.reading:
                self._being_read.add(held)

    def ended(self, start: Start, report: Ended) -> Sequence[Report]:
        """What may be told now that a job has ended."""
        held = self._held.pop(report.serial, None)
        if held is None and start.session not in self._queues:
            return (report,)
        held = held or _Held(start)
        held.ended = report
        self._queues[start.session].append(held)
        self._untold[held.registration] += 1
        return self._release(start.session)

    def unmapped(self, report: Unmapped) -> Sequence[Report]:
        """What may be told now that a registration's memory was let go."""
        if report.registration not in self._untold:
            return (report,)
        self._unmapped[report.registration] = report
        return ()

    def verify(self, ledger: Ledger) -> None:
        """Read every block that an earlier daemon sealed."""
        self._read(ledger, ledger.sealed_blocks(), None)

    def _chosen(self, blocks: Int64s, ledger: Ledger) -> Int64s:
        """Those that nobody has read since an earlier daemon, and some of the others."""
        sampled = self._sampled(blocks.size)
        if ledger.suspect is not None:
            chosen = ledger.suspect[blocks]
            chosen[sampled] |= ledger.sealed(blocks[sampled])
            return blocks[chosen]
        if not sampled:
            return blocks[:0]
        some = blocks[sampled]
        return some[ledger.sealed(some)]

    def _sampled(self, count: int) -> list[int]:
        """Which of so many blocks are to be read, at random distances that the rate says."""
        if not self._rate:
            return []
        sampled = []
        at = self._before_next
        while at < count:
            sampled.append(int(at))
            at += 2 * random.random() / self._rate if self._rate < 1 else 1
        self._before_next = at - count
        return sampled

    def _read(self, ledger: Ledger, blocks: Int64s, held: _Held | None) -> None:
        deed, urgent = ledger.deed, held is not None
        reading = _Reading.of(ledger, held, blocks)
        whole = Blocks(deed.start, deed.block_bytes, blocks, ledger.keys(blocks))
        for part in whole.batches(urgent=urgent):
            if held is not None:
                held.reading += 1
            done = partial(self._was_read, reading.cut(part))
            self._auditor.read(whole.cut(part), urgent=urgent, done=done)

    def _was_read(self, reading: _Reading, sums: Sums) -> None:
        ledger, held, blocks = reading.ledger, reading.held, reading.blocks
        good, reports = sums == reading.sums, list[Report]()
        if not ledger.closed:
            same = ledger.current(blocks, reading.versions)
            if (bad := blocks[same & ~good]).size:
                reports += self._condemn(ledger, bad, held)
            ledger.trust(blocks[same & good])
            lost = blocks[~same & ~good & reading.suspect]
            if held is not None and held.error is None and lost.size:
                held.error = _stored_over(lost)
        if held is not None:
            held.reading -= 1
            if not held.reading:
                self._being_read.discard(held)
            reports += self._release(held.start.session)
        if reports:
            self._tell(reports)

    def _condemn(self, ledger: Ledger, bad: Int64s, held: _Held | None) -> list[Report]:
        """Blocks that lost their bytes: under a key nobody finds them again; those without one
        are read, and fail, with every load until something else is stored in them."""
        owner, keys = ledger.deed.owner, ledger.keys(bad)
        log.error("host blocks are corrupt", owner=owner.name, blocks=bad.size, first=int(bad[0]))
        error = _corrupt(keys[0].hex() if keys else int(bad[0]))
        for each in self._being_read:  # what others read of it does not count once it is vacated
            if each is held or each.reads(ledger, bad):
                each.error = error
        if keys:
            ledger.vacate(bad)
        else:
            ledger.distrust(bad)
        return [Corrupted(owner, keys, 0 if held else bad.size)]

    def _release(self, session: str) -> list[Report]:
        """The ends of loads that nothing holds back any more."""
        queue, reports = self._queues.get(session, deque()), list[Report]()
        while queue and queue[0].ready:
            held = queue.popleft()
            reports.append(held.report)
            self._untold[held.registration] -= 1
            if not self._untold[held.registration]:
                del self._untold[held.registration]
                if unmapped := self._unmapped.pop(held.registration, None):
                    reports.append(unmapped)
        if not queue:
            self._queues.pop(session, None)
        return reports


def _corrupt(block: object) -> ErrorInfo:
    message = "a host block does not hold what was stored in it any more: compute it again"
    return KVFerryError(Code.CORRUPT_BLOCK, message, block).info


def _stored_over(blocks: Int64s) -> ErrorInfo:
    message = "a host block was stored over before anybody could vouch for it: compute it again"
    return KVFerryError(Code.CORRUPT_BLOCK, message, int(blocks[0])).info


def _never_sealed(blocks: Int64s) -> ErrorInfo:
    message = (
        "nobody vouches for this host block: it was being stored when the daemon that had it "
        "ended, or was never stored"
    )
    return KVFerryError(Code.CORRUPT_BLOCK, message, int(blocks[0])).info
