"""ClientLink: attempts to connect again, with a given time and a FakeDaemon."""

from __future__ import annotations

import errno
import time
from unittest.mock import Mock

import pytest
import zmq

from kvferry.client import Code, Gone, LocalDaemon, OffloadClient, Refused
from kvferry.client.link import FIRST_BACKOFF, MAX_BACKOFF
from kvferry.client.restoring import ATTEMPT_TIMEOUT
from kvferry.client.wire import ConnectionState
from kvferry.proto import messages as wire
from kvferry.proto.results import JobResult, Outcome
from kvferry.proto.specs import CPULoadStoreSpec, Direction, GPULoadStoreSpec
from support.client_keys import FINGERPRINT
from support.fake_daemon import FakeDaemon


def test_an_attempt_without_a_reply_is_followed_by_another_one(fake_daemon: FakeDaemon) -> None:
    client = OffloadClient(fake_daemon.directory, engine="engine")
    fake_daemon.silent = True
    client.abandon()
    opened = fake_daemon.opened
    now = time.monotonic()
    for late in (0.0, ATTEMPT_TIMEOUT / 2, ATTEMPT_TIMEOUT - 1):
        client._link.advance(now + late)
        assert fake_daemon.opened == opened + 1, "the attempt has not timed out yet"
    now += ATTEMPT_TIMEOUT + 1
    for _ in range(2):  # a reply that arrives at the deadline counts
        client._link.advance(now)
    fake_daemon.silent = False
    fake_daemon.received.clear()
    client._link.advance(now)
    assert fake_daemon.received_of(wire.Hello)
    client.wait_connected(1.0)
    assert client._session.wire.state is ConnectionState.CONNECTED


def test_a_daemon_that_disconnects_during_an_attempt_is_tried_again(
    fake_daemon: FakeDaemon,
) -> None:
    client = OffloadClient(fake_daemon.directory, engine="engine")
    fake_daemon.silent = True
    client.abandon()
    link, now = client._link, time.monotonic() + MAX_BACKOFF
    link.advance(now)
    client._session.connection_lost(Gone(Code.DAEMON_GONE, "the daemon was killed"))
    fake_daemon.silent = False
    link.advance(now)
    fake_daemon.received.clear()
    link.advance(now + MAX_BACKOFF)
    assert fake_daemon.received_of(wire.Hello)
    client.wait_connected()


def test_results_that_arrive_right_before_a_disconnect_are_received(
    fake_daemon: FakeDaemon,
) -> None:
    client = OffloadClient(fake_daemon.directory, engine="engine")
    client.transfer_async(7, (GPULoadStoreSpec([1]), CPULoadStoreSpec([3])))
    done = JobResult(7, Direction.STORE, Outcome.DONE, 64)
    fake_daemon.send_to_client(wire.Finished((done,)))
    fake_daemon.disconnected = True
    client._link.check_connection()
    assert client.gone is not None
    results = client._session.jobs.take_results()
    assert [(result.job_id, result.success) for result in results] == [(7, True)]


def test_pauses_after_failed_attempts_double_up_to_a_maximum(fake_daemon: FakeDaemon) -> None:
    client = OffloadClient(fake_daemon.directory, engine="engine")
    locate = Mock(side_effect=Refused(Code.BAD_CONFIG, "there are two daemons"))
    client._link.locate = locate
    client.abandon()
    now = time.monotonic() + 2 * MAX_BACKOFF
    for attempt in range(1, 10):
        calls = locate.call_count
        client._link.advance(now)
        assert locate.call_count == calls + 1
        pause = min(FIRST_BACKOFF * 2 ** (attempt - 1), MAX_BACKOFF)
        client._link.advance(now + 0.49 * pause)
        assert locate.call_count == calls + 1, "the next attempt is too early"
        now += 1.01 * pause


def test_a_daemon_of_another_build_is_asked_at_the_longest_pauses(
    fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal is logged once, as an error."""
    client = OffloadClient(fake_daemon.directory, engine="engine")
    refused = Refused(Code.PROTOCOL_VERSION, "another build; install the same one")
    client._link.locate = Mock(side_effect=refused)
    client.abandon()
    link, now = client._link, time.monotonic()
    for attempt in range(1, 5):
        link.advance(now)
        assert client._link.locate.call_count == attempt
        assert MAX_BACKOFF / 2 <= link._next_step - now <= MAX_BACKOFF
        now = link._next_step
    assert client.gone is not None
    assert client.gone.__cause__ is refused
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 1
    assert "another build; install the same one" in errors[0]


def test_a_client_that_polls_rarely_reconnects(fake_daemon: FakeDaemon) -> None:
    """Every poll runs one step of an attempt. Each step has its own timeout."""
    client = OffloadClient(fake_daemon.directory, engine="engine")
    client.open_namespace(FINGERPRINT)
    client.abandon()
    now = time.monotonic()
    for _ in range(4):  # Hello, OpenNamespace, Subscribe, and the end
        client._link.advance(now)
        client._link.connection.receive_messages(client._session.receive_message)
        now += 2 * ATTEMPT_TIMEOUT
    assert client.connected


def test_a_client_without_descriptors_reconnects_once_it_has_some(
    kvferryd: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that poll do not raise the errors of ZeroMQ."""
    with OffloadClient(kvferryd.directory) as client:
        with monkeypatch.context() as patched:
            patched.setattr(zmq.Context, "socket", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
            client.abandon()
            for _ in range(3):
                client._link.restart_attempt()
                assert client.get_finished() == []
            with pytest.raises(Gone):
                client.wait_connected(0.0)
        client.wait_connected()
        assert client.status().pid > 0
