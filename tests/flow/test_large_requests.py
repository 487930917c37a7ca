"""Requests of a million tokens, and clients that request the largest replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch
import zmq

from kvferry.client import (
    Fingerprint,
    GPULoadStoreSpec,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    shared_empty,
)
from kvferry.proto.codec import encode
from kvferry.proto.messages import OpenNamespace, Subscribe
from kvferry.proto.protocol import make_hello
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.process_usage import ProcessUsage
from support.time_limits import TIMEOUT

# A million tokens in blocks of 16, and bytes of a GPU block.
BLOCKS, PAGE = 62_500, 64
FINGERPRINT = Fingerprint("model", 2 * PAGE, key_bytes=64)
KEYS = [number.to_bytes(64) for number in range(BLOCKS)]
EVERY = GPULoadStoreSpec(range(2 * BLOCKS))

Connect = Callable[[LocalDaemon], "zmq.Socket[bytes]"]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(daemon) -> a session in the namespace, which queues two messages per direction."""
    names = count()
    with ExitStack() as stack, zmq.Context() as context:

        def open_session(daemon: LocalDaemon) -> zmq.Socket[bytes]:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 2)
            socket.setsockopt(zmq.RCVHWM, 2)
            socket.connect(f"ipc://{daemon.directory / 'kvferry.sock'}")
            socket.send(encode(make_hello("rude", f"rude {next(names)}")))
            socket.send(encode(OpenNamespace(1, FINGERPRINT)))
            for _ in range(2):
                assert socket.poll(30_000)
                socket.recv()
            return socket

        yield open_session
        stack.close()


@pytest.fixture
def tensor() -> torch.Tensor:
    """(2 * BLOCKS, PAGE) bytes: each GPU block is full of its number."""
    tensor = shared_empty((2 * BLOCKS, PAGE // 8), torch.int64)
    tensor.copy_(numbered())
    return tensor


def numbered() -> torch.Tensor:
    return torch.arange(2 * BLOCKS)[:, None].expand(-1, PAGE // 8)


def join(daemon: LocalDaemon, tensor: torch.Tensor) -> OffloadClient:
    client = OffloadClient(daemon.directory, timeout=TIMEOUT)
    client.open_namespace(FINGERPRINT)
    client.register_kv_caches({"layer": tensor}, num_blocks=2 * BLOCKS, block_size_factor=2)
    return client


def store_all(client: OffloadClient, manager: OffloadingManager) -> None:
    offered = manager.prepare_store(KEYS)
    assert offered is not None
    client.transfer_async(1, (EVERY, offered.store_spec))
    client.wait([1])
    manager.complete_store(KEYS)
    (stored,) = client.get_finished()
    assert (stored.job_id, stored.transfer_size) == (1, 2 * BLOCKS * PAGE)


def test_a_prompt_of_a_million_tokens(
    start_kvferryd: StartKvferryd, tmp_path: Path, tensor: torch.Tensor
) -> None:
    """By key, two GPU blocks in a host block."""
    daemon = start_kvferryd(pool_bytes=32 << 20, tiers_disk_path=tmp_path, tiers_disk_size="64MiB")
    with join(daemon, tensor) as client:
        manager = OffloadingManager(client)
        search = manager.prefetch(KEYS)
        until(lambda: manager.lookup(KEYS[0]) is Lookup.MISS)
        assert (search.done, search.found_keys) == (True, ())
        store_all(client, manager)
        until(lambda: all(manager.lookup(key) is Lookup.HIT for key in KEYS))
        tensor.zero_()
        manager.touch(KEYS)
        client.transfer_async(2, (manager.prepare_load(KEYS), EVERY))
        client.wait([2])
        manager.complete_load(KEYS)
        (loaded,) = client.get_finished()
        assert (loaded.job_id, loaded.transfer_size) == (2, tensor.nbytes)
        assert torch.equal(tensor, numbered())
        assert manager.usage.pinned == 0


def test_clients_that_receive_nothing_take_little_memory(
    start_kvferryd: StartKvferryd, connect: Connect, tensor: torch.Tensor
) -> None:
    """Eight connections ask for snapshots of 4 MB a hundred times each."""
    daemon = start_kvferryd(pool_bytes=32 << 20)
    with join(daemon, tensor) as client:
        store_all(client, OffloadingManager(client))
        sockets = [connect(daemon) for _ in range(8)]
        before = most = ProcessUsage.of(daemon.pid).private
        for _ in range(100):
            for socket in sockets:
                assert socket.poll(30_000, zmq.POLLOUT)
                socket.send(encode(Subscribe()))
            most = max(most, ProcessUsage.of(daemon.pid).private)
        client.status()
        assert max(most, ProcessUsage.of(daemon.pid).private) - before < 128 << 20
