"""What an operator reads: each thing once, with what it takes to understand it."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon, OffloadClient
from kvferry.proto.messages import Error, StatusRequest
from kvferry.testing.engine import StartSmallEngine, until
from kvferry.testing.plugin import StartKvferryd
from support.raw_client import RawClient
from support.service_manager import kvferryd_command

NEVER = 1 << 40


@pytest.fixture
def daemon(start_kvferryd: StartKvferryd) -> LocalDaemon:
    return start_kvferryd(log_format="json", reference_fail_every=3)


def said(daemon: LocalDaemon, event: str, **of: object) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in daemon.log().splitlines()]
    return [r for r in records if r["event"] == event and of.items() <= r.items()]


def test_the_life_of_an_engine(daemon: LocalDaemon, start_engine: StartSmallEngine) -> None:
    engine = start_engine(daemon, name="llama")
    results = engine.finish(*[engine.store([i], [i]) for i in range(9)])
    moved = sum(result.transfer_size for result in results)
    engine.store([0], [0], wait_for=NEVER)
    engine.client.status()
    engine.client.close()
    until(lambda: bool(said(daemon, "client disconnected")))
    (registered,) = said(daemon, "engine registered")
    assert (registered["engine"], registered["host_blocks"]) == ("llama", engine.region.num_blocks)
    assert registered["copied"] == ["store cpu, load cpu"]
    (went,) = said(daemon, "client disconnected", client="scheduler")
    assert went["reason"] == "goodbye"
    assert (went["jobs_lost"], went["bytes_moved"]) == (1, moved)
    assert len(said(daemon, "client connected", engine="llama")) == 2
    (failed,) = said(daemon, "job failed")  # of three, within ten seconds
    assert (failed["engine"], failed["code"]) == ("llama", "copy_failed")
    (pool,) = said(daemon, "pool registered")
    assert pool["bytes"] >= 16 << 20


def test_a_process_that_died(daemon: LocalDaemon, start_engine: StartSmallEngine) -> None:
    engine = start_engine(daemon)
    engine.process.kill()
    until(lambda: bool(said(daemon, "client disconnected")))
    (went,) = said(daemon, "client disconnected")
    assert went["reason"] in ("process exited", "connection closed")


def test_the_refused_are_a_number(daemon: LocalDaemon) -> None:
    with RawClient(daemon.directory) as stranger, OffloadClient(daemon.directory) as client:
        for number in range(200):
            stranger.send(StatusRequest(number))
            stranger.recv(Error)
        assert client.status().errors["no_session"] == 200
    assert len(said(daemon, "message refused", code="no_session")) == 1


@pytest.mark.parametrize("where", ["a full disk", "a reader that ends", "one that sleeps"])
def test_a_log_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    """Its lines are lost, and nothing else: clients come and go, and a stop is a clean one."""
    reader, writer = os.pipe()
    if where == "a full disk":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with subprocess.Popen(kvferryd_command(tmp_path), stderr=writer) as daemon:
        try:
            until(lambda: daemon.poll() is not None or (tmp_path / "cpu/kvferry.sock").exists())
            if where == "one that sleeps":
                fill(writer)
            else:
                os.close(reader)
            for _ in range(3):
                with OffloadClient(tmp_path / "cpu", timeout=20.0) as client:
                    assert client.status().pid == daemon.pid
            daemon.terminate()
            assert daemon.wait(20) == 0
        finally:
            daemon.kill()
            os.close(writer)
            with suppress(OSError):
                os.close(reader)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 16))
    os.set_blocking(pipe, True)
