"""The command line: `kvferry status`, `top`, `release`, `doctor` and `bench`.

Exit status: 0 done; 1 failed, with one line on stderr; 2 wrong usage, or a package is missing; 129,
130, 143 after SIGHUP, ctrl-c, SIGTERM. Packages that only some commands need are imported when
those run: status needs no torch. Runs on the main thread.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvferry.proto.errors import KVFerryError

# Arguments of pip install. kvferry is on no index: its extras come from a checkout.
_INSTALL = {
    "typer": "'.[cli]' in a checkout of kvferry",
    "rich": "'.[cli]' in a checkout of kvferry",
    "torch": "'.[tensors]' in a checkout of kvferry",
    "matplotlib": "matplotlib",
}
# Seconds by which a callback has returned.
SOON = 0.01
_ENDS = signal.SIGHUP, signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. arguments: default: those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a locale has no letter for
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, _end)
    sys.unraisablehook = _once_more
    try:
        from kvferry.client.cli.app import app

        app(given, prog_name="kvferry", obj=given)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        _give_up(f"{package} is not installed: pip install {_INSTALL[package]}", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except KVFerryError as error:
        _give_up(" ".join(str(error).split()), 1)
    sys.exit(0)


def _end(number: int, _: object) -> NoReturn:
    """As ctrl-c does: the terminal is left as it was, and no daemon of a bench stays behind.

    Shells say again what the terminal has said.
    """
    for again in _ENDS:
        signal.signal(again, signal.SIG_IGN)
    sys.exit(128 + number)


def _once_more(ignored: sys.UnraisableHookArgs) -> None:
    """What ends us came in a callback, of the collector's or a weak set's, which nothing leaves."""
    end = ignored.exc_value
    if not isinstance(end, (SystemExit, KeyboardInterrupt)):
        sys.__unraisablehook__(ignored)
        return

    def leave(*_: object) -> NoReturn:
        raise end.with_traceback(None)

    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, SOON)


def _give_up(why: str, status: int) -> NoReturn:
    print(f"kvferry: {why}", file=sys.stderr)
    sys.exit(status)
