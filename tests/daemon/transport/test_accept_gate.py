"""The door of an ipc socket: who sees the file can come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.daemon.access.endpoint import shut
from kvferry.daemon.transport.accept_gate import AcceptGate, last_descriptor


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "front.sock"


@pytest.fixture
async def door(path: Path) -> AcceptGate:
    return AcceptGate(path)


@pytest.fixture(autouse=True)
def bound(door: AcceptGate) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        door.bind(router)
        yield
        door.close()


def knock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.connect(str(path))


async def test_nobody_sees_a_socket_before_it_listens(path: Path, door: AcceptGate) -> None:
    assert not path.exists()
    door.open()
    knock(path)


async def test_it_shuts_where_descriptors_run_out(path: Path, door: AcceptGate) -> None:
    door.open()
    door.came(last_descriptor())
    assert path.exists()
    door.came(last_descriptor() + 1)
    assert not path.exists()
    knock(shut(path))


@pytest.mark.parametrize("cleared", [False, True])
async def test_it_leaves_nothing_behind(path: Path, door: AcceptGate, cleared: bool) -> None:
    door.open()
    if cleared:
        path.unlink()
    door.close()
    assert list(path.parent.iterdir()) == []
