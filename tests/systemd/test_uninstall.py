"""The other instructions: an upgrade, and an uninstallation that removes everything.

This test must run last in its folder, because it uninstalls the daemon in the shared container.
"""

from __future__ import annotations

import pytest

from support.systemd_container import WHEELS, SystemdContainer

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]


def test_an_upgrade_and_an_uninstallation(
    machine: SystemdContainer, commands: dict[str, str]
) -> None:
    unit = "kvferryd@cpu"
    machine.run("systemctl", "enable", "--now", unit)
    pid = machine.run("systemctl", "show", "--value", "--property=MainPID", unit)
    offline = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS=/{WHEELS}\numask 077\n"
    machine.script(offline + commands["Upgrade"], directory="/src")
    assert machine.run("systemctl", "is-active", unit) == "active"
    assert machine.run("systemctl", "show", "--value", "--property=MainPID", unit) != pid
    machine.script("userdel engine; userdel stranger")
    machine.script(commands["Uninstall"])
    assert "kvferry" not in machine.run("systemctl", "list-units", "--all", "--plain", "kvferry*")
    assert machine.run("getent", "passwd", "kvferry", check=False) == ""
    left = machine.run(
        "find", "/etc", "/opt", "/run", "/usr", "/var/lib", "-xdev", "-name", "kvferry*"
    )
    own = {f"/etc/systemd/system/{name}.service.d" for name in (unit, "kvferryd@")}
    assert set(left.split()) <= own, "the drop-ins of the tests"
