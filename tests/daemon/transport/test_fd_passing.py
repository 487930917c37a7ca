"""Descriptors that sessions left at the desk: whose they are, and when they are closed."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.daemon.access.admission import credentials_of
from kvferry.daemon.transport import fd_passing as descriptors_module
from kvferry.daemon.transport.fd_passing import FdServer
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, KVFerryError, Refused
from kvferry.proto.fd_passing import SendFds
from kvferry.proto.messages import Error


def memory() -> int:
    return os.memfd_create("kvferry-test")


def is_open(descriptor: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


class FdServerFixture:
    def __init__(self, folder: Path) -> None:
        self.sessions = {"a", "b"}
        self.refused: list[str] = []
        admission = SimpleNamespace(check_process=lambda process: None)
        endpoint = SimpleNamespace(admission=admission, descriptors=folder / "fds.sock")
        self.desk = FdServer(cast(Any, endpoint), lambda: self.sessions, self.refusal)

    def refusal(self, error: KVFerryError) -> Error:
        self.refused.append(error.code)
        return Error(None, error.info, "boot")


@pytest.fixture
async def house(short_path: Path) -> AsyncIterator[FdServerFixture]:
    house = FdServerFixture(short_path)
    yield house
    house.desk.close()


async def test_what_is_kept_is_closed_with_its_session_unless_it_was_taken(
    house: FdServerFixture,
) -> None:
    one, two, other = memory(), memory(), memory()
    first, _, third = (
        house.desk.hold_fd(who, d) for who, d in (("a", one), ("a", two), ("b", other))
    )
    assert house.desk.take_fds("a", (first,)) == (one,)
    house.desk.close_session("a")
    assert [is_open(descriptor) for descriptor in (one, two, other)] == [True, False, True]
    os.dup2(one, two)  # the number is somebody else's now
    house.desk.close_session("a")
    assert is_open(two)
    os.close(two)
    assert house.desk.take_fds("b", (third,)) == (other,)
    os.close(one)
    os.close(other)


async def test_what_is_kept_for_who_has_gone_is_closed_at_once(house: FdServerFixture) -> None:
    descriptor = memory()
    house.desk.hold_fd("gone", descriptor)
    assert not is_open(descriptor)


async def test_a_ticket_is_used_once_and_one_that_is_wrong_takes_none(
    house: FdServerFixture,
) -> None:
    one = memory()
    ticket = house.desk.hold_fd("a", one)
    for tickets, code in (
        ((ticket, ticket), Code.UNKNOWN_HANDLE),
        ((ticket, 99), Code.UNKNOWN_HANDLE),
    ):
        with pytest.raises(Refused) as refused:
            house.desk.take_fds("a", tickets)
        assert refused.value.code == code
    with pytest.raises(Refused):
        house.desk.take_fds("b", (ticket,))
    assert house.desk.take_fds("a", (ticket,)) == (one,)
    os.close(one)


@pytest.mark.parametrize("crowded", [False, True])
async def test_a_session_deposits_so_many_and_no_more(
    house: FdServerFixture, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    monkeypatch.setattr(descriptors_module, "MAX_HELD", 2)
    monkeypatch.setattr(descriptors_module, "fds_exhausted", lambda: crowded)
    here, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given: list[int] = []
    for _ in range(3):
        given.append(memory())
        house.desk._reply(theirs, credentials_of(here), encode(SendFds("a")), given)
    assert house.refused == [Code.BUSY] * (3 if crowded else 1)
    assert len(given) == len(house.refused)  # the caller's to close
    for descriptor in given:
        os.close(descriptor)
    here.close()
    theirs.close()
