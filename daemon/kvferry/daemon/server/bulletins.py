"""The bulletins of sessions: who gets to see there that a job was done.

All is called by the loop, but `ended` by the lane, whose thread alone writes.
"""

from __future__ import annotations

import os
from collections import defaultdict

import msgspec

from kvferry.daemon.core.actions import Ended, Start
from kvferry.proto.bulletin import Bulletin
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import JobResult, Outcome


class _Notice(msgspec.Struct, frozen=True):
    bulletin: Bulletin
    start: Start
    held: bool
    """Whether the socket alone is to tell how it ended."""


class Bulletins:
    def __init__(self) -> None:
        self._bulletins: dict[str, Bulletin] = {}
        self._notices: dict[int, _Notice] = {}
        self._held: defaultdict[str, set[int]] = defaultdict(set)
        """Jobs of sessions of which the socket alone is to tell."""

    def open(self, session: str, descriptor: int) -> None:
        """Takes the descriptor over. Raises Refused (NOT_SHAREABLE)."""
        try:
            self._bulletins[session] = Bulletin(descriptor)
        except (OSError, ValueError) as error:  # no memory at all, or none that may be written
            message = "a bulletin is a sealed memfd that may be mapped and written"
            raise Refused(Code.NOT_SHAREABLE, message, str(error)) from error
        finally:
            os.close(descriptor)

    def close(self, session: str) -> None:
        self._bulletins.pop(session, None)
        self._held.pop(session, None)

    def shows(self, session: str, job_id: int) -> bool:
        """Whether the session sees there that this job was done. Asked once of a job that ended."""
        bulletin = self._bulletins.get(session)
        if bulletin is None or bulletin.full:
            return False
        held = self._held.get(session, set())
        if job_id not in held:
            return True
        held.remove(job_id)
        return False

    def started(self, start: Start, *, held: bool) -> None:
        bulletin = self._bulletins.get(start.session)
        if bulletin is not None:
            self._notices[start.plan.serial] = _Notice(bulletin, start, held)
            if held:
                self._held[start.session].add(start.job_id)

    def ended(self, report: Ended) -> None:
        notice = self._notices.pop(report.serial, None)
        if notice is None:
            return
        plan, job_id = notice.start.plan, notice.start.job_id
        outcome = Outcome.FAILED if notice.held else report.outcome
        moved = plan.nbytes if outcome is Outcome.DONE else 0
        notice.bulletin.write(JobResult(job_id, plan.direction, outcome, moved, report.seconds))
