"""The daemon is killed and started again: what was stored is there, and nothing else is."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    Fingerprint,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    KVLayout,
    Lookup,
    OffloadClient,
    TensorLayout,
    TensorRef,
    TransferResult,
    TransferSpec,
    offload_key,
)
from kvferry.testing.engine import until
from support.service_manager import ServiceManager, kvferryd_command

from .block_tables import await_committed

PAGE, BLOCKS, FACTOR = 4096, 32, 2
OWN = 2 * PAGE
"""The front of the pool is the daemon's own."""
LAYOUT = KVLayout((TensorLayout(BLOCKS, PAGE, PAGE),), ((TensorRef(0, PAGE),),), FACTOR)
FINGERPRINT = Fingerprint("llama", PAGE * FACTOR, key_bytes=12)
CHUNK = 4 << 20


def key(number: int) -> bytes:
    return offload_key(number.to_bytes(8, "big"))


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(key(number) for number in numbers)


class RestartingEngine:
    """A client that owns tensors, and knows what it wrote in them."""

    def __init__(self, directory: Path, name: str = "one", *, namespace: bool = True) -> None:
        self.client = OffloadClient(directory, engine=name)
        if namespace:
            self.opened = self.client.open_namespace(FINGERPRINT, cpu_bytes_to_use=4 << 20)
        self.region, (self.tensor,), _ = self.client.allocate_kv_caches(
            LAYOUT, host_bytes=None if namespace else 4 << 20
        )
        self.jobs = 0

    def fill(self, blocks: Sequence[int], seed: int) -> torch.Tensor:
        """Put random bytes into GPU blocks; returns them."""
        content = np.random.default_rng(seed).integers(-128, 128, (len(blocks), PAGE), np.int8)
        self.tensor[list(blocks)] = torch.from_numpy(content).to(self.tensor.device)
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        return torch.from_numpy(content)

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        return self.tensor[list(blocks)].cpu()

    def submit(self, spec: TransferSpec) -> int:
        self.jobs += 1
        self.client.transfer_async(self.jobs, spec)
        return self.jobs

    def run(self, spec: TransferSpec) -> TransferResult:
        self.client.wait([self.submit(spec)])
        (result,) = self.client.get_finished()
        return result

    def store(self, blocks: Sequence[int], names: Sequence[bytes]) -> TransferResult:
        return self.run((GPULoadStoreSpec(blocks), KeyLoadStoreSpec(tuple(names))))

    def load(self, names: Sequence[bytes], blocks: Sequence[int]) -> TransferResult:
        return self.run((KeyLoadStoreSpec(tuple(names)), GPULoadStoreSpec(blocks)))

    def await_verified(self) -> None:
        """Return once every block that an earlier daemon left is verified."""
        until(lambda: verified(self.client), 20)

    def lookup(self, *numbers: int) -> list[Lookup]:
        self.client.poll()
        return [self.client.lookup(key(number)) for number in numbers]

    def close(self) -> None:
        self.client.close()


def verified(client: OffloadClient) -> bool:
    """Whether every block that an earlier daemon left is verified."""
    verification = client.status().verification
    return verification is not None and verification.decided_bytes == verification.total_bytes


class RestartedService:
    """A daemon under a manager that keeps descriptors."""

    def __init__(self, folder: Path, device: str = "cpu", **options: object) -> None:
        chosen = {"device": device.removeprefix("cuda:"), "pool_chunk": CHUNK, "log_format": "json"}
        self.folder, self.options = folder, {**chosen, **options}
        self.manager = ServiceManager(self.command(), folder / "notify", log=folder / "app.log")

    @property
    def directory(self) -> Path:
        return next((self.folder / "run").glob("*/lock")).parent

    def start(self) -> None:
        self.manager.start()

    def restart(self, **options: object) -> None:
        self.manager.kill()
        self.manager.command = self.command(**options)
        self.start()

    def refused(self, **options: object) -> int:
        """Start it so that it does not serve: its exit status."""
        if hasattr(self.manager, "process"):
            self.manager.kill()
        self.manager.command = self.command(**options)
        self.manager.start(ready=False)
        status = self.manager.wait_dead()
        until(lambda: any(s.startswith("refused to") for s in self.manager.values("STATUS")))
        return status

    def start_as_before(self) -> None:
        """Start it as it was, after that."""
        self.manager.command = self.command()
        self.start()

    def engine(self, name: str = "one", *, namespace: bool = True) -> closing[RestartingEngine]:
        return closing(RestartingEngine(self.directory, name, namespace=namespace))

    def change(self, name: str, at: int, data: bytes) -> None:
        """Write into kept memory behind everybody's back."""
        with mmap.mmap(self.manager.kept(name), 0) as memory:
            memory[at : at + len(data)] = data

    def command(self, **options: object) -> list[str]:
        return kvferryd_command(self.folder / "run", **(self.options | options))  # type: ignore[arg-type]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RestartedService]:
    service = RestartedService(tmp_path)
    with service.manager:
        service.start()
        yield service


@pytest.fixture
def service_on_device(short_path: Path, device: str) -> Iterator[RestartedService]:
    """On a GPU as well."""
    service = RestartedService(short_path, device)
    with service.manager:
        service.start()
        yield service


def test_stored_keys_are_hits_after_a_restart(service_on_device: RestartedService) -> None:
    with service_on_device.engine() as one:
        content = one.fill(range(8), seed=1)
        assert one.store(range(8), keys(1, 2, 3, 4)).success
        assert one.store([8], keys(5)).success  # half of a host block
        await_committed(service_on_device.manager, 5)
    service_on_device.restart()
    with service_on_device.engine("two") as two:
        assert two.opened.reattached
        until(lambda: two.lookup(1, 2, 3, 4) == [Lookup.HIT] * 4, 20)
        assert two.lookup(6) == [Lookup.MISS]
        assert two.load(keys(3, 1), [20, 21, 22, 23]).success
        assert torch.equal(two.read(range(20, 24)), content[[4, 5, 0, 1]])
        half = two.load(keys(5), [24, 25])
        assert half.error is not None
        assert half.error.code == Code.KEY_ABSENT
        until(lambda: verified(two.client), 20)
    assert "region restored" in service_on_device.manager.log()


def test_stores_between_restarts_accumulate(
    service: RestartedService,
) -> None:
    contents: dict[int, torch.Tensor] = {}
    for round_ in range(3):
        with service.engine() as engine:
            until(lambda: engine.lookup(*range(round_)) == [Lookup.HIT] * round_, 20)  # noqa: B023
            for number in range(round_):
                assert engine.load(keys(number), [0, 1]).success
                assert torch.equal(engine.read(range(2)), contents[number])
            contents[round_] = engine.fill([4, 5], seed=round_)
            assert engine.store([4, 5], keys(round_)).success
            await_committed(service.manager, round_ + 1)
        service.restart()


def test_a_store_that_was_in_flight_is_not_resident(tmp_path: Path) -> None:
    service = RestartedService(tmp_path)
    with service.manager:
        service.start()
        with service.engine() as one:
            assert one.store([0, 1], keys(1)).success
            await_committed(service.manager, 1)
        service.restart(reference_stall=0.5)
        with service.engine() as one:
            one.submit((GPULoadStoreSpec(range(16)), KeyLoadStoreSpec(keys(*range(2, 10)))))
            until(lambda: one.client.namespaces()[0].pending == 8)
            service.restart()
        with service.engine() as one:
            one.await_verified()
            assert one.lookup(*range(1, 10)) == [Lookup.HIT] + [Lookup.MISS] * 8


def test_keys_that_were_evicted_or_reset_stay_away(service: RestartedService) -> None:
    with service.engine() as one:
        blocks = one.opened.num_blocks
        for first in range(0, blocks + 16, 16):
            assert one.store(range(32), keys(*range(first, first + 16))).success
        await_committed(service.manager, blocks)
    service.restart()
    with service.engine() as one:
        one.await_verified()
        assert one.lookup(0, 15, 16, blocks + 15) == [Lookup.MISS] * 2 + [Lookup.HIT] * 2
        one.client.reset()
    service.restart()
    with service.engine() as one:
        assert one.opened.reattached
        assert one.lookup(16, blocks + 15) == [Lookup.MISS] * 2
        assert one.opened.generation == 2


def test_the_order_of_use_is_kept_over_a_restart(service: RestartedService) -> None:
    with service.engine() as one:
        blocks = one.opened.num_blocks
        for first in range(0, blocks, 16):
            assert one.store(range(32), keys(*range(first, first + 16))).success
        await_committed(service.manager, blocks)
        assert one.load(keys(3), [0, 1]).success
    service.restart()
    with service.engine() as one:
        one.await_verified()
        assert one.store(range(32), keys(*range(9000, 9016))).success
        assert one.lookup(3, 16) == [Lookup.HIT] * 2
        assert one.lookup(0, 15) == [Lookup.MISS] * 2


def test_bytes_that_changed_meanwhile_are_never_loaded(service_on_device: RestartedService) -> None:
    with service_on_device.engine() as one:
        content = one.fill(range(4), seed=1)
        assert one.store(range(4), keys(1, 2)).success
        await_committed(service_on_device.manager, 2)
    service_on_device.manager.kill()
    service_on_device.change("pool-00000", OWN + PAGE + 17, b"\x00\x01\x02\x03")
    service_on_device.start()
    with service_on_device.engine() as one:
        result = one.load(keys(1), [20, 21])
        assert not result.success
        assert result.error is not None
        assert result.error.code in (Code.CORRUPT_BLOCK, Code.KEY_ABSENT)
        until(lambda: one.lookup(1) == [Lookup.MISS])
        assert one.load(keys(2), [20, 21]).success
        assert torch.equal(one.read(range(20, 22)), content[2:])
        content = one.fill([0, 1], seed=2)  # and it can be stored anew
        assert one.store([0, 1], keys(1)).success
        assert one.load(keys(1), [8, 9]).success
        assert torch.equal(one.read(range(8, 10)), content)


def test_a_block_that_changes_while_the_daemon_runs_is_found_by_the_scrub(tmp_path: Path) -> None:
    service = RestartedService(tmp_path, integrity_scrub_rate="1GiB")
    with service.manager:
        service.start()
        with service.engine() as one:
            assert one.store(range(4), keys(1, 2)).success
            await_committed(service.manager, 2)
            service.change("pool-00000", OWN + 5, b"tampered")
            until(lambda: one.lookup(1, 2) == [Lookup.MISS, Lookup.HIT])
            assert not one.load(keys(1), range(2)).success
            assert one.load(keys(2), range(2)).success
            assert one.client.status().errors[Code.CORRUPT_BLOCK] == 1
        assert "host blocks corrupt" in service.manager.log()


def test_blocks_by_number_are_loadable_after_a_restart(
    service_on_device: RestartedService,
) -> None:
    with service_on_device.engine(namespace=False) as one:
        content = one.fill(range(4), seed=3)
        assert one.run((GPULoadStoreSpec(range(4)), CPULoadStoreSpec([7, 9]))).success
        await_committed(service_on_device.manager, 2)
    service_on_device.restart()
    with service_on_device.engine(namespace=False) as one:
        assert one.region.reattached
        back = CPULoadStoreSpec([9, 7]), GPULoadStoreSpec(range(10, 14))
        until(lambda: one.run(back).success, 20)
        assert torch.equal(one.read(range(10, 14)), content[[2, 3, 0, 1]])
        never = one.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14))))
        assert never.error is not None
        assert never.error.code == Code.STALE
        assert one.run((GPULoadStoreSpec(range(2)), CPULoadStoreSpec([8]))).success
        assert one.run((CPULoadStoreSpec([7, 8]), GPULoadStoreSpec(range(10, 14)))).success


@pytest.mark.parametrize("option", ["pool_bytes", "pool_chunk"])
def test_a_pool_of_another_size_starts_empty_and_logs_it(
    service: RestartedService, option: str
) -> None:
    with service.engine() as one:
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    service.restart(**{option: 8 << 20})
    assert "kept pool dropped" in service.manager.log()
    with service.engine() as one:
        assert not one.opened.reattached
        assert one.lookup(1) == [Lookup.MISS]
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    service.restart(**{option: 8 << 20})
    with service.engine() as one:
        until(lambda: one.lookup(1) == [Lookup.HIT], 20)


BAD_OPTIONS: dict[str, dict[str, object]] = {
    "a pool larger than memory": {"pool_bytes": 100 << 40, "pool_chunk": 1 << 40},
    "more chunks than descriptors": {"pool_chunk": 4096, "pool_bytes": 1 << 36, "check": False},
    "a pool that cannot be mapped": {"pool_bytes": 1 << 47, "pool_chunk": 1 << 46, "check": False},
    "a place for metrics": {"metrics_listen": "nowhere"},
    "a place for metrics, with another pool": {"metrics_listen": "nowhere", "pool_bytes": 8 << 20},
    "a place for events, with no pool kept": {"events_publish": "tcp://nowhere", "pool_keep": 0},
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_a_refused_start_keeps_the_pool(service: RestartedService, option: str) -> None:
    """The line is mended, and the cache is there."""
    with service.engine() as one:
        content = one.fill(range(2), seed=1)
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    names = service.manager.names
    options = BAD_OPTIONS[option].copy()
    if not options.pop("check", True):
        options["pool_check_memory"] = 0
    assert service.refused(**options) == 2, service.manager.log()
    assert service.manager.names == names
    service.start_as_before()
    with service.engine() as one:
        assert one.opened.reattached
        one.await_verified()
        assert one.load(keys(1), [8, 9]).success
        assert torch.equal(one.read([8, 9]), content)


NO_ROOM_ON_THE_DEVICE = """
from kvferry.daemon import app
from kvferry.daemon.engine.reference import ReferenceEngine
from kvferry.proto.errors import Code, Failed

def attach(*_):
    raise Failed(Code.COPY_FAILED, "no memory for copy.staging")

ReferenceEngine.attach = attach
app.main()
"""


def test_a_start_that_fails_on_the_device_keeps_the_pool(service: RestartedService) -> None:
    """copy.staging is tried once all else is there; here with another pool, as in one edit."""
    with service.engine() as one:
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    service.manager.kill()
    names = service.manager.names
    service.manager.command = service.command(pool_bytes=8 << 20)
    service.manager.command[1:3] = ["-c", NO_ROOM_ON_THE_DEVICE]
    service.manager.start(ready=False)
    assert service.manager.wait_dead() == 1
    until(lambda: any(s.startswith("failed: ") for s in service.manager.values("STATUS")))
    assert service.manager.names == names
    service.start_as_before()
    with service.engine() as one:
        until(lambda: one.lookup(1) == [Lookup.HIT], 20)


def test_a_refused_first_start_stores_nothing(tmp_path: Path) -> None:
    service = RestartedService(tmp_path)
    with service.manager:
        assert service.refused(events_publish="tcp://nowhere") == 2, service.manager.log()
        assert service.manager.names == []


@pytest.mark.parametrize(("at", "data"), [(0, b"kvferry0"), (4096 + 12, b"\xff\xff\xff")])
def test_a_block_table_that_is_damaged_or_of_another_version_is_dropped(
    service: RestartedService, at: int, data: bytes
) -> None:
    with service.engine() as one:
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    service.manager.kill()
    (name,) = [name for name in service.manager.names if name.startswith("block-table-")]
    for offset in (at, at + (1 << 20) if at else at):  # the record has two places
        service.change(name, offset, data)
    service.start()
    assert "block table dropped" in service.manager.log()
    until(lambda: name not in service.manager.names)
    with service.engine() as one:
        assert not one.opened.reattached
        assert one.lookup(1) == [Lookup.MISS]


def test_pool_keep_false_stores_nothing(tmp_path: Path) -> None:
    service = RestartedService(tmp_path, pool_keep="false")
    with service.manager:
        service.start()
        with service.engine() as one:
            assert one.store([0, 1], keys(1)).success
        assert service.manager.names == []


def test_a_kept_pool_is_dropped_if_pool_keep_is_false(service: RestartedService) -> None:
    with service.engine() as one:
        assert one.store([0, 1], keys(1)).success
        await_committed(service.manager, 1)
    service.restart(pool_keep="false")
    until(lambda: service.manager.names == [])
    with service.engine() as one:
        assert one.lookup(1) == [Lookup.MISS]


def test_a_freed_region_is_not_restored(service: RestartedService) -> None:
    with service.engine("old", namespace=False) as old:
        assert old.run((GPULoadStoreSpec(range(2)), CPULoadStoreSpec([0]))).success
        await_committed(service.manager, 1)
    with OffloadClient(service.directory, engine="new") as new:
        until(lambda: not any(engine.present for engine in new.status().engines))
        new.allocate_kv_caches(LAYOUT, host_bytes=16 << 20)
        until(lambda: len([n for n in service.manager.names if n.startswith("block-table-")]) == 1)
    service.restart()
    with service.engine("old", namespace=False) as old:
        assert not old.region.reattached
