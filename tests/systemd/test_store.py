"""The Supervisor under a real systemd: what the descriptor store keeps, and when it drops it."""

from __future__ import annotations

import time
from ast import literal_eval
from collections.abc import Iterator
from typing import Any

import pytest

from support.systemd_container import SystemdContainer

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

PROGRAM = """
import os, time
from kvferry.daemon.systemd import Supervisor

supervisor = Supervisor()
kept = {name: os.pread(d, 99, 0).decode() for name, d in supervisor.stored_fds.items()}
def memory(text):
    descriptor = os.memfd_create("test")
    os.write(descriptor, text.encode())
    return descriptor
if not kept:
    for name in ("one", "two", "three"):
        supervisor.store_fd(name, memory(name))
    for text in ("old", "new"):
        supervisor.store_fd("twice", memory(text))
    supervisor.remove_fd("two")
supervisor.ready(repr((kept, supervisor.has_fd_store, supervisor.watchdog_seconds)))
while True:
    time.sleep(0.2)
    supervisor.keep_alive()
"""
UNIT = """
[Service]
Type=notify
NotifyAccess=main
ExecStart=/opt/kvferry/bin/python /srv/keeper.py
FileDescriptorStoreMax=16
FileDescriptorStorePreserve=yes
WatchdogSec=5
Restart=always
RestartSec=10ms
[Install]
WantedBy=multi-user.target
"""


def show(machine: SystemdContainer, name: str) -> str:
    return machine.run("systemctl", "show", "--value", f"--property={name}", "keeper")


def read_report(machine: SystemdContainer) -> Any:
    """The program's report: (restored descriptors, has_fd_store, watchdog_seconds)."""
    return literal_eval(show(machine, "StatusText"))


@pytest.fixture
def keeper(machine: SystemdContainer) -> Iterator[SystemdContainer]:
    """A container with a program that stores some descriptors and removes one of them."""
    machine.write("/srv/keeper.py", PROGRAM)
    machine.write("/etc/systemd/system/keeper.service", UNIT)
    machine.script("systemctl daemon-reload; systemctl enable --now keeper")
    yield machine
    machine.script("systemctl disable --now keeper")


RESTORED = {"one": "one", "three": "three", "twice": "new"}


def kill(machine: SystemdContainer) -> None:
    pid = show(machine, "MainPID")
    machine.run("systemctl", "kill", "--signal=KILL", "keeper")
    while show(machine, "MainPID") in (pid, "0") or show(machine, "SubState") != "running":
        time.sleep(0.05)


def test_kept_descriptors_are_passed_on_after_two_kills(keeper: SystemdContainer) -> None:
    assert read_report(keeper) == ({}, True, 5.0)
    for _ in range(2):
        kill(keeper)
        assert read_report(keeper) == (RESTORED, True, 5.0)


def test_kept_descriptors_are_passed_on_after_a_stop(keeper: SystemdContainer) -> None:
    keeper.script("systemctl stop keeper; systemctl start keeper")
    assert read_report(keeper)[0] == RESTORED


def test_a_stop_of_a_unit_that_is_not_enabled_drops_descriptors(keeper: SystemdContainer) -> None:
    """systemd unloads a stopped unit that no other unit refers to."""
    keeper.script("systemctl disable keeper; systemctl stop keeper; systemctl start keeper")
    assert read_report(keeper)[0] == {}


def test_cleaning_the_unit_drops_descriptors(keeper: SystemdContainer) -> None:
    """deploy/README.md recommends this command to free the memory."""
    keeper.script("systemctl stop keeper; systemctl clean --what=fdstore keeper")
    keeper.run("systemctl", "start", "keeper")
    assert read_report(keeper)[0] == {}


def test_descriptors_survive_a_restart_of_systemd(keeper: SystemdContainer) -> None:
    """The names are kept. Of two descriptors with one name, either may be passed on."""
    keeper.run("systemctl", "daemon-reexec")
    kill(keeper)
    restored = read_report(keeper)[0]
    assert restored.pop("twice") in ("old", "new")
    assert restored == {"one": "one", "three": "three"}
