"""Whoever posts a bulletin hears of every job by the socket, too: once, and in order."""

from __future__ import annotations

import os

import pytest

from kvferry.proto.bulletin import Bulletin, new_bulletin
from kvferry.proto.messages import Finished, Outcome, PostResults, Wait, Waited
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from kvferry.testing.raw import Raw, store

JOBS = 60


@pytest.fixture
def page() -> int:
    return new_bulletin()


def told(raw: Raw, count: int) -> list[tuple[int, Outcome]]:
    """How the next `count` jobs ended, and that there is no more of them."""
    results: list[tuple[int, Outcome]] = []
    while len(results) < count:
        results += [(result.job_id, result.outcome) for result in raw.recv(Finished).results]
    assert len(results) == count
    return results


def test_every_job_is_told_of_by_both(start_kvferryd: StartKvferryd, page: int) -> None:
    with Raw(start_kvferryd().directory, "engine") as raw:
        raw.register()
        (ticket,) = raw.deposit(page)
        raw.send(PostResults(ticket))
        for job in range(JOBS):
            raw.send(store(job, [job % 8], [job % 8]))
        assert told(raw, JOBS) == [(job, Outcome.DONE) for job in range(JOBS)]
        posted = Bulletin(page)
        until(lambda: len([*posted.read(0)]) == JOBS)  # the loop may be the first to tell
        assert [result.job_id for result in posted.read(0)] == list(range(JOBS))
    os.close(page)


def test_what_was_done_is_told_before_what_was_not(
    start_kvferryd: StartKvferryd, page: int
) -> None:
    """A result that the bulletin does not tell pushes those before it out."""
    with Raw(start_kvferryd(reference_fail_every=3).directory, "engine") as raw:
        raw.register()
        (ticket,) = raw.deposit(page)
        raw.send(PostResults(ticket))
        for job in range(JOBS):
            raw.send(store(job, [job % 8], [job % 8]))
        results = told(raw, JOBS)
        assert [job for job, _ in results] == list(range(JOBS))
        assert {outcome for _, outcome in results} == {Outcome.DONE, Outcome.FAILED}
    os.close(page)


def test_who_waited_knows_the_results(start_kvferryd: StartKvferryd, page: int) -> None:
    with Raw(start_kvferryd().directory, "engine") as raw:
        raw.register()
        (ticket,) = raw.deposit(page)
        raw.send(PostResults(ticket))
        for job in range(8):
            raw.send(store(job, [job], [job]))
        raw.send(Wait(1, tuple(range(8))))
        seen = []
        while not isinstance(message := raw.recv(object), Waited):
            assert isinstance(message, Finished), message
            seen += [result.job_id for result in message.results]
        assert seen == list(range(8))
    os.close(page)


def test_a_page_that_is_full_hides_nothing(start_kvferryd: StartKvferryd, page: int) -> None:
    """Nobody reads the bulletin: what it has no room for is told all the same."""
    jobs = 1100
    with Raw(start_kvferryd(limits_max_stores=jobs).directory, "engine") as raw:
        raw.register()
        (ticket,) = raw.deposit(page)
        raw.send(PostResults(ticket))
        for job in range(jobs):
            raw.send(store(job, [job % 8], [job % 8]))
        assert [job for job, _ in told(raw, jobs)] == list(range(jobs))
    os.close(page)
