"""Blocks leave the host pool for disk and come back, through a real daemon."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvferry.client import (
    LocalDaemon,
    Lookup,
)
from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.disk.command import list_namespaces
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked
from kvferry.proto.events import BlockStored, KVEventBatch, published_hash
from kvferry.proto.messages import TiersFound
from kvferry.testing.engine import until
from support.child_processes import children_of
from support.patient_daemon import PatientDaemon
from support.pool_files import pool_files
from support.tier_processes import tier_process_of
from support.tiered_engine import (
    FINGERPRINT,
    PAGE,
    TieredEngine,
    keys,
)
from support.time_limits import TIMEOUT

Enter = Callable[..., TieredEngine]


@pytest.fixture
def enter() -> Iterator[Enter]:
    """enter(daemon, **namespace) -> TieredEngine; all are closed before their daemons."""
    with ExitStack() as stack:
        yield lambda daemon, **namespace: TieredEngine(daemon, stack, **namespace)


Start = Callable[..., LocalDaemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(**options) -> a daemon with a disk tier, at the same root each time, and with the same
    epochs; disk=False: without the tier."""
    with ExitStack() as running:

        def with_tier(disk: bool = True, **options: Any) -> LocalDaemon:
            paths: dict[str, Any] = {"state_dir": tmp_path / "state"}
            if disk:
                paths |= {"tiers_disk_path": tmp_path / "tier", "tiers_disk_size": "256MiB"}
            return running.enter_context(PatientDaemon(pool_bytes=1 << 20, **paths | options))

        yield with_tier


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_blocks_are_found_after_the_daemon_and_its_pool(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    numbers = range(16)
    with ExitStack() as stack:
        first = start(tiers_disk_write="write_through")
        engine = TieredEngine(first, stack)
        assert engine.opened.tiers == ("disk",)
        engine.store(numbers)
        engine.wait_written(16)
    first.process.send_signal(number)
    first.process.wait(TIMEOUT)
    assert [each.model for each in list_namespaces(tmp_path / "tier")] == [FINGERPRINT.model]
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        until(lambda: engine.tier().state == "on")
        assert engine.manager.lookup(keys([0])[0]) is Lookup.MISS
        engine.promote(numbers)
        engine.load(numbers)
        assert engine.find(numbers) == TiersFound(2, 16)
        tier = engine.tier()
        assert tier.promoted == 16
        assert (tier.checksum_failures, tier.errors) == (0, 0)


def test_what_the_pool_evicts_comes_back(start: Start, enter: Enter) -> None:
    """With the default policy: the coldest blocks are on disk before they are evicted."""
    engine = enter(start())
    count = engine.num_blocks
    for number in range(0, 3 * count, 16):
        engine.store(range(number, number + 16))
        cold = max(0, min(number + 16, count) // 4 - 1)
        engine.wait_written(cold)
    assert engine.manager.lookup(keys([0])[0]) is Lookup.MISS
    engine.promote(range(8))
    engine.load(range(8))


def test_the_head_of_a_prompt_is_found_after_a_kill_amid_its_writes(start: Start) -> None:
    """With the default policy, and a prompt that the pool keeps. At this rate half of it is written
    at once, and the rest after 8 s."""
    with ExitStack() as stack:
        daemon = start(tiers_disk_rate="16KiB")
        engine = TieredEngine(daemon, stack)
        engine.store(range(64))
        engine.wait_written(1)
    daemon.kill()
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        until(lambda: engine.tier().state == "on")
        found = engine.find(range(64)).prefix
        assert found >= 32
        engine.promote(range(found))
        engine.load(range(found))
        until(lambda: engine.tier().keys == found)  # no block on disk is without its head


# Resets


def stores_in(root: Path) -> list[StoreName]:
    """The stores of a disk tier, in the order of their epochs."""
    names = [path.name for path in root.iterdir() if path.is_dir()]
    stores = [StoreName.parse(name) for name in names if not name.startswith("trash-")]
    return sorted(stores, key=lambda store: store.epoch)


def write(engine: TieredEngine, numbers: range) -> None:
    """Store keys, and wait until they are in the tier."""
    before = engine.tier().written
    engine.store(numbers)
    engine.wait_written(before + len(numbers))


def assert_not_found(engine: TieredEngine, numbers: range, root: Path, epoch: int) -> None:
    """Nothing of these keys is found in a disk tier, and only stores of this epoch are left."""
    until(lambda: engine.tier().state == "on")
    until(lambda: {store.epoch for store in stores_in(root)} <= {epoch})
    for number in numbers:
        assert engine.find(range(number, number + 1)).prefix == 0
    engine.client.status()
    assert engine.manager.epochs == (epoch,)


def test_a_reset_namespace_is_not_found_again(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    with ExitStack() as stack:
        daemon = start(tiers_disk_write="write_through")
        engine = TieredEngine(daemon, stack)
        write(engine, range(8))
        engine.client.reset()
        (epoch,) = engine.manager.epochs
        assert_not_found(engine, range(8), root, epoch)
        write(engine, range(8, 12))
    daemon.kill()
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        engine.promote(range(8, 12))
        assert_not_found(engine, range(8), root, epoch)
        assert [store.epoch for store in stores_in(root)] == [epoch]


def test_a_reset_holds_although_its_drop_is_lost(start: Start, tmp_path: Path) -> None:
    """The tier does not answer, and the daemon is killed right after the reset."""
    root = tmp_path / "tier"
    with ExitStack() as stack:
        daemon = start(tiers_disk_write="write_through")
        engine = TieredEngine(daemon, stack)
        write(engine, range(8))
        os.kill(the_tier_process(daemon), signal.SIGSTOP)
        engine.client.reset()
        (epoch,) = engine.manager.epochs
    daemon.kill()
    assert [store.epoch for store in stores_in(root)] == [0]
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        assert_not_found(engine, range(8), root, epoch)
        assert stores_in(root) == []


def test_a_disk_tier_has_the_last_reset_when_the_file_of_epochs_is_lost(
    start: Start, tmp_path: Path
) -> None:
    """Although the old store is still there, too."""
    root = tmp_path / "tier"
    with ExitStack() as stack:
        daemon = start(tiers_disk_write="write_through")
        engine = TieredEngine(daemon, stack)
        write(engine, range(8))
        (old,) = stores_in(root)
        engine.client.reset()
        (epoch,) = engine.manager.epochs
        write(engine, range(8, 12))
    daemon.stop()
    # As if the drop of the old one was lost.
    (new,) = stores_in(root)
    shutil.copytree(root / str(new), root / str(old))
    (tmp_path / "state/epochs").unlink()
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        engine.promote(range(8, 12))
        engine.load(range(8, 12))
        assert_not_found(engine, range(8), root, epoch)
        assert stores_in(root) == [new]


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_reset_holds_for_a_daemon_that_is_stopped(
    start: Start, tmp_path: Path, is_reset: bool
) -> None:
    """Both daemons have their own tier, and the epochs of this host."""
    roots = tmp_path / "tier", tmp_path / "other"
    options: dict[str, Any] = {"tiers_disk_write": "write_through", "tiers_disk_path": roots[1]}
    with ExitStack() as stack, ExitStack() as stopped:
        engine = TieredEngine(start(tiers_disk_write="write_through"), stack)
        other = start(**options)
        for each in (engine, TieredEngine(other, stopped)):
            write(each, range(8))
        stopped.close()
        other.stop()
        if is_reset:
            engine.client.reset()
        (epoch,) = engine.manager.epochs
        engine = TieredEngine(start(**options), stack)
        if is_reset:
            assert_not_found(engine, range(8), roots[1], epoch)
        else:
            engine.promote(range(8))
            engine.load(range(8))


# Costs


def test_blocks_that_are_computed_faster_are_not_promoted(start: Start) -> None:
    with ExitStack() as stack:
        daemon = start(tiers_disk_write="write_through")
        engine = TieredEngine(daemon, stack)
        engine.store(range(4))
        engine.wait_written(4)
    daemon.stop()
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)

        def skipped() -> int:
            engine.find(range(4), compute_seconds=1e-12)
            return engine.tier().skipped

        until(lambda: skipped() > 0)
        assert engine.tier().skipped == 4
        assert engine.find(range(4), compute_seconds=1e-12) == TiersFound(2, 0)
        assert engine.find(range(4), compute_seconds=1.0).prefix == 4


def test_a_tier_process_that_dies_is_replaced(start: Start, enter: Enter) -> None:
    """Requests are misses meanwhile. Afterwards the written blocks are found again."""
    daemon = start(tiers_disk_write="write_through")
    engine = enter(daemon, cpu_bytes_to_use=32 * PAGE)
    engine.store(range(16))
    engine.wait_written(16)
    engine.store(range(100, 132))  # evicts them
    os.kill(the_tier_process(daemon), signal.SIGKILL)
    until(lambda: engine.tier().deaths == 1)
    engine.promote(range(8))
    engine.load(range(8))
    assert "Traceback" not in daemon.log()


def test_a_root_that_cannot_be_used_costs_only_the_tier(start: Start, enter: Enter) -> None:
    engine = enter(start(tiers_disk_path="/proc/none"))
    engine.store(range(4))
    assert engine.find(range(6)).prefix == 4
    engine.promote(range(4))  # waits until the mirror has them
    engine.load(range(4))
    until(lambda: engine.tier().deaths > 1)
    tier = engine.tier()
    assert tier.state == "off"
    assert "/proc/none" in tier.failure


def test_a_tier_process_ends_with_a_killed_daemon(start: Start) -> None:
    """Even one that is stopped: it must not write into the pool of the next daemon."""
    daemon = start()
    chunk = os.open(pool_files(daemon.pid)[0], os.O_RDONLY)
    until(lambda: not wait_until_unlocked(chunk, 0.0))
    os.kill(the_tier_process(daemon), signal.SIGSTOP)
    daemon.kill()
    assert wait_until_unlocked(chunk, TIMEOUT)
    os.close(chunk)


def test_a_subscriber_receives_which_blocks_are_on_disk(start: Start, enter: Enter) -> None:
    daemon = start(tiers_disk_write="write_through")
    engine = enter(daemon, cpu_bytes_to_use=32 * PAGE)
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.RCVTIMEO, int(TIMEOUT * 1000))
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        listener.connect(f"ipc://{daemon.directory}/events.sock")
        # From then on events are queued for it.
        until(lambda: bool(children_of(daemon.pid, b"KV events")))
        engine.store(range(4))
        on_disk = set[int]()
        while len(on_disk) < 4:
            batch = msgspec.msgpack.decode(listener.recv_multipart()[2], type=KVEventBatch)
            for event in batch.events:
                if isinstance(event, BlockStored) and event.medium == "STORAGE":
                    assert (event.locality, event.ownership) == ("LOCAL", "disk")
                    on_disk.update(event.block_hashes)
    assert on_disk == set(map(published_hash, keys(range(4))))


def test_a_second_tier_has_what_the_first_has_not(start: Start, enter: Enter) -> None:
    engine = enter(
        start(
            tiers_disk_write="off",
            tiers_custom_module="kvferry.testing.memory_tier",
            tiers_custom_options="{ size = 16777216 }",
            tiers_custom_write="write_through",
        ),
        cpu_bytes_to_use=32 * PAGE,
    )
    assert engine.opened.tiers == ("disk", "custom")
    engine.store(range(16))
    until(lambda: engine.client.status().tiers[1].written == 16)
    engine.store(range(100, 132))  # evicts them
    engine.promote(range(8))
    engine.load(range(8))
    disk, custom = engine.client.status().tiers
    assert (disk.name, disk.hits, disk.written) == ("disk", 0, 0)
    assert (custom.name, custom.promoted) == ("custom", 8)
    assert custom.hits >= 8
    engine.client.reset()
    assert engine.find(range(17)).prefix == 0


def test_keys_that_the_tier_has_evicted_are_written_again(start: Start, enter: Enter) -> None:
    """If they are used in the pool."""
    daemon = start(
        disk=False,
        tiers_custom_module="kvferry.testing.memory_tier",
        tiers_custom_options=f"{{ size = {16 * PAGE} }}",
        tiers_custom_write="write_through",
    )
    engine = enter(daemon)
    engine.store(range(16))
    engine.wait_written(16)
    engine.load(range(16))
    engine.store(range(16, 24))  # evicts eight of them there
    engine.wait_written(24 + 8)


def the_tier_process(daemon: LocalDaemon) -> int:
    pid = tier_process_of(daemon.pid)
    assert pid is not None
    return pid
