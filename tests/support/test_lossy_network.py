"""Links of a lossy network delay and lose packets. No process remains at the end."""

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
from support.time_limits import TIMEOUT


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


def open_udp(host: NetworkHost) -> socket.socket:
    with host.entered():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((host.address, 0))
    opened.settimeout(TIMEOUT)
    return opened


def connect(stack: ExitStack, first: NetworkHost, second: NetworkHost) -> list[socket.socket]:
    """Returns both ends of a TCP connection."""
    with second.entered():
        listener = stack.enter_context(socket.create_server((second.address, 0)))
    with first.entered():
        client = stack.enter_context(socket.create_connection(listener.getsockname(), TIMEOUT))
    server, peer = listener.accept()
    assert peer[0] == first.address
    server.settimeout(TIMEOUT)
    return [client, stack.enter_context(server)]


@pytest.mark.parametrize("loss", [0.0, 0.03])
def test_tcp_carries_bytes(network: LossyNetwork, loss: float) -> None:
    first, second = network.hosts
    content = os.urandom(4 << 20)
    with ExitStack() as stack:
        client, server = connect(stack, first, second)
        second.set_link(loss=loss)
        sender = threading.Thread(target=client.sendall, args=(content,))
        sender.start()
        received = bytearray()
        while len(received) < len(content):
            part = server.recv(1 << 20)
            assert part
            received += part
        sender.join()
    assert received == content
    assert (first.counters().lost > 0) == (loss > 0)


def test_a_link_delays_each_packet(network: LossyNetwork) -> None:
    first, second = network.hosts

    def round_trip() -> float:
        begin = time.monotonic()
        client.sendto(b"?", server.getsockname())
        _, peer = server.recvfrom(9)
        server.sendto(b"!", peer)
        client.recv(9)
        return time.monotonic() - begin

    with open_udp(first) as client, open_udp(second) as server:
        assert min(round_trip() for _ in range(5)) < 0.2
        first.set_link(delay=0.1)
        assert 0.2 <= round_trip() < TIMEOUT
        second.set_link(delay=0.05)
        assert 0.3 <= round_trip() < TIMEOUT
        first.set_link()
        second.set_link()
        assert min(round_trip() for _ in range(5)) < 0.2


def test_a_lossy_link_loses_its_share(network: LossyNetwork) -> None:
    first, second = network.hosts
    count = 200
    second.set_link(loss=0.25)
    with open_udp(first) as sender, open_udp(second) as receiver:
        for number in range(count):
            sender.sendto(bytes([number]), receiver.getsockname())
        deadline = time.monotonic() + TIMEOUT
        while (sent := first.counters()).forwarded + sent.lost < count:
            assert time.monotonic() < deadline
        assert 20 < sent.lost < 80  # 50 plus or minus five standard deviations
        received = [receiver.recv(9)[0] for _ in range(sent.forwarded)]
        assert received == sorted(set(received))
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(9)


def test_a_blackhole_is_silent_and_ends(network: LossyNetwork) -> None:
    first, second = network.hosts
    with ExitStack() as stack:
        client, server = connect(stack, first, second)
        first.set_link(blackhole=True)
        client.sendall(b"lost")
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.recv(9)
        assert first.counters().lost > 0
        first.set_link()
        server.settimeout(TIMEOUT)
        assert server.recv(9) == b"lost"  # TCP sends it again


def test_processes_of_a_host_end_with_the_network(network: LossyNetwork) -> None:
    first, second = network.hosts
    with first.entered():
        processes = [subprocess.Popen(["sleep", "1000"])]
    inside = subprocess.Popen([*second.command, "sleep", "1000"])
    processes.append(inside)
    name = Path(f"/proc/{inside.pid}/comm")
    until(lambda: name.read_text() == "sleep\n")  # it runs in the namespace
    command = ["cat", "/proc/net/fib_trie"]
    assert second.address in subprocess.check_output([*second.command, *command], text=True)
    network.close()
    assert [process.wait(TIMEOUT) for process in processes] == [-signal.SIGKILL] * 2
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
def test_no_process_remains_after_sigkill_of_the_test() -> None:
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
            assert poll.poll(1000 * TIMEOUT)
