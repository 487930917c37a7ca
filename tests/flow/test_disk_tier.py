"""Blocks leave the host pool for disk and come back, through a real daemon."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, Lookup
from kvferry.daemon.core.store_name import StoreName
from kvferry.daemon.tiers.disk.command import list_namespaces
from kvferry.daemon.tiers.pool_lock import wait_until_unlocked
from kvferry.proto.messages import TiersFound
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.pool_files import pool_files
from support.tier_processes import tier_process_of
from support.tiered_engine import FINGERPRINT, TieredEngine, content, keys
from support.time_limits import TIMEOUT

Start = Callable[..., LocalDaemon]
NUMBERS = range(16)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(**options) -> a daemon with a disk tier, at the same root each time, and with the same
    epochs."""
    with ExitStack() as running:

        def with_tier(**options: Any) -> LocalDaemon:
            paths = {"state_dir": tmp_path / "state", "tiers_disk_path": tmp_path / "tier"}
            chosen: dict[str, Any] = {"tiers_disk_size": "256MiB", **paths, **options}
            return running.enter_context(PatientDaemon(pool_bytes=1 << 20, **chosen))

        yield with_tier


@pytest.mark.parametrize("encrypted", [False, True])
def test_blocks_are_found_after_the_daemon_and_its_pool(
    start: Start, tmp_path: Path, encrypted: bool
) -> None:
    options = {}
    if encrypted:
        (tmp_path / "key").write_bytes(os.urandom(32))
        (tmp_path / "key").chmod(0o400)
        options["tiers_disk_key_file"] = tmp_path / "key"
    with ExitStack() as stack:
        first = start(tiers_disk_write="write_through", **options)
        engine = TieredEngine(first, stack)
        assert engine.opened.tiers == ("disk",)
        engine.store(NUMBERS)
        engine.wait_written(16)
    first.kill()
    assert [each.model for each in list_namespaces(tmp_path / "tier")] == [FINGERPRINT.model]
    files = [path.read_bytes() for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    plain = any(content(1).numpy().tobytes()[:16] in each for each in files)
    assert plain is not encrypted
    with ExitStack() as stack:
        engine = TieredEngine(start(**options), stack)
        until(lambda: engine.tier().state == "on")
        assert engine.manager.lookup(keys([0])[0]) is Lookup.MISS
        engine.promote(NUMBERS)
        engine.load(NUMBERS)
        assert engine.find(NUMBERS) == TiersFound(2, 16)
        tier = engine.tier()
        assert (tier.promoted, tier.checksum_failures, tier.errors) == (16, 0, 0)


def test_what_the_pool_evicts_comes_back(start: Start) -> None:
    """With the default policy: the coldest blocks are on disk before they are evicted."""
    with ExitStack() as stack:
        engine = TieredEngine(start(), stack)
        count = engine.num_blocks
        for number in range(0, 3 * count, 16):
            engine.store(range(number, number + 16))
            cold = max(0, min(number + 16, count) // 4 - 1)
            engine.wait_written(cold)
        assert engine.manager.lookup(keys([0])[0]) is Lookup.MISS
        engine.promote(range(8))
        engine.load(range(8))


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


def test_a_tier_process_ends_with_a_killed_daemon(start: Start) -> None:
    """Even one that is stopped: it must not write into the pool of the next daemon."""
    daemon = start()
    chunk = os.open(pool_files(daemon.pid)[0], os.O_RDONLY)
    until(lambda: not wait_until_unlocked(chunk, 0.0))
    os.kill(the_tier_process(daemon), signal.SIGSTOP)
    daemon.kill()
    assert wait_until_unlocked(chunk, TIMEOUT)
    os.close(chunk)


def the_tier_process(daemon: LocalDaemon) -> int:
    pid = tier_process_of(daemon.pid)
    assert pid is not None
    return pid
