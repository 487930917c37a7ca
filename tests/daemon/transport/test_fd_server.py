"""Descriptors held by the FdServer: which session may take them, and when they are closed."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.daemon.access.admission import credentials_of
from kvferry.daemon.transport import fd_server
from kvferry.daemon.transport.fd_server import FdServer
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.fd_passing import SendFds
from kvferry.proto.messages import Error
from support.descriptors import count_memfds, is_open
from support.eventually import eventually


def create_memfd() -> int:
    return os.memfd_create("kvferry-test")


class FdServerFixture:
    """A server for the sessions "a" and "b", which may hold two descriptors each."""

    def __init__(self, folder: Path) -> None:
        self.sessions = {"a", "b"}
        self.refused: list[str] = []
        admission = SimpleNamespace(check_process=lambda process: None)
        endpoint = SimpleNamespace(admission=admission, descriptors=folder / "fds.sock")
        self.server = FdServer(cast(Any, endpoint), lambda: self.sessions, self.make_refusal, 2)

    def make_refusal(self, error: KVFerryError) -> Error:
        self.refused.append(error.code)
        return Error(None, error.info)


@pytest.fixture
async def fixture(short_path: Path) -> AsyncIterator[FdServerFixture]:
    fixture = FdServerFixture(short_path)
    yield fixture
    fixture.server.close()


async def test_descriptors_that_were_not_taken_are_closed_with_their_session(
    fixture: FdServerFixture,
) -> None:
    taken, held, other = create_memfd(), create_memfd(), create_memfd()
    handle = fixture.server.hold_fd("a", taken)
    fixture.server.hold_fd("a", held)
    other_handle = fixture.server.hold_fd("b", other)
    assert fixture.server.take_fds("a", (handle,)) == (taken,)
    fixture.server.close_session("a")
    assert [is_open(descriptor) for descriptor in (taken, held, other)] == [True, False, True]
    os.dup2(taken, held)  # the number is used again
    fixture.server.close_session("a")
    assert is_open(held)
    os.close(held)
    assert fixture.server.take_fds("b", (other_handle,)) == (other,)
    os.close(taken)
    os.close(other)


async def test_descriptors_of_a_refused_packet_are_closed(
    fixture: FdServerFixture, short_path: Path
) -> None:
    descriptor = os.memfd_create("refused-packet")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(short_path / "fds.sock"))
        socket.send_fds(client, [encode(SendFds("closed"))], [descriptor])
        os.close(descriptor)
        await eventually(lambda: fixture.refused)
    assert fixture.refused == [Code.NO_SESSION]
    assert count_memfds("refused-packet") == 0


async def test_a_handle_is_valid_once_and_an_unknown_handle_takes_nothing(
    fixture: FdServerFixture,
) -> None:
    descriptor = create_memfd()
    handle = fixture.server.hold_fd("a", descriptor)
    for handles, code in (
        ((handle, handle), Code.UNKNOWN_HANDLE),
        ((handle, 99), Code.UNKNOWN_HANDLE),
    ):
        with pytest.raises(Refused) as refused:
            fixture.server.take_fds("a", handles)
        assert refused.value.code == code
    with pytest.raises(Refused):
        fixture.server.take_fds("b", (handle,))
    assert fixture.server.take_fds("a", (handle,)) == (descriptor,)
    os.close(descriptor)


@pytest.mark.parametrize("exhausted", [False, True])
async def test_a_session_may_hold_a_bounded_number_of_descriptors(
    fixture: FdServerFixture, monkeypatch: pytest.MonkeyPatch, exhausted: bool
) -> None:
    monkeypatch.setattr(fd_server, "fds_exhausted", lambda: exhausted)
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent: list[int] = []
    for _ in range(3):
        sent.append(create_memfd())
        fixture.server._reply(server, credentials_of(client), encode(SendFds("a")), sent)
    assert fixture.refused == [Code.BUSY] * (3 if exhausted else 1)
    assert len(sent) == len(fixture.refused)  # the caller must close the others
    for descriptor in sent:
        os.close(descriptor)
    client.close()
    server.close()
