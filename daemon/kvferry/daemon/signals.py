"""Signals: SIGTERM and SIGINT stop the daemon, SIGHUP reloads its configuration.

The end of another process may stop it, too (`stop.with_process`).

It notifies the service manager when the daemon stops, reloads, or changes its health. The handlers
run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial

from kvferry.daemon.systemd import Supervisor


class SignalHandlers:
    """Handlers of SIGTERM, SIGINT and SIGHUP.

    reload: reads and applies the configuration; raises nothing.

    Passes health on to the service manager, because a reload must restore the status that health
    has set. SIGINT stays ignored if it was ignored when the daemon started.
    """

    def __init__(self, supervisor: Supervisor, reload: Callable[[], None]) -> None:
        self._supervisor, self._reload = supervisor, reload
        self._status = ""
        self._ready = False

    @property
    def watchdog_seconds(self) -> float | None:
        """Interval in which `keep_alive` must be called; None if there is no watchdog."""
        return self._supervisor.watchdog_seconds

    def set_status(self, status: str) -> None:
        """Set the text that `systemctl status` shows once the daemon is ready."""
        self._status = status

    def ready(self) -> None:
        self._ready = True
        self._supervisor.ready(self._status)

    def keep_alive(self) -> None:
        self._supervisor.keep_alive()

    def report_unhealthy(self, why: str) -> None:
        """why: empty if the daemon is healthy again."""
        self._supervisor.status(f"unhealthy: {why}" if why else self._status)

    @contextlib.contextmanager
    def handled(self, stop: Callable[[], None], with_process: int = 0) -> Iterator[None]:
        """Handle signals while the context is open; their actions run on the event loop.

        with_process: id of a process whose end stops the daemon, too; 0: none.
        """
        loop = asyncio.get_running_loop()
        stop = partial(self._end, stop)
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: stop,
            signal.SIGHUP: self._hup,
        }
        # A shell starts background jobs with SIGINT ignored: ctrl-c is for the foreground job.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            handlers[signal.SIGINT] = stop
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one may be pending
        with watched_process(with_process, stop):
            yield
        for number in handlers:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the daemon is stopping: nothing to reload

    def _end(self, stop: Callable[[], None]) -> None:
        self._supervisor.stopping()
        stop()

    def _hup(self) -> None:
        if self._ready:
            self._supervisor.reloading()
        self._reload()
        if self._ready:
            self._supervisor.ready(self._status)


@contextlib.contextmanager
def watched_process(pid: int, ended: Callable[[], None]) -> Iterator[None]:
    """Call `ended` on the event loop when the process ends, also if it has ended. pid 0: none."""
    loop = asyncio.get_running_loop()
    if not pid:
        yield
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        loop.call_soon(ended)
        yield
        return

    def stop_watching() -> None:
        loop.remove_reader(pidfd)
        ended()

    loop.add_reader(pidfd, stop_watching)
    try:
        yield
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
