"""Connecting an engine that starts: it waits for a daemon that runs, and for no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvferry.proto.errors import KVFerryError, Refused

# Seconds to wait for a daemon that runs when an engine starts.
CONNECT_TIMEOUT = 5.0


class Connectable(Protocol):
    """An OffloadClient, or an OffloadingManager."""

    def poll(self) -> None: ...

    def wait_connected(self, timeout: float | None = None) -> None: ...


def connect_if_running(
    who: str,
    client: Connectable,
    find_daemons: Iterable[Callable[[], Path]],
    timeout: float,
    log: logging.Logger,
) -> None:
    """Wait for the daemons that run now. Without them, the engine starts, and polling connects.

    who: for the log, which is the engine's. A refusal is logged by the client, which connects again
    in case that the daemon or its configuration changes.
    """
    try:
        with suppress(Refused):  # the client meets it, too
            for find_daemon in find_daemons:
                find_daemon()
        client.wait_connected(timeout)
    except KVFerryError as error:
        if isinstance(error.__cause__, Refused):
            with suppress(KVFerryError):
                client.poll()  # logs it, also if the engine is idle
        else:
            log.warning("kvferry: %s continues without its daemon for now: %s", who, error)
