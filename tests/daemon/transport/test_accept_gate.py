"""The accept gate: clients can connect only while the file of the ipc socket is visible."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.daemon.access.runtime_directory import closed_path
from kvferry.daemon.transport.accept_gate import AcceptGate, max_client_fd


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "front.sock"


@pytest.fixture
async def gate(path: Path) -> AcceptGate:
    return AcceptGate(path)


@pytest.fixture(autouse=True)
def bind_gate(gate: AcceptGate) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        gate.bind_socket(router)
        yield
        gate.close()


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))


async def test_a_socket_is_visible_after_the_gate_opens(path: Path, gate: AcceptGate) -> None:
    assert not path.exists()
    gate.open_gate()
    connect(path)


async def test_the_gate_closes_when_descriptors_run_out(path: Path, gate: AcceptGate) -> None:
    gate.open_gate()
    gate.connection_accepted(max_client_fd())
    assert path.exists()
    gate.connection_accepted(max_client_fd() + 1)
    assert not path.exists()
    connect(closed_path(path))


@pytest.mark.parametrize("cleared", [False, True])
async def test_the_gate_leaves_no_file_behind(path: Path, gate: AcceptGate, cleared: bool) -> None:
    gate.open_gate()
    if cleared:
        path.unlink()
    gate.close()
    assert list(path.parent.iterdir()) == []
