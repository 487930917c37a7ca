"""The system call filters of the unit and of the containers allow and refuse the same."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.seccomp_profile import PROFILE, REFUSED_CALLS
from support.time_limits import TIMEOUT

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "kvferryd@.service").read_text()
QUADLET = (DEPLOY / "containers" / "kvferryd@.container").read_text()
MANIFEST = (DEPLOY / "containers" / "kubernetes-daemon.yml").read_text()
PAGE = (DEPLOY / "containers.md").read_text()
RULES: list[dict[str, Any]] = json.loads(PROFILE.read_text())["syscalls"]
*LISTS, RUNTIMES = [rule for rule in RULES if len(rule["names"]) > 1]
CALLS = [name for rule in LISTS for name in rule["names"]]
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
# CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWNS.
NAMESPACES = (
    0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000
)


def settings(name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT)


@pytest.fixture(scope="module")
def groups() -> dict[str, set[str]]:
    """What systemd's named groups contain; each may name others."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    command = ["systemd-analyze", "--no-pager", "syscall-filter"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT).stdout
    blocks = re.findall(r"(?m)^(@\S+)\n((?: +\S.*\n)+)", listed)
    return {name: set(re.findall(r"(?m)^ +([@\w]\S*)$", lines)) for name, lines in blocks}


def expanded(name: str, groups: dict[str, set[str]]) -> set[str]:
    if not name.startswith("@"):
        return {name}
    return {each for inner in groups[name] for each in expanded(inner, groups)}


def allowed_by_unit(groups: dict[str, set[str]]) -> set[str]:
    """systemd applies the lines in their order, and always adds @default."""
    allowed = expanded("@default", groups)
    for line in settings("SystemCallFilter"):
        names = {each for name in line.lstrip("~").split() for each in expanded(name, groups)}
        allowed = allowed - names if line.startswith("~") else allowed | names
    return allowed


def test_the_unit_allows_what_the_profile_allows(groups: dict[str, set[str]]) -> None:
    """Except for calls that are newer than this systemd."""
    known = expanded("@known", groups)
    assert len(known & {*CALLS}) > 150
    assert {*CALLS} & known <= allowed_by_unit(groups)
    assert "setresuid" in RUNTIMES["names"]
    assert "setresuid" not in allowed_by_unit(groups)


def test_both_refuse_dangerous_calls(groups: dict[str, set[str]]) -> None:
    assert {*REFUSED_CALLS} <= expanded("@known", groups)
    assert not {*REFUSED_CALLS} & allowed_by_unit(groups)
    assert not {*REFUSED_CALLS} & {name for rule in RULES for name in rule["names"]}


def test_both_fail_with_the_same_error() -> None:
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert [errno.errorcode[profile["defaultErrnoRet"]]] == settings("SystemCallErrorNumber")
    # A profile without architectures is for the native one.
    assert profile.keys() == {"defaultAction", "defaultErrnoRet", "syscalls"}
    assert settings("SystemCallArchitectures") == ["native"]


def test_both_allow_the_same_sockets_and_no_namespaces() -> None:
    sockets = [rule for rule in RULES if rule["names"] == ["socket"]]
    assert {rule["comment"]: rule["args"][0]["value"] for rule in sockets} == FAMILIES
    assert settings("RestrictAddressFamilies") == [" ".join(FAMILIES)]
    (clone,) = [rule for rule in RULES if rule["names"] == ["clone"]]
    (mask,) = clone["args"]
    assert (mask["op"], mask["value"], mask["valueTwo"]) == ("SCMP_CMP_MASKED_EQ", NAMESPACES, 0)
    (clone3,) = [rule for rule in RULES if rule["names"] == ["clone3"]]
    assert clone3["errnoRet"] == errno.ENOSYS
    assert settings("RestrictNamespaces") == ["yes"]


def test_the_containers_use_the_profile() -> None:
    assert f"\nSeccompProfile=/etc/containers/{PROFILE.name}\n" in QUADLET
    assert f"#     cp deploy/containers/{PROFILE.name} /etc/containers/\n" in QUADLET
    assert f"seccompProfile: {{type: Localhost, localhostProfile: {PROFILE.name}}}" in MANIFEST
    assert f"/var/lib/kubelet/seccomp/{PROFILE.name}" in PAGE
    assert f"--security-opt seccomp=deploy/containers/{PROFILE.name}" in PAGE
