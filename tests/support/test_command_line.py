"""The command in this process."""

from __future__ import annotations

import signal
import sys

from support.command_line import kvferry, restored_handlers


def test_the_command_leaves_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with restored_handlers():
        assert kvferry("--help") == 0
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


def test_handlers_are_restored_between_tests() -> None:
    """By a fixture of all tests: other tests in this process have run the command."""
    kvferry("--help")


def test_handlers_have_been_restored() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sys.unraisablehook.__module__ != "kvferry.client.cli"
