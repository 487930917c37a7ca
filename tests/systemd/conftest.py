"""A machine with the daemon installed as deploy/README.md says."""

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
# Its Python is never started often enough to be worth the files.
Environment=PYTHONDONTWRITEBYTECODE=1
"""


def cache() -> Path:
    """Where the bare system is kept between runs: $KVFERRY_TEST_CACHE, or among the user's."""
    if own := os.environ.get("KVFERRY_TEST_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry-tests"


@pytest.fixture(scope="session")
def commands() -> dict[str, str]:
    return sections(CHECKOUT / "deploy" / "README.md")


@contextmanager
def fresh(*, gpu: bool = False) -> Iterator[SystemdContainer]:
    """A machine where nothing is installed, with a checkout in /src."""
    if reason := missing(cache()):
        pytest.skip(reason)
    if gpu and not Path("/dev/nvidiactl").exists():
        pytest.skip("NVIDIA's devices are not here")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *extras["daemon"], *extras["cli"]]
    needed += [name for name in extras["dev"] if name.startswith("mooncake")]
    needed += project["build-system"]["requires"]
    root = Foundation(cache(), needed, CHECKOUT / "constraints.txt").copy()
    for name in SHIPPED:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, root / "src" / name, ignore=hidden)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(CHECKOUT / name, root / "src" / name)
    try:
        machine = SystemdContainer(root, gpu=gpu)
    except RuntimeError as error:
        pytest.skip(f"no container boots here: {error}")
    with machine:
        yield machine


@pytest.fixture(scope="session")
def bare() -> Iterator[SystemdContainer]:
    """A machine where nothing is installed."""
    with fresh() as machine:
        yield machine


@pytest.fixture(scope="session")
def machine(bare: SystemdContainer, commands: dict[str, str]) -> SystemdContainer:
    """A machine with the unit installed."""
    install(bare, commands["Install"])
    return bare


@pytest.fixture(scope="session")
def gpu_machine(commands: dict[str, str]) -> Iterator[SystemdContainer]:
    """The same with the GPUs of this one."""
    with fresh(gpu=True) as machine:
        install(machine, commands["Install"])
        yield machine


def install(machine: SystemdContainer, commands: str) -> None:
    """Do as the instructions say, and add users for it."""
    machine.script(OFFLINE + commands, directory="/src")
    machine.write(f"/etc/systemd/system/{TEMPLATE}.service.d/test.conf", DROP_IN)
    # The first size is that of the pool.
    machine.script("sed -i '0,/^# size = .*/s//size = \"64MiB\"/' /etc/kvferry/kvferryd.toml")
    machine.script("useradd -G kvferry engine; useradd stranger; systemctl daemon-reload")
