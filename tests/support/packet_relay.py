"""The relay process of lossy_network: it creates the hosts and forwards their packets.

A host is a network namespace with one TUN device. The relay reads IPv4 packets from the devices and
writes each to the device of its destination, after the delay of both links, unless one of the links
loses it. netem does the same, but not every kernel has it. The namespaces have no names: they end
with the last process in them. The relay kills all of these when its parent closes the control
socket or dies, also by SIGKILL.

    python -m support.packet_relay CONTROL_FD PARENT_PID ADDRESS...
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

DEVICE = "tun0"
# Jumbo frames, as between the hosts of a cluster.
MTU = 9000
PREFIX_BITS = 24
# Packets that wait for the end of their delay; further ones are lost.
MAX_DELAYED = 16384
# Packets that are read from one device before the others are served.
READ_BATCH = 64

CLONE_NEWNET = 0x40000000
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
TUNSETIFF = 0x400454CA
IPV4_DESTINATION = slice(16, 20)

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespace(descriptor: int) -> None:
    """Move the calling thread and its later children into a network namespace. Raises OSError."""
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def open_namespace() -> int:
    """A descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@dataclass
class Link:
    """Delays and losses of packets that a host sends or receives."""

    # Seconds, each way.
    delay: float = 0.0
    # Probability that a packet is lost.
    loss: float = 0.0
    # Whether every packet is lost.
    blackhole: bool = False


@dataclass
class Counters:
    """Packets that a host sent: forwarded to their destination, or lost."""

    forwarded: int = 0
    lost: int = 0


class RelayedHost:
    """A network namespace whose only device is a TUN device. Needs root."""

    def __init__(self, address: str) -> None:
        previous = open_namespace()
        try:
            if _libc.unshare(CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self.namespace = open_namespace()
            self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(self.tun, TUNSETIFF, request)
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{address}/{PREFIX_BITS}", "dev", DEVICE)
            _ip("link", "set", DEVICE, "mtu", str(MTU), "up")
        finally:
            enter_namespace(previous)
            os.close(previous)
        self.link = Link()
        self.counters = Counters()

    def kill_processes(self) -> bool:
        """Kill all processes in the namespace. Returns whether there were any."""
        inode = os.fstat(self.namespace).st_ino
        found = False
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # the process has ended
                if entry.name.isdigit() and (entry / "ns" / "net").stat().st_ino == inode:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        return found


class PacketRelay:
    """Forwards packets between hosts until the control socket is closed or the parent ends."""

    def __init__(self, control: socket.socket, parent: int, addresses: list[str]) -> None:
        self._control = control
        self._parent = os.pidfd_open(parent)
        self._hosts = [RelayedHost(address) for address in addresses]
        names = [socket.inet_aton(address) for address in addresses]
        self._by_address = dict(zip(names, self._hosts, strict=True))
        self._by_tun = {host.tun: host for host in self._hosts}
        self._delayed: list[tuple[float, int, int, bytes]] = []  # due, order, device, packet
        self._order = 0
        self._random = random.Random(0)

    def run(self) -> None:
        socket.send_fds(self._control, [b"{}"], [host.namespace for host in self._hosts])
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._parent, *self._by_tun):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                timeout = None
                if self._delayed:
                    timeout = max(0.0, 1000 * (self._delayed[0][0] - time.monotonic()))
                for descriptor, _ in poll.poll(timeout):
                    if host := self._by_tun.get(descriptor):
                        self._read(host)
                    elif descriptor == self._parent or not self._command():
                        return
                self._deliver()
        finally:
            while any(host.kill_processes() for host in self._hosts):
                time.sleep(0.01)

    def _read(self, source: RelayedHost) -> None:
        for _ in range(READ_BATCH):
            try:
                packet = os.read(source.tun, MTU)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[IPV4_DESTINATION])
            if packet[0] >> 4 != 4 or target is None:
                continue
            links = source.link, target.link
            if (
                any(link.blackhole or self._random.random() < link.loss for link in links)
                or len(self._delayed) >= MAX_DELAYED
            ):
                source.counters.lost += 1
                continue
            source.counters.forwarded += 1
            delay = sum(link.delay for link in links)
            if delay or self._delayed:  # packets with one delay keep their order
                self._order += 1
                due = time.monotonic() + delay
                heapq.heappush(self._delayed, (due, self._order, target.tun, packet))
            else:
                os.write(target.tun, packet)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, _, tun, packet = heapq.heappop(self._delayed)
            os.write(tun, packet)

    def _command(self) -> bool:
        """Set the link of a host if the command has one. Replies with the host's counters."""
        text = self._control.recv(4096)
        if not text:
            return False
        command = json.loads(text)
        host = self._hosts[command["host"]]
        if "link" in command:
            host.link = Link(**command["link"])
        self._control.send(json.dumps(asdict(host.counters)).encode())
        return True


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def main() -> None:
    control, parent, *addresses = sys.argv[1:]
    with socket.socket(fileno=int(control)) as connection:
        try:
            relay = PacketRelay(connection, int(parent), addresses)
        except OSError as error:
            connection.send(json.dumps({"error": str(error)}).encode())
            return
        relay.run()


if __name__ == "__main__":
    main()
