"""The page of results: what is written is read once, in order; a late reader loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvferry.proto.bulletin import CAPACITY, NBYTES, Bulletin, new_bulletin
from kvferry.proto.errors import Code, Refused
from kvferry.proto.messages import JobResult, Outcome
from kvferry.proto.specs import Direction


@pytest.fixture
def page() -> Iterator[int]:
    descriptor = new_bulletin()
    yield descriptor
    os.close(descriptor)


def done(job_id: int, direction: Direction = Direction.STORE) -> JobResult:
    return JobResult(job_id, direction, Outcome.DONE, 100 + job_id, 0.5 * job_id)


def test_what_is_written_is_read(page: int) -> None:
    here, there = Bulletin(page), Bulletin(page)
    assert list(there.read(0)) == []
    results = [done(7), done((1 << 63) - 1, Direction.LOAD)]
    for result in results:
        here.write(result)
    assert list(there.read(0)) == results
    assert list(there.read(1)) == results[1:]
    assert list(there.read(2)) == []
    assert [there.shows_more_than(count) for count in (0, 1, 2)] == [True, True, False]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_nothing_behind_a_job_that_was_not_done_is_read_before_it(
    page: int, outcome: Outcome
) -> None:
    bulletin = Bulletin(page)
    for result in (done(1), JobResult(2, Direction.STORE, outcome), done(3)):
        bulletin.write(result)
    assert [result.job_id for result in bulletin.read(0)] == [1]
    assert list(bulletin.read(1)) == []
    assert [result.job_id for result in bulletin.read(2)] == [3]


def test_it_goes_round_as_long_as_it_is_read(page: int) -> None:
    here, there = Bulletin(page), Bulletin(page)
    for number in range(3 * CAPACITY):
        here.write(done(number))
        assert [result.job_id for result in there.read(number)] == [number]
        there.keep_from(number + 1)


def test_a_full_one_is_left_alone_for_good(page: int) -> None:
    """What did not fit comes by the socket, and so does all after it: in order."""
    here, there = Bulletin(page), Bulletin(page)
    for number in range(CAPACITY + 1):
        here.write(done(number))
    assert len(list(there.read(0))) == CAPACITY
    there.keep_from(CAPACITY)
    here.write(done(CAPACITY + 1))
    assert list(there.read(CAPACITY)) == []


def test_a_reader_that_lies_about_how_far_it_read_harms_itself_only(page: int) -> None:
    here, there = Bulletin(page), Bulletin(page)
    there.keep_from((1 << 64) - 1)
    for number in range(2 * CAPACITY):
        here.write(done(number))


@pytest.mark.parametrize("how", ["unsealed", "small"])
def test_a_page_that_could_shrink_under_the_daemon_is_refused(how: str) -> None:
    descriptor = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NBYTES if how == "unsealed" else 64)
    with pytest.raises(Refused) as caught:
        Bulletin(descriptor)
    os.close(descriptor)
    assert caught.value.code == Code.NOT_SHAREABLE
