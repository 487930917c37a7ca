"""The verbs that never wait, shared by both clients."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvferry.client.connection import Connection
from kvferry.client.conversation import Conversation, TransferResult
from kvferry.client.endpoint import find_daemon
from kvferry.proto.errors import Gone
from kvferry.proto.messages import Welcome
from kvferry.proto.specs import TransferSpec

if TYPE_CHECKING:
    import torch

    from kvferry.client.tensors.canonical import CanonicalKVCaches

KVCaches: TypeAlias = (
    "CanonicalKVCaches | Mapping[str, torch.Tensor] | Mapping[str, Sequence[torch.Tensor]]"
)

ALIVE_EVERY = 0.02
"""Seconds between looks, while polling, at whether the daemon is still there."""


class NonBlocking:
    def __init__(self, directory: Path | str | None, engine: str, client: str) -> None:
        self._connection = Connection(Path(directory) if directory else find_daemon())
        self._conversation = Conversation(engine, client)
        self._next_look = 0.0

    @property
    def directory(self) -> Path:
        return self._connection.directory

    @property
    def engine(self) -> str:
        return self._conversation.engine

    @property
    def daemon(self) -> Welcome:
        """Who the daemon is, and what it allows."""
        assert self._conversation.welcome is not None
        return self._conversation.welcome

    def transfer_async(self, job_id: int, spec: TransferSpec, wait_for: int = 0) -> None:
        """Submit a transfer and return at once; how it ended comes from get_finished.

        spec: (source, destination). wait_for: the value of the engine's timeline that must be
        reached first; 0 for none. Raises Refused where this side can tell that the job cannot be
        accepted (BAD_SPEC, DUPLICATE_JOB, BUSY, MESSAGE_TOO_LARGE) and Gone once the daemon is
        known to be gone; the daemon's own refusal comes as the job's result.
        """
        data = self._conversation.submit(job_id, spec, wait_for)
        self._send(data)
        self._conversation.submitted(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """Results that are here and were not fetched yet: each once, in order per direction."""
        self._take_in()
        if not self._conversation.idle:
            now = time.monotonic()
            if now > self._next_look:
                self._next_look = now + ALIVE_EVERY
                self._look()
        return self._conversation.results()

    def cancel(self, job_ids: Collection[int]) -> None:
        """Give jobs up; each still ends once, as cancelled, or done where it was too late."""
        self._send(self._conversation.cancel(job_ids))

    def _send(self, data: bytes) -> None:
        self._connection.send(data)

    def _drain(self) -> None:
        self._take_in()
        self._look()

    def _take_in(self) -> bool:
        """Take in what has arrived; whether that was anything."""
        return self._connection.drain(self._conversation.feed)

    def _look(self) -> None:
        """Notice that the daemon went; what it said before counts."""
        try:
            self._connection.check_alive()
        except Gone as error:
            if self._conversation.ended is None:
                self._take_in()
                self._conversation.lose(error)
