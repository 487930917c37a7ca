"""Clients that send all the time, or never receive: the daemon serves all others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    ClientMessage,
    Opened,
    OpenNamespace,
    StatusRequest,
    Submit,
    Subscribe,
)
from kvferry.proto.specs import MAX_KEYS, GPULoadStoreSpec, KeyLoadStoreSpec
from kvferry.testing.engine import until
from support.daemon_invariants import check_released
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, one_tensor, store
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.timeout(300)

FLOOD = """
import sys
from pathlib import Path
from kvferry.proto.codec import encode
from kvferry.proto.messages import Cancel
from support.raw_client import RawClient

raw = RawClient(Path(sys.argv[1]), sys.argv[2])
message = {"junk": b"junk", "cancels": encode(Cancel(tuple(range(10_000))))}[sys.argv[3]]
print("welcome", flush=True)
while True:
    raw.send(message)
"""


@contextmanager
def flood(daemon: LocalDaemon, kind: str) -> Iterator[None]:
    """Two processes that send one message again and again, as fast as they can."""
    with ExitStack() as running:
        floods = []
        for name in ("one", "two"):
            command = [sys.executable, "-c", FLOOD, str(daemon.directory), name, kind]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            running.callback(process.wait)
            running.callback(process.kill)
            floods.append(process)
        for process in floods:
            assert process.stdout is not None
            assert process.stdout.readline()
            running.callback(process.stdout.close)
        yield


def check_served(daemon: LocalDaemon, name: str) -> None:
    """A new client connects, registers, and its transfers are done."""
    with RawClient(daemon.directory, name, timeout=TIMEOUT) as raw:
        raw.register()
        for job in range(3):
            raw.send(store(job, [job], [job]))
            assert raw.result(job).outcome == "done"


@pytest.mark.parametrize("kind", ["junk", "cancels"])
def test_a_flood(start_daemon: Callable[..., LocalDaemon], kind: str) -> None:
    """New clients are served, ended sessions are noticed, and SIGTERM stops the daemon."""
    daemon = start_daemon()
    with flood(daemon, kind):
        for number in range(3):
            check_served(daemon, f"new-{number}")
        with OffloadClient(daemon.directory, engine="observer", timeout=TIMEOUT) as observer:
            before = observer.status().sessions
            raw = RawClient(daemon.directory, "dropped")
            assert observer.status().sessions == before + 1
            raw.drop()
            until(lambda: observer.status().sessions == before)
        assert daemon.stop(TIMEOUT) == 0


MAX_GROWTH = 200 << 20
KEYS = [number.to_bytes(64, "big") for number in range(1 << 15)]
SPACE = OpenNamespace(1, Fingerprint("silent", 64, key_bytes=64), len(KEYS) * 64)


class SilentCloser(RawClient):
    """Closes without Goodbye, since it would not receive the reply."""

    def close(self) -> None:
        self.drop()


def fill_namespace(raw: RawClient) -> None:
    """Store 32,768 keys of 64 bytes: a snapshot of two megabytes."""
    raw.ask(SPACE, Opened)
    raw.ask(AllocateKVCaches(1, one_tensor(len(KEYS))), Allocated)
    for at in range(0, len(KEYS), MAX_KEYS):
        gpu, keys = GPULoadStoreSpec(range(MAX_KEYS)), KeyLoadStoreSpec(KEYS[at : at + MAX_KEYS])
        raw.send(Submit(1, gpu, keys))
        assert raw.result(1).outcome == "done"


@pytest.mark.parametrize("request_", [Subscribe(), StatusRequest(1)], ids=repr)
def test_a_client_that_never_receives(
    start_daemon: Callable[..., LocalDaemon], request_: ClientMessage
) -> None:
    """Its queued replies are limited, then it is disconnected; others are served."""
    daemon = start_daemon()
    with RawClient(daemon.directory, "storing") as storing:
        fill_namespace(storing)
        before = ProcessUsage.of(daemon.pid)
        with closing(SilentCloser(daemon.directory, "silent")) as silent:
            silent.ask(SPACE, Opened)
            for batch in range(5):
                for _ in range(1000 if isinstance(request_, Subscribe) else 40_000):
                    silent.send(request_)
                check_served(daemon, f"other-{batch}")
                assert ProcessUsage.of(daemon.pid).since(before).private < MAX_GROWTH
    check_released(daemon.directory)
