"""Which modules an import loads: no torch to submit and poll, no regular package at the top."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.client import LocalDaemon
from support.time_limits import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ["proto", "client", "daemon", "tests"]


def imported_modules(code: str, *arguments: str) -> set[str]:
    """Run a program that prints the names of its imported modules. Returns them."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("kvferry.proto.messages", {"torch", "zmq", "asyncio"}),
        ("kvferry.client", {"torch", "kvferry.daemon", "kvferry.testing", "uvloop", "structlog"}),
        ("kvferry.daemon.app", {"torch", "kvferry.testing"}),
        ("kvferry.daemon.core.core", {"torch", "zmq", "asyncio"}),
        ("kvferry.testing.plugin", {"torch", "kvferry.daemon"}),
        ("kvferry.testing.engine", {"torch", "kvferry.daemon"}),
        ("kvferry.testing.worker", {"kvferry.daemon"}),
    ],
)
def test_modules_loaded_by_each_import(package: str, unwanted: set[str]) -> None:
    imported = imported_modules(f"import sys, {package}; print(*sys.modules)")
    assert package in imported
    assert not imported & unwanted


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it is not installed
from kvferry.client import *
from kvferry.client.doctor import Verdict, run_checks

def check_round_trip(client, pages):
    pages[:2] = [[7], [0]]
    client.transfer_async(1, (GPULoadStoreSpec([0]), CPULoadStoreSpec([0])))
    client.transfer_async(2, (CPULoadStoreSpec([0]), GPULoadStoreSpec([1])))
    client.wait([1, 2])
    assert all(result.success for result in client.get_finished())
    assert pages[1].tolist() == [7] * 64

layout = KVLayout((TensorLayout(2, 64, 64),), ((TensorRef(0, 64),),))
with OffloadClient(sys.argv[1], engine="own") as client:
    pages = shared_empty((2, 64))
    client.register_kv_caches({"layer": pages}, num_blocks=2, host_bytes=64)
    check_round_trip(client, pages)
with OffloadClient(sys.argv[1], engine="allocated") as client:
    check_round_trip(client, client.allocate_kv_caches(layout, host_bytes=64).tensors[0])
    try:
        shared_empty((2, 64), device="cuda")
    except ImportError as error:
        assert "pip install '.[tensors]'" in str(error), error
    else:
        raise AssertionError
    assert client.status().errors == {}
assert all(finding.verdict is not Verdict.FAIL for finding in run_checks(client.directory))
print(*sys.modules)
"""


def test_torch_is_needed_only_for_a_gpu(kvferryd: LocalDaemon) -> None:
    imported_modules(WITHOUT_TORCH, str(kvferryd.directory))


def test_one_namespace_of_four_directories() -> None:
    for name in NAMESPACES:
        assert not (ROOT / name / "__init__.py").exists()
        assert not (ROOT / name / "kvferry" / "__init__.py").exists()
    for name in [*NAMESPACES[:-1], "testing"]:
        parent = "tests" if name == "testing" else name
        assert (ROOT / parent / "kvferry" / name / "__init__.py").exists()
