"""Engines come and go, also without a word: the daemon has as many descriptors as before."""

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

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.client.tensors import shared_empty
from kvferry.proto.codec import encode
from kvferry.proto.fd_passing import FetchFd, SendFds
from kvferry.proto.memory import FdAllocation
from kvferry.proto.messages import Allocated, AllocateKVCaches
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient, one_tensor

ENGINE = """
import os, signal, sys
from pathlib import Path
from kvferry.client import Timeline
from kvferry.proto.messages import (Allocated, AllocateKVCaches, Welcome)
from support.raw_client import RawClient, one_tensor, store

directory, name, does, ends = sys.argv[1:]
timeline = Timeline.create()
raw = RawClient(Path(directory), name)
if does == "register":
    raw.register()
    for job in range(4):
        raw.send(store(job, [job], [job]))
        raw.result(job)
elif does == "allocate":
    (clock,) = raw.deposit(timeline.descriptor)
    raw.ask(AllocateKVCaches(1, one_tensor(), 4096, clock), Allocated)
    raw.send(store(1, [1], [1], wait_for=1 << 40))
elif does == "deposit":
    raw.deposit(*[timeline.descriptor] * 20)
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif ends == "goodbye":
    raw.close()
else:
    raw.drop()
"""
"""An engine without torch, that starts in no time. `ends`: "killed", "goodbye" or "wordless"."""


def descriptors(daemon: LocalDaemon) -> int:
    """How many it has, without the ledgers of regions: those stay with their regions."""
    count = 0
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "kvferry-block-table" not in os.readlink(link)
    return count


def ledgers(daemon: LocalDaemon) -> int:
    """How many ledgers it has mapped: each behind more than one descriptor."""
    found = set[int]()
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "kvferry-block-table" in os.readlink(link):
                found.add(link.stat().st_ino)
    return len(found)


@pytest.fixture
def counted(start_kvferryd: StartKvferryd) -> Iterator[LocalDaemon]:
    """A daemon that in the end has as many descriptors as in the beginning."""
    daemon = start_kvferryd()
    with OffloadClient(daemon.directory, engine="observer") as observer:
        until(lambda: observer.status().pool.pinned_bytes == observer.status().pool.size_bytes)
        began = descriptors(daemon)
        yield daemon
        until(lambda: observer.status().sessions == 1)
        until(lambda: descriptors(daemon) <= began)
        until(lambda: not any(engine.present for engine in observer.status().engines))
        until(lambda: ledgers(daemon) == len(observer.status().engines))


def test_twenty_engines(counted: LocalDaemon) -> None:
    """What each does and how it ends; five at a time."""
    ends = ["goodbye", "killed", "killed", "wordless"]
    does = ["register", "allocate", "allocate", "deposit", "nothing"]
    for round_ in range(4):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", ENGINE, counted.directory, f"{i}", what, ends[round_]]
            )
            for i, what in enumerate(does)
        ]
        statuses = {process.wait(30) for process in running}
        assert statuses == ({-9} if ends[round_] == "killed" else {0})


def test_engines_with_torch(counted: LocalDaemon, start_engine: StartSmallEngine) -> None:
    with start_engine(counted, daemon_owned=True) as one, start_engine(counted) as other:
        for engine in (one, other):
            engine.finish(engine.store([0], [0]), engine.load([1], [1]))
        other.store([0], [0], wait_for=1 << 40)
        other.process.kill()


def test_connections_to_the_descriptor_socket_that_send_nonsense(counted: LocalDaemon) -> None:
    """They say nothing, or nonsense, or leave before the answer."""
    path = str(counted.directory / "fds.sock")
    for words in (b"", b"nonsense", bytes(8000), encode(FetchFd("nobody", 1))):
        for _ in range(5):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(path)
                if words:
                    socket.send_fds(connection, [words], [connection.fileno()] * 3)


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


def test_connections_that_take_over_each_other_s_numbers(kvferryd: LocalDaemon) -> None:
    """A client right behind one that went gets its descriptor's number, and must not go with it.

    With every core busy the end of the old connection is heard late.
    """
    spin = [sys.executable, "-c", "while True: pass"]
    busy_processes = [subprocess.Popen(spin) for _ in range(3)]
    tensors = {"layer": shared_empty((8, 64))}
    try:
        for number in range(100):
            with OffloadClient(kvferryd.directory, engine=f"engine-{number}") as client:
                client.register_kv_caches(tensors, num_blocks=8, host_bytes=4096)
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()


LINGERS = 30


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A socket whose last close takes seconds: its peer does not read what was sent."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            linger = struct.pack("ii", 1, LINGERS)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 16))
            yield ours


@pytest.mark.parametrize("way", ["deposit", "second packet"])
def test_no_close_of_a_client_s_descriptor_is_waited_for(kvferryd: LocalDaemon, way: str) -> None:
    """The daemon has the last one of a socket that lingers, or of what such a one is in."""
    with (
        OffloadClient(kvferryd.directory, engine="other") as other,
        RawClient(kvferryd.directory, "rude") as rude,
        lingering() as odd,
        contextlib.ExitStack() as stack,
    ):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        os.kill(kvferryd.pid, signal.SIGSTOP)
        packet = encode(SendFds(rude.session))
        match way:
            case "deposit":
                connection.connect(str(kvferryd.directory / "fds.sock"))
                socket.send_fds(connection, [packet], [odd.fileno()])
            case "second packet":
                connection.connect(str(kvferryd.directory / "fds.sock"))
                connection.send(packet)
                socket.send_fds(connection, [packet], [odd.fileno()])
        odd.close()
        os.kill(kvferryd.pid, signal.SIGCONT)
        began = time.monotonic()
        rude.close()
        while time.monotonic() - began < 0.5:
            other.status()
        tensors = {"layer": shared_empty((8, 64))}
        other.register_kv_caches(tensors, num_blocks=8, host_bytes=4096)
        assert time.monotonic() - began < LINGERS / 2
