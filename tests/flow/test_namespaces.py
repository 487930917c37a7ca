"""The engines of a model share one cache through real processes. It survives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq

from kvferry.client import (
    Code,
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    TensorLayout,
    TensorRef,
    TransferResult,
    offload_key,
)
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
from support.time_limits import PROMPTLY, TIMEOUT
from support.trace_replay import ReplayOutcome as Replayed
from support.trace_replay import replay

PAGE, BLOCKS, TENSORS = 1024, 64, 2
FINGERPRINT = Fingerprint(
    "llama", TENSORS * PAGE, dtype="bfloat16", hash_algorithm="sha256", key_bytes=12
)
LAYOUT = KVLayout(
    (TensorLayout(BLOCKS, PAGE, PAGE),) * TENSORS, (tuple(TensorRef(t, PAGE) for t in range(2)),)
)
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING


def key(number: int) -> bytes:
    return offload_key(number.to_bytes(8, "big"))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@dataclass
class Tenant:
    """An engine in a namespace: scheduler and worker in one process."""

    client: OffloadClient
    manager: OffloadingManager
    pages: Sequence[torch.Tensor]
    jobs: int = 0

    def fill_block(self, block: int, seed: int) -> None:
        for number, page in enumerate(self.pages):
            page[block] = content(seed, number)

    def read_block(self, block: int) -> list[bytes]:
        return [page[block].cpu().numpy().tobytes() for page in self.pages]

    def transfer(self, spec: Any, **options: Any) -> int:
        self.jobs += 1
        self.client.transfer_async(self.jobs, spec, **options)
        return self.jobs

    def run(self, spec: Any) -> TransferResult:
        job = self.transfer(spec)
        self.client.wait([job])
        (result,) = self.client.get_finished()
        assert result.job_id == job
        return result

    def store(self, *numbers: int) -> TransferResult:
        """Write each number into the GPU block of that number, and store it under its key."""
        for number in numbers:
            self.fill_block(number, number)
        return self.run((GPULoadStoreSpec(numbers), KeyLoadStoreSpec(keys(*numbers))))

    def load(self, *numbers: int, into: Sequence[int]) -> TransferResult:
        return self.run((KeyLoadStoreSpec(keys(*numbers)), GPULoadStoreSpec(into)))

    def has_lookup(self, number: int, wanted: Lookup) -> bool:
        return self.manager.lookup(key(number)) is wanted


def content(seed: int, tensor: int) -> torch.Tensor:
    return torch.full((PAGE,), (31 * seed + 7 * tensor) % 127, dtype=torch.int8)


def expected(seed: int) -> list[bytes]:
    return [content(seed, tensor).numpy().tobytes() for tensor in range(TENSORS)]


StartTenant = Callable[..., Tenant]


@pytest.fixture
def start_tenant() -> Iterator[StartTenant]:
    """start_tenant(daemon, name, **namespace) -> an engine in a namespace of that daemon."""
    with ExitStack() as stack:

        def start(
            daemon: LocalDaemon,
            name: str,
            fingerprint: Fingerprint = FINGERPRINT,
            *,
            events: bool = False,
            **namespace: Any,
        ) -> Tenant:
            client = stack.enter_context(OffloadClient(daemon.directory, engine=name))
            client.open_namespace(fingerprint, **namespace)
            pages = client.allocate_kv_caches(LAYOUT).tensors
            return Tenant(client, OffloadingManager(client, events=events), pages)

        yield start


@pytest.fixture
def daemon(device: str, start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd("0" if device.startswith("cuda") else device)


# Several engines share a namespace


def test_the_second_engine_hits_what_the_first_stored(
    daemon: LocalDaemon, start_tenant: StartTenant
) -> None:
    first, second = start_tenant(daemon, "first"), start_tenant(daemon, "second")
    assert first.store(1, 2, 3).transfer_size == 3 * TENSORS * PAGE
    until(lambda: second.has_lookup(3, HIT), PROMPTLY)
    spec = second.manager.prepare_load(keys(1, 2, 3))
    assert second.run((spec, GPULoadStoreSpec([10, 20, 30]))).success
    second.manager.complete_load(spec.keys)
    assert [second.read_block(b) for b in (10, 20, 30)] == [expected(n) for n in (1, 2, 3)]
    assert second.store(1, 2, 3).transfer_size == 0  # the keys are stored already


# A namespace survives its engines

KILLED_ENGINE = """
import sys, time
from numpy import array
from kvferry.client import *
from flow.test_namespaces import FINGERPRINT, LAYOUT, Tenant, keys

client = OffloadClient(sys.argv[1], engine="engine")
client.open_namespace(FINGERPRINT)
timeline = Timeline.create(sys.argv[2])
pages = client.allocate_kv_caches(LAYOUT, timeline=timeline).tensors
tenant = Tenant(client, OffloadingManager(client), pages)
assert tenant.store(1, 2, 3).success
tenant.fill_block(4, 4)
tenant.transfer((GPULoadStoreSpec([4]), KeyLoadStoreSpec(keys(4))), wait_for=1 << 40)
tenant.client.pin(keys(1))
tenant.client.status()
print("up", flush=True)
time.sleep(600)
"""


def test_after_a_kill_the_next_engine_loads_what_was_stored(
    daemon: LocalDaemon, device: str, start_tenant: StartTenant
) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", KILLED_ENGINE, str(daemon.directory), device],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "up\n"
    with OffloadClient(daemon.directory, engine="observer") as observer:
        (before,) = observer.namespaces()
        assert (before.pending, before.ready, before.pinned) == (1, 3, 1)
        engine.kill()
        engine.communicate()
        until(lambda: not observer.namespaces()[0].pinned, PROMPTLY)
    next_engine = start_tenant(daemon, "engine")
    assert next_engine.client.namespace.opened.reattached
    until(lambda: next_engine.has_lookup(4, MISS), PROMPTLY)  # its store never ended
    assert [next_engine.has_lookup(n, HIT) for n in (1, 2, 3)] == [True] * 3
    assert next_engine.load(1, 2, 3, into=[7, 8, 9]).success
    assert [next_engine.read_block(b) for b in (7, 8, 9)] == [expected(n) for n in (1, 2, 3)]
    assert next_engine.load(4, into=[5]).error.code == Code.KEY_ABSENT  # type: ignore[union-attr]


def test_two_daemons_of_two_ranks(start_kvferryd: StartKvferryd) -> None:
    """A key is a hit if both daemons have it."""
    daemons = [start_kvferryd(), start_kvferryd()]
    with ExitStack() as stack:
        workers = []
        for rank, daemon in enumerate(daemons):
            client = stack.enter_context(OffloadClient(daemon.directory, engine="tp"))
            client.open_namespace(
                msgspec.structs.replace(FINGERPRINT, rank=rank, world_size=2), mirror=False
            )
            pages = client.allocate_kv_caches(LAYOUT).tensors
            workers.append(Tenant(client, None, pages))  # type: ignore[arg-type]
        manager = stack.enter_context(
            OffloadingManager.connect(
                [d.directory for d in daemons], engine="tp", fingerprint=FINGERPRINT
            )
        )
        output = manager.prepare_store(keys(1))
        assert output is not None
        spec = GPULoadStoreSpec([1])
        assert workers[0].run((spec, output.store_specs[0])).success
        until(lambda: manager.usage.ready == 1, PROMPTLY)
        assert manager.lookup(key(1)) is PENDING  # rank 1 has not
        assert workers[1].run((spec, output.store_specs[1])).success
        until(lambda: manager.usage.ready == 2, PROMPTLY)
        manager.complete_store(keys(1))
        assert manager.lookup(key(1)) is HIT


# Events


def test_kv_events_are_published(kvferryd: LocalDaemon, start_tenant: StartTenant) -> None:
    tenant = start_tenant(kvferryd, "tenant", cpu_bytes_to_use=2 * TENSORS * PAGE)
    topic = tenant.client.namespace.opened.name
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
        subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
        subscriber.connect(f"ipc://{kvferryd.directory}/events.sock")
        # From then on events are queued for it.
        until(lambda: bool(children_of(kvferryd.pid, b"KV events")))
        tenant.store(1, 2)
        tenant.store(3)
        tenant.client.reset()
        published: list[Any] = []
        numbers = []
        while AllBlocksCleared() not in published:
            name, number, payload = subscriber.recv_multipart()
            assert name.decode() == topic
            numbers.append(int.from_bytes(number, "big"))
            published += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    hashes = list(map(published_hash, keys(1, 2, 3)))
    assert numbers == list(range(len(numbers)))
    assert published[0] == BlockStored(hashes[:2], None, [], 0, None, "CPU", None)
    assert published[1] == BlockRemoved([hashes[1]], "CPU")  # the tail of a prefix is evicted first
    assert published[2] == BlockStored(hashes[2:], None, [], 0, None, "CPU", None)


# Replay of a trace


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_replay_loads_what_was_stored(policy: str) -> None:
    """Three engines replay prefixes that repeat and exceed the capacity."""
    rng = np.random.default_rng(0)
    trace = []
    for _ in range(120):
        family, depth = int(rng.zipf(1.5)) % 12, int(rng.integers(1, 24))
        shared = [1000 * family + i for i in range(depth)]
        trace.append(shared + [int(n) for n in rng.integers(1 << 32, 1 << 33, size=4)])
    outcome: Replayed = replay(trace, 150, policy=policy, clients=3)
    assert (outcome.requests, outcome.wrong) == (120, 0)
    assert outcome.blocks == sum(map(len, trace))
    assert 0.2 < outcome.hit_rate < 0.9
