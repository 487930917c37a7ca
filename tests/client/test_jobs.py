"""A result that comes by two ways is had once, whichever is first."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.client.jobs import Jobs
from kvferry.proto.bulletin import CAPACITY, Bulletin, new_bulletin
from kvferry.proto.errors import Code, ErrorInfo, Gone
from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.specs import Direction

STORE = Direction.STORE
WRONG = ErrorInfo(Code.COPY_FAILED, "the copy failed")


class Daemon:
    """Writes results both ways; what it sent waits until it is delivered."""

    def __init__(self) -> None:
        page = new_bulletin()
        self.jobs, self._bulletin = Jobs(), Bulletin(page)
        self.jobs.bulletin = Bulletin(page)
        os.close(page)
        self._sent: list[JobResult] = []

    def end(self, job_id: int, outcome: Outcome = Outcome.DONE) -> None:
        error = None if outcome is Outcome.DONE else WRONG
        result = JobResult(job_id, STORE, outcome, error=error)
        if outcome is not Outcome.REFUSED:
            self._bulletin.write(result)
        self._sent.append(result)

    def deliver(self, most: int = 1 << 30) -> None:
        for result in self._sent[:most]:
            self.jobs.take(result)
        del self._sent[:most]

    def seen(self) -> list[int]:
        self.jobs.read_bulletin()
        return [result.job_id for result in self.jobs.results()]


@pytest.fixture
def daemon() -> Daemon:
    daemon = Daemon()
    for job_id in range(5):
        daemon.jobs.add(job_id, STORE)
    return daemon


def test_the_bulletin_is_first_and_the_socket_says_nothing_new(daemon: Daemon) -> None:
    daemon.end(0)
    assert daemon.seen() == [0]
    daemon.deliver()
    assert daemon.seen() == []


def test_the_socket_may_be_first(daemon: Daemon) -> None:
    daemon.end(0)
    daemon.end(1)
    daemon.deliver(1)
    assert daemon.seen() == [0, 1]
    daemon.deliver()
    assert daemon.seen() == []


def test_an_id_used_again_is_not_ended_by_the_old_result(daemon: Daemon) -> None:
    daemon.end(0)
    assert daemon.seen() == [0]
    daemon.jobs.add(0, STORE)
    daemon.deliver()
    assert 0 in daemon.jobs
    daemon.end(0)
    assert daemon.seen() == [0]


def test_a_job_that_failed_comes_by_the_socket_and_in_its_turn(daemon: Daemon) -> None:
    daemon.end(0)
    daemon.end(1, Outcome.FAILED)
    daemon.end(2)
    assert daemon.seen() == [0]
    daemon.deliver(2)
    assert daemon.seen() == [1, 2]


def test_refused_jobs_do_not_count(daemon: Daemon) -> None:
    daemon.end(0, Outcome.REFUSED)
    daemon.end(1)
    assert daemon.seen() == [1]
    daemon.deliver()
    assert daemon.seen() == [0]


def test_what_was_posted_before_the_daemon_went_counts(daemon: Daemon) -> None:
    daemon.end(0)
    daemon.jobs.lose(Gone(Code.DAEMON_GONE, "killed"))
    assert [r.outcome for r in daemon.jobs.results()] == [Outcome.DONE] + 4 * [Outcome.LOST]


@given(st.lists(st.sampled_from(["done", "failed", "refused", "deliver", "look"]), max_size=60))
def test_each_job_ends_once_and_those_that_ran_in_order(what: list[str]) -> None:
    daemon, ran, seen = Daemon(), list[int](), list[int]()
    for number, one in enumerate(what):
        if one == "deliver":
            daemon.deliver(2)
        elif one == "look":
            seen += daemon.seen()
        else:
            daemon.jobs.add(number, STORE)
            daemon.end(number, Outcome(one))
            if one != "refused":
                ran.append(number)
    daemon.deliver()
    seen += daemon.seen()
    assert [number for number in seen if number in ran] == ran
    assert sorted(seen) == [i for i, one in enumerate(what) if one not in ("deliver", "look")]
    assert not daemon.jobs


def test_one_who_never_looks_loses_nothing() -> None:
    daemon, many = Daemon(), 3 * CAPACITY
    for number in range(many):
        daemon.jobs.add(number, STORE)
        daemon.end(number)
    daemon.deliver(many // 2)
    seen = daemon.seen()
    daemon.deliver()
    assert seen + daemon.seen() == list(range(many))
