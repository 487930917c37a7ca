"""The threads that a daemon needs, and those that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.daemon import config_reader
from kvferry.daemon.thread_count import needed_threads
from kvferry.proto.process import count_startable_threads
from kvferry.testing.engine import until
from support.child_processes import children_of
from support.process_usage import ProcessUsage


def test_threads_are_counted_up_to_the_number_given() -> None:
    assert count_startable_threads(0) == 0
    for _ in range(3):
        assert count_startable_threads(100) == 100


def test_each_tier_and_checksum_thread_counts() -> None:
    def needed(*arguments: str) -> int:
        return needed_threads(config_reader.read(arguments))

    alone = needed("--siblings-enabled", "false")
    assert needed() > alone
    more = needed("--siblings-enabled", "false", "--integrity-threads", "100")
    assert more == needed("--siblings-enabled", "false", "--integrity-threads", "1") + 99
    disk = ("--tiers-disk-path", "/disk", "--tiers-disk-size", "1GiB")
    assert needed(*disk) > needed()


def test_a_daemon_has_fewer_threads_than_it_needs(tmp_path: Path) -> None:
    tier: dict[str, Any] = {
        "tiers_disk_path": tmp_path,
        "tiers_disk_size": "16MiB",
        "siblings_enabled": "true",
    }
    config = config_reader.read(["--tiers-disk-path", "/disk", "--tiers-disk-size", "16MiB"])
    with LocalDaemon(pool_bytes=16 << 20, **tier) as daemon:
        with OffloadClient(daemon.directory) as client:
            until(lambda: [each.state for each in client.status().tiers] == ["on"])
        processes = [daemon.pid, *children_of(daemon.pid, b"kvferryd: ")]
        assert len(processes) == 3
        assert sum(ProcessUsage.of(pid).threads for pid in processes) < needed_threads(config)
