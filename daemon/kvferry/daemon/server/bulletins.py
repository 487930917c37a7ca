"""The bulletins of sessions: who gets to see there that a job was done.

All is called by the loop, but `ended` and `post` by the lane, whose thread alone writes.
"""

from __future__ import annotations

import msgspec

from kvferry.daemon.core.actions import Ended, Start
from kvferry.daemon.server.closing import close
from kvferry.proto.bulletin import Bulletin
from kvferry.proto.messages import JobResult, Outcome


class _Notice(msgspec.Struct, eq=False):
    bulletin: Bulletin
    start: Start


class Entry(msgspec.Struct, frozen=True, eq=False):
    """What is to be written on a bulletin."""

    bulletin: Bulletin
    result: JobResult


class Bulletins:
    def __init__(self) -> None:
        self._bulletins: dict[str, Bulletin] = {}
        self._notices: dict[int, _Notice] = {}

    def open(self, session: str, descriptor: int) -> None:
        """Takes the descriptor over. Raises Refused (NOT_SHAREABLE)."""
        try:
            self._bulletins[session] = Bulletin(descriptor)
        finally:
            close(descriptor)

    def close(self, session: str) -> None:
        self._bulletins.pop(session, None)

    def started(self, start: Start) -> None:
        bulletin = self._bulletins.get(start.session)
        if bulletin is not None:
            self._notices[start.plan.serial] = _Notice(bulletin, start)

    def ended(self, report: Ended) -> Entry | None:
        """What to `post` of it. From here on it is settled who tells."""
        notice = self._notices.pop(report.serial, None)
        if notice is None:
            return None
        plan, job_id = notice.start.plan, notice.start.job_id
        moved = plan.nbytes if report.outcome is Outcome.DONE else 0
        result = JobResult(job_id, plan.direction, report.outcome, moved, report.seconds)
        return Entry(notice.bulletin, result)

    def post(self, entry: Entry) -> None:
        entry.bulletin.write(entry.result)

    def shows(self, session: str) -> bool:
        """Whether the session sees there that a job of its was done."""
        bulletin = self._bulletins.get(session)
        return bulletin is not None and not bulletin.full
