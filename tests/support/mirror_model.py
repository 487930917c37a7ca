"""A client's mirror of a namespace: a snapshot, and the key events that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.proto.keys import EventKind
from kvferry.proto.messages import KeyEvents, Snapshot


class MirrorModel:
    """A plain mirror of a namespace's keys.

    snapshot: its messages; None if the mirror has received all events. epoch: of
    the keys at the beginning.
    """

    def __init__(self, snapshot: Iterator[Any] | None = None, epoch: int = 0) -> None:
        self.snapshot = snapshot
        self.epoch = epoch
        self.ready, self.pending = set[bytes](), set[bytes]()
        self.sequence = 0
        self._parts = 0
        # Events received before the last part of the snapshot.
        self._early: list[KeyEvents] = []

    def receive(self, message: KeyEvents) -> None:
        if self.snapshot is not None:
            self._early.append(message)
            return
        self.sequence += 1
        assert message.sequence == self.sequence
        assert message.events
        self._check_epoch(message)
        for event in message.events:
            keys = set(event.keys)
            assert len(keys) == len(event.keys)
            self._check(event.kind, keys)
            self._apply(event.kind, keys)

    def read_part(self) -> None:
        """Read the next part of the snapshot. Early events are applied after the last one."""
        assert self.snapshot is not None
        part = next(self.snapshot)
        assert isinstance(part, Snapshot)
        assert (part.part, part.epoch) == (self._parts, self.epoch)
        assert self._parts == 0 or part.sequence == self.sequence
        self._parts, self.sequence = self._parts + 1, part.sequence
        (self.pending if part.pending else self.ready).update(part.keys)
        if part.last:
            assert next(self.snapshot, None) is None
            self.snapshot, early = None, self._early
            for message in early:  # a part may include changes that these events report
                self.sequence += 1
                assert message.sequence == self.sequence
                self._check_epoch(message)
                for event in message.events:
                    self._apply(event.kind, set(event.keys))

    def _check_epoch(self, message: KeyEvents) -> None:
        """Check that another epoch begins with the removal of all keys."""
        if message.events[0].kind is EventKind.CLEARED:
            self.epoch = message.epoch
        assert message.epoch == self.epoch

    def _check(self, kind: EventKind, keys: set[bytes]) -> None:
        """Check that the keys of an event are in the state that it ends, and in no other."""
        ended = {
            EventKind.STORED: self.pending,
            EventKind.ABANDONED: self.pending,
            EventKind.REMOVED: self.ready,
        }.get(kind, set())
        assert keys & (self.ready | self.pending) == keys & ended
        assert kind is EventKind.PENDING or keys <= ended

    def _apply(self, kind: EventKind, keys: set[bytes]) -> None:
        self.ready -= keys
        self.pending -= keys
        match kind:
            case EventKind.PENDING:
                self.pending |= keys
            case EventKind.STORED:
                self.ready |= keys
            case EventKind.CLEARED:
                self.ready, self.pending = set(), set()
