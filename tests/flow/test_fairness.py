"""What clients get of the daemon beside others that ask for much."""

from __future__ import annotations

from kvferry.proto.messages import (
    Cancel,
    Finished,
    Outcome,
    StatusReport,
    StatusRequest,
    Wait,
    Waited,
)
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, store

ASKED = 600
JOBS = 50


def test_cheap_requests_do_not_wait_for_as_many_expensive_ones(
    start_kvferryd: StartKvferryd,
) -> None:
    """Both clients ask all at once; ROUTER serves them one message each."""
    daemon = start_kvferryd()
    expensive = (1,) * 65536  # each takes milliseconds to look up
    with (
        RawClient(daemon.directory, "greedy") as greedy,
        RawClient(daemon.directory, "honest") as honest,
    ):
        for number in range(ASKED):
            greedy.send(Wait(number, expensive))
        greedy.recv(Waited)
        for number in range(ASKED):
            honest.send(StatusRequest(number))
        for number in range(ASKED):
            assert honest.recv(StatusReport).request_id == number
        honest.send(StatusRequest(ASKED))
        honest.recv(StatusReport)
        served = 1
        while greedy.waits():
            greedy.recv(Waited)
            served += 1
        greedy.session = ""  # it leaves without a word: the rest is not worth waiting for
    assert served < ASKED / 3


def test_results_that_end_together_come_together(start_kvferryd: StartKvferryd) -> None:
    """Each once, in order, and before the reply of whoever waited for them."""
    with RawClient(start_kvferryd(reference_stall=0.2).directory, "engine") as raw:
        raw.register()
        for job in range(JOBS):
            raw.send(store(job, [job % 8], [job % 8]))
        raw.send(Wait(1, tuple(range(JOBS))))
        raw.send(Cancel(tuple(range(1, JOBS))))
        messages = list[Finished]()
        while not isinstance(message := raw.recv(object), Waited):
            assert isinstance(message, Finished), message
            messages.append(message)
        results = [result for message in messages for result in message.results]
        assert sorted(result.job_id for result in results) == list(range(JOBS))
        assert {result.outcome for result in results} == {Outcome.DONE, Outcome.CANCELLED}
        assert len(messages) < JOBS / 2
        raw.send(store(99, [0], [0]))
        assert raw.recv(Finished).results[0].job_id == 99
