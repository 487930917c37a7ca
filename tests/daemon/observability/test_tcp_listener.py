"""Sockets that listen at one address, or at all."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from kvferry.daemon.observability.tcp_listener import listen_tcp, parse_address

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")


def accepts(listener: socket.socket, host: str) -> bool:
    try:
        with socket.create_connection((host, listener.getsockname()[1]), timeout=5):
            return True
    except ConnectionRefusedError:
        return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9400", ("", 9400)),
        ("*:9400", ("*", 9400)),
        ("[::]:9400", ("::", 9400)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_addresses_have_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "both"),
    [("", [True, True]), ("*", [True, True]), ("::", [True, True]), ("127.0.0.1", [True, False])],
)
def test_all_addresses_are_those_of_both_families(host: str, both: list[bool]) -> None:
    with listen_tcp(host, 0, 1) as listener:
        assert [accepts(listener, each) for each in ("127.0.0.1", "::1")] == both


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_all_addresses_are_those_of_ipv4(
    monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    create = socket.create_server

    def refuse_ipv6(address: Any, *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(error, os.strerror(error))
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", refuse_ipv6)
    with listen_tcp("", 0, 1) as listener:
        assert accepts(listener, "127.0.0.1")


@needs_ipv6
def test_a_port_that_is_in_use_in_one_family_is_an_error() -> None:
    with (
        listen_tcp("127.0.0.1", 0, 1) as listener,
        pytest.raises(OSError, match="in use"),
    ):
        listen_tcp("", listener.getsockname()[1], 1)
