"""Who is to tell how a job ended: its bulletin, or the socket alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.daemon.core.actions import Cargo, CopyPlan, Ended, Start
from kvferry.daemon.core.deeds import engine_owner
from kvferry.daemon.server.bulletins import Bulletins
from kvferry.proto.bulletin import CAPACITY, Bulletin, new_bulletin
from kvferry.proto.messages import Outcome
from kvferry.proto.specs import Direction


class Desk:
    def __init__(self) -> None:
        self.bulletins = Bulletins()
        self.page = new_bulletin()
        self.bulletins.open("a", os.dup(self.page))

    def start(self, serial: int, *, session: str = "a") -> None:
        plan = CopyPlan(serial, 1, Direction.LOAD, (), 64, 0, 0, 0)
        cargo = Cargo(engine_owner(session), np.array([0]))
        self.bulletins.started(Start(plan, session, 100 + serial, cargo))

    def end(self, serial: int, outcome: Outcome = Outcome.DONE) -> None:
        entry = self.bulletins.ended(Ended(serial, outcome, 0.5))
        if entry is not None:
            self.bulletins.post(entry)

    def seen(self, first: int = 0) -> list[int]:
        """Jobs that the reader finds, up to one of which the socket tells."""
        return [result.job_id for result in Bulletin(self.page).read(first)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    os.close(desk.page)


def test_what_was_done_is_shown(desk: Desk) -> None:
    desk.start(1)
    desk.end(1)
    assert desk.seen() == [101]
    assert desk.bulletins.shows("a")


def test_a_session_without_a_page_is_told_by_the_socket(desk: Desk) -> None:
    desk.start(1, session="b")
    desk.end(1)
    assert not desk.bulletins.shows("b")


def test_a_page_that_is_full_shows_nothing_more(desk: Desk) -> None:
    for serial in range(CAPACITY + 1):
        desk.start(serial)
        desk.end(serial)
    assert len(desk.seen()) == CAPACITY
    assert not desk.bulletins.shows("a")


def test_a_session_that_left_shows_nothing(desk: Desk) -> None:
    desk.start(1)
    desk.start(2)
    desk.bulletins.close("a")
    desk.end(1)
    desk.end(2)
    assert not desk.bulletins.shows("a")
