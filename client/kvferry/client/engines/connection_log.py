"""ConnectionLog: what an engine's log says of what it got of its daemons.

Called in the scheduler's thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from kvferry.client.manager import OffloadingManager
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.proto.messages import SIBLINGS
from kvferry.proto.sizes import format_size


class ConnectionLog:
    """Logs what an engine got of its daemons: when all are connected, and when that changes.

    log: the engine's. block_tokens: tokens of a host block, for each KV cache group; empty if not
    known. notes: further parts of the line.
    """

    def __init__(
        self, log: logging.Logger, block_tokens: Sequence[int] = (), notes: Sequence[str] = ()
    ) -> None:
        self._log, self._block_tokens, self._notes = log, block_tokens, notes
        # Number of sessions so far, of all ranks; the lines of the last message.
        self._sessions = 0
        self._logged: list[str] = []

    def update(self, manager: OffloadingManager) -> None:
        """Called in each step."""
        sessions = sum([client.incarnation for client in manager.clients])
        if sessions == self._sessions or manager.gone is not None:
            return
        self._sessions = sessions
        said = [self._summary(manager), *_shortfalls(manager.clients)]
        if said != self._logged:
            self._logged = said
            summary, *shortfalls = said
            self._log.info("kvferry: %s", summary)
            for shortfall in shortfalls:
                self._log.warning("kvferry: %s", shortfall)

    def _summary(self, manager: OffloadingManager) -> str:
        clients = manager.clients
        spaces = [client.namespace for client in clients]
        blocks = [space.opened.num_blocks for space in spaces]
        opened = spaces[0].opened
        parts = [
            f"{format_size(sum(space.host_bytes for space in spaces))} of host memory",
            # Without replicas each key takes a block of every rank.
            self._tokens(sum(blocks) if manager.writers.count > 1 else min(blocks)),
            f"namespace {opened.name}",
            f"policy {opened.policy}",
            *self._notes,
            f"siblings {'enabled' if SIBLINGS in opened.tiers else 'disabled'}",
            f"tiers: {', '.join(t for t in opened.tiers if t != SIBLINGS) or 'none'}",
        ]
        daemons = [f"{client.directory} ({client.daemon.device.name})" for client in clients]
        noun = "daemon" if len(daemons) == 1 else "daemons"
        return f"{', '.join(part for part in parts if part)}, {noun} {', '.join(daemons)}"

    def _tokens(self, blocks: int) -> str:
        """A prompt takes host blocks of each KV cache group, or fewer of a window."""
        groups = self._block_tokens
        if not groups:
            return ""
        tokens = math.floor(blocks / sum(Fraction(1, each) for each in groups))
        return f"{'at least ' if len(groups) > 1 else ''}{tokens:,} tokens"


def _shortfalls(clients: Iterable[NonBlockingClient]) -> list[str]:
    """For each daemon that gave less host memory than was asked for, why."""
    return [
        f"less host memory than it could use, of daemon {client.directory}: {shortfall}"
        for client in clients
        if (shortfall := client.namespace.shortfall)
    ]
