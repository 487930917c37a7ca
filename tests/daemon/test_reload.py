"""The daemon under a service manager: what it says of itself, and SIGHUP."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client import OffloadClient
from kvferry.testing.engine import until
from support.service_manager import ServiceManager, kvferryd_command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The daemon's configuration."""
    path = tmp_path / "kvferryd.toml"
    path.write_text('[log]\nlevel = "info"\n')
    return path


@pytest.fixture
def manager(tmp_path: Path, file: Path) -> Iterator[ServiceManager]:
    """One whose daemon is ready."""
    command = kvferryd_command(tmp_path, config=file, stop_drain_seconds=1)
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "log") as manager:
        manager.start()
        yield manager


def reload(manager: ServiceManager, file: Path, text: str) -> str:
    """Write the file and have it read again; what the daemon logged of it."""
    file.write_text(text)
    before, ready = len(manager.log()), len(manager.values("READY"))
    manager.process.send_signal(signal.SIGHUP)
    until(lambda: len(manager.values("READY")) > ready)
    return manager.log()[before:]


def test_from_start_to_stop(manager: ServiceManager, tmp_path: Path) -> None:
    """Ready means that a client is answered at once; it says where it serves."""
    opening, serving = manager.values("STATUS")
    assert opening == "opening device cpu"
    assert str(tmp_path / "cpu") in serving
    with OffloadClient(tmp_path / "cpu") as client:
        assert client.status().pid == manager.process.pid
    assert manager.stop() == 0
    assert manager.values("STOPPING") == ["1"]


def test_a_daemon_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    command = kvferryd_command(tmp_path, pool_bytes=1 << 46, pool_chunk=1 << 45)
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "log") as manager:
        manager.start(ready=False)
        assert manager.wait_dead() == 2
        until(lambda: any("pool_too_large" in text for text in manager.values("STATUS")))
        assert not manager.values("READY")


def test_a_reload_is_announced_and_ends(manager: ServiceManager, file: Path) -> None:
    said = reload(manager, file, '[log]\nlevel = "info"\n')
    assert "configuration reloaded" in said
    kinds = [name for message in manager.said for name in message]
    phases = [name for name in kinds if name in ("READY", "RELOADING", "MONOTONIC_USEC")]
    assert phases == ["READY", "RELOADING", "MONOTONIC_USEC", "READY"]
    assert len(set(manager.values("STATUS")[1:])) == 1


def test_the_log_s_level_changes_at_once(
    manager: ServiceManager, file: Path, tmp_path: Path
) -> None:
    def visit() -> str:
        before = len(manager.log())
        with OffloadClient(tmp_path / "cpu") as client:
            client.status()
        return manager.log()[before:]

    assert "client connected" in visit()
    until(lambda: "client disconnected" in manager.log())
    assert reload(manager, file, '[log]\nlevel = "warning"\n') == ""
    assert visit() == ""
    assert "configuration reloaded" in reload(
        manager, file, '[log]\nlevel = "info"\nformat = "json"\n'
    )
    assert '"event": "client connected"' in visit()


def test_keys_that_need_a_restart_are_named_once(manager: ServiceManager, file: Path) -> None:
    text = "[limits]\nmax_stores = 7\n"
    said = reload(manager, file, text)
    assert "changed keys need a restart" in said
    assert "limits.max_stores" in said
    assert "limits.allow" not in said
    assert "need a restart" not in reload(manager, file, text)
    both = reload(manager, file, text + '[pool]\nchunk = "1MiB"\n')
    assert "limits.max_stores" in both
    assert "pool.chunk" in both


@pytest.mark.parametrize(
    "text",
    [
        "[limits\n",
        "[limits]\nmax_stores = 0\n",
        '[access]\ngroup = "99999999999"\n',
        '[access]\ngroup = "no-such-group"\n',
    ],
)
def test_a_broken_file_changes_nothing(
    manager: ServiceManager, file: Path, tmp_path: Path, text: str
) -> None:
    """Not even what is right in it."""
    said = reload(manager, file, text + '[log]\nlevel = "error"\n')
    assert "reload failed" in said
    assert "bad_config" in said
    with OffloadClient(tmp_path / "cpu") as client:
        assert client.status().pid == manager.process.pid
    assert "client connected" in manager.log()


def test_a_reload_that_fails_ends_all_the_same(
    manager: ServiceManager, file: Path, tmp_path: Path
) -> None:
    """Whatever it fails with: here somebody has taken the folder away."""
    shutil.rmtree(tmp_path / "cpu")
    said = reload(manager, file, '[log]\nlevel = "error"\n')
    assert "reload failed" in said
    assert "Traceback" not in said


def test_a_reload_beside_a_client(manager: ServiceManager, file: Path, tmp_path: Path) -> None:
    """Who is in stays in."""
    with OffloadClient(tmp_path / "cpu") as client:
        boot = client.status().boot_id
        reload(manager, file, '[access]\ngroup = "61001"\n')
        reload(manager, file, "")
        assert client.status().boot_id == boot


EARLY = """
import os, signal, sys
from pathlib import Path
from kvferry.daemon import config_reader as config
from kvferry.daemon.__main__ import main

read = config.read
def early(*arguments):
    found = read(*arguments)
    Path(os.environ["FILE"]).write_text('[log]\\nformat = "json"\\n')
    os.kill(os.getpid(), signal.SIGHUP)
    config.read = read
    return found

config.read = early
main()
"""
"""The file changes, and a reload is asked for, right after the daemon has read it at its start."""


def test_a_reload_before_the_daemon_can_heed_it_waits(file: Path, tmp_path: Path) -> None:
    file.write_text("")
    command = [sys.executable, "-c", EARLY, *kvferryd_command(tmp_path, config=file)[3:]]
    notify, environ = tmp_path / "notify", {"FILE": str(file)}
    with ServiceManager(command, notify, environ=environ, log=tmp_path / "log") as manager:
        manager.start()
        until(lambda: '"event": "configuration reloaded"' in manager.log())
        assert manager.stop() == 0


LATE = """
import os, signal
from kvferry.daemon.__main__ import main
from kvferry.daemon.access.endpoint import Endpoint

close = Endpoint.close
def late(endpoint):
    os.kill(os.getpid(), signal.SIGHUP)
    close(endpoint)

Endpoint.close = late
main()
"""


def test_a_reload_during_the_stop_is_ignored(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATE, *kvferryd_command(tmp_path)[3:]]
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "log") as manager:
        manager.start()
        assert manager.stop() == 0
