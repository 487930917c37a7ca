"""The `kvferry` command in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.client.cli import main


def kvferry(*arguments: object) -> int:
    """Run the command. Returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Undo what the command installs for its process: handlers of signals and of exceptions.

    With them, SIGTERM raises SystemExit in whatever this process runs after the command.
    """
    numbers = signal.SIGHUP, signal.SIGTERM, signal.SIGALRM
    handlers = [signal.getsignal(number) for number in numbers]
    hook = sys.unraisablehook
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        sys.unraisablehook = hook
