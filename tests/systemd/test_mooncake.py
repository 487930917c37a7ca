"""The units of Mooncake Store, installed by the commands of deploy/mooncake.md, under systemd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.systemd_container import OFFLINE, SystemdContainer, sections
from support.time_limits import TIMEOUT

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "deploy" / "mooncake.md"
MASTER, STORE = "mooncake-master", "mooncake-store"
FILE = "/etc/kvferry/kvferryd.toml"
METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9003/metrics", timeout=5).read().decode())
"""


def until(machine: SystemdContainer, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        log = ["journalctl", "--no-pager", "--lines=40", f"--unit={MASTER}", f"--unit={STORE}"]
        assert time.monotonic() < deadline, machine.run(*log)
        time.sleep(0.1)


def capacity(machine: SystemdContainer) -> list[int]:
    """The capacity of each store in bytes, as the master reports it."""
    text = machine.run("/opt/kvferry/bin/python", "-c", METRICS, check=False)
    return [int(n) for n in re.findall(r"(?m)^segment_total_capacity_bytes\{.*\} (\d+)$", text)]


@pytest.fixture(scope="module")
def cluster(machine: SystemdContainer) -> Iterator[SystemdContainer]:
    """A container with a master and a store of 256 MiB."""
    page = sections(PAGE)
    machine.script(OFFLINE + page["Install"], directory="/src")
    machine.script(
        "sed -i 's/^MOONCAKE_SEGMENT=.*/MOONCAKE_SEGMENT=256MB/' /etc/kvferry/mooncake.env"
    )
    machine.script(f"systemctl enable --now {MASTER}; systemctl enable --now {STORE}")
    until(machine, lambda: capacity(machine) == [256 << 20])
    yield machine
    machine.script(page["Uninstall"])
    left = machine.run("find", "/etc", "/run/systemd", "-xdev", "-name", "mooncake*")
    assert left == ""


@pytest.mark.parametrize("unit", [MASTER, STORE])
def test_a_killed_process_is_restarted(cluster: SystemdContainer, unit: str) -> None:
    show = ["systemctl", "show", "--value", "--property=MainPID", unit]
    pid = cluster.run(*show)
    cluster.run("systemctl", "kill", "--signal=KILL", unit)
    until(cluster, lambda: cluster.run(*show) not in (pid, "0"))
    # The master counts the memory of a dead store until --client_ttl.
    until(cluster, lambda: capacity(cluster) == [256 << 20])


@pytest.mark.parametrize("unit", [MASTER, STORE])
def test_a_process_runs_without_capabilities(cluster: SystemdContainer, unit: str) -> None:
    pid = cluster.run("systemctl", "show", "--value", "--property=MainPID", unit)
    status = cluster.run("cat", f"/proc/{pid}/status")
    assert re.search(r"CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"(?m)^Uid:\s+[1-9]", status)


def test_the_store_starts_before_its_master(cluster: SystemdContainer) -> None:
    cluster.script(f"systemctl stop {STORE} {MASTER}; systemctl start {STORE}; sleep 1")
    cluster.run("systemctl", "start", MASTER)
    until(cluster, lambda: capacity(cluster) == [256 << 20])


def test_a_daemon_reaches_the_store(cluster: SystemdContainer) -> None:
    before = cluster.run("cat", FILE)
    cluster.script(f"sed -i 's/^# master = .*/master = \"127.0.0.1:50051\"/' {FILE}")
    try:
        cluster.run("systemctl", "start", "kvferryd@cpu")
        log = ["journalctl", "--no-pager", "--boot", "--unit=kvferryd@cpu"]
        until(cluster, lambda: re.search("tier started.*mooncake", cluster.run(*log)) is not None)
    finally:
        cluster.run("systemctl", "stop", "kvferryd@cpu")
        cluster.write(FILE, before + "\n")


def test_a_stop_succeeds(cluster: SystemdContainer) -> None:
    for unit in (STORE, MASTER):
        cluster.run("systemctl", "stop", unit)
        assert cluster.run("systemctl", "show", "--value", "--property=Result", unit) == "success"
