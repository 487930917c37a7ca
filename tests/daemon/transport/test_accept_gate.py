"""The door of an ipc socket: who sees the file can come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.daemon.access.endpoint import closed_path
from kvferry.daemon.transport.accept_gate import AcceptGate, max_client_fd


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "front.sock"


@pytest.fixture
async def door(path: Path) -> AcceptGate:
    return AcceptGate(path)


@pytest.fixture(autouse=True)
def bound(door: AcceptGate) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        door.bind_socket(router)
        yield
        door.close()


def knock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.connect(str(path))


async def test_a_socket_is_visible_only_once_it_listens(path: Path, door: AcceptGate) -> None:
    assert not path.exists()
    door.open_gate()
    knock(path)


async def test_the_gate_closes_when_descriptors_run_out(path: Path, door: AcceptGate) -> None:
    door.open_gate()
    door.connection_accepted(max_client_fd())
    assert path.exists()
    door.connection_accepted(max_client_fd() + 1)
    assert not path.exists()
    knock(closed_path(path))


@pytest.mark.parametrize("cleared", [False, True])
async def test_the_gate_leaves_no_file_behind(path: Path, door: AcceptGate, cleared: bool) -> None:
    door.open_gate()
    if cleared:
        path.unlink()
    door.close()
    assert list(path.parent.iterdir()) == []
