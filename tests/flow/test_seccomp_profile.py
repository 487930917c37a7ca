"""kvferryd under the system call filter of containers: it needs no call that is denied."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvferry.client import LocalDaemon, Lookup
from kvferry.testing.engine import until
from kvferry.testing.mooncake_store import INSTALL, MooncakeStore, is_installed
from support import patient_daemon
from support.child_processes import children_of
from support.raw_client import RawClient
from support.restarting_fixture import RestartedService, keys
from support.seccomp_profile import REFUSED_CALLS, SeccompProfile, libseccomp, probe
from support.sibling_daemons import find_keys
from support.tiered_engine import TieredEngine
from support.time_limits import TIMEOUT

from .block_tables import await_committed

try:
    libseccomp()
except OSError as error:
    pytest.skip(f"libseccomp cannot be loaded: {error}", allow_module_level=True)

# uvloop works as well without io_uring.
NOT_NEEDED = {"io_uring_setup"}
BLOCKS = range(16)
Start = Callable[..., LocalDaemon]


@pytest.fixture
def profile() -> Iterator[SeccompProfile]:
    """At the end it checks that no call was denied."""
    with SeccompProfile() as profile:
        yield profile
    assert profile.denied <= NOT_NEEDED


class ConfinedService(RestartedService):
    """A daemon under a profile, whose pool is kept over restarts."""

    def __init__(self, profile: SeccompProfile, folder: Path, device: str) -> None:
        self._launcher = profile.launcher
        super().__init__(folder, device)

    def command(self, **options: object) -> list[str]:
        return [*self._launcher, *super().command(**options)]


class ConfinedDaemon(LocalDaemon):
    """A daemon under a profile, patient with tiers."""

    def __init__(self, profile: SeccompProfile, **options: Any) -> None:
        self._launcher = profile.launcher
        super().__init__(pool_bytes=1 << 20, **options)

    def _start(self, timeout: float) -> None:
        program = [sys.executable, patient_daemon.__file__, *self.command[3:]]
        self.command = [*self._launcher, *program]
        super()._start(timeout)


@pytest.fixture
def start(profile: SeccompProfile, short_path: Path) -> Iterator[Start]:
    """start(folder, **options) -> a daemon, with that runtime directory."""
    with ExitStack() as running:

        def start(folder: str, **options: Any) -> LocalDaemon:
            places = {"runtime_dir": short_path / folder, "state_dir": short_path / "state"}
            return running.enter_context(ConfinedDaemon(profile, **places, **options))

        yield start


def filter_mode(pid: int) -> str:
    """What the kernel shows of a process: 2 if it has a filter."""
    (mode,) = re.findall(r"(?m)^Seccomp:\s+(\d)$", Path(f"/proc/{pid}/status").read_text())
    return str(mode)


def test_a_restarted_daemon_has_its_pool(
    profile: SeccompProfile, short_path: Path, device: str
) -> None:
    service = ConfinedService(profile, short_path, device)
    with service.manager:
        service.start()
        with service.engine() as engine:
            content = engine.fill(range(8), seed=1)
            assert engine.store(range(8), keys(1, 2, 3, 4)).success
            await_committed(service.manager, 4)
        service.restart()
        pid = service.manager.process.pid
        until(lambda: bool(children_of(pid, b"checksums")))
        (checksums,) = children_of(pid, b"checksums")
        assert (filter_mode(pid), filter_mode(checksums)) == ("2", "2")
        with RawClient(service.directory, "raw") as worker, Path("/dev/null").open() as null:
            worker.deposit(null.fileno())  # what a driver exports is a device, too
        with service.engine("two") as engine:
            assert engine.opened.reattached
            engine.await_verified()
            assert engine.lookup(1, 2, 3, 4) == [Lookup.HIT] * 4
            assert engine.load(keys(3, 1), [20, 21, 22, 23]).success
            assert torch.equal(engine.read(range(20, 24)), content[[4, 5, 0, 1]])
        service.manager.process.send_signal(signal.SIGHUP)
        until(lambda: "reload" in service.manager.log())
        assert service.manager.stop() == 0


def test_an_encrypted_disk_tier_with_metrics_and_events(start: Start, short_path: Path) -> None:
    (short_path / "key").write_bytes(bytes(32))
    (short_path / "key").chmod(0o400)
    begin = partial(
        start,
        "run",
        access_group=os.getgid(),
        metrics_listen="127.0.0.1:0",
        tiers_disk_path=short_path / "tier",
        tiers_disk_size="16MiB",
        tiers_disk_write="write_through",
        tiers_disk_key_file=short_path / "key",
    )
    daemon = begin()
    with (
        ExitStack() as stack,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.setsockopt(zmq.RCVTIMEO, int(TIMEOUT * 1000))
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"ipc://{daemon.directory}/events.sock")
        until(lambda: bool(children_of(daemon.pid, b"KV events")))
        engine = TieredEngine(daemon, stack)
        engine.store(BLOCKS)
        assert len(subscriber.recv_multipart()) == 3
        engine.wait_written(len(BLOCKS))
        (address,) = re.findall(r"metrics=(\S+)", daemon.log())
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT) as answer:
            assert b"kvferry_tier_on" in answer.read()
    assert daemon.stop() == 0
    daemon = begin()
    with ExitStack() as stack:
        engine = TieredEngine(daemon, stack)
        engine.promote(BLOCKS)
        engine.load(BLOCKS)
        assert (engine.tier().errors, engine.tier().checksum_failures) == (0, 0)


def test_siblings(start: Start, short_path: Path) -> None:
    both = f"{short_path / 'a'}:{short_path / 'b'}"
    options = {"siblings_enabled": "true", "siblings_directories": both}
    with ExitStack() as stack:
        one, two = (TieredEngine(start(name, **options), stack) for name in "ab")
        one.store(BLOCKS)
        find_keys(two, BLOCKS)
        two.load(BLOCKS)


@pytest.mark.skipif(not is_installed(), reason=f"Mooncake is not installed: {INSTALL}")
def test_a_mooncake_store(start: Start) -> None:
    with MooncakeStore(segment_bytes=64 << 20) as store:
        options = {
            "tiers_mooncake_master": store.address,
            "tiers_mooncake_write": "write_through",
            "tiers_mooncake_admit_after": 1,
        }
        with ExitStack() as stack:
            daemon = start("a", **options)
            engine = TieredEngine(daemon, stack)
            until(lambda: engine.tier().state == "on")
            engine.store(BLOCKS)
            engine.wait_written(len(BLOCKS))
        assert daemon.stop() == 0
        with ExitStack() as stack:
            engine = TieredEngine(start("b", **options), stack)
            engine.promote(BLOCKS)
            engine.load(BLOCKS)


def test_the_command_of_the_health_check(profile: SeccompProfile, start: Start) -> None:
    daemon = start("run")
    program = [*profile.launcher, sys.executable, "-m", "kvferry.client.cli", "status", "--check"]

    def is_healthy() -> bool:
        command = [*program, "--directory", str(daemon.directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        assert not done.stderr
        return ": healthy" in done.stdout and done.returncode == 0

    until(is_healthy)


def test_dangerous_calls_are_denied() -> None:
    with SeccompProfile() as profile:
        command = [*profile.launcher, sys.executable, "-c", probe()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert json.loads(done.stdout) == dict.fromkeys(profile.denied, errno.EPERM)
    assert profile.denied == {*REFUSED_CALLS, "unshare", "socket"}
