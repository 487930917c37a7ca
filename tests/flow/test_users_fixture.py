"""The pytest plugin, used by tests of another project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.time_limits import TIMEOUT

CONFTEST = 'pytest_plugins = ["kvferry.testing.plugin"]\n'
USERS_TESTS = """
import os
import sys
from pathlib import Path

import pytest


def record_pid(daemon):
    with Path("pids").open("a") as pids:
        pids.write(f"{daemon.pid}\\n")


def test_a_client(kvferryd, kvferry_client):
    record_pid(kvferryd)
    assert "torch" not in sys.modules
    assert kvferry_client.status().pid == kvferryd.pid
    assert kvferry_client.directory == kvferryd.directory
    assert kvferry_client.daemon.device.kind == "cpu"


def test_a_new_daemon_for_each_test(kvferryd, kvferry_client):
    record_pid(kvferryd)
    assert kvferry_client.status().totals.stores == 0
    assert str(kvferryd.pid) not in Path("pids").read_text().split()[:-1]


def test_options(start_kvferryd):
    from kvferry.client import OffloadClient

    first, other = start_kvferryd(pool_bytes=4 << 20), start_kvferryd(limits_max_stores=3)
    record_pid(first), record_pid(other)
    with OffloadClient(first.directory) as client:
        assert client.status().pool.size_bytes == 4 << 20
    with OffloadClient(other.directory) as client:
        assert client.daemon.limits.max_stores == 3


def test_a_daemon_that_the_test_stopped(start_kvferryd):
    daemon = start_kvferryd()
    record_pid(daemon)
    assert daemon.stop() == 0


def test_a_transfer(kvferryd, kvferry_client):
    import numpy as np
    from kvferry.client import CPULoadStoreSpec, GPULoadStoreSpec, shared_empty

    record_pid(kvferryd)
    tensor = shared_empty((4, 256))
    tensor[0] = 7
    kvferry_client.register_kv_caches({"layer": tensor}, num_blocks=4)
    spec = GPULoadStoreSpec(np.array([0])), CPULoadStoreSpec(np.array([2]))
    kvferry_client.transfer_async(1, spec)
    kvferry_client.transfer_async(2, (spec[1], GPULoadStoreSpec(np.array([3]))))
    kvferry_client.wait([1, 2])
    assert all(result.success for result in kvferry_client.get_finished())
    assert (tensor[3] == 7).all()


@pytest.mark.xfail(strict=True)
def test_that_fails(start_kvferryd):
    record_pid(start_kvferryd())
    raise AssertionError
"""


def test_a_users_tests_pass(tmp_path: Path) -> None:
    """Warnings are errors. Each daemon's log is output of its test. No daemon runs afterwards."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_of_a_user.py").write_text(USERS_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rP", "-W", "error", "-p", "no:asyncio"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed, 1 xfailed" in done.stdout
    assert done.stdout.count("serving") == 6  # -rP shows the output of tests that passed
    pids = (tmp_path / "pids").read_text().split()
    assert len(set(pids)) == 7
    assert not [pid for pid in pids if is_kvferryd(pid)]


def is_kvferryd(pid: str) -> bool:
    path = Path("/proc") / pid / "cmdline"
    return os.path.exists(path) and b"kvferry" in path.read_bytes()
