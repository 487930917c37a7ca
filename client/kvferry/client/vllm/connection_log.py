"""What vLLM's log says of the connection: what the engine got when it is there, and why it is not.

Used by both sides of the connector, in their threads. Does not import vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from fractions import Fraction

from kvferry.client.manager import OffloadingManager
from kvferry.client.nonblocking import NonBlockingClient
from kvferry.client.vllm.engine_config import EngineConfig
from kvferry.proto.messages import SIBLINGS
from kvferry.proto.sizes import format_size

# A child of vLLM's logger, which is the only one that vLLM configures: of other loggers, Python
# writes warnings as bare text, and nothing below.
vllm_log = logging.getLogger("vllm.kvferry")


class ConnectionLog:
    """Logs what an engine got of its daemons: when all are connected, and when that changes."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
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
            vllm_log.info("kvferry: %s", summary)
            for shortfall in shortfalls:
                vllm_log.warning("kvferry: %s", shortfall)

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
            f"store {self._config.store_mode.value}",
            f"siblings {'enabled' if SIBLINGS in opened.tiers else 'disabled'}",
            f"tiers: {', '.join(t for t in opened.tiers if t != SIBLINGS) or 'none'}",
        ]
        daemons = [f"{client.directory} ({client.daemon.device.name})" for client in clients]
        noun = "daemon" if len(daemons) == 1 else "daemons"
        return f"{', '.join(part for part in parts if part)}, {noun} {', '.join(daemons)}"

    def _tokens(self, blocks: int) -> str:
        """A prompt takes a host block per chunk and KV cache group, or fewer of a window."""
        groups = self._config.chunk_tokens
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
