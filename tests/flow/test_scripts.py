"""Scripts print their usage, and an interrupted program ends without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.time_limits import TIMEOUT

TESTS = Path(__file__).parents[1]
SCRIPTS = sorted([*TESTS.glob("bench/*.py"), *TESTS.glob("gpu/vllm_*.py")])


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_its_usage(script: Path) -> None:
    done = run(script, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout
    done = run(script, "--no-such-option")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_an_unknown_scenario_is_refused() -> None:
    done = run(TESTS / "gpu" / "vllm_scenarios.py", "restart", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr.splitlines()[-1]
    assert "tensor-parallel" in done.stderr.splitlines()[-1]


# Ctrl-C

INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from {module} import main
main([])
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kvferry.daemon.__main__", "uvloop"),
        ("kvferry.daemon.__main__", "kvferry.daemon.transport.server"),
        ("kvferry.client.cli", "typer"),
        ("kvferry.client.cli", "kvferry.client.cli.status"),
    ],
)
def test_ctrl_c_while_modules_are_imported(module: str, name: str) -> None:
    done = run("-c", INTERRUPTED.format(module=module, name=name))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


BEFORE_THE_LOOP = """
import os, signal, sys
from kvferry.daemon import app
from kvferry.daemon.__main__ import main

make_pool = app.make_pool
def interrupted(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return make_pool(*arguments, **options)

app.make_pool = interrupted
main(["--pool-size", "1MiB", "--runtime-dir", sys.argv[1]])
"""


def test_ctrl_c_before_a_daemon_serves(tmp_path: Path) -> None:
    done = run("-c", BEFORE_THE_LOOP, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not list(tmp_path.glob("*/*.sock"))


DEMO = """
import os, signal, sys
from kvferry.testing import demo

demo.undisturbed = lambda engine: os.kill(os.getpid(), signal.SIGINT)
sys.exit(demo.main(["--prompt-tokens", "256", "--steps", "32"]))
"""


def test_ctrl_c_in_the_demo() -> None:
    done = run("-c", DEMO)
    assert (done.returncode, done.stderr) == (130, "")
    assert "kvferryd is another process" in done.stdout
