"""The unit, as it is installed, run by a real systemd: what an operator does with it, and what
happens to it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.testing.machine import Machine

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

UNIT = "kvferryd@cpu"
FILE = "/etc/kvferry/kvferryd.toml"
PYTHON = "/opt/kvferry/bin/python"
PATIENCE = 60.0
CAP_SYS_RESOURCE = 24

ENGINE = '''
"""engine.py store|load|busy: an engine without torch, whose blocks have keys."""
import json, mmap, os, sys, time
from pathlib import Path
from kvferry.client import (
    Fingerprint, GPULoadStoreSpec, KeyLoadStoreSpec, Lookup, OffloadClient, OffloadingManager,
    offload_key,
)
from kvferry.proto.errors import KVFerryError
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import (OpenNamespace, Opened, RegisterKVCaches, Registered)
from kvferry.testing.raw import Raw, one_tensor

BLOCKS, PAGE = 8, 4096
fingerprint = Fingerprint("model", PAGE, key_bytes=12)
keys = [offload_key(number.to_bytes(8, "big")) for number in range(BLOCKS)]
bytes_of = lambda block: bytes((31 * block + place) % 251 for place in range(PAGE))

def main(does):
    directory = Path("/run/kvferry/cpu")
    memory = os.memfd_create("kv")
    os.ftruncate(memory, BLOCKS * PAGE)
    tensor = mmap.mmap(memory, BLOCKS * PAGE)
    with OffloadClient(directory, engine="engine") as client, Raw(directory, "engine") as worker:
        worker.ask(OpenNamespace(1, fingerprint), Opened)
        (ticket,) = worker.deposit(memory)
        places = (FdAllocation(ticket, BLOCKS * PAGE),), (Location(0, 0),)
        worker.ask(RegisterKVCaches(2, one_tensor(BLOCKS, PAGE), *places), Registered)
        client.open_namespace(fingerprint)
        blocks = GPULoadStoreSpec(range(BLOCKS))
        if does == "load":
            manager = OffloadingManager(client)
            deadline = time.monotonic() + 5
            while manager.lookup(keys[-1]) is Lookup.RETRY and time.monotonic() < deadline:
                time.sleep(0.01)
            if any(manager.lookup(key) is not Lookup.HIT for key in keys):
                return {"outcome": "miss"}
            client.transfer_async(1, (KeyLoadStoreSpec(tuple(keys)), blocks))
        else:
            tensor[:] = b"".join(map(bytes_of, range(BLOCKS)))
            client.transfer_async(1, (blocks, KeyLoadStoreSpec(tuple(keys))))
        client.wait([1])
        (result,) = client.get_finished()
        right = tensor[:] == b"".join(map(bytes_of, range(BLOCKS)))
        number = 1
        while does == "busy":  # until the daemon goes
            number += 1
            open("/run/busy", "w").write(str(number))
            client.transfer_async(number, (KeyLoadStoreSpec(tuple(keys)), blocks))
            client.get_finished()
            client.wait([number])
        return {"outcome": result.outcome, "right": right, "pid": client.daemon.pid}

try:
    print(json.dumps(main(sys.argv[1])))
except KVFerryError as error:
    print(json.dumps({"outcome": error.code}))
'''


class Service:
    """The unit on its machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def systemctl(self, verb: str, *more: str, check: bool = True) -> str:
        return self.machine.run("systemctl", verb, UNIT, *more, check=check)

    def show(self, name: str) -> str:
        """A property of the unit, as systemd has it."""
        return self.systemctl("show", "--value", f"--property={name}")

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, self.systemctl("status", "--no-pager", check=False)
            time.sleep(0.1)

    def log(self) -> str:
        """Of this start of the unit."""
        invocation = self.show("InvocationID")
        return self.machine.run("journalctl", "--no-pager", f"_SYSTEMD_INVOCATION_ID={invocation}")

    def until_another(self, pid: str) -> None:
        """Until systemd has started it anew, and it is ready."""

        def is_up() -> bool:
            said = self.systemctl("show", "--property=MainPID,ActiveState").splitlines()
            return "ActiveState=active" in said and f"MainPID={pid}" not in said

        self.until(is_up)

    def engine(self, does: str, user: str = "engine") -> Any:
        """What an engine of a user tells that stores its blocks, or loads them."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        said = self.machine.run(*become, PYTHON, "/srv/engine.py", does)
        return json.loads(said.splitlines()[-1])

    def configure(self, text: str) -> None:
        """Settings of the unit for one test."""
        self.machine.write(f"/etc/systemd/system/{UNIT}.service.d/this.conf", text)
        self.machine.run("systemctl", "daemon-reload")


@pytest.fixture
def service(machine: Machine) -> Iterator[Service]:
    """The unit, started; afterwards as it was installed."""
    service = Service(machine)
    before = machine.run("cat", FILE)
    machine.write("/srv/engine.py", ENGINE)
    service.systemctl("start")
    yield service
    service.systemctl("stop")
    service.systemctl("clean", "--what=fdstore", check=False)
    service.systemctl("reset-failed", check=False)
    machine.write(FILE, before + "\n")
    service.configure("")


def test_it_is_ready_when_start_returns(service: Service) -> None:
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText") == "serving host memory at /run/kvferry/cpu"
    status = service.machine.run("/opt/kvferry/bin/kvferry", "status")
    assert f"pid {service.show('MainPID')}" in status
    assert "64 MiB" in status


def test_who_it_is_and_what_it_opens(service: Service) -> None:
    run = service.machine.run
    assert run("stat", "--format=%U", f"/proc/{service.show('MainPID')}") == "kvferry"
    stat = ["stat", "--format=%a %U %G"]
    assert run(*stat, "/run/kvferry") == "755 kvferry kvferry"
    assert run(*stat, "/run/kvferry/cpu") == "750 kvferry kvferry"
    assert run(*stat, "/run/kvferry/cpu/kvferry.sock") == "660 kvferry kvferry"


def test_all_of_its_memory_may_be_locked(service: Service) -> None:
    (rights,) = re.findall(r"CapBnd:\s+(\w+)", service.machine.run("cat", "/proc/1/status"))
    if not int(rights, 16) >> CAP_SYS_RESOURCE & 1:
        pytest.skip("no limit can be raised on this machine: it has no CAP_SYS_RESOURCE")
    limits = service.machine.run("cat", f"/proc/{service.show('MainPID')}/limits")
    assert re.findall(r"Max locked memory +(\S+) +(\S+)", limits) == [("unlimited",) * 2]


def test_who_may_use_it(service: Service) -> None:
    """A member of the group; and by a reload one that is no member. Nobody else, not even past
    the files."""
    assert service.engine("store")["right"]
    assert service.engine("store", "stranger") == {"outcome": "forbidden"}
    service.machine.script(f"sed -i 's/^# allow_uids.*/allow_uids = ['$(id -u stranger)']/' {FILE}")
    service.systemctl("reload")
    assert service.engine("store", "stranger")["right"]
    service.machine.script(f"sed -i 's/^allow_uids.*//' {FILE}")
    service.systemctl("reload")
    service.machine.script("chmod 755 /run/kvferry/cpu; chmod 666 /run/kvferry/cpu/*.sock")
    assert service.engine("store", "stranger") == {"outcome": "forbidden"}
    assert "forbidden x1" in service.machine.run("/opt/kvferry/bin/kvferry", "status")


def test_a_reload(service: Service) -> None:
    pid = service.show("MainPID")
    service.machine.script(f"echo '[events]\npublish = \"off\"' >> {FILE}", 30)
    service.systemctl("reload", check=False)
    assert "not reloaded" in service.log(), "a table stands there twice"
    service.machine.script(f"sed -i '$d' {FILE}; sed -i '$d' {FILE}")
    service.machine.script(f"sed -i 's/^# max_stores.*/max_stores = 7/' {FILE}")
    service.systemctl("reload")
    service.until(lambda: "limits.max_stores" in service.log())
    assert service.show("ActiveState") == "active"
    assert service.show("MainPID") == pid


def test_killed_it_comes_back(service: Service) -> None:
    pid = service.show("MainPID")
    service.systemctl("kill", "--signal=KILL")
    service.until_another(pid)
    assert int(service.show("NRestarts")) >= 1
    assert service.engine("store")["right"]


@pytest.mark.parametrize("how", [("kill", "--signal=KILL"), ("restart",)])
def test_its_blocks_come_back(service: Service, how: tuple[str, ...]) -> None:
    assert service.engine("store")["outcome"] == "done"
    time.sleep(2)  # blocks are sealed a moment after they were stored; nothing here shows it
    pid = service.show("MainPID")
    service.systemctl(*how)
    service.until_another(pid)
    loaded = service.engine("load")
    assert (loaded["outcome"], loaded.get("right")) == ("done", True)


def test_an_engine_finds_its_blocks_while_the_daemon_runs(service: Service) -> None:
    """So that it is the daemon's end that the test before this one is about."""
    assert service.engine("store")["outcome"] == "done"
    loaded = service.engine("load")
    assert (loaded["outcome"], loaded["right"]) == ("done", True)


def test_the_watchdog(service: Service) -> None:
    """One that is well is left alone, one that hangs is ended and started again."""
    service.configure("[Service]\nWatchdogSec=3\n")
    service.systemctl("restart")
    pid = service.show("MainPID")
    time.sleep(8)
    assert service.show("MainPID") == pid
    service.systemctl("kill", "--signal=STOP")
    service.until_another(pid)
    assert "atchdog" in service.machine.run("journalctl", "--no-pager", f"--unit={UNIT}")


def test_a_stop_under_load_is_a_clean_one(service: Service) -> None:
    busy = ["setpriv", "--reuid=engine", "--regid=engine", "--init-groups", PYTHON]
    service.machine.script("rm -f /run/busy; install -o engine /dev/null /run/busy")
    unit = ["systemd-run", "--quiet", "--unit=busy", "--property=RemainAfterExit=yes"]
    service.machine.run(*unit, *busy, "/srv/engine.py", "busy")
    try:
        service.until(lambda: service.machine.run("cat", "/run/busy") > "10")
        service.systemctl("stop")
        assert service.show("Result") == "success"
        assert service.show("ExecMainStatus") == "0"
        state = ["systemctl", "show", "--value", "--property=SubState", "busy"]
        service.until(lambda: service.machine.run(*state) == "exited")
    finally:
        service.machine.run("systemctl", "stop", "busy", check=False)
    assert service.machine.run("ls", "/run/kvferry") == "cpu", "other instances use the directory"
    assert service.machine.run("ls", "/run/kvferry/cpu") == "lock"


def test_one_that_cannot_start_says_why_and_gives_up_in_the_end(service: Service) -> None:
    service.systemctl("stop")
    service.configure("[Service]\nRestartSec=10ms\nRestartMaxDelaySec=20ms\n")
    service.machine.script(f'sed -i \'s/^size = .*/size = "100TiB"\\nchunk = "50TiB"/\' {FILE}')
    service.systemctl("start", check=False)
    service.until(lambda: service.show("ActiveState") == "failed")
    assert "pool_too_large" in service.show("StatusText")
    assert "pool_too_large" in service.machine.run("journalctl", "--no-pager", f"--unit={UNIT}")
    service.machine.script(f"sed -i 's/^size = .*/size = \"64MiB\"/; /^chunk =/d' {FILE}")
    service.systemctl("reset-failed")
    service.systemctl("start")
    assert service.show("ActiveState") == "active"


def test_how_exposed_it_is(service: Service) -> None:
    """By this systemd's own reckoning, which knows more than an older one."""
    said = service.machine.run("systemd-analyze", "security", UNIT, "--no-pager", "--threshold=21")
    assert "Overall exposure level" in said
    verified = service.machine.run("systemd-analyze", "verify", f"{UNIT}.service")
    assert "Unknown" not in verified
