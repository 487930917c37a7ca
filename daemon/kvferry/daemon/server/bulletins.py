"""The bulletins of sessions: who gets to see there that a job was done.

All is called by the loop, but `ended` and `post` by the lane, whose thread alone writes. A load
whose bytes are still being read again is not shown as done: the socket tells, once they are good.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from kvferry.daemon.core.actions import Ended, Start
from kvferry.daemon.server.closing import close
from kvferry.proto.bulletin import Bulletin
from kvferry.proto.messages import JobResult, Outcome


class _Notice(msgspec.Struct, eq=False):
    bulletin: Bulletin
    start: Start
    held: bool
    """Whether the socket alone is to tell how it ended, as things are."""


class Entry(msgspec.Struct, frozen=True, eq=False):
    """What is to be written on a bulletin."""

    bulletin: Bulletin
    result: JobResult


class Bulletins:
    def __init__(self) -> None:
        self._bulletins: dict[str, Bulletin] = {}
        self._notices: dict[int, _Notice] = {}
        self._hidden: defaultdict[str, set[int]] = defaultdict(set)
        """Jobs of sessions that ended, and of which the socket alone tells."""

    def open(self, session: str, descriptor: int) -> None:
        """Takes the descriptor over. Raises Refused (NOT_SHAREABLE)."""
        try:
            self._bulletins[session] = Bulletin(descriptor)
        finally:
            close(descriptor)

    def close(self, session: str) -> None:
        self._bulletins.pop(session, None)
        self._hidden.pop(session, None)

    def started(self, start: Start, *, held: bool) -> None:
        bulletin = self._bulletins.get(start.session)
        if bulletin is not None:
            self._notices[start.plan.serial] = _Notice(bulletin, start, held)

    def vouch(self, serial: int) -> None:
        """What was held may be shown when it is done, if it has not ended yet."""
        notice = self._notices.get(serial)
        if notice is not None:
            notice.held = False

    def ended(self, report: Ended) -> Entry | None:
        """What to `post` of it. From here on it is settled who tells."""
        notice = self._notices.pop(report.serial, None)
        if notice is None:
            return None
        plan, session, job_id = notice.start.plan, notice.start.session, notice.start.job_id
        held = notice.held
        if held and session in self._bulletins:
            self._hidden[session].add(job_id)
        outcome = Outcome.FAILED if held else report.outcome
        moved = plan.nbytes if outcome is Outcome.DONE else 0
        result = JobResult(job_id, plan.direction, outcome, moved, report.seconds)
        return Entry(notice.bulletin, result)

    def post(self, entry: Entry) -> None:
        entry.bulletin.write(entry.result)

    def shows(self, session: str, job_id: int) -> bool:
        """Whether the session sees there that this job was done. Asked once of a job that ended."""
        bulletin = self._bulletins.get(session)
        if bulletin is None or bulletin.full:
            return False
        hidden = self._hidden.get(session, set())
        if job_id not in hidden:
            return True
        hidden.remove(job_id)
        return False
