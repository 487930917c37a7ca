"""After engines end in any way, the daemon has as many open descriptors as before."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon, OffloadClient, Timeline
from kvferry.client.tensors import shared_empty
from kvferry.proto.codec import encode
from kvferry.proto.fd_passing import FetchFd, SendFds
from kvferry.proto.memory import FdAllocation
from kvferry.proto.messages import Allocated, AllocateKVCaches
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, one_tensor, store
from support.time_limits import PROMPTLY, TIMEOUT

# An engine without torch, so that it starts quickly. `ends`: "killed", "goodbye" or "dropped".


NEVER = 1 << 40
# Runs `act` in a process that is then killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from flow.test_descriptors import act
from support.raw_client import RawClient

directory, action = sys.argv[1:]
act(RawClient(Path(directory), action), action)
os.kill(os.getpid(), signal.SIGKILL)
"""
ACTIONS = "register", "allocate", "deposit", "nothing"


def act(raw: RawClient, action: str) -> None:
    """What an engine does before it ends."""
    timeline = Timeline.create()
    match action:
        case "register":
            raw.register()
            for job in range(4):
                raw.send(store(job, [job], [job]))
                raw.result(job)
        case "allocate":
            (handle,) = raw.deposit(timeline.descriptor)
            raw.ask(AllocateKVCaches(1, one_tensor(), 4096, handle), Allocated)
            raw.send(store(1, [1], [1], wait_for=NEVER))
        case "deposit":
            raw.deposit(*[timeline.descriptor] * 20)
    timeline.close()


def count_descriptors(daemon: LocalDaemon) -> int:
    """Open descriptors of the daemon, without block tables, which stay with their regions."""
    count = 0
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "kvferry-block-table" not in os.readlink(link)
    return count


def count_block_tables(daemon: LocalDaemon) -> int:
    """Block tables that the daemon has open. Each has more than one descriptor."""
    found = set[int]()
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "kvferry-block-table" in os.readlink(link):
                found.add(link.stat().st_ino)
    return len(found)


@pytest.fixture
def counted(start_kvferryd: StartKvferryd) -> Iterator[LocalDaemon]:
    """A daemon that must have as many descriptors at the end of the test as at the beginning."""
    daemon = start_kvferryd()
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: observer.status().pool.pinned_bytes == observer.status().pool.size_bytes)
        before = count_descriptors(daemon)
        yield daemon
        until(lambda: observer.status().sessions == 1)
        until(lambda: count_descriptors(daemon) <= before)
        until(lambda: not any(engine.present for engine in observer.status().engines))
        until(lambda: count_block_tables(daemon) == len(observer.status().engines))


@pytest.mark.parametrize("end", ["killed", "goodbye", "dropped"])
def test_engines(counted: LocalDaemon, end: str) -> None:
    if end == "killed":
        command = [sys.executable, "-c", KILLED, str(counted.directory)]
        killed = [subprocess.Popen([*command, action]) for action in ACTIONS]
        assert {process.wait(TIMEOUT) for process in killed} == {-signal.SIGKILL}
        return
    for action in ACTIONS:
        raw = RawClient(counted.directory, action)
        act(raw, action)
        (raw.close if end == "goodbye" else raw.drop)()


def test_connections_to_the_descriptor_socket_that_send_nonsense(counted: LocalDaemon) -> None:
    """They send nothing or invalid bytes, or close before the reply."""
    path = str(counted.directory / "fds.sock")
    for packet in (b"", b"nonsense", bytes(8000), encode(FetchFd("unknown", 1))):
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(path)
                if packet:
                    socket.send_fds(connection, [packet], [connection.fileno()] * 3)


def test_a_fetched_descriptor_that_is_not_received(counted: LocalDaemon) -> None:
    path = str(counted.directory / "fds.sock")
    for number in range(10):
        with RawClient(counted.directory, f"engine-{number}") as raw:
            answer = raw.ask(AllocateKVCaches(1, one_tensor(), 4096), Allocated)
            (allocation,) = answer.allocations
            assert isinstance(allocation, FdAllocation)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(path)
                connection.send(encode(FetchFd(raw.session, allocation.handle)))


LINGER_SECONDS = int(2 * PROMPTLY)


@contextlib.contextmanager
def lingering_socket() -> Iterator[socket.socket]:
    """A socket whose last close takes seconds, because its peer does not read."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            linger = struct.pack("ii", 1, LINGER_SECONDS)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 16))
            yield ours


@pytest.mark.parametrize("sent_in", ["deposit", "second packet"])
def test_closing_a_client_s_descriptor_does_not_block(kvferryd: LocalDaemon, sent_in: str) -> None:
    """The daemon closes the last descriptor of a lingering socket, received in a packet."""
    with (
        OffloadClient(kvferryd.directory, engine="other") as other,
        RawClient(kvferryd.directory, "rude") as rude,
        lingering_socket() as slow_to_close,
        contextlib.ExitStack() as stack,
    ):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        os.kill(kvferryd.pid, signal.SIGSTOP)
        packet = encode(SendFds(rude.session))
        connection.connect(str(kvferryd.directory / "fds.sock"))
        if sent_in == "second packet":
            connection.send(packet)
        socket.send_fds(connection, [packet], [slow_to_close.fileno()])
        slow_to_close.close()
        os.kill(kvferryd.pid, signal.SIGCONT)
        began = time.monotonic()
        rude.close()
        while time.monotonic() - began < 0.5:
            other.status()
        tensors = {"layer": shared_empty((8, 64))}
        other.register_kv_caches(tensors, num_blocks=8, host_bytes=4096)
        assert time.monotonic() - began < PROMPTLY
