"""A mistake of the daemon's own: whoever met it is told, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvferry.client import Gone, LocalDaemon, OffloadClient, Outcome
from kvferry.testing.engine import StartSmallEngine, until

CLUMSY = """
from kvferry.daemon import app
from kvferry.daemon.core.core import Core
from kvferry.proto.messages import StatusRequest, Submit

def clumsy(method):
    def handle(self, session, message, now):
        if isinstance(message, Submit) and message.job_id % 2 == 0:
            raise ZeroDivisionError("a mistake of ours")
        return method(self, session, message, now)
    return handle

Core.handle = clumsy(Core.handle)
app.main()
"""


class ClumsyDaemon(LocalDaemon):
    """It fails on every second job."""

    def _start(self, timeout: float) -> None:
        self.command[1:3] = ["-c", CLUMSY]
        super()._start(timeout)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with ClumsyDaemon(pool_bytes=8 << 20, log_format="json") as one:
        yield one


def test_who_meets_it_is_sent_away_and_the_others_go_on(
    daemon: LocalDaemon, start_engine: StartSmallEngine
) -> None:
    unlucky, other = (start_engine(daemon, name=name) for name in ("unlucky", "other"))
    (first,) = unlucky.finish(unlucky.store([0], [0]))
    assert first.outcome is Outcome.DONE
    job = unlucky.store([1], [1])
    unlucky.client.wait([job], timeout=10)
    (lost,) = unlucky.client.get_finished()
    assert (lost.job_id, lost.outcome) == (job, Outcome.LOST)
    with OffloadClient(daemon.directory) as observer:
        assert {engine.name for engine in observer.status().engines} == {"unlucky", "other"}
    (done,) = other.finish(other.store([2], [2]))
    assert done.outcome is Outcome.DONE
    until(lambda: "internal error" in daemon.log())
    records = [json.loads(line) for line in daemon.log().splitlines()]
    (told,) = [one for one in records if one["event"] == "internal error"]
    assert told["engine"] == "unlucky"
    assert "ZeroDivisionError: a mistake of ours" in told["exception"]
    assert "in handle" in told["exception"]


def test_who_is_sent_away_hears_why(daemon: LocalDaemon, start_engine: StartSmallEngine) -> None:
    engine = start_engine(daemon)
    engine.store([0], [0])
    job = engine.store([1], [1])
    engine.client.wait([job], timeout=10)
    with pytest.raises(Gone, match="see its log"):
        raise engine.client.gone or AssertionError("it came back")
