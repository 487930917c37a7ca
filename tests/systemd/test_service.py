"""The installed unit under a real systemd: operations of an operator, and failures."""

from __future__ import annotations

import errno
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.seccomp_profile import REFUSED_CALLS, probe
from support.systemd_container import HOST, SystemdContainer
from support.time_limits import TIMEOUT

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).parents[2]
FILE = "/etc/kvferry/kvferryd.toml"
PYTHON = "/opt/kvferry/bin/python"
CAP_SYS_RESOURCE = 24
ENGINE = Path(__file__).with_name("key_engine.py")


class SystemdService:
    """The unit for a device in a container. device: "cpu", or a GPU's index."""

    def __init__(self, machine: SystemdContainer, device: str) -> None:
        self.machine, self.device, self.unit = machine, device, f"kvferryd@{device}"

    @property
    def directory(self) -> str:
        """The directory of its sockets."""
        return self.machine.script("dirname /run/kvferry/*/lock")

    def systemctl(self, command: str, *options: str, check: bool = True) -> str:
        return self.machine.run("systemctl", command, self.unit, *options, check=check)

    def show(self, name: str) -> str:
        """A property of the unit, from systemctl show."""
        return self.systemctl("show", "--value", f"--property={name}")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, self.systemctl("status", "--no-pager", check=False)
            time.sleep(0.1)

    def log(self) -> str:
        """The log since the last start of the unit."""
        return self.journal(f"_SYSTEMD_INVOCATION_ID={self.show('InvocationID')}")

    def journal(self, *matches: str) -> str:
        return self.machine.run("journalctl", "--no-pager", *matches)

    def wait_restarted(self, pid: str) -> None:
        """Wait until systemd has started another process than `pid`, and it is ready."""

        def is_up() -> bool:
            shown = self.systemctl("show", "--property=MainPID,ActiveState").splitlines()
            return "ActiveState=active" in shown and f"MainPID={pid}" not in shown

        self.until(is_up)

    def run_engine(self, action: str, user: str = "engine") -> Any:
        """Run an engine as a user, to store or load its blocks. Returns its output."""
        output = self.machine.run(*self.engine_command(action, user))
        return json.loads(output.splitlines()[-1])

    def engine_command(self, action: str, user: str = "engine") -> list[str]:
        """On a GPU the engine uses the torch of the host."""
        arguments = [self.directory, action]
        if self.device == "cpu":
            become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
            return [*become, "env", "PYTHONPATH=/src/tests", PYTHON, "/srv/engine.py", *arguments]
        uid, groups = (self.machine.run("id", option, user) for option in ("-u", "-G"))
        become = ["chroot", f"--userspec={uid}:{uid}", f"--groups={groups.replace(' ', ',')}"]
        source = self.machine.root / "src"
        path = [source / name for name in ("proto", "client", "tests")]
        path += [
            Path(name) for name in sys.path if name and not Path(name).is_relative_to(CHECKOUT)
        ]
        python = ["env", f"PYTHONPATH={':'.join(map(str, path))}", sys.executable]
        return [*become, HOST, *python, f"{self.machine.root}/srv/engine.py", *arguments]

    def configure(self, text: str) -> None:
        """Write a drop-in of the unit for one test."""
        self.machine.write(f"/etc/systemd/system/{self.unit}.service.d/this.conf", text)
        self.machine.run("systemctl", "daemon-reload")


@pytest.fixture(params=["cpu", pytest.param("0", marks=pytest.mark.gpu)])
def service(request: pytest.FixtureRequest) -> Iterator[SystemdService]:
    """The unit, started. Restores the installed unit at the end."""
    machine = request.getfixturevalue("machine" if request.param == "cpu" else "gpu_machine")
    service = SystemdService(machine, request.param)
    before = machine.run("cat", FILE)
    machine.write("/srv/engine.py", ENGINE.read_text())
    service.systemctl("start", check=False)
    assert service.show("ActiveState") == "active", service.journal(f"--unit={service.unit}")
    yield service
    service.systemctl("stop")
    service.systemctl("clean", "--what=fdstore", check=False)
    service.systemctl("reset-failed", check=False)
    machine.write(FILE, before + "\n")
    service.configure("")


def test_the_daemon_is_ready_when_start_returns(service: SystemdService) -> None:
    assert service.show("ActiveState") == "active"
    text = service.show("StatusText")
    assert re.fullmatch(rf"serving (host memory|.*NVIDIA.*) at {service.directory}", text)
    status = service.machine.run("/opt/kvferry/bin/kvferry", "status")
    assert f"pid {service.show('MainPID')}" in status
    assert "64 MiB" in status


def test_the_user_and_permissions_of_the_daemon(service: SystemdService) -> None:
    run = service.machine.run
    assert run("stat", "--format=%U", f"/proc/{service.show('MainPID')}") == "kvferry"
    stat = ["stat", "--format=%a %U %G"]
    assert run(*stat, "/run/kvferry") == "755 kvferry kvferry"
    assert run(*stat, service.directory) == "750 kvferry kvferry"
    assert run(*stat, f"{service.directory}/kvferry.sock") == "660 kvferry kvferry"


def test_the_daemon_may_lock_all_of_its_memory(service: SystemdService) -> None:
    (bounds,) = re.findall(r"CapBnd:\s+(\w+)", service.machine.run("cat", "/proc/1/status"))
    if not int(bounds, 16) >> CAP_SYS_RESOURCE & 1:
        pytest.skip("this machine has no CAP_SYS_RESOURCE, so no limit can be raised")
    limits = service.machine.run("cat", f"/proc/{service.show('MainPID')}/limits")
    assert re.findall(r"Max locked memory +(\S+) +(\S+)", limits) == [("unlimited",) * 2]


def test_only_members_of_the_group_may_connect(service: SystemdService) -> None:
    """The daemon refuses other users even if file permissions allow the connection."""
    assert service.run_engine("store")["right"]
    assert service.run_engine("store", "stranger") == {"outcome": "forbidden"}
    folder = service.directory
    service.machine.script(f"chmod 755 {folder}; chmod 666 {folder}/*.sock")
    assert service.run_engine("store", "stranger") == {"outcome": "forbidden"}
    status = service.machine.run("/opt/kvferry/bin/kvferry", "status")
    assert re.search("forbidden x[1-9]", status), status  # a slow client is refused again


def test_a_reload(service: SystemdService) -> None:
    pid = service.show("MainPID")
    service.machine.script(f"echo '[events]\npublish = \"off\"' >> {FILE}")
    service.systemctl("reload", check=False)
    service.until(lambda: "reload failed" in service.log())  # the file has a table twice
    service.machine.script(f"sed -i '$d' {FILE}; sed -i '$d' {FILE}")
    service.machine.script(f"sed -i 's/^# max_stores.*/max_stores = 7/' {FILE}")
    service.systemctl("reload")
    service.until(lambda: "limits.max_stores" in service.log())
    assert service.show("ActiveState") == "active"
    assert service.show("MainPID") == pid


def test_a_killed_daemon_is_restarted(service: SystemdService) -> None:
    pid = service.show("MainPID")
    service.systemctl("kill", "--signal=KILL")
    service.wait_restarted(pid)
    assert int(service.show("NRestarts")) >= 1
    assert service.run_engine("store")["right"]


def test_an_engine_of_its_user_keeps_its_shared_memory(service: SystemdService) -> None:
    """With CUDA MPS the engine and the daemon have one user.

    A daemon that ends must not remove the engine's files in /dev/shm.
    """
    service.configure("[Service]\nUser=engine\nGroup=engine\n")
    service.systemctl("restart")
    become = ["setpriv", "--reuid=engine", "--regid=engine", "--init-groups"]
    service.machine.run(*become, "touch", "/dev/shm/engine")
    pid = service.show("MainPID")
    service.systemctl("kill", "--signal=KILL")
    service.wait_restarted(pid)
    service.machine.run("rm", "/dev/shm/engine")


@pytest.mark.parametrize("how", [("kill", "--signal=KILL"), ("restart",)])
def test_blocks_are_restored_after_a_kill(service: SystemdService, how: tuple[str, ...]) -> None:
    loaded = {}
    # Blocks are committed some time after their store; the status does not show it.
    for seconds in (2, 10, 30):
        assert service.run_engine("store")["outcome"] == "done"
        time.sleep(seconds)
        pid = service.show("MainPID")
        service.systemctl(*how)
        service.wait_restarted(pid)
        loaded = service.run_engine("load")
        if loaded["outcome"] != "miss":
            break
    assert (loaded["outcome"], loaded.get("right")) == ("done", True)


def test_the_watchdog(service: SystemdService) -> None:
    """systemd does not restart a healthy daemon, and restarts one that hangs."""
    service.configure("[Service]\nWatchdogSec=6\n")
    service.systemctl("restart")
    pid = service.show("MainPID")
    time.sleep(10)
    assert service.show("MainPID") == pid
    service.systemctl("kill", "--signal=STOP")
    service.wait_restarted(pid)
    service.until(lambda: "atchdog" in service.journal(f"--unit={service.unit}"))


def test_a_stop_under_load_succeeds(service: SystemdService) -> None:
    folder, busy = service.directory, "/run/busy"
    service.machine.script(f": > {busy}")
    unit = ["systemd-run", "--quiet", "--unit=busy", "--property=RemainAfterExit=yes"]
    unit.append(f"--property=StandardOutput=file:{busy}")
    service.machine.run(*unit, *service.engine_command("busy"))
    try:
        service.until(lambda: len(service.machine.run("cat", busy)) > 99)
        service.systemctl("stop")
        assert service.show("Result") == "success"
        assert service.show("ExecMainStatus") == "0"
        state = ["systemctl", "show", "--value", "--property=SubState", "busy"]
        service.until(lambda: service.machine.run(*state) == "exited")
    finally:
        service.machine.run("systemctl", "stop", "busy", check=False)
    assert service.directory == folder, "the directory changed"
    assert service.machine.run("ls", folder) == "lock"


def test_a_unit_that_cannot_start_reports_the_reason_and_stops(service: SystemdService) -> None:
    service.systemctl("stop")
    service.configure("[Service]\nRestartSec=10ms\nRestartMaxDelaySec=20ms\n")
    service.machine.script(f'sed -i \'s/^size = .*/size = "100TiB"\\nchunk = "50TiB"/\' {FILE}')
    service.systemctl("start", check=False)
    service.until(lambda: service.show("ActiveState") == "failed")
    assert "pool_too_large" in service.show("StatusText")
    service.until(lambda: "pool_too_large" in service.journal(f"--unit={service.unit}"))
    service.machine.script(f"sed -i 's/^size = .*/size = \"64MiB\"/; /^chunk =/d' {FILE}")
    service.systemctl("reset-failed")
    service.systemctl("start")
    assert service.show("ActiveState") == "active"


def test_the_unit_refuses_dangerous_calls(service: SystemdService) -> None:
    service.machine.write("/srv/probe.py", probe())
    service.configure(f"[Service]\nExecStartPre={PYTHON} /srv/probe.py\n")
    service.systemctl("restart")
    service.until(lambda: "userfaultfd" in service.log())
    (found,) = re.findall(r"\{.*\}", service.log())
    errors = dict.fromkeys((*REFUSED_CALLS, "unshare"), errno.EPERM)
    assert json.loads(found) == {**errors, "socket": errno.EAFNOSUPPORT}


def test_the_unit_may_open_gpu_devices_only(service: SystemdService) -> None:
    """Skipped if the kernel of this machine does not let systemd restrict devices."""
    node, read = "/srv/some-device", "head -c0 < /srv/some-device"
    service.machine.script(f"rm -f {node}; mknod {node} c 1 11; {read}")
    closed = ["systemd-run", "--quiet", "--pipe", "--wait", "--property=DevicePolicy=closed"]
    output = service.machine.run(*closed, "/bin/sh", "-c", f"{read} && echo opened", check=False)
    if "opened" in output:
        pytest.skip("systemd cannot restrict devices on this machine")
    assert "not permitted" in output
    assert service.show("DevicePolicy") == "closed"
    assert service.run_engine("store")["right"]
