"""Containers with the daemon installed by the commands of deploy/README.md."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.systemd_container import (
    OFFLINE,
    Foundation,
    SystemdContainer,
    missing,
    sections,
)

CHECKOUT = Path(__file__).parents[2]
SHIPPED = ("client", "daemon", "deploy", "proto", "tests/kvferry", "tests/support")
TEMPLATE = "kvferryd@"

DROP_IN = """
[Service]
# Python starts too rarely to need bytecode files.
Environment=PYTHONDONTWRITEBYTECODE=1
"""


def cache_directory() -> Path:
    """The directory of the minimal system: $KVFERRY_TEST_CACHE, or in the user's cache."""
    if path := os.environ.get("KVFERRY_TEST_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry-tests"


def requirements() -> list[str]:
    """Packages that the daemon, the command line, Mooncake, and their build need."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    return [
        *project["project"]["dependencies"],
        *extras["daemon"],
        *extras["cli"],
        *[name for name in extras["encryption"] if name.startswith("cryptography")],
        *[name for name in extras["mooncake"] if name.startswith("mooncake")],
        *project["build-system"]["requires"],
    ]


@pytest.fixture(scope="session")
def commands() -> dict[str, str]:
    return sections(CHECKOUT / "deploy" / "README.md")


@contextmanager
def boot_container(*, gpu: bool = False) -> Iterator[SystemdContainer]:
    """A container without kvferry, with a checkout in /src."""
    if reason := missing(cache_directory()):
        pytest.skip(reason)
    if gpu and not Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has no NVIDIA GPU")
    root = Foundation(cache_directory(), requirements(), CHECKOUT / "constraints.txt").copy()
    for name in SHIPPED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, root / "src" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(CHECKOUT / name, root / "src" / name)
    try:
        machine = SystemdContainer(root, gpu=gpu)
    except RuntimeError as error:
        pytest.skip(f"this machine cannot boot a container: {error}")
    with machine:
        yield machine


@pytest.fixture(scope="session")
def bare() -> Iterator[SystemdContainer]:
    """A container without kvferry."""
    with boot_container() as machine:
        yield machine


@pytest.fixture(scope="session")
def machine(bare: SystemdContainer, commands: dict[str, str]) -> SystemdContainer:
    """A container with the unit installed."""
    install(bare, commands["Install"])
    return bare


@pytest.fixture(scope="session")
def gpu_machine(commands: dict[str, str]) -> Iterator[SystemdContainer]:
    """A container with the unit installed and with the GPUs of this machine."""
    with boot_container(gpu=True) as machine:
        install(machine, commands["Install"])
        yield machine


def install(machine: SystemdContainer, commands: str) -> None:
    """Run the commands of the instructions, and add the users of the tests."""
    machine.script(OFFLINE + commands, directory="/src")
    machine.write(f"/etc/systemd/system/{TEMPLATE}.service.d/test.conf", DROP_IN)
    # The first `size` in the file is that of the pool.
    machine.script("sed -i '0,/^# size = .*/s//size = \"64MiB\"/' /etc/kvferry/kvferryd.toml")
    machine.script("useradd -G kvferry engine; useradd stranger; systemctl daemon-reload")
