"""The lowest versions that pyproject.toml allows: do the README's install and its commands work?

    python tests/lowest_versions.py --constraints > FILE     # "numpy==1.26" and so on, for pip
    python tests/lowest_versions.py                          # in an environment that has them

`make lowest` does both. The environment has what the README installs: no torch, no pytest.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "daemon", "cli"


def lowest_versions() -> dict[str, str]:
    """The lowest version of each package that the README's install brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return dict(requirement.split(">=") for requirement in requirements)


def check_installed() -> None:
    """Raise SystemExit unless exactly the lowest versions are installed. 1.26 and 1.26.0 agree."""
    for name, lowest in lowest_versions().items():
        if _numbers(version(name)) != _numbers(lowest):
            raise SystemExit(f"{name} {version(name)} is installed, not {lowest}: run make lowest")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in re.findall(r"\d+", text)]
    zeros = sum(1 for _ in takewhile(lambda number: number == 0, reversed(numbers)))
    return numbers[: len(numbers) - zeros]


def run_commands() -> None:
    """Run kvferry's commands, and the first code of the SDK's page, with a daemon with a disk."""
    from kvferry.client import LocalDaemon, endpoint

    page = (ROOT / "client" / "README.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0]
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-") as directory,
        LocalDaemon(tiers_disk_path=f"{directory}/tier", tiers_disk_size="64MiB") as daemon,
    ):
        for command in ("kvferryd --version", "kvferry --version", "kvferry --help"):
            _run(*command.split())
        endpoint.runtime_directories = lambda: [daemon.runtime_dir]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, "client/README.md", "exec"), {})
        print(output.getvalue())
        if "True" not in output.getvalue() or "False" in output.getvalue():
            raise SystemExit("the code of client/README.md has not moved its blocks")
        for command in ("status", "top --once", "doctor"):
            _run("kvferry", *command.split(), "-d", str(daemon.directory))
        _run("kvferry", "tier", "list", f"{directory}/tier")


def _run(command: str, *arguments: str) -> None:
    print(f"$ {command} {' '.join(arguments)}", flush=True)
    subprocess.run([Path(sys.executable).with_name(command), *arguments], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--constraints"]:
        print("\n".join(f"{name}=={lowest}" for name, lowest in lowest_versions().items()))
    else:
        check_installed()
        run_commands()
