"""The command line: `kvferry status`, `top`, `release`, `tier`, `doctor` and `bench`.

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
    "structlog": "'.[daemon]' in a checkout of kvferry",
    "torch": "'.[tensors]' in a checkout of kvferry, or only torch's CPU build (smaller by 5 GB), "
    "which is enough for --device cpu",
}
# Seconds after which a callback has returned.
CALLBACK_DONE = 0.01
_TERMINATING = signal.SIGHUP, signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit. arguments: default: those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # characters that the locale cannot encode
    for number in _TERMINATING:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _exit_on_signal)
    sys.unraisablehook = _raise_exit_later
    try:
        from kvferry.client.cli.commands import app

        app(given, prog_name="kvferry", obj=given)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        _fail(f"{package} is not installed: pip install {_INSTALL[package]}", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except KVFerryError as error:
        _fail(" ".join(str(error).split()), 1)
    sys.exit(0)


def _exit_on_signal(number: int, _: object) -> NoReturn:
    """Exit as after ctrl-c: restore the terminal, stop the daemon of a bench.

    Further signals are ignored: a shell repeats the SIGHUP of its terminal.
    """
    for repeated in _TERMINATING:
        signal.signal(repeated, signal.SIG_IGN)
    sys.exit(128 + number)


def _raise_exit_later(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise an exit again that was raised in a callback of the garbage collector or a weak set.

    Python does not propagate exceptions from there. A timer raises it outside of the callback.
    """
    exit_ = unraisable.exc_value
    if not isinstance(exit_, (SystemExit, KeyboardInterrupt)):
        sys.__unraisablehook__(unraisable)
        return

    def raise_exit(*_: object) -> NoReturn:
        raise exit_.with_traceback(None)

    signal.signal(signal.SIGALRM, raise_exit)
    signal.setitimer(signal.ITIMER_REAL, CALLBACK_DONE)


def _fail(message: str, status: int) -> NoReturn:
    print(f"kvferry: {message}", file=sys.stderr)
    sys.exit(status)
