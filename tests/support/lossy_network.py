"""A network of hosts on this machine. A test sets the delay and the loss of each link.

Each host is a network namespace with an address; packet_relay forwards IP packets between them, so
TCP behaves as on a real network. Needs root, /dev/net/tun and iproute2: see `missing`. Processes in
the hosts and the hosts themselves end with the network, and when the test's process dies, also by
SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.packet_relay import Counters, Link, enter_namespace, open_namespace
from support.time_limits import TIMEOUT

# The hosts' network. Several networks do not interfere, because their namespaces differ.
SUBNET = "10.77.0"


class NetworkUnavailable(Exception):
    """This machine does not allow network namespaces or TUN devices; the message says why."""


def missing() -> str:
    """Why this machine cannot have such a network; empty if nothing is known to be missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    absent = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class NetworkHost:
    """One host. LossyNetwork creates it. For one thread at a time."""

    def __init__(self, control: socket.socket, index: int, namespace: int) -> None:
        self.address = f"{SUBNET}.{index + 1}"
        self._control, self._index, self._namespace = control, index, namespace

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix of a command that runs the command in this host."""
        return "nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets and processes that the calling thread creates inside belong to this host.

        All hosts share files, pids and Unix sockets with a path.
        """
        previous = open_namespace()
        enter_namespace(self._namespace)
        try:
            yield
        finally:
            enter_namespace(previous)
            os.close(previous)

    def set_link(self, *, delay: float = 0.0, loss: float = 0.0, blackhole: bool = False) -> None:
        """Set the host's link for later packets, in both directions.

        delay: seconds, each way. loss: probability for each packet. blackhole: lose all packets;
        no error is sent, so the other side sees silence.
        """
        self._ask(link=asdict(Link(delay, loss, blackhole)))

    def counters(self) -> Counters:
        """Packets that this host has sent so far."""
        return Counters(**self._ask())

    def _ask(self, **command: Any) -> dict[str, Any]:
        self._control.send(json.dumps({"host": self._index, **command}).encode())
        reply: dict[str, Any] = json.loads(self._control.recv(4096))
        return reply


class LossyNetwork:
    """Hosts that reach each other. Raises NetworkUnavailable."""

    def __init__(self, hosts: int = 2) -> None:
        addresses = [f"{SUBNET}.{index + 1}" for index in range(hosts)]
        with ExitStack() as opened:
            control, relay_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(control)
            control.settimeout(TIMEOUT)
            with relay_end:
                number = relay_end.fileno()
                command = [sys.executable, "-m", "support.packet_relay", str(number)]
                command += [str(os.getpid()), *addresses]
                self.relay = subprocess.Popen(command, pass_fds=[number])
            opened.callback(self.relay.wait)
            opened.callback(control.shutdown, socket.SHUT_RDWR)
            text, namespaces, _, _ = socket.recv_fds(control, 4096, hosts)
            for descriptor in namespaces:
                opened.callback(os.close, descriptor)
            if error := json.loads(text or '{"error": "the relay ended"}').get("error"):
                raise NetworkUnavailable(error)
            self.hosts = [NetworkHost(control, *pair) for pair in enumerate(namespaces)]
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End all processes in the hosts, and the network."""
        self._opened.close()

    def __enter__(self) -> LossyNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
