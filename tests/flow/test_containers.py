"""Daemon and engines in containers that share only the runtime directory.

Each process has PID, IPC, network, mount and user namespaces of its own, so no pid of one is
visible to another.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvferry.client import OffloadClient
from kvferry.testing.engine import until
from support.time_limits import PROMPTLY, TIMEOUT

CONTAINER = (
    *("unshare", "--user", "--map-root-user", "--pid", "--ipc", "--net", "--mount"),
    *("--fork", "--kill-child", "--mount-proc"),
)
ENGINE = """
import sys, time
from kvferry.client import Fingerprint, GPULoadStoreSpec, KeyLoadStoreSpec, OffloadClient
from kvferry.client import offload_key, shared_empty

what, directory = sys.argv[1:]
kv = shared_empty((8, 65536), "int8")
keys = [offload_key(bytes([n]) * 8, 0) for n in range(4)]
fingerprint = Fingerprint("model", host_block_bytes=65536, key_bytes=len(keys[0]))

def move(client, job_id, *spec):
    client.transfer_async(job_id, spec)
    client.wait([job_id])
    (result,) = client.get_finished()
    assert result.success, result.error

with OffloadClient(directory, engine=what) as client:
    client.open_namespace(fingerprint)
    client.register_kv_caches({"layer": kv}, num_blocks=8)
    if what == "first":
        for n in range(4):
            kv[n] = n + 1
        move(client, 1, GPULoadStoreSpec([0, 1, 2, 3]), KeyLoadStoreSpec(keys))
    else:
        move(client, 1, KeyLoadStoreSpec(keys), GPULoadStoreSpec([7, 6, 5, 4]))
        assert [int(kv[7 - n].min()) for n in range(4)] == [1, 2, 3, 4], kv[:, 0]
        assert [int(kv[7 - n].max()) for n in range(4)] == [1, 2, 3, 4], kv[:, 0]
    print("moved", flush=True)
    while True:  # reconnects, if the daemon was restarted
        client.get_finished()
        time.sleep(0.05)
"""


def can_isolate() -> bool:
    return subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_isolate(), reason="no user namespaces on this machine")


@contextmanager
def in_container(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process in its container; killed at the end, as by an out-of-memory killer."""
    process = subprocess.Popen([*CONTAINER, *command], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def engine(name: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that has moved its blocks."""
    with in_container(sys.executable, "-c", ENGINE, name, str(directory)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "moved\n"
        yield process


@contextmanager
def daemon(directory: Path) -> Iterator[None]:
    arguments = "--device", "cpu", "--pool-size", "1MiB", "--runtime-dir", str(directory)
    with in_container(sys.executable, "-m", "kvferry.daemon", *arguments):
        until((directory / "cpu" / "kvferry.sock").exists, timeout=TIMEOUT)
        yield


def connected(observer: OffloadClient) -> list[str]:
    """Engines with registered KV caches."""
    return [engine.name for engine in observer.status().engines if engine.present]


def test_engines_share_blocks_and_their_deaths_are_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "cpu"
    with daemon(tmp_path), OffloadClient(directory) as observer:
        with engine("first", directory) as first:
            assert connected(observer) == ["first"]
            os.kill(first.pid, signal.SIGKILL)
            until(lambda: not connected(observer), timeout=PROMPTLY)
        with engine("second", directory):
            assert connected(observer) == ["second"]
        until(lambda: not connected(observer), timeout=PROMPTLY)


def test_an_engine_reconnects_after_a_restart_of_the_daemon(tmp_path: Path) -> None:
    directory = tmp_path / "cpu"
    with ExitStack() as stack:
        with daemon(tmp_path):
            stack.enter_context(engine("first", directory))
        with daemon(tmp_path), OffloadClient(directory) as observer:
            until(lambda: connected(observer) == ["first"], timeout=PROMPTLY)
