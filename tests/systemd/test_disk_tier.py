"""A disk tier in the unit's state directory, as deploy/README.md describes, and a reboot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.engine import until
from support.systemd_container import OFFLINE, SystemdContainer

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

README = Path(__file__).parents[2] / "deploy" / "README.md"
ENGINE = Path(__file__).with_name("key_engine.py")
UNIT, DIRECTORY = "kvferryd@cpu", "/var/lib/kvferry"
DROP_IN = "/etc/systemd/system/kvferryd@.service.d/tier.conf"


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
        output = self.machine.run(*command, "/srv/engine.py", directory, action)
        return json.loads(output.splitlines()[-1])

    def load(self) -> tuple[str, bool | None]:
        """Promote and load the blocks. Returns the outcome, and whether they are right."""
        found = self.run_engine("find")
        return found["outcome"], found.get("right")


@pytest.fixture
def service(machine: SystemdContainer) -> Iterator[TieredService]:
    """The unit with the drop-in, started. Restores the installed unit at the end."""
    machine.write("/srv/engine.py", ENGINE.read_text())
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
    assert service.load() == ("done", True)
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
    assert service.load() == ("done", True)
    service.machine.script(commands.splitlines()[-1])
    service.lose_pool()
    assert service.run_engine("store")["outcome"] == "done"
    until(lambda: service.tier()["written"] == 8)  # nothing was found: all are written again
