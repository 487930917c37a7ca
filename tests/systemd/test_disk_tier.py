"""A disk tier in the unit's state directory, as deploy/README.md describes, and a reboot."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.systemd_container import OFFLINE, SystemdContainer
from support.time_limits import TIMEOUT

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

README = Path(__file__).parents[2] / "deploy" / "README.md"
UNIT, DIRECTORY = "kvferryd@cpu", "/var/lib/kvferry"
DROP_IN = "/etc/systemd/system/kvferryd@.service.d/tier.conf"

ENGINE = '''
"""tier_engine.py store|find DIRECTORY: store eight keys, or promote and load them."""
import json, mmap, os, sys, time
from pathlib import Path
from kvferry.client import (
    Fingerprint, GPULoadStoreSpec, KeyLoadStoreSpec, Lookup, OffloadClient, OffloadingManager,
    offload_key,
)
from kvferry.proto.memory import FdAllocation, Location
from kvferry.proto.messages import Opened, OpenNamespace, Registered, RegisterKVCaches
from support.raw_client import RawClient, one_tensor

BLOCKS, PAGE = 8, 4096
fingerprint = Fingerprint("model", PAGE, key_bytes=12)
keys = tuple(offload_key(number.to_bytes(8, "big")) for number in range(BLOCKS))
right = b"".join(bytes([number + 1]) * PAGE for number in range(BLOCKS))
directory = Path(sys.argv[2])

with OffloadClient(directory, engine="engine") as client, RawClient(directory, "engine") as worker:
    memory = os.memfd_create("kv")
    os.ftruncate(memory, BLOCKS * PAGE)
    pages = mmap.mmap(memory, BLOCKS * PAGE)
    worker.ask(OpenNamespace(1, fingerprint), Opened)
    (handle,) = worker.deposit(memory)
    places = (FdAllocation(handle, BLOCKS * PAGE),), (Location(0, 0),)
    worker.ask(RegisterKVCaches(2, one_tensor(BLOCKS, PAGE), *places), Registered)
    client.open_namespace(fingerprint)
    gpu, host = GPULoadStoreSpec(range(BLOCKS)), KeyLoadStoreSpec(keys)
    found = 0
    if sys.argv[1] == "store":
        pages[:] = right
        client.transfer_async(1, (gpu, host))
    else:
        manager = OffloadingManager(client)
        assert manager.lookup(keys[0]) is Lookup.MISS, "the key is in the pool"
        deadline, pending = time.monotonic() + TIMEOUT, (Lookup.RETRY, Lookup.HIT_PENDING)
        while found < BLOCKS and time.monotonic() < deadline:  # a search can time out
            prefetch = manager.prefetch(keys)
            while any(manager.lookup(key) in pending for key in keys):
                time.sleep(0.01)
            found = sum(manager.lookup(key) is Lookup.HIT for key in prefetch.found_keys)
        client.transfer_async(1, (host, gpu))
    client.wait([1])
    (result,) = client.get_finished()
    print(json.dumps({"outcome": result.outcome, "found": found, "right": pages[:] == right}))
'''


def drop_in() -> str:
    """The drop-in of the instructions, with a smaller tier and write-through."""
    section = README.read_text().partition("## Disk tier")[2]
    (found,) = re.findall(
        r"(?m)^    \[Service\]\n    ExecStart=\n    ExecStart=.*--tier.*$", section
    )
    text = re.sub(r"(?m)^    ", "", str(found)).replace("200GiB", "64MiB")
    return f"{text} --tiers-disk-write write_through\n"


def encryption_commands() -> tuple[str, str]:
    """Of the instructions: those that install the package and make a key, and the line of the unit
    that passes it."""
    section = README.read_text().partition("### Encryption")[2]
    (commands,) = re.findall(r"(?m)^    (umask.*\n.*pip install.*\n.*/dev/urandom.*)$", section)
    (credential,) = re.findall(r"(?m)^    (LoadCredential=.*)$", section)
    return commands, credential


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class TieredService:
    """The unit with the drop-in."""

    def __init__(self, machine: SystemdContainer) -> None:
        self.machine = machine

    def systemctl(self, *arguments: str) -> str:
        return self.machine.run("systemctl", *arguments, UNIT)

    def stop(self) -> None:
        """Stop the unit. systemd cannot clean a unit that has failed, as after a kill."""
        self.systemctl("stop")
        self.machine.run("systemctl", "reset-failed", UNIT, check=False)

    def tier(self) -> Any:
        (tier,) = json.loads(self.machine.run("/opt/kvferry/bin/kvferry", "status", "--json"))[
            "tiers"
        ]
        return tier

    def lose_pool(self) -> None:
        """Stop the daemon, clear the descriptor store as a reboot does, and start it."""
        self.stop()
        self.systemctl("clean", "--what=fdstore")
        self.systemctl("start")
        until(lambda: self.tier()["state"] == "on")

    def has_plain_bytes(self) -> bool:
        """Whether bytes of the engine's blocks are on the disk."""
        search = (
            "import pathlib, sys; files = pathlib.Path(sys.argv[1]).rglob('*'); "
            "print(any(bytes([5]) * 512 in f.read_bytes() for f in files if f.is_file()))"
        )
        python = "/opt/kvferry/bin/python", "-c"
        return self.machine.run(*python, search, DIRECTORY).strip() == "True"

    def run_engine(self, action: str) -> Any:
        directory = self.machine.script("dirname /run/kvferry/cpu/lock")
        become = ["setpriv", "--reuid=engine", "--regid=engine", "--init-groups"]
        command = [*become, "env", "PYTHONPATH=/src/tests", "/opt/kvferry/bin/python"]
        output = self.machine.run(*command, "/srv/tier_engine.py", action, directory)
        return json.loads(output.splitlines()[-1])


@pytest.fixture
def service(machine: SystemdContainer) -> Iterator[TieredService]:
    """The unit with the drop-in, started. Restores the installed unit at the end."""
    machine.write("/srv/tier_engine.py", f"TIMEOUT = {TIMEOUT}\n{ENGINE}")
    machine.write(DROP_IN, drop_in())
    machine.run("systemctl", "daemon-reload")
    service = TieredService(machine)
    service.systemctl("start")
    yield service
    service.stop()
    service.systemctl("clean", "--what=fdstore", "--what=state")
    machine.script(f"rm {DROP_IN}; systemctl daemon-reload")


def test_the_unit_has_a_state_directory_for_its_tier(service: TieredService) -> None:
    stat = ["stat", "--format=%a %U %G"]
    assert service.machine.run(*stat, DIRECTORY) == "700 kvferry kvferry"
    until(lambda: service.tier()["state"] == "on")
    assert service.machine.run(*stat, f"{DIRECTORY}/cpu") == "700 kvferry kvferry"
    assert service.tier()["capacity_bytes"] == 64 << 20
    assert service.systemctl("is-active") == "active"


@pytest.mark.parametrize("kill", [False, True])
def test_blocks_are_found_when_the_pool_is_lost(service: TieredService, kill: bool) -> None:
    """The daemon is stopped or killed. Then the descriptor store is cleared, as by a reboot."""
    until(lambda: service.tier()["state"] == "on")
    assert service.run_engine("store")["outcome"] == "done"
    until(lambda: service.tier()["written"] == 8)
    if kill:
        service.systemctl("kill", "--signal=KILL")
    service.lose_pool()
    assert service.has_plain_bytes()
    assert service.run_engine("find") == {"outcome": "done", "found": 8, "right": True}
    tool = ["/opt/kvferry/bin/kvferry", "tier", "list", f"{DIRECTORY}/cpu"]
    assert re.search(r"\b8\b", service.machine.run(*tool))


def test_a_credential_encrypts_the_tier(service: TieredService) -> None:
    """The blocks are found with the key that encrypted them, and with no other."""
    commands, credential = encryption_commands()
    service.stop()
    service.machine.script(OFFLINE + commands, directory="/src")
    unit = drop_in().rstrip() + f" --tiers-disk-key-file tier.key\n{credential}\n"
    service.machine.write(DROP_IN, unit)
    service.machine.run("systemctl", "daemon-reload")
    service.systemctl("start")
    until(lambda: service.tier()["state"] == "on")
    assert service.run_engine("store")["outcome"] == "done"
    until(lambda: service.tier()["written"] == 8)
    service.lose_pool()
    assert not service.has_plain_bytes()
    assert service.run_engine("find") == {"outcome": "done", "found": 8, "right": True}
    service.machine.script(commands.splitlines()[-1])
    service.lose_pool()
    assert service.run_engine("store")["outcome"] == "done"
    until(lambda: service.tier()["written"] == 8)  # nothing was found: all are written again
