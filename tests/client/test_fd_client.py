"""Descriptors that arrive with a reply."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvferry.client.transport.fd_client import FdExchange
from kvferry.proto.codec import encode
from kvferry.proto.errors import Code, ErrorInfo, Refused
from kvferry.proto.fd_passing import FetchFd
from kvferry.proto.messages import Error
from kvferry.shm.memfd import sealed_memfd
from support.descriptors import count_memfds

REFUSAL = encode(Error(None, ErrorInfo(Code.UNKNOWN_HANDLE, "unknown handle 7")))


@pytest.mark.parametrize("reply", [REFUSAL, b"\xc1"], ids=["refusal", "no message"])
def test_a_descriptor_that_comes_with_an_error_is_closed(short_path: Path, reply: bytes) -> None:
    """A hostile sibling could use up those of its reader."""
    descriptor = sealed_memfd("passed", 4096)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(short_path / "fds.sock"))
        listener.listen()
        with FdExchange(short_path, FetchFd("s", 7)) as exchange:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                socket.send_fds(connection, [reply], [descriptor])
            with pytest.raises(Refused):
                exchange.read_reply()
        assert count_memfds("passed") == 1
    os.close(descriptor)
