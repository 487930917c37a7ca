"""Listening TCP sockets for metrics and KV events. Called at start."""

from __future__ import annotations

import errno
import socket

# Hosts that stand for all addresses of this machine, of IPv4 and IPv6.
ALL = "", "*", "::"
# A kernel without IPv6, and one in which it is disabled.
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port", ":port" or "[IPv6]:port". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"no port in {text}")
    return host.strip("[]"), int(port)


def listen_tcp(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens at an address of either family, or at all of both. Raises OSError."""
    if host in ALL:
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            return socket.create_server(("", port), backlog=backlog)
    if ":" in host:
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog)
    try:
        return socket.create_server((host, port), backlog=backlog)
    except socket.gaierror:  # a name that has only addresses of IPv6
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog)
