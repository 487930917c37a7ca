"""SIGHUP: reads the configuration again and applies the keys that can change at run time.

Called by the signal handler, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from kvferry.daemon import config_reader
from kvferry.daemon.config import Config, changed_keys

# The keys that change without a restart.
LIVE = frozenset({"access.group", "log.level", "log.format"})

log = structlog.get_logger()


class Reload:
    """Reads the configuration again when it is called.

    arguments: the command line, which overrides the file as at start. config: the one in effect.
    apply: applies a whole configuration, or raises and changes nothing.
    """

    def __init__(
        self, arguments: Sequence[str] | None, config: Config, apply: Callable[[Config], None]
    ) -> None:
        self._arguments, self._running, self._apply = arguments, config, apply
        self._need_restart: frozenset[str] = frozenset()

    def __call__(self) -> None:
        """Read and apply the configuration. Raises nothing: after an error nothing has changed."""
        try:
            config = config_reader.read(self._arguments)
            self._apply(config)
        except Exception as error:  # for instance a directory that was removed
            log.error("reload failed; the old configuration stays in effect", reason=str(error))
            return
        changed = frozenset(changed_keys(self._running, config)) - LIVE
        if changed - self._need_restart:
            log.warning("changed keys need a restart", keys=sorted(changed))
        self._need_restart = changed
        log.info("configuration reloaded")
