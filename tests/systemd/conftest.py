"""A machine with the daemon installed as deploy/README.md says."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.systemd_container import WHEELS, Foundation, SystemdContainer, missing

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
    """By the title of its section, the first block of commands in it."""
    text = (CHECKOUT / "deploy" / "README.md").read_text()
    return dict(re.findall(r"(?ms)^## ([^\n]+)$(?:(?!^## ).)*?^```sh\n(.*?)^```", text))


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
    offline = f"export PIP_NO_INDEX=1 PIP_FIND_LINKS=/{WHEELS} PIP_NO_COMPILE=1\n"
    offline += "umask 077\n"  # as root has it on a machine that was made safe
    machine.script(offline + commands, directory="/src")
    machine.write(f"/etc/systemd/system/{TEMPLATE}.service.d/test.conf", DROP_IN)
    # The first size is that of the pool.
    machine.script("sed -i '0,/^# size = .*/s//size = \"64MiB\"/' /etc/kvferry/kvferryd.toml")
    machine.script("useradd -G kvferry engine; useradd stranger; systemctl daemon-reload")
