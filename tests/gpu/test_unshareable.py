"""Memory that cannot be shared is refused where it is registered, with the setting to change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kvferry.client import Code, LocalDaemon, OffloadClient, Refused
from kvferry.client.tensors import shared_empty

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


def test_expandable_segments_are_refused_by_name(daemon: LocalDaemon) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, daemon.directory],
        env=os.environ | setting,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"[{Code.NOT_SHAREABLE}]" in done.stdout, done.stderr
    assert "expandable_segments" in done.stdout
    assert "allocate_kv_caches" in done.stdout


def test_host_tensors_are_not_for_a_gpu_s_daemon(daemon: LocalDaemon) -> None:
    with OffloadClient(daemon.directory, engine="cpu") as client:
        with pytest.raises(Refused) as refused:
            client.register_kv_caches({"layer": shared_empty((8, 4096))}, num_blocks=8)
        assert refused.value.code == Code.DEVICE_MISMATCH
        assert client.status().engines == ()


def test_a_dead_engine_s_device_memory_is_free_again(daemon: LocalDaemon) -> None:
    """The mapping closes within a second of SIGKILL, so the driver gives the memory back."""
    code = ENGINE.replace("64, 1 << 20", "1024, 1 << 20") + "\nimport os; os.kill(os.getpid(), 9)"
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with OffloadClient(daemon.directory, engine="observer") as observer:
        subprocess.run([sys.executable, "-c", code, daemon.directory], timeout=60, check=False)
        for _ in range(100):
            if torch.cuda.mem_get_info()[0] >= before - (64 << 20):
                break
            observer.wait([], timeout=1)
            torch.cuda._sleep(20_000_000)
            torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)
