"""Key events and snapshots of a namespace."""

from __future__ import annotations

from typing import Any

from kvferry.daemon.core.actions import (
    Broadcast,
    CopyPlan,
    PublishKVEvents,
    SendMessage,
    SendStream,
)
from kvferry.proto import messages as wire
from kvferry.proto.keys import EventKind
from kvferry.proto.specs import MAX_KEYS
from support.cached_keys import pending_keys, ready_keys
from support.namespaces_fixture import (
    FAILED,
    FINGERPRINT,
    OTHER,
    PAGE,
    REGION_BYTES,
    NamespacesFixture,
    each,
    key_events_of,
    store,
)


def test_a_subscriber_gets_all_events_in_order() -> None:
    """After each step, the sets of a subscriber equal the ready and the pending keys."""
    fixture = NamespacesFixture("a", "b", "c")
    ready, pending, sequence = set[bytes](), set[bytes](), 0
    (stream,) = fixture.send("b", wire.Subscribe())
    assert isinstance(stream, SendStream)
    assert list(stream.messages) == [wire.Snapshot(0, 0, False, (), True)]
    plans: list[CopyPlan] = []

    def start_store(letters: bytes) -> list[Any]:
        start, *actions = fixture.submit("a", store(letters))
        plans.append(start.plan)
        return actions

    steps: list[tuple[Any, list[tuple[str, bytes]] | None]] = [
        (lambda: start_store(b"ab"), [("pending", b"ab")]),
        (lambda: start_store(b"c"), [("pending", b"c")]),
        (lambda: fixture.end(plans.pop()), [("stored", b"c")]),
        (lambda: fixture.end(plans.pop()), [("stored", b"ab")]),
        (lambda: start_store(b"def"), [("removed", b"ba"), ("pending", b"def")]),
        (lambda: fixture.end(plans.pop(), FAILED), [("abandoned", b"def")]),
        (lambda: start_store(b"cd"), [("pending", b"d")]),
        (lambda: fixture.send("a", wire.Touch(each(b"a"), 1, 1)), None),
        (lambda: fixture.send("a", wire.Reset(5)), [("cleared", b"")]),
        (lambda: start_store(b"d"), [("pending", b"d")]),
        (lambda: fixture.end(plans.pop(0)), None),
        (lambda: fixture.end(plans.pop()), [("stored", b"d")]),
        (lambda: start_store(b"d"), None),
    ]
    for step, expected in steps:
        actions = step()
        assert key_events_of(actions) == expected
        for action in actions:
            if isinstance(action, Broadcast):
                assert action.sessions == ("b",)
                sequence += 1
                assert action.message.sequence == sequence
                for event in action.message.events:
                    apply_event(event, ready, pending)
        (namespace,) = fixture.core._namespaces
        cache = namespace.cache
        assert (ready, pending) == ({*ready_keys(cache)}, {*pending_keys(cache)})


def apply_event(event: wire.KeyEvent, ready: set[bytes], pending: set[bytes]) -> None:
    ready.difference_update(event.keys)
    pending.difference_update(event.keys)
    match event.kind:
        case "pending":
            pending.update(event.keys)
        case "stored":
            ready.update(event.keys)
        case "cleared":
            ready.clear()
            pending.clear()


def test_kv_events_are_published_without_subscribed_mirrors() -> None:
    fixture = NamespacesFixture("a")
    fixture.stored("a", b"abcd")
    _, published = fixture.submit("a", store(b"e"))
    events = (
        wire.KeyEvent(EventKind("removed"), (b"d",)),
        wire.KeyEvent(EventKind("pending"), (b"e",)),
    )
    assert published == PublishKVEvents(FINGERPRINT.name, 16, wire.KeyEvents(3, events))


def test_subscribers_get_each_event_once_after_the_reply() -> None:
    fixture = NamespacesFixture("a", "b", "c")
    for session in ("a", "b", "b"):
        fixture.send(session, wire.Subscribe())
    start, published, broadcast = fixture.submit("c", store(b"a"))
    assert sorted(broadcast.sessions) == ["a", "b"]
    assert broadcast.message == published.key_events
    finished, *rest = fixture.end(start.plan)
    assert isinstance(finished, SendMessage)
    assert key_events_of(rest) == [("stored", b"a")]


def test_events_are_sent_only_to_sessions_of_the_namespace() -> None:
    fixture = NamespacesFixture("a", "b")
    fixture.open_namespace("n", OTHER)
    for session in ("b", "n"):
        fixture.send(session, wire.Subscribe())
    fixture.close_sessions("b")
    assert key_events_of(fixture.submit("a", store(b"a"))) is None
    fixture.send("a", wire.Subscribe())
    fixture.register("n")
    (action,) = (a for a in fixture.submit("n", store(b"a")) if isinstance(a, Broadcast))
    assert action.sessions == ("n",)
    assert action.message.sequence == 1  # each namespace has its own sequence


def test_a_part_of_a_snapshot_lists_the_keys_of_some_blocks_when_it_is_created() -> None:
    fixture = NamespacesFixture("a", "b", quota=2 * REGION_BYTES)
    fixture.stored("a", b"abc")
    plan = fixture.start("a", store(b"de"))
    (namespace,) = fixture.core._namespaces
    snapshot = namespace.snapshot(part_blocks=2)
    first = next(snapshot)
    fixture.end(plan)  # its event has sequence number 4: a mirror applies it after the snapshot
    assert [first, *snapshot] == [
        wire.Snapshot(3, 0, False, (b"a", b"b")),
        wire.Snapshot(3, 1, False, (b"c", b"d")),
        wire.Snapshot(3, 2, False, (b"e",)),
        wire.Snapshot(3, 3, False, (), True),
    ]


def test_a_snapshot_of_pending_keys_only_has_one_part() -> None:
    fixture = NamespacesFixture("a")
    fixture.start("a", store(b"ab"))
    (stream,) = fixture.send("a", wire.Subscribe())
    assert list(stream.messages) == [wire.Snapshot(1, 0, True, (b"a", b"b"), True)]


def test_more_keys_than_an_event_may_have_are_several_events() -> None:
    room = (MAX_KEYS + 1) * PAGE
    fixture = NamespacesFixture("a", quota=room, pool_bytes=room)
    (namespace,) = fixture.core._namespaces
    keys = tuple(number.to_bytes(4) for number in range(MAX_KEYS + 1))
    namespace.cache.prepare_store(keys)
    key_events = namespace.take_key_events()
    assert key_events is not None
    assert [event.keys for event in key_events.events] == [keys[:MAX_KEYS], keys[MAX_KEYS:]]
    sequence = namespace.sequence
    assert namespace.take_key_events() is None
    assert namespace.sequence == sequence
