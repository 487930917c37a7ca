"""SIGHUP: reads the configuration again and applies the keys that can change at run time.

Called by the signal handler, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from kvferry.daemon import config as configuration
from kvferry.daemon.config import Config

# The keys that change without a restart.
LIVE = frozenset({"access.group", "log.level", "log.format"})

log = structlog.get_logger()


class Reload:
    """arguments: the command line, which overrides the file as at start. config: what runs.

    apply: takes a configuration over whole, or raises and changes nothing.
    """

    def __init__(
        self, arguments: Sequence[str] | None, config: Config, apply: Callable[[Config], None]
    ) -> None:
        self._arguments, self._running, self._apply = arguments, config, apply
        self._waiting: frozenset[str] = frozenset()

    def __call__(self) -> None:
        """Read and apply. Raises nothing: with a broken file all stays as it was, and is said."""
        try:
            config = configuration.read(self._arguments)
            self._apply(config)
        except Exception as error:  # a folder that somebody removed, for instance
            log.error("reload failed; the old configuration stays in effect", reason=str(error))
            return
        waiting = frozenset(configuration.differing(self._running, config)) - LIVE
        if waiting - self._waiting:
            log.warning("changed keys need a restart", keys=sorted(waiting))
        self._waiting = waiting
        log.info("configuration reloaded")
