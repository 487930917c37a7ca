"""The daemon with a service manager: notifications, and reloads by SIGHUP."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.client import OffloadClient
from kvferry.testing.engine import until
from support.client_keys import FINGERPRINT
from support.service_manager import ServiceManager, kvferryd_command


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The configuration of the daemon."""
    path = tmp_path / "kvferryd.toml"
    path.write_text('[log]\nlevel = "info"\n')
    return path


@pytest.fixture
def manager(tmp_path: Path, config_file: Path) -> Iterator[ServiceManager]:
    """A service manager whose daemon is ready."""
    command = kvferryd_command(tmp_path, config=config_file, stop_drain_seconds=1)
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "log") as manager:
        manager.start()
        yield manager


def reload(manager: ServiceManager, config_file: Path, text: str) -> str:
    """Write the file and reload it. Returns what the daemon logged meanwhile."""
    config_file.write_text(text)
    before, ready = len(manager.log()), len(manager.values("READY"))
    manager.process.send_signal(signal.SIGHUP)
    until(lambda: len(manager.values("READY")) > ready)
    return manager.log()[before:]


def test_notifications_from_start_to_stop(manager: ServiceManager, tmp_path: Path) -> None:
    """A ready daemon serves clients at once. Its status names its directory."""
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


def test_reloads(manager: ServiceManager, config_file: Path, tmp_path: Path) -> None:
    """They are announced, keep connected clients, and report keys that need a restart once."""

    def connect() -> str:
        before = len(manager.log())
        with OffloadClient(tmp_path / "cpu") as client:
            client.open_namespace(FINGERPRINT, cpu_bytes_to_use=FINGERPRINT.host_block_bytes)
        return manager.log()[before:]

    with OffloadClient(tmp_path / "cpu") as client:
        boot = client.status().boot_id
        assert "configuration reloaded" in reload(manager, config_file, '[log]\nlevel = "info"\n')
        kinds = [name for message in manager.messages for name in message]
        phases = [name for name in kinds if name in ("READY", "RELOADING", "MONOTONIC_USEC")]
        assert phases == ["READY", "RELOADING", "MONOTONIC_USEC", "READY"]
        assert len(set(manager.values("STATUS")[1:])) == 1
        reload(manager, config_file, '[access]\ngroup = "61001"\n')
        text = "[limits]\nmax_stores = 7\n"
        log = reload(manager, config_file, text)
        assert "changed keys need a restart" in log
        assert "limits.max_stores" in log
        assert "limits.allow" not in log
        assert "need a restart" not in reload(manager, config_file, text)
        both = reload(manager, config_file, text + '[pool]\nchunk = "1MiB"\n')
        assert "limits.max_stores" in both
        assert "pool.chunk" in both
        reload(manager, config_file, "")
        assert client.status().boot_id == boot
    assert "client connected" in connect()
    until(lambda: "client disconnected" in manager.log())
    assert reload(manager, config_file, '[log]\nlevel = "warning"\n') == ""
    assert connect() == ""
    changed = '[log]\nlevel = "info"\nformat = "json"\n'
    assert "configuration reloaded" in reload(manager, config_file, changed)
    assert '"event": "client connected"' in connect()


def test_a_reload_that_fails_changes_nothing(
    manager: ServiceManager, config_file: Path, tmp_path: Path
) -> None:
    """Valid keys of the file are ignored, too. The daemon is ready again."""
    for text in (
        "[limits\n",
        "[limits]\nmax_stores = 0\n",
        '[access]\ngroup = "99999999999"\n',
        '[access]\ngroup = "no-such-group"\n',
    ):
        log = reload(manager, config_file, text + '[log]\nlevel = "error"\n')
        assert "reload failed" in log
        assert "bad_config" in log
    with OffloadClient(tmp_path / "cpu") as client:
        assert client.status().pid == manager.process.pid
        client.open_namespace(FINGERPRINT, cpu_bytes_to_use=FINGERPRINT.host_block_bytes)
    assert "client connected" in manager.log()
    shutil.rmtree(tmp_path / "cpu")
    log = reload(manager, config_file, '[log]\nlevel = "error"\n')
    assert "reload failed" in log
    assert "Traceback" not in log


# The file changes, and SIGHUP arrives, right after the daemon has read the file at its start.
EARLY_RELOAD = """
import os, signal, sys
from pathlib import Path
from kvferry.daemon import config_reader as config
from kvferry.daemon.__main__ import main

read = config.read
def read_and_reload(*arguments):
    found = read(*arguments)
    Path(os.environ["FILE"]).write_text('[log]\\nformat = "json"\\n')
    os.kill(os.getpid(), signal.SIGHUP)
    config.read = read
    return found

config.read = read_and_reload
main()
"""


def test_a_reload_during_the_start_is_done_later(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text("")
    command = [
        sys.executable,
        "-c",
        EARLY_RELOAD,
        *kvferryd_command(tmp_path, config=config_file)[3:],
    ]
    notify, environ = tmp_path / "notify", {"FILE": str(config_file)}
    with ServiceManager(command, notify, environ=environ, log=tmp_path / "log") as manager:
        manager.start()
        until(lambda: '"event": "configuration reloaded"' in manager.log())
        assert manager.stop() == 0


LATE_RELOAD = """
import os, signal
from kvferry.daemon.__main__ import main
from kvferry.daemon.access.runtime_directory import Endpoint

close = Endpoint.close
def reload_and_close(endpoint):
    os.kill(os.getpid(), signal.SIGHUP)
    close(endpoint)

Endpoint.close = reload_and_close
main()
"""


def test_a_reload_during_the_stop_is_ignored(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATE_RELOAD, *kvferryd_command(tmp_path)[3:]]
    with ServiceManager(command, tmp_path / "notify", log=tmp_path / "log") as manager:
        manager.start()
        assert manager.stop() == 0
