"""An internal error of the daemon: its client is disconnected, it is logged, others continue."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvferry.client import LocalDaemon, OffloadClient, Outcome
from kvferry.testing.engine import StartSmallEngine, until
from support.time_limits import TIMEOUT

FAULTY = """
from kvferry.daemon import app
from kvferry.daemon.core.core import Core
from kvferry.daemon.core.registration import OWN_SESSION
from kvferry.proto.messages import StatusRequest, Submit

def faulty(method):
    def handle(self, session, message, now):
        if session != OWN_SESSION and isinstance(message, Submit) and message.job_id % 2 == 0:
            raise ZeroDivisionError("a mistake of ours")
        return method(self, session, message, now)
    return handle

Core.handle = faulty(Core.handle)
app.main()
"""


class FaultyDaemon(LocalDaemon):
    """A daemon with an internal error on every second job of a client."""

    def _start(self, timeout: float) -> None:
        self.command[1:3] = ["-c", FAULTY]
        super()._start(timeout)


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with FaultyDaemon(pool_bytes=8 << 20, log_format="json") as daemon:
        yield daemon


def test_the_client_is_disconnected_and_others_continue(
    daemon: LocalDaemon, start_engine: StartSmallEngine
) -> None:
    engine, other = (start_engine(daemon, name=name) for name in ("first", "other"))
    (first,) = engine.finish(engine.store([0], [0]))
    assert first.outcome is Outcome.DONE
    job = engine.store([1], [1])
    engine.client.wait([job], timeout=TIMEOUT)
    (lost,) = engine.client.get_finished()
    assert (lost.job_id, lost.outcome) == (job, Outcome.LOST)
    assert "see its log" in str(engine.client.gone)
    with OffloadClient(daemon.directory) as observer:
        assert {engine.name for engine in observer.status().engines} == {"first", "other"}
    (done,) = other.finish(other.store([2], [2]))
    assert done.outcome is Outcome.DONE
    until(lambda: "internal error" in daemon.log())
    records = [json.loads(line) for line in daemon.log().splitlines()]
    (record,) = [each for each in records if each["event"] == "internal error"]
    assert record["engine"] == "first"
    assert "ZeroDivisionError: a mistake of ours" in record["exception"]
    assert "in handle" in record["exception"]
