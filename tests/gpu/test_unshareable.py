"""Memory that cannot be shared is refused, and the error names the setting to change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from kvferry.client import Code, LocalDaemon, OffloadClient, Refused
from kvferry.client.tensors import shared_empty
from kvferry.testing.engine import until
from support.time_limits import PROMPTLY, TIMEOUT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

ENGINE = """
import sys
import torch
from kvferry.client import KVFerryError, OffloadClient
with OffloadClient(sys.argv[1], engine="expandable") as client:
    try:
        client.register_kv_caches({"layer": torch.empty(64, 1 << 20, device="cuda")}, num_blocks=64)
    except KVFerryError as error:
        print(error)
"""


@pytest.fixture
def daemon() -> Iterator[LocalDaemon]:
    with LocalDaemon("0", pool_bytes=16 << 20) as daemon:
        yield daemon


def test_expandable_segments_are_refused(daemon: LocalDaemon) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, daemon.directory],
        env=os.environ | setting,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert f"[{Code.NOT_SHAREABLE}]" in done.stdout, done.stderr
    assert "expandable_segments" in done.stdout
    assert "allocate_kv_caches" in done.stdout


def test_a_daemon_of_a_gpu_refuses_host_tensors(daemon: LocalDaemon) -> None:
    with OffloadClient(daemon.directory, engine="cpu") as client:
        with pytest.raises(Refused) as refused:
            client.register_kv_caches({"layer": shared_empty((8, 4096))}, num_blocks=8)
        assert refused.value.code == Code.NOT_SHAREABLE
        assert client.status().engines == ()


DYING_ENGINE = """
import os, signal, sys
import torch
from kvferry.client import OffloadClient
client = OffloadClient(sys.argv[1], engine="dying")
client.register_kv_caches({"layer": torch.empty(4096, 1 << 20, device="cuda")}, num_blocks=4096)
os.kill(os.getpid(), signal.SIGKILL)
"""


# Other processes may allocate device memory during a try. A leak would show in each of them.
TRIES = 3


def test_the_device_memory_of_a_dead_engine_is_freed(daemon: LocalDaemon) -> None:
    """The daemon unmaps it, so the driver frees it."""
    torch.zeros(1, device="cuda")
    assert any(frees_memory_of_a_dead_engine(daemon) for _ in range(TRIES))


def frees_memory_of_a_dead_engine(daemon: LocalDaemon) -> bool:
    """Whether all but 1 GiB is free again after an engine with 4 GiB was killed."""
    before = torch.cuda.mem_get_info()[0]
    done = subprocess.run([sys.executable, "-c", DYING_ENGINE, daemon.directory], timeout=TIMEOUT)
    assert done.returncode == -signal.SIGKILL
    with suppress(TimeoutError):
        until(lambda: torch.cuda.mem_get_info()[0] > before - (1 << 30), PROMPTLY)
        return True
    return False
