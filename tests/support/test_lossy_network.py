"""Links of a lossy network delay and lose packets. No process remains at the end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

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
        second.set_link(blackhole=True)
        sender.sendto(b"lost", receiver.getsockname())
        receiver.setblocking(False)
        while first.counters().lost == sent.lost:
            assert time.monotonic() < deadline
        with pytest.raises(BlockingIOError):
            receiver.recv(9)


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
