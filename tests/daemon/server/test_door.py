"""The door of an ipc socket: who sees the file can come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.daemon.server.door import Door, last_descriptor, shut


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        yield router


def knock(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.connect(str(path))


async def test_nobody_sees_a_socket_before_it_listens(
    short_path: Path, router: zmq.Socket[bytes]
) -> None:
    path = short_path / "front.sock"
    door = Door(path)
    door.bind(router)
    assert not path.exists()
    door.open()
    knock(path)
    door.close()


async def test_it_shuts_where_descriptors_run_out(
    short_path: Path, router: zmq.Socket[bytes]
) -> None:
    path = short_path / "front.sock"
    door = Door(path)
    door.bind(router)
    door.open()
    door.came(last_descriptor())
    assert path.exists()
    door.came(last_descriptor() + 1)
    assert not path.exists()
    knock(shut(path))
    door.close()


@pytest.mark.parametrize("cleared", [False, True])
async def test_it_leaves_nothing_behind(
    short_path: Path, router: zmq.Socket[bytes], cleared: bool
) -> None:
    path = short_path / "front.sock"
    door = Door(path)
    door.bind(router)
    door.open()
    if cleared:
        path.unlink()
    door.close()
    assert list(short_path.iterdir()) == []
