"""One cache for every engine of a model, through real processes: shared, lasting, told."""

from __future__ import annotations

import subprocess
import sys
import time
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
    CPULoadStoreSpec,
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    LocalDaemon,
    Lookup,
    OffloadClient,
    OffloadingManager,
    Refused,
    TensorLayout,
    TensorRef,
    TransferResult,
    offload_key,
)
from kvferry.proto.messages import Outcome
from kvferry.testing.engine import until
from kvferry.testing.plugin import StartKvferryd
from support.trace_replay import ReplayOutcome as Replayed
from support.trace_replay import replay

PAGE, BLOCKS, TENSORS = 1024, 64, 2
FINGERPRINT = Fingerprint(
    "llama", TENSORS * PAGE, dtype="bfloat16", hash_algorithm="sha256", key_bytes=12
)
LAYOUT = KVLayout(
    (TensorLayout(BLOCKS, PAGE, PAGE),) * TENSORS, (tuple(TensorRef(t, PAGE) for t in range(2)),)
)
NEVER = 1 << 40
PROMPTLY = 2.0
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING


def key(number: int) -> bytes:
    return offload_key(number.to_bytes(8, "big"))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@dataclass
class Tenant:
    """An engine in a namespace: scheduler and worker in one."""

    client: OffloadClient
    manager: OffloadingManager
    pages: Sequence[torch.Tensor]
    jobs: int = 0

    def fill(self, block: int, seed: int) -> None:
        for number, page in enumerate(self.pages):
            page[block] = content(seed, number)

    def holds(self, block: int) -> list[bytes]:
        return [page[block].cpu().numpy().tobytes() for page in self.pages]

    def transfer(self, spec: Any, **more: Any) -> int:
        self.jobs += 1
        self.client.transfer_async(self.jobs, spec, **more)
        return self.jobs

    def run(self, spec: Any) -> TransferResult:
        job = self.transfer(spec)
        self.client.wait([job])
        (result,) = self.client.get_finished()
        assert result.job_id == job
        return result

    def store(self, *numbers: int) -> TransferResult:
        """Store blocks with these contents under these keys."""
        for number in numbers:
            self.fill(number, number)
        return self.run((GPULoadStoreSpec(numbers), KeyLoadStoreSpec(keys(*numbers))))

    def load(self, *numbers: int, into: Sequence[int]) -> TransferResult:
        return self.run((KeyLoadStoreSpec(keys(*numbers)), GPULoadStoreSpec(into)))

    def sees(self, number: int, what: Lookup) -> bool:
        return self.manager.lookup(key(number)) is what


def content(seed: int, tensor: int) -> torch.Tensor:
    return torch.full((PAGE,), (31 * seed + 7 * tensor) % 127, dtype=torch.int8)


def expected(seed: int) -> list[bytes]:
    return [content(seed, tensor).numpy().tobytes() for tensor in range(TENSORS)]


Enter = Callable[..., Tenant]


@pytest.fixture
def enter() -> Iterator[Enter]:
    """enter(daemon, name, **namespace) -> an engine in a namespace of that daemon."""
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


# Shared


def test_the_second_engine_hits_what_the_first_stored(daemon: LocalDaemon, enter: Enter) -> None:
    first, second = enter(daemon, "first"), enter(daemon, "second")
    assert first.store(1, 2, 3).transfer_size == 3 * TENSORS * PAGE
    until(lambda: second.sees(3, HIT), PROMPTLY)
    spec = second.manager.prepare_load(keys(1, 2, 3))
    assert second.run((spec, GPULoadStoreSpec([10, 20, 30]))).success
    second.manager.complete_load(spec.keys)
    assert [second.holds(b) for b in (10, 20, 30)] == [expected(n) for n in (1, 2, 3)]
    assert second.store(1, 2, 3).transfer_size == 0  # they are there


def test_the_same_key_at_once_is_stored_once(daemon: LocalDaemon, enter: Enter) -> None:
    first, second = enter(daemon, "first"), enter(daemon, "second")
    for tenant in (first, second):
        tenant.fill(5, 5)
    spec = GPULoadStoreSpec([5]), KeyLoadStoreSpec(keys(5))
    jobs = [(tenant, tenant.transfer(spec)) for tenant in (first, second)]
    sizes = []
    for tenant, job in jobs:
        tenant.client.wait([job])
        (result,) = tenant.client.get_finished()
        assert result.success
        sizes.append(result.transfer_size)
    assert sorted(sizes) == [0, TENSORS * PAGE]


def test_other_fingerprints_share_nothing(daemon: LocalDaemon, enter: Enter) -> None:
    first = enter(daemon, "first", cpu_bytes_to_use=1 << 20)
    other = msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8")
    second = enter(daemon, "second", other, cpu_bytes_to_use=1 << 20)
    first.store(1)
    assert second.load(1, into=[9]).error is not None
    assert second.sees(1, MISS)
    (said,) = second.client.namespace.opened.unlike
    assert "kv_dtype: 'fp8' here, '' there" in said


def test_one_model_does_not_starve_another(daemon: LocalDaemon, enter: Enter) -> None:
    quota = 4 * TENSORS * PAGE
    first = enter(daemon, "first", cpu_bytes_to_use=quota)
    other = msgspec.structs.replace(FINGERPRINT, model="qwen")
    second = enter(daemon, "second", other, cpu_bytes_to_use=quota)
    second.store(1)
    first.store(*range(4))
    first.store(*range(4, 8))
    assert second.load(1, into=[9]).success
    assert first.load(1, into=[9]).error.code == Code.KEY_ABSENT  # type: ignore[union-attr]


# Lasting

DOOMED = """
import sys, time
from numpy import array
from kvferry.client import *
from flow.test_namespaces import FINGERPRINT, LAYOUT, NEVER, Tenant, keys

client = OffloadClient(sys.argv[1], engine="doomed")
client.open_namespace(FINGERPRINT)
timeline = Timeline.create(sys.argv[2])
pages = client.allocate_kv_caches(LAYOUT, timeline=timeline).tensors
tenant = Tenant(client, OffloadingManager(client), pages)
assert tenant.store(1, 2, 3).success
tenant.fill(4, 4)
tenant.transfer((GPULoadStoreSpec([4]), KeyLoadStoreSpec(keys(4))), wait_for=NEVER)
tenant.client.pin(keys(1))
tenant.client.status()
print("up", flush=True)
time.sleep(600)
"""


def test_the_engine_is_killed_and_its_successor_hits_what_was_complete(
    daemon: LocalDaemon, device: str, enter: Enter
) -> None:
    doomed = subprocess.Popen(
        [sys.executable, "-c", DOOMED, str(daemon.directory), device],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "up\n"
    with OffloadClient(daemon.directory, engine="observer") as observer:
        (before,) = observer.namespaces()
        assert (before.pending, before.ready, before.pinned) == (1, 3, 1)
        doomed.kill()
        doomed.communicate()
        until(lambda: not observer.namespaces()[0].pinned, PROMPTLY)
    successor = enter(daemon, "doomed")
    assert successor.client.namespace.opened.reattached
    until(lambda: successor.sees(4, MISS), PROMPTLY)  # its store never ended
    assert [successor.sees(n, HIT) for n in (1, 2, 3)] == [True] * 3
    assert successor.load(1, 2, 3, into=[7, 8, 9]).success
    assert [successor.holds(b) for b in (7, 8, 9)] == [expected(n) for n in (1, 2, 3)]
    assert successor.load(4, into=[5]).error.code == Code.KEY_ABSENT  # type: ignore[union-attr]


def test_a_store_that_fails_leaves_nothing(start_kvferryd: StartKvferryd, enter: Enter) -> None:
    tenant = enter(start_kvferryd(reference_fail_every=1), "tenant")
    assert tenant.store(1).outcome is Outcome.FAILED
    until(lambda: tenant.sees(1, MISS), PROMPTLY)
    assert tenant.load(1, into=[2]).error.code == Code.KEY_ABSENT  # type: ignore[union-attr]


def test_a_pin_keeps_and_a_release_lets_go(kvferryd: LocalDaemon, enter: Enter) -> None:
    tenant = enter(kvferryd, "tenant", cpu_bytes_to_use=2 * TENSORS * PAGE)
    tenant.store(1, 2)
    until(lambda: tenant.sees(2, HIT), PROMPTLY)
    spec = tenant.manager.prepare_load(keys(1, 2))
    assert tenant.store(3).error.code == Code.CACHE_FULL  # type: ignore[union-attr]
    tenant.manager.complete_load(spec.keys)
    assert tenant.store(3).success
    until(lambda: tenant.sees(3, HIT), PROMPTLY)
    assert [tenant.sees(1, MISS), tenant.sees(2, MISS)].count(True) == 1


def test_a_reset_and_a_store_from_before_it(kvferryd: LocalDaemon, enter: Enter) -> None:
    """Weights were changed: what was decided on before must not come after."""
    tenant, other = enter(kvferryd, "tenant"), enter(kvferryd, "other")
    tenant.store(1)
    until(lambda: other.sees(1, HIT), PROMPTLY)
    late = other.manager.prepare_store(keys(2))
    assert late is not None
    tenant.manager.reset_cache()
    assert tenant.sees(1, MISS)
    until(lambda: other.sees(1, MISS), PROMPTLY)
    assert other.run((GPULoadStoreSpec([2]), late.store_spec)).error.code == Code.STALE  # type: ignore[union-attr]
    other.manager.complete_store(keys(2), success=False)
    fresh = other.manager.prepare_store(keys(2))
    assert fresh is not None
    assert other.run((GPULoadStoreSpec([2]), fresh.store_spec)).success
    until(lambda: tenant.sees(2, HIT), PROMPTLY)


def test_two_daemons_of_two_ranks(start_kvferryd: StartKvferryd) -> None:
    """A key is a hit when both have it."""
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


# Told


def test_kv_events_are_published(kvferryd: LocalDaemon, enter: Enter) -> None:
    tenant = enter(kvferryd, "tenant", cpu_bytes_to_use=2 * TENSORS * PAGE)
    topic = tenant.client.namespace.opened.name
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.RCVTIMEO, 5000)
        listener.setsockopt_string(zmq.SUBSCRIBE, topic)
        listener.connect(f"ipc://{kvferryd.directory}/events.sock")
        time.sleep(0.2)  # a subscription takes a moment
        tenant.store(1, 2)
        tenant.store(3)
        tenant.client.reset()
        told: list[Any] = []
        numbers = []
        while ["AllBlocksCleared"] not in told:
            name, number, payload = listener.recv_multipart()
            assert name.decode() == topic
            numbers.append(int.from_bytes(number, "big"))
            told += msgspec.msgpack.decode(payload)[1]
    hashes = [one[:-4] for one in keys(1, 2, 3)]
    assert numbers == list(range(len(numbers)))
    assert told[0] == ["BlockStored", hashes[:2], None, [], 0, None, "CPU"]
    assert told[1][0] == "BlockRemoved"
    assert told[1][1] == [hashes[1]]  # the tail of a prefix goes first
    assert told[2] == ["BlockStored", hashes[2:], None, [], 0, None, "CPU"]


def test_a_manager_tells_what_became_a_hit(kvferryd: LocalDaemon, enter: Enter) -> None:
    tenant = enter(kvferryd, "tenant", events=True)
    tenant.store(1, 2)
    until(lambda: tenant.sees(2, HIT), PROMPTLY)
    (event,) = tenant.manager.take_events()
    assert (set(event.keys), event.removed) == (set(keys(1, 2)), False)
    assert tenant.manager.take_events() == []


def test_a_daemon_tells_of_its_namespaces(kvferryd: LocalDaemon, enter: Enter) -> None:
    tenant = enter(kvferryd, "tenant", eviction_policy="arc")
    tenant.store(1, 2)
    until(lambda: tenant.sees(2, HIT), PROMPTLY)
    assert tenant.sees(3, MISS)
    tenant.manager.flush()
    (status,) = tenant.client.namespaces()
    assert (status.fingerprint, status.policy) == (FINGERPRINT, "arc")
    assert (status.ready, status.stored, status.engines) == (2, 2, ("tenant",))
    assert status.misses >= 1
    assert status.free + status.ready == status.blocks


# Bad input


def test_what_cannot_be_is_refused_and_changes_nothing(kvferryd: LocalDaemon, enter: Enter) -> None:
    tenant = enter(kvferryd, "tenant")
    tenant.store(1)
    before = tenant.client.namespaces()

    def refused(call: Callable[[], object]) -> str:
        with pytest.raises(Refused) as caught:
            call()
        return caught.value.code

    def failed(*spec: Any) -> str:
        error = tenant.run(spec).error
        assert error is not None
        return error.code

    client, one = tenant.client, GPULoadStoreSpec([1])
    assert failed(KeyLoadStoreSpec(keys(9)), one) == Code.KEY_ABSENT
    assert failed(one, CPULoadStoreSpec([1])) == Code.BAD_SPEC
    assert failed(one, KeyLoadStoreSpec(keys(1, 2))) == Code.SIZE_MISMATCH
    assert failed(GPULoadStoreSpec([BLOCKS]), KeyLoadStoreSpec(keys(2))) == Code.BLOCK_OUT_OF_RANGE
    assert refused(lambda: tenant.transfer((one, KeyLoadStoreSpec([b"short"])))) == Code.BAD_KEY
    million = [bytes(12)] * 1_000_000
    assert refused(lambda: tenant.transfer((one, KeyLoadStoreSpec(million)))) == Code.BAD_KEY
    assert refused(lambda: client.pin(million)) == Code.BAD_KEY
    assert refused(lambda: client.unpin(keys(1))) == Code.NOT_PINNED
    assert refused(lambda: client.allocate_kv_caches(LAYOUT, host_bytes=1 << 20)) == Code.BAD_LAYOUT
    with OffloadClient(kvferryd.directory, engine="other") as other:
        assert refused(lambda: other.lookup(key(1))) == Code.UNKNOWN_NAMESPACE
        small = msgspec.structs.replace(FINGERPRINT, model="other")
        for quota in (0, 100, 1 << 40):
            open_it = lambda: other.open_namespace(small, cpu_bytes_to_use=quota)  # noqa: B023, E731
            assert refused(open_it) == Code.POOL_FULL
        _ = refused(lambda: other.open_namespace(FINGERPRINT, eviction_policy="random"))
        assert _ == Code.BAD_SPEC
    assert tenant.client.namespaces() == before


# Replayed


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_replay_loads_what_was_stored(policy: str) -> None:
    """Prefixes that come back, more of them than there is room, by three engines at once."""
    random = np.random.default_rng(0)
    trace = []
    for _ in range(120):
        family, depth = int(random.zipf(1.5)) % 12, int(random.integers(1, 24))
        shared = [1000 * family + i for i in range(depth)]
        trace.append(shared + [int(n) for n in random.integers(1 << 32, 1 << 33, size=4)])
    outcome: Replayed = replay(trace, 150, policy=policy, clients=3)
    assert (outcome.requests, outcome.wrong) == (120, 0)
    assert outcome.blocks == sum(map(len, trace))
    assert 0.2 < outcome.hit_rate < 0.9
