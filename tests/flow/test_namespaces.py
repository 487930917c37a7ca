"""A namespace survives its engines, and publishes events."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import msgspec
import torch
import zmq

from kvferry.client import Code, LocalDaemon, Lookup, OffloadClient
from kvferry.proto.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    published_hash,
)
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.child_processes import children_of
from support.restarting_fixture import FACTOR, PAGE, RestartingEngine, keys
from support.time_limits import PROMPTLY, TIMEOUT

KILLED_ENGINE = """
import sys, time
from pathlib import Path
from kvferry.client import GPULoadStoreSpec, KeyLoadStoreSpec, Timeline
from support.restarting_fixture import RestartingEngine, keys

engine = RestartingEngine(Path(sys.argv[1]), timeline=Timeline.create(sys.argv[2]))
engine.fill(range(8), seed=1)
assert engine.store(range(6), keys(1, 2, 3)).success
never_ends = GPULoadStoreSpec([6, 7]), KeyLoadStoreSpec(keys(4))
engine.client.transfer_async(99, never_ends, wait_for=1 << 40)
engine.client.pin(keys(1))
engine.client.status()
print("up", flush=True)
time.sleep(600)
"""


def test_after_a_kill_the_next_engine_loads_what_was_stored(
    device: str, start_kvferryd: StartKvferryd
) -> None:
    daemon = start_kvferryd("0" if device.startswith("cuda") else device)
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED_ENGINE, str(daemon.directory), device],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "up\n"
    with OffloadClient(daemon.directory, engine="observer") as observer:
        (before,) = observer.namespaces()
        assert (before.pending, before.ready, before.pinned) == (1, 3, 1)
        killed.kill()
        killed.communicate()
        until(lambda: not observer.namespaces()[0].pinned, PROMPTLY)
    with closing(RestartingEngine(daemon.directory)) as engine:
        assert engine.opened.reattached
        until(lambda: engine.lookup(4) == [Lookup.MISS], PROMPTLY)  # its store never ended
        assert engine.lookup(1, 2, 3) == [Lookup.HIT] * 3
        content = engine.fill(range(6), seed=1)[:6]
        assert engine.load(keys(1, 2, 3), range(10, 16)).success
        assert torch.equal(engine.read(range(10, 16)), content)
        assert engine.load(keys(4), [20, 21]).error.code == Code.KEY_ABSENT  # type: ignore[union-attr]


def test_kv_events_are_published(kvferryd: LocalDaemon) -> None:
    with (
        closing(RestartingEngine(kvferryd.directory, host_bytes=2 * FACTOR * PAGE)) as engine,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
        subscriber.setsockopt_string(zmq.SUBSCRIBE, engine.opened.name)
        subscriber.connect(f"ipc://{kvferryd.directory}/events.sock")
        # From then on events are queued for it.
        until(lambda: bool(children_of(kvferryd.pid, b"KV events")))
        engine.store(range(4), keys(1, 2))
        engine.store(range(2), keys(3))
        engine.client.reset()
        published: list[Any] = []
        numbers = []
        while AllBlocksCleared() not in published:
            name, number, payload = subscriber.recv_multipart()
            assert name.decode() == engine.opened.name
            numbers.append(int.from_bytes(number, "big"))
            published += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    hashes = list(map(published_hash, keys(1, 2, 3)))
    assert numbers == list(range(len(numbers)))
    assert published[0] == BlockStored(hashes[:2], None, [], 0, None, "CPU", None)
    assert published[1] == BlockRemoved([hashes[1]], "CPU")  # the tail of a prefix is evicted first
    assert published[2] == BlockStored(hashes[2:], None, [], 0, None, "CPU", None)
