"""SGLang's tree over a daemon that stops, dies, restarts or is not there: the server goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.client import LocalDaemon
from support.eventually import wait_until
from support.service_manager import ServiceManager, kvferryd_command
from support.time_limits import TIMEOUT

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang's own
StartServer = Callable[..., Any]
PROMPT = list(range(40))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceManager]:
    """A daemon in tmp_path / "cpu", whose pool outlives it."""
    command = kvferryd_command(tmp_path / "cpu")
    with ServiceManager(command, tmp_path / "notify") as service:
        service.start()
        yield service


def stored_server(start_server: StartServer, directory: Path) -> Any:
    """A server whose device has lost a prompt that the daemon has."""
    server = start_server(directory)
    server.run(PROMPT)
    server.evict_all()
    wait_until(lambda: server.match(PROMPT).host_hit_length)
    server.linker._promises.end_all()
    return server


def test_a_server_starts_without_a_daemon_and_uses_one_that_comes(
    tmp_path: Path, start_server: StartServer
) -> None:
    server = start_server(tmp_path / "cpu", connected=False)
    assert server.run(PROMPT) == 0
    server.evict_all()
    assert server.run(PROMPT) == 0
    with LocalDaemon(pool_bytes=16 << 20, runtime_dir=tmp_path / "cpu"):
        server.wait_connected()
        server.run([*PROMPT, 1])
        server.evict_all()
        wait_until(lambda: server.match(PROMPT).host_hit_length)
        assert server.run(PROMPT) > 0
    assert server.run([7, *PROMPT]) == server.wrong == server.failed == 0


def test_a_promise_of_a_daemon_that_has_died_is_computed(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    """Between lookup and load; with several ranks the load would fail on all of them."""
    server = stored_server(start_server, daemon.directory)
    load = server.linker.load

    def kill_and_load(rid: str, transfers: Any) -> bool:
        daemon.kill()
        wait_until(lambda: server.step() or server.linker._manager.gone)
        return bool(load(rid, transfers))

    server.linker.load = kill_and_load
    assert server.run(PROMPT) == server.failed == server.wrong == 0
    assert server.run([*PROMPT, 1]) == 0  # from the device


def test_a_load_whose_daemon_dies_fails_alone(
    daemon: LocalDaemon, start_server: StartServer
) -> None:
    server = stored_server(start_server, daemon.directory)
    start = server.linker.start_layer_wise_loading

    def start_and_kill() -> int:
        os.kill(daemon.pid, signal.SIGSTOP)  # the job waits for it
        index = start()
        daemon.kill()
        return int(index)

    server.linker.start_layer_wise_loading = start_and_kill
    free = server.allocator.available_size()
    assert server.run(PROMPT) == 0
    assert server.failed == 1
    server.linker.start_layer_wise_loading = start
    assert server.run(PROMPT) == 0  # computed
    assert server.failed == 1
    server.evict_all()
    assert server.allocator.available_size() == free


def test_a_daemon_that_is_stopped_does_not_stop_the_server(
    daemon: LocalDaemon, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups are a miss, a load that has begun fails, and stores end without success."""
    monkeypatch.setattr("kvferry.client.sglang.loads.LOAD_TIMEOUT", 0.5)
    monkeypatch.setattr("kvferry.client.sglang.stores.WAIT_TIMEOUT", 0.5)
    server = stored_server(start_server, daemon.directory)
    start = server.linker.start_layer_wise_loading

    def stop_and_start() -> int:
        os.kill(daemon.pid, signal.SIGSTOP)
        return int(start())

    server.linker.start_layer_wise_loading = stop_and_start
    assert server.run(PROMPT) == 0
    assert server.failed == 1
    server.linker.start_layer_wise_loading = start
    assert server.run([9, *PROMPT]) == 0
    server.drain()  # its store has ended
    os.kill(daemon.pid, signal.SIGCONT)
    server.wait_connected()
    server.evict_all()
    wait_until(lambda: server.match(PROMPT).host_hit_length)
    assert server.run(PROMPT) == 36
    assert server.wrong == 0


def test_a_daemon_that_restarts_keeps_what_it_has(
    service: ServiceManager, tmp_path: Path, start_server: StartServer
) -> None:
    server = stored_server(start_server, tmp_path / "cpu")
    service.stop()  # it writes all checksums first
    assert server.run([3, *PROMPT]) == 0
    service.start()
    server.wait_connected()
    wait_until(lambda: server.match(PROMPT).host_hit_length)
    assert server.run(PROMPT) == 36
    assert server.wrong == server.failed == 0


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_load_what_the_daemons_of_all_have(
    server_args: Any, tmp_path: Path, kind: str
) -> None:
    command = [sys.executable, "-m", "support.sglang_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), kind, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [json.loads(output[-1]) for output in outputs] == [[[36, 0], 0, 0]] * 2
