"""The client's mirror against a namespace, with messages that are delayed and lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.client.mirror import Mirror
from kvferry.proto.keys import EventKind, Lookup, OffloadKey
from kvferry.proto.messages import KeyEvent, KeyEvents, Snapshot

PROFILE = settings(max_examples=200)
KEYS = tuple(bytes([n]) * 4 for n in range(6))
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING

State: TypeAlias = dict[OffloadKey, Lookup]


class SimulatedDaemon:
    """A daemon's namespace, a wire that can drop messages, and the client's mirror."""

    def __init__(self) -> None:
        # The resident keys at each number, and their epoch.
        self.states: list[State] = [{}]
        self.epochs = [0]
        self.wire: deque[KeyEvents | Snapshot] = deque()
        self.streams: list[Iterator[Snapshot]] = [self.snapshot()]
        # Requests for a snapshot that the daemon has not received yet.
        self.requested = 0
        self.mirror = Mirror()
        self.mirror.track_changes()
        # The hits at the last check.
        self.known_hits: set[OffloadKey] = set()

    def send_events(
        self, kind: EventKind, keys: tuple[OffloadKey, ...], epoch: int | None = None
    ) -> None:
        state = dict(self.states[-1])
        if kind is EventKind.CLEARED:
            state.clear()
        for key in keys:
            state.pop(key, None)
            if kind in (EventKind.STORED, EventKind.BORROWED, EventKind.PENDING):
                state[key] = PENDING if kind is EventKind.PENDING else HIT
        self.states.append(state)
        self.epochs.append(self.epochs[-1] if epoch is None else epoch)
        events = (KeyEvent(kind, keys),)
        self.wire.append(KeyEvents(len(self.states) - 1, events, self.epochs[-1]))

    def reset(self) -> None:
        """Epochs differ, but need not grow."""
        known = {*self.epochs}
        epoch = next(each for each in (9, 3, *range(10, 99)) if each not in known)
        self.send_events(EventKind.CLEARED, (), epoch=epoch)

    def snapshot(self) -> Iterator[Snapshot]:
        """A snapshot of the resident keys, in parts of at most two keys."""
        sequence, state, epoch = len(self.states) - 1, self.states[-1], self.epochs[-1]
        parts = [
            (pending is PENDING, tuple(keys[at : at + 2]))
            for pending in (HIT, PENDING)
            for keys in [[key for key in KEYS if state.get(key) is pending]]
            for at in range(0, len(keys), 2)
        ] or [(False, ())]
        return iter(
            [
                Snapshot(sequence, number, pending, keys, number == len(parts) - 1, epoch)
                for number, (pending, keys) in enumerate(parts)
            ]
        )

    def receive_requests(self) -> None:
        """The daemon receives the requests for snapshots."""
        self.streams += [self.snapshot() for _ in range(self.requested)]
        self.requested = 0

    def stream(self, which: int) -> None:
        """Send the next part of one of the unfinished snapshots."""
        if self.streams:
            chosen = self.streams[which % len(self.streams)]
            part = next(chosen, None)
            if part is None:
                self.streams.remove(chosen)
            else:
                self.wire.append(part)

    def drop(self) -> None:
        """Lose a message. Only the last part of a snapshot is never lost."""
        if self.wire and not getattr(self.wire[0], "last", False):
            self.wire.popleft()

    def deliver(self) -> None:
        if self.wire:
            message = self.wire.popleft()
            self.requested += self.mirror.apply_message(message)
            self.check()

    def check(self) -> None:
        """A complete mirror equals the namespace at the number of the last received message."""
        state = self.states[self.mirror.sequence]
        if self.mirror.complete:
            assert self.mirror.epoch == self.epochs[self.mirror.sequence]
        for key in KEYS if self.mirror.complete else ():
            assert self.mirror.lookup(key) is state.get(key, MISS)
        hits = {key for key in KEYS if self.mirror.lookup(key) is HIT}
        changed = set(self.mirror.take_changed_keys())
        assert hits ^ self.known_hits <= changed
        self.known_hits = hits

    def settle(self) -> None:
        """Deliver all messages without a loss."""
        while self.streams or self.wire or self.requested:
            self.receive_requests()
            self.stream(0)
            self.deliver()


KEY_SETS = st.lists(st.sampled_from(KEYS), max_size=3, unique=True).map(tuple)
EVENTS = st.sampled_from([kind for kind in EventKind if kind is not EventKind.CLEARED])
STEPS = st.one_of(
    st.tuples(st.just("send_events"), EVENTS, KEY_SETS),
    st.just(("send_events", EventKind.CLEARED, ())),  # the region was freed
    st.just(("reset",)),
    st.sampled_from([("deliver",), ("deliver",), ("deliver",), ("drop",), ("receive_requests",)]),
    st.tuples(st.just("stream"), st.integers(0, 3)),
    st.just(("streams", None)),
)


@PROFILE
@given(st.lists(STEPS, max_size=60))
def test_a_mirror_equals_the_namespace_after_all_messages(steps: list[tuple[object, ...]]) -> None:
    daemon = SimulatedDaemon()
    for name, *arguments in steps:
        if name == "streams":
            daemon.streams.append(daemon.snapshot())
        else:
            getattr(daemon, str(name))(*arguments)
    daemon.settle()
    # Shows the client which numbers it has missed.
    daemon.wire.append(KeyEvents(len(daemon.states) - 1, (), daemon.epochs[-1]))
    daemon.settle()
    assert daemon.mirror.complete
    assert daemon.mirror.sequence == len(daemon.states) - 1
    found = [daemon.mirror.lookup(key) for key in KEYS]
    assert found == [daemon.states[-1].get(key, MISS) for key in KEYS]
