"""Scripts print their usage, and an interrupted program ends without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.time_limits import TIMEOUT

TESTS = Path(__file__).parents[1]
SCRIPTS = sorted([*TESTS.glob("bench/*.py"), *TESTS.glob("gpu/vllm_*.py")])


def run(*arguments: object, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# One process for all of them, since most import torch.
USAGE = """
import contextlib, io, json, runpy, sys
from pathlib import Path

def outcome(script, option):
    sys.argv, sys.path[0] = [script, option], str(Path(script).parent)
    output, error, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    return status, output.getvalue(), error.getvalue()

for script in sys.argv[1:]:
    print(json.dumps([script, outcome(script, "--help"), outcome(script, "--no-such-option")]))
"""


def test_scripts_print_their_usage() -> None:
    done = run("-c", USAGE, *SCRIPTS, timeout=5 * TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
    results = list(map(json.loads, done.stdout.splitlines()))
    assert [script for script, *_ in results] == list(map(str, SCRIPTS))
    for script, (status, output, error), (refused, _, reason) in results:
        assert (status, error, refused) == (0, "", 2), script
        assert "usage: " in output, script
        assert "error: " in reason, script


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
