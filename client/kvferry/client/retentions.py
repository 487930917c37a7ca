"""What daemons have done with the keys that a client has asked them to retain. Client's thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Retention:
    """The answer to a retain, in numbers of distinct keys. It arrives while the client is polled.

    kept: retained. missing: not loadable, or the connection was lost. clipped: beyond a share of
    the namespace, the last keys first. refused: `kvferry status` shows the code of the error.
    unanswered: not known yet.
    """

    kept: int = 0
    missing: int = 0
    clipped: int = 0
    refused: int = 0
    unanswered: int = 0

    @property
    def done(self) -> bool:
        """Whether the daemon has answered for all keys."""
        return not self.unanswered


class Retentions:
    """The retentions of one session that are not answered."""

    def __init__(self) -> None:
        # For each request the number of its keys.
        self._unanswered: dict[int, tuple[Retention, int]] = {}

    def begin(self, request_id: int, retention: Retention, keys: int) -> None:
        """A request for some of the keys is sent."""
        retention.unanswered += keys
        self._unanswered[request_id] = retention, keys

    def answer(self, request_id: int, kept: int, missing: int, clipped: int) -> None:
        """The daemon has answered a request, or refused it: then the keys are in no number."""
        retention, keys = self._unanswered.pop(request_id, (Retention(), 0))
        retention.unanswered -= keys
        retention.kept += kept
        retention.missing += missing
        retention.clipped += clipped
        retention.refused += max(0, keys - kept - missing - clipped)

    def end_all(self) -> None:
        """The connection is lost: nothing is retained."""
        for request_id, (_, keys) in tuple(self._unanswered.items()):
            self.answer(request_id, 0, keys, 0)
