"""The daemon's log has one record per event, with the fields an operator needs."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.client_keys import FINGERPRINT
from support.service_manager import kvferryd_command
from support.time_limits import TIMEOUT

NEVER = 1 << 40


@pytest.fixture
def daemon(start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd(log_format="json", reference_fail_every=3)


def find_records(daemon: LocalDaemon, event: str, **fields: object) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in daemon.log().splitlines()]
    return [r for r in records if r["event"] == event and fields.items() <= r.items()]


def test_records_of_an_engine(daemon: LocalDaemon, start_engine: StartSmallEngine) -> None:
    engine = start_engine(daemon, name="llama")
    results = engine.finish(*[engine.store([i], [i]) for i in range(9)])
    moved = sum(result.transfer_size for result in results)
    engine.store([0], [0], wait_for=NEVER)
    engine.client.status()
    engine.client.close()
    until(lambda: bool(find_records(daemon, "client disconnected")))
    (registered,) = find_records(daemon, "engine registered")
    assert (registered["engine"], registered["host_blocks"]) == ("llama", engine.region.num_blocks)
    assert registered["copied"] == ["store cpu, load cpu"]
    (disconnected,) = find_records(daemon, "client disconnected", client="scheduler")
    assert disconnected["reason"] == "goodbye"
    assert (disconnected["jobs_lost"], disconnected["bytes_moved"]) == (1, moved)
    assert len(find_records(daemon, "client connected", engine="llama")) == 2
    (failed,) = find_records(daemon, "job failed")  # of three, within ten seconds
    assert (failed["engine"], failed["code"]) == ("llama", "copy_failed")
    (pool,) = find_records(daemon, "pool registered")
    assert pool["bytes"] >= 16 << 20
    engine.process.kill()
    until(lambda: len(find_records(daemon, "client disconnected", engine="llama")) == 2)
    killed = find_records(daemon, "client disconnected", engine="llama")[1]
    assert killed["reason"] in ("process exited", "connection closed")


def test_health_checks_are_not_logged(daemon: LocalDaemon) -> None:
    with OffloadClient(daemon.directory, engine="kvferry-cli") as client:
        client.status()
        client.namespaces()
    with OffloadClient(daemon.directory, engine="llama") as client:
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=FINGERPRINT.host_block_bytes)
    until(lambda: bool(find_records(daemon, "client disconnected", engine="llama")))
    assert find_records(daemon, "client connected", engine="llama")
    assert not find_records(daemon, "client connected", engine="kvferry-cli")
    assert not find_records(daemon, "client disconnected", engine="kvferry-cli")


def test_records_of_who_opens_and_who_empties_a_namespace(daemon: LocalDaemon) -> None:
    """Of many resets within ten seconds one is logged."""
    with OffloadClient(daemon.directory, engine="llama", client="agent") as client:
        for _ in range(2):
            client.open_namespace(FINGERPRINT, cpu_bytes_to_use=FINGERPRINT.host_block_bytes)
        for _ in range(3):
            client.reset()
    until(lambda: bool(find_records(daemon, "client disconnected", engine="llama")))
    who = {"client": "agent", "engine": "llama", "uid": os.getuid(), "pid": os.getpid()}
    who["namespace"] = FINGERPRINT.name
    assert len(find_records(daemon, "namespace opened", **who)) == 1
    assert len(find_records(daemon, "namespace reset", **who)) == 1


@pytest.mark.parametrize(
    "output", ["full disk", "pipe without a reader", "full pipe whose reader sleeps"]
)
def test_a_log_that_cannot_be_written(tmp_path: Path, output: str) -> None:
    """Only the records are lost: the daemon serves clients, and stops with status 0."""
    reader, writer = os.pipe()
    if output == "full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with subprocess.Popen(kvferryd_command(tmp_path), stderr=writer) as daemon:
        try:
            until(lambda: daemon.poll() is not None or (tmp_path / "cpu/kvferry.sock").exists())
            if output == "full pipe whose reader sleeps":
                fill_pipe(writer)
            else:
                os.close(reader)
            for _ in range(3):
                with OffloadClient(tmp_path / "cpu", timeout=TIMEOUT) as client:
                    assert client.status().pid == daemon.pid
            daemon.terminate()
            assert daemon.wait(TIMEOUT) == 0
        finally:
            daemon.kill()
            os.close(writer)
            with suppress(OSError):
                os.close(reader)


def fill_pipe(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))
    os.set_blocking(pipe, True)
