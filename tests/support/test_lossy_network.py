"""Packets between the hosts are real, and are delayed, lost and swallowed; nothing stays."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.testing.engine import until
from support.lossy_network import LossyNetwork, NetworkHost, NetworkUnavailable, missing

PATIENCE = 60.0


@pytest.fixture
def network() -> Iterator[LossyNetwork]:
    if reason := missing():
        pytest.skip(reason)
    try:
        opened = LossyNetwork()
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with opened:
        yield opened


def udp(host: NetworkHost) -> socket.socket:
    with host.entered():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((host.address, 0))
    made.settimeout(PATIENCE)
    return made


def connect(stack: ExitStack, one: NetworkHost, other: NetworkHost) -> list[socket.socket]:
    """Both ends of a TCP connection."""
    with other.entered():
        listener = stack.enter_context(socket.create_server((other.address, 0)))
    with one.entered():
        client = stack.enter_context(socket.create_connection(listener.getsockname(), PATIENCE))
    server, peer = listener.accept()
    assert peer[0] == one.address
    server.settimeout(PATIENCE)
    return [client, stack.enter_context(server)]


@pytest.mark.parametrize("loss", [0.0, 0.03])
def test_tcp_carries_bytes(network: LossyNetwork, loss: float) -> None:
    one, other = network.hosts
    content = os.urandom(4 << 20)
    with ExitStack() as stack:
        client, server = connect(stack, one, other)
        other.set_link(loss=loss)
        sender = threading.Thread(target=client.sendall, args=(content,))
        sender.start()
        received = bytearray()
        while len(received) < len(content):
            part = server.recv(1 << 20)
            assert part
            received += part
        sender.join()
    assert received == content
    assert (one.counters().lost > 0) == (loss > 0)


def test_a_delayed_link_holds_each_packet(network: LossyNetwork) -> None:
    one, other = network.hosts

    def round_trip() -> float:
        begin = time.monotonic()
        asker.sendto(b"?", answerer.getsockname())
        _, peer = answerer.recvfrom(9)
        answerer.sendto(b"!", peer)
        asker.recv(9)
        return time.monotonic() - begin

    with udp(one) as asker, udp(other) as answerer:
        assert min(round_trip() for _ in range(5)) < 0.2
        one.set_link(delay=0.1)
        assert 0.2 <= round_trip() < PATIENCE
        other.set_link(delay=0.05)
        assert 0.3 <= round_trip() < PATIENCE
        one.set_link()
        other.set_link()
        assert min(round_trip() for _ in range(5)) < 0.2


def test_a_lossy_link_loses_its_share(network: LossyNetwork) -> None:
    one, other = network.hosts
    count = 200
    other.set_link(loss=0.25)
    with udp(one) as sender, udp(other) as receiver:
        for number in range(count):
            sender.sendto(bytes([number]), receiver.getsockname())
        deadline = time.monotonic() + PATIENCE
        while (sent := one.counters()).forwarded + sent.lost < count:
            assert time.monotonic() < deadline
        assert 20 < sent.lost < 80  # 50, give or take five standard deviations
        received = [receiver.recv(9)[0] for _ in range(sent.forwarded)]
        assert received == sorted(set(received))
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(9)


def test_a_blackhole_is_silent_and_ends(network: LossyNetwork) -> None:
    one, other = network.hosts
    with ExitStack() as stack:
        client, server = connect(stack, one, other)
        one.set_link(blackhole=True)
        client.sendall(b"swallowed")
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.recv(9)
        assert one.counters().lost > 0
        one.set_link()
        server.settimeout(PATIENCE)
        assert server.recv(9) == b"swallowed"  # TCP sends it again


def test_processes_of_a_host_end_with_the_network(network: LossyNetwork) -> None:
    one, other = network.hosts
    with one.entered():
        processes = [subprocess.Popen(["sleep", "1000"])]
    inside = subprocess.Popen([*other.command, "sleep", "1000"])
    processes.append(inside)
    name = Path(f"/proc/{inside.pid}/comm")
    until(lambda: name.read_text() == "sleep\n", PATIENCE)  # it has entered
    shown = ["cat", "/proc/net/fib_trie"]
    assert other.address in subprocess.check_output([*other.command, *shown], text=True)
    network.close()
    assert [process.wait(PATIENCE) for process in processes] == [-signal.SIGKILL] * 2
    assert network.relay.returncode == 0


VICTIM = """
import subprocess, time
from support.lossy_network import LossyNetwork
network = LossyNetwork()
with network.hosts[0].entered():
    process = subprocess.Popen(["sleep", "1000"])
print(network.relay.pid, process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.usefixtures("network")
def test_nothing_stays_after_sigkill_of_the_test() -> None:
    victim = subprocess.Popen([sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, text=True)
    with victim, ExitStack() as stack:
        assert victim.stdout is not None
        pids = [int(word) for word in victim.stdout.readline().split()]
        inode = Path(f"/proc/{pids[1]}/ns/net").stat().st_ino
        assert inode != Path("/proc/self/ns/net").stat().st_ino
        ends = [os.pidfd_open(pid) for pid in pids]
        for descriptor in ends:
            stack.callback(os.close, descriptor)
        victim.kill()
        for descriptor in ends:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(1000 * PATIENCE)
