"""A daemon whose disk tier has a key file: a restart with the same key, and with others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon
from kvferry.proto.messages import TiersFound
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.tiered_engine import TieredEngine, content

NUMBERS = range(16)
Start = Callable[..., LocalDaemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(key) -> a daemon with a disk tier, at the same root each time. No key: in the clear."""
    with ExitStack() as running:

        def start(key: bytes) -> LocalDaemon:
            options: dict[str, Any] = {"tiers_disk_size": "64MiB"}
            if key:
                key_file = tmp_path / "key"
                key_file.unlink(missing_ok=True)
                key_file.write_bytes(key)
                key_file.chmod(0o400)
                options["tiers_disk_key_file"] = key_file
            return running.enter_context(
                PatientDaemon(
                    pool_bytes=1 << 20,
                    state_dir=tmp_path / "state",
                    tiers_disk_path=tmp_path / "tier",
                    tiers_disk_write="write_through",
                    **options,
                )
            )

        yield start


def store(daemon: LocalDaemon) -> None:
    with ExitStack() as stack:
        engine = TieredEngine(daemon, stack)
        engine.store(NUMBERS)
        engine.wait_written(len(NUMBERS))
    daemon.close()


def test_blocks_are_found_after_a_restart_and_are_nowhere_in_the_clear(
    start: Start, tmp_path: Path
) -> None:
    key = os.urandom(32)
    store(start(key))
    files = [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    found = b"".join(path.read_bytes() for path in files)
    assert not any(content(number).numpy().tobytes()[:16] in found for number in NUMBERS)
    with ExitStack() as stack:
        engine = TieredEngine(start(key), stack)
        engine.promote(NUMBERS)
        engine.load(NUMBERS)
        tier = engine.tier()
        assert (tier.promoted, tier.checksum_failures, tier.errors) == (16, 0, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"1" * 32, b"2" * 32), (b"1" * 32, b""), (b"", b"1" * 32)],
    ids=["another key", "no key", "first key"],
)
def test_blocks_of_another_key_are_misses_and_stored_again(
    start: Start, before: bytes, after: bytes
) -> None:
    store(start(before))
    with ExitStack() as stack:
        daemon = start(after)
        engine = TieredEngine(daemon, stack)
        until(lambda: engine.tier().state == "on")
        assert engine.find(NUMBERS) == TiersFound(2, 0)
        assert (engine.tier().errors, engine.tier().checksum_failures) == (0, 0)
        assert "namespace dropped from disk" in daemon.log()
        engine.store(NUMBERS)
        engine.wait_written(len(NUMBERS))
    daemon.close()
    with ExitStack() as stack:
        engine = TieredEngine(start(after), stack)
        engine.promote(NUMBERS)
        engine.load(NUMBERS)
