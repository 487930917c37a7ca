"""Limits of the machine: descriptors, addresses, locked memory, a directory in use."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from kvferry.client import LocalDaemon
from kvferry.proto.errors import Code, Gone, Refused
from kvferry.proto.fingerprint import Fingerprint
from kvferry.proto.message import Message
from kvferry.proto.messages import (
    Allocated,
    AllocateKVCaches,
    Error,
    Opened,
    OpenNamespace,
)
from kvferry.testing.engine import until
from support.fuzz import memfd
from support.process_usage import ProcessUsage
from support.raw_client import RawClient, one_tensor, store

pytestmark = pytest.mark.timeout(120)

DESCRIPTORS = 280


class LimitedDaemon(LocalDaemon):
    """A daemon with a limit of descriptors."""

    descriptors = DESCRIPTORS

    @property
    def limit(self) -> str:
        """Arguments of ulimit."""
        return f"-n {self.descriptors}"

    def _start(self, timeout: float) -> None:
        self.command = ["sh", "-c", f'ulimit {self.limit}; exec "$@"', "sh", *self.command]
        super()._start(timeout)


class SmallAddressSpaceDaemon(LimitedDaemon):
    """A daemon with about 2 GiB of addresses for tensors."""

    limit = f"-v {4 << 20}"


@pytest.fixture
def limited() -> Iterator[LocalDaemon]:
    with LimitedDaemon(pool_bytes=16 << 20) as daemon:
        yield daemon
        assert daemon.process.poll() is None, daemon.log()


def test_too_few_descriptors_to_start() -> None:
    class TooFew(LimitedDaemon):
        descriptors = 40

    with pytest.raises(Exception, match="LimitNOFILE"):
        TooFew(pool_bytes=16 << 20)


def is_served(directory: Path) -> bool:
    try:
        with RawClient(directory, "later", timeout=2) as raw:
            raw.register()
            raw.send(store(1, [0], [0]))
            return str(raw.result(1).outcome) == "done"
    except (TimeoutError, Refused, Gone):
        return False


def connect_many(sockets: ExitStack, kind: int, path: Path) -> None:
    """Connect more sockets than the daemon may have descriptors."""
    context = zmq.Context()
    sockets.callback(context.term)
    for _ in range(2 * DESCRIPTORS):
        one = context.socket(kind)
        sockets.callback(one.close, 0)
        one.connect(f"ipc://{path}")


def test_more_clients_than_descriptors(limited: LocalDaemon) -> None:
    """Connected clients are served. The others wait, and connect when some have disconnected."""
    with RawClient(limited.directory, "early") as early:
        early.register()
        with ExitStack() as sockets:
            connect_many(sockets, zmq.DEALER, limited.directory / "kvferry.sock")
            until(lambda: "not accepting clients" in limited.log())
            early.send(store(1, [0], [0]))
            assert early.result(1).outcome == "done"
            assert ProcessUsage.of(limited.pid).descriptors < DESCRIPTORS - 20
        until(lambda: is_served(limited.directory))


def test_more_subscribers_than_descriptors(limited: LocalDaemon) -> None:
    """libzmq aborts without a descriptor: in the publisher's process, not in the daemon."""
    with ExitStack() as sockets:
        connect_many(sockets, zmq.SUB, limited.directory / "events.sock")
        until(lambda: "KV event publisher exited" in limited.log())
        assert ProcessUsage.of(limited.pid).descriptors < DESCRIPTORS // 2
        assert is_served(limited.directory)


def send_many_fds(raw: RawClient, descriptor: int) -> None:
    for _ in range(20):
        raw.deposit(*[descriptor] * 20)


def test_more_deposits_than_descriptors(limited: LocalDaemon) -> None:
    """The descriptors beyond the limit are refused and closed."""
    with RawClient(limited.directory, "many-fds") as raw:
        descriptor = memfd(4096)
        with pytest.raises(Refused) as refused:
            send_many_fds(raw, descriptor)
        os.close(descriptor)
        assert refused.value.code == Code.BUSY
        assert "LimitNOFILE" in refused.value.message
    until(lambda: is_served(limited.directory))


def test_more_namespaces_than_descriptors(limited: LocalDaemon) -> None:
    """Each needs some, also without sessions. The ones unused for longest are removed."""
    for number in range(2 * DESCRIPTORS):
        with RawClient(limited.directory, f"engine-{number}") as raw:
            raw.ask(OpenNamespace(1, Fingerprint(f"model-{number}", 4096), 4096), Opened)
    assert is_served(limited.directory)
    assert "not kept" not in limited.log()


def test_more_silent_connections_than_descriptors(limited: LocalDaemon) -> None:
    """Silent connections are closed. The daemon continues."""
    with RawClient(limited.directory, "early"), ExitStack() as connections:
        for _ in range(2 * DESCRIPTORS):
            client = connections.enter_context(
                closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            )
            client.setblocking(False)
            try:
                client.connect(str(limited.directory / "fds.sock"))
            except BlockingIOError:  # the kernel's queue is full
                break
        until(lambda: is_served(limited.directory))


def allocate(raw: RawClient, nbytes: int) -> Allocated | Error:
    """Let the daemon allocate one tensor, which is never touched."""
    raw.send(AllocateKVCaches(1, one_tensor(64, 64, nbytes // 64), 64 * 64))
    answer = raw.recv(Message)
    assert isinstance(answer, Allocated | Error)
    return answer


def test_more_tensors_than_addresses() -> None:
    """A tensor without addresses is refused, and accepted when another one is gone."""
    with SmallAddressSpaceDaemon(pool_bytes=16 << 20) as daemon, ExitStack() as clients:
        first = clients.enter_context(RawClient(daemon.directory, "large"))
        assert isinstance(allocate(first, 1 << 30), Allocated)
        answer: Allocated | Error | None = None
        for number in range(8):
            client = clients.enter_context(RawClient(daemon.directory, f"large-{number}"))
            if isinstance(answer := allocate(client, 1 << 30), Error):
                break
        assert isinstance(answer, Error)
        assert answer.error.code == Code.MAP_FAILED
        assert "LimitAS" in answer.error.message
        assert is_served(daemon.directory)
        first.close()
        until(lambda: isinstance(allocate(client, 1 << 30), Allocated))
        assert daemon.process.poll() is None


def test_a_lock_file_with_the_pid_of_another_process(tmp_path: Path) -> None:
    """A dead daemon's file does not prevent a start, though another process has its pid."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "lock").write_text(f"{os.getpid()}\n")
    with LocalDaemon(runtime_dir=tmp_path, pool_bytes=1 << 20) as daemon:
        assert (tmp_path / "cpu" / "lock").read_text() == f"{daemon.pid}\n"
