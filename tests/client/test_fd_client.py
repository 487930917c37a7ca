"""Descriptors that arrive with a reply."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.client.transport.fd_client import FdExchange
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo, Gone, Refused
from kvferry.proto.fd_passing import FdHandles, FetchFd
from kvferry.proto.messages import Error
from kvferry.shm.memfd import sealed_memfd
from support.descriptors import count_memfds

REFUSAL = encode(Error(None, ErrorInfo(Code.UNKNOWN_HANDLE, "unknown handle 7")))


@contextmanager
def answered(folder: Path, reply: bytes, descriptors: list[int]) -> Iterator[FdExchange]:
    """A fetch that a daemon has answered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "fds.sock"))
        listener.listen()
        with FdExchange(folder, FetchFd("s", 7)) as exchange:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                socket.send_fds(connection, [reply], descriptors)
            yield exchange


@pytest.mark.parametrize("reply", [REFUSAL, b"\xc1"], ids=["refusal", "no message"])
def test_a_descriptor_that_comes_with_an_error_is_closed(short_path: Path, reply: bytes) -> None:
    """A hostile sibling could use up those of its reader."""
    descriptor = sealed_memfd("passed", 4096)
    with answered(short_path, reply, [descriptor]) as exchange, pytest.raises(Refused):
        exchange.read_reply()
    assert count_memfds("passed") == 1
    os.close(descriptor)


def test_a_reply_without_the_descriptor_is_an_error(short_path: Path) -> None:
    with (
        answered(short_path, encode(FdHandles((7,))), []) as exchange,
        pytest.raises(Gone, match="without a descriptor"),
    ):
        exchange.read_reply()
