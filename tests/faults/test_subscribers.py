"""Hostile subscribers of KV events: the daemon's memory is bounded and its clients are served."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.client import LocalDaemon
from kvferry.daemon.observability.kv_events_process import MEMORY_BUDGET
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.messages import Allocated, AllocateKVCaches, Opened, OpenNamespace, Submit
from kvferry.proto.specs import GPULoadStoreSpec, KeyLoadStoreSpec
from kvferry.testing.engine import until
from support.hostile_subscribers import publishers_of
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, one_tensor
from support.time_limits import TIMEOUT
from support.traffic_statistics import percentile

pytestmark = pytest.mark.timeout(600)

SPACE = OpenNamespace(1, Fingerprint("honest", 64), 64 * 64)
# Memory of an interpreter with ZeroMQ and numpy before the first subscription, with a margin.
PROCESS_BYTES = 60 << 20
# Limit of the daemon's own growth: subscribers use the memory of another process.
DAEMON_GROWTH = 30 << 20


class HonestSubscriber:
    """A subscriber, and an engine that stores keys. Each store is an event."""

    def __init__(self, raw: RawClient, subscriber: zmq.Socket[bytes]) -> None:
        self._raw, self._subscriber = raw, subscriber
        self._numbers = itertools.count(1)
        self.seconds: list[float] = []
        self.received: list[int] = []
        raw.ask(SPACE, Opened)
        raw.ask(AllocateKVCaches(1, one_tensor(64)), Allocated)

    def store(self) -> None:
        number, began = next(self._numbers), time.perf_counter()
        key = number.to_bytes(36, "big")
        self._raw.send(Submit(number, GPULoadStoreSpec([number % 64]), KeyLoadStoreSpec([key])))
        assert self._raw.result(number).outcome == "done"
        self.seconds.append(time.perf_counter() - began)
        time.sleep(0.001)

    def receive(self) -> int:
        """Receive all published messages. Returns their number."""
        before = len(self.received)
        while self._subscriber.poll(0):
            self.received.append(int.from_bytes(self._subscriber.recv_multipart()[1], "big"))
        return len(self.received) - before

    def receives_events(self) -> bool:
        """Store a key. Returns whether the subscriber receives an event."""
        self.store()
        time.sleep(0.05)
        return self.receive() > 0


@pytest.fixture
def daemon(start_daemon: Callable[..., LocalDaemon]) -> LocalDaemon:
    return start_daemon(log_level="warning")


@pytest.fixture
def honest(daemon: LocalDaemon) -> Iterator[HonestSubscriber]:
    with (
        RawClient(daemon.directory, "honest", timeout=TIMEOUT) as raw,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, SPACE.fingerprint.name)
        subscriber.connect(f"ipc://{daemon.directory / 'events.sock'}")
        yield HonestSubscriber(raw, subscriber)


def publisher_bytes(daemon: LocalDaemon) -> int:
    total = 0
    for pid in publishers_of(daemon.pid):
        try:
            total += ProcessUsage.of(pid).private
        except (FileNotFoundError, ProcessLookupError, KeyError):  # it has just ended
            continue
    return total


ATTACKS = {
    "topics": ("topics", 2, 25_000),  # 10 MB of topics in all, which cost libzmq 500 MB
    "frames": ("frames", 4, 10),
    "connections": ("silent", 2_000, 0),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_subscribers(
    daemon: LocalDaemon, honest: HonestSubscriber, attack: str, long: bool
) -> None:
    until(honest.receives_events)
    for _ in range(300):
        honest.store()
    alone, honest.seconds = percentile(honest.seconds, 0.99), []
    before = ProcessUsage.of(daemon.pid)
    kind, connections, messages = ATTACKS[attack]
    path = str(Path(daemon.directory) / "events.sock")
    counts = (str(connections), str(messages * (10 if long else 1)))
    command = [sys.executable, "-m", "support.hostile_subscribers", path, kind, *counts]
    attackers = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4 if long else 2)
    ]
    most = 0
    try:
        while any(attacker.poll() is None for attacker in attackers):
            honest.store()
            honest.receive()
            most = max(most, publisher_bytes(daemon))
            assert most < PROCESS_BYTES + MEMORY_BUDGET
            assert ProcessUsage.of(daemon.pid).since(before).private < DAEMON_GROWTH
        assert all(attacker.returncode == 0 for attacker in attackers)
    finally:
        for attacker in attackers:
            attacker.kill()
            attacker.wait()
    grew = ProcessUsage.of(daemon.pid).since(before).private
    beside = percentile(honest.seconds, 0.99)
    restarts = daemon.log().count("KV event publisher exited")
    print(
        f"{attack}: p99 {1e3 * alone:.1f} ms alone, {1e3 * beside:.1f} ms beside it "
        f"({len(honest.seconds)} jobs); daemon +{grew / 1e6:.1f} MB, publisher at most "
        f"{most / 1e6:.1f} MB, {restarts} restarts"
    )
    until(honest.receives_events)
    assert honest.received == sorted(set(honest.received))
    if attack == "topics":
        assert restarts > 0
    assert len(publishers_of(daemon.pid)) == 1
