"""Daemons that are siblings, each with one engine."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.client import LocalDaemon, Lookup
from kvferry.proto.status import SiblingStatus
from kvferry.testing.engine import until
from support.patient_daemon import PatientDaemon
from support.restarting_daemons import RestartingDaemons
from support.tiered_engine import TieredEngine, keys
from support.time_limits import TIMEOUT


class SiblingDaemons:
    """`count` daemons with device cpu, which are siblings, and their engines.

    kept: numbers of those whose pool is kept over a restart.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        stack: ExitStack,
        kept: Container[int] = (),
        **options: Any,
    ) -> None:
        self.folders = [folder / str(number) for number in range(count)]
        self._stack, self._options, self._kept = stack, options, kept
        self.daemons = [self.start(number) for number in range(count)]
        self.engines = [TieredEngine(daemon, stack) for daemon in self.daemons]

    def start(self, number: int) -> LocalDaemon | RestartingDaemons:
        options: dict[str, Any] = {
            "pool_bytes": 1 << 20,
            "siblings_enabled": "true",
            "siblings_directories": ":".join(map(str, self.folders)),
            "state_dir": self.folders[0].parent / "state",
            **self._options,
        }
        folder = self.folders[number]
        if number in self._kept:
            folder.mkdir()
            kept = RestartingDaemons("cpu", folder, kept=True, **options)
            return self._stack.enter_context(kept)
        return self._stack.enter_context(PatientDaemon(runtime_dir=folder, **options))

    def kill(self, number: int) -> None:
        self.daemons[number].kill()
        self.engines[number].raw.session = ""  # nobody replies to its Goodbye

    def restart(self, number: int) -> None:
        """Start a daemon that was killed, and wait until its engine is connected."""
        daemon = self.daemons[number]
        if isinstance(daemon, RestartingDaemons):
            daemon.start()
        else:
            self.daemons[number] = self.start(number)
        self.engines[number].client.wait_connected(TIMEOUT)
        self.engines[number].open_raw()

    def statuses(self, number: int) -> tuple[SiblingStatus, ...]:
        return self.engines[number].client.status().siblings

    def wait_linked(self) -> None:
        """Wait until each can load from all others."""
        others = [True] * (len(self.folders) - 1)
        for number in range(len(self.folders)):
            until(partial(self._is_linked, number, others))

    def _is_linked(self, number: int, others: list[bool]) -> bool:
        """Also "on" without memory: a sibling may not have the namespace yet."""
        statuses = self.statuses(number)
        return [each.is_on and each.mapped_bytes > 0 for each in statuses] == others


def find_keys(engine: TieredEngine, numbers: Sequence[int]) -> None:
    """Wait until keys that a sibling has are loadable here."""

    def loadable() -> bool:
        engine.find(numbers)
        return {engine.manager.lookup(each) for each in keys(numbers)} == {Lookup.HIT}

    until(loadable)
