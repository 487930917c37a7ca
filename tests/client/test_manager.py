"""OffloadingManager with one daemon; its events are keys that became hits, or ceased to be one."""

from __future__ import annotations

import pytest

from kvferry.client import (
    Code,
    KeyLoadStoreSpec,
    OffloadClient,
    OffloadingManager,
    Refused,
)
from kvferry.client.use_report import MAX_KEYS as MAX_TOUCHED
from kvferry.proto import messages as wire
from kvferry.proto.keys import EventKind
from kvferry.proto.specs import MAX_KEYS
from support.client_keys import (
    FINGERPRINT,
    HIT,
    MISS,
    PENDING,
    A,
    B,
    C,
    D,
    Start,
    answers,
    offer,
    open_manager,
    removed,
    stored,
)
from support.fake_daemon import FakeDaemon


@pytest.fixture
def manager(fake_daemon: FakeDaemon) -> OffloadingManager:
    """A manager of one daemon. Key A is ready, key B is pending."""
    fake_daemon.store(A)
    fake_daemon.reserve(B)
    return open_manager(fake_daemon)


# Store


def test_absent_keys_are_offered_and_pending_until_complete_store(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    assert answers(manager, A, B, C) == [HIT, PENDING, MISS]
    assert offer(manager, A, D, B, C, D) == (D, C)
    assert answers(manager, C, D) == [PENDING, PENDING]
    assert offer(manager, C, D) == ()
    fake_daemon.store(C)
    manager.complete_store([C, D])
    assert answers(manager, C, D) == [HIT, MISS]  # the daemon skipped D
    assert offer(manager, C, D) == (D,)
    manager.complete_store([D], success=False)
    manager.complete_store([D, A], success=False)
    assert answers(manager, A, D) == [HIT, MISS]
    assert offer(manager, D, b"eeee") == (D, b"eeee")
    manager.complete_store([D])
    assert answers(manager, D, b"eeee") == [MISS, PENDING]


def test_more_keys_than_blocks_are_none(start_fake_daemon: Start) -> None:
    daemon = start_fake_daemon(num_blocks=3)
    daemon.store(A)
    manager = open_manager(daemon)
    assert manager.num_blocks == 3
    assert manager.prepare_store([A, B, C, D]) is None
    assert answers(manager, B) == [MISS]
    assert offer(manager, B, C, A, A) == (B, C)
    assert offer(manager, D) == (D,)


# Load


def test_loaded_keys_are_pinned_until_complete_load(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    fake_daemon.store(C)
    assert manager.prepare_load([C, A]) == KeyLoadStoreSpec((C, A))
    manager.prepare_load(iter([A]))
    usage = manager.usage
    assert (usage.blocks, usage.ready, usage.pending, usage.pinned, usage.free) == (8, 2, 1, 2, 5)
    manager.complete_load([A, C])
    manager.complete_load([A])
    assert fake_daemon.received == [
        wire.Pin((C, A)),
        wire.Pin((A,)),
        wire.Unpin((A, C)),
        wire.Unpin((A,)),
    ]
    assert manager.usage.pinned == 0
    with pytest.raises(Refused) as refused:
        manager.complete_load([A])
    assert refused.value.code == Code.NOT_PINNED


@pytest.mark.parametrize("key", [B, C, D])
def test_only_a_hit_is_loaded(
    fake_daemon: FakeDaemon, manager: OffloadingManager, key: bytes
) -> None:
    offer(manager, D)
    with pytest.raises(Refused) as refused:
        manager.prepare_load([A, key])
    assert (refused.value.code, refused.value.value) == (Code.KEY_ABSENT, repr(key))
    assert fake_daemon.received == []


@pytest.mark.parametrize("method", ["prepare_store", "prepare_load", "touch"])
def test_keys_of_another_length_are_refused(manager: OffloadingManager, method: str) -> None:
    with pytest.raises(Refused) as refused:
        getattr(manager, method)([A, b"aaaaa"])
    assert refused.value.code == Code.BAD_KEY
    assert manager.lookup(b"aaaaa") is MISS


def test_more_keys_than_fit_into_a_message_are_legal(start_fake_daemon: Start) -> None:
    """Of a touch the first batch must be the most recent: the last."""
    daemon = start_fake_daemon(num_blocks=1 << 17)
    manager = open_manager(daemon)
    keys = tuple(n.to_bytes(4) for n in range(3 * MAX_KEYS + 10))
    batches = [keys[at : at + MAX_KEYS] for at in range(0, len(keys), MAX_KEYS)]
    manager.touch(keys)
    manager.lookup(A)
    assert not manager.prefetch(keys).found_keys
    manager.flush()
    *tail, head = [wire.Touch(batch) for batch in reversed(batches)]
    assert daemon.received == [*tail, wire.Touch(head.keys, 0, 1)]
    assert offer(manager, *keys) == keys
    for batch in batches:
        daemon.store(*batch)
    daemon.received.clear()
    assert manager.prepare_load(keys) == KeyLoadStoreSpec(keys)
    manager.complete_load(keys)
    assert daemon.received == [*map(wire.Pin, batches), *map(wire.Unpin, batches)]
    with pytest.raises(Refused, match="4 bytes"):
        manager.touch([*keys, b"aaaaa"])


# Touches and counts


def test_spare_keys_are_sent_after_the_touched_ones_and_kept_keys_at_once(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    """Touched keys are sent together, the most recent first."""
    manager.spare([A, B])
    for keys in ([A, B], [C, B], [D, D]):
        manager.touch(keys)
    manager.keep([C, D])
    assert fake_daemon.received == [wire.Touch((C, D), by_prompt=False)]
    manager.flush()
    assert fake_daemon.received[1:] == [wire.Touch((D, C, B, A)), wire.Spare((A, B))]
    manager.flush()
    assert len(fake_daemon.received) == 3


def test_lookups_are_counted_and_sent_once(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    answers(manager, A, B, C, A, D, A)
    offer(manager, C)
    assert fake_daemon.received == [wire.Touch((), 3, 2)]
    manager.lookup(A)
    manager.touch([A])
    manager.prepare_load([A])
    manager.flush()
    assert fake_daemon.received[1:] == [wire.Pin((A,)), wire.Touch((A,), 1, 0)]
    assert (manager.hits, manager.misses) == (4, 2)
    manager.take_events()
    assert len(fake_daemon.received) == 3
    manager.lookup(C)
    manager.take_events()
    assert fake_daemon.received[3:] == []
    manager.complete_store([C])
    manager.lookup(C)
    manager.take_events()
    assert fake_daemon.received[3:] == [wire.Touch((), 0, 1)]


def test_generated_tokens_and_what_loads_saved_are_reported_once(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    """Of a prompt of two keys the engine has generated a third one."""
    manager.count_saved(512, 0.25)
    manager.count_saved(512, 0.5)
    manager.touch([A, B, C], new=1)
    manager.flush()
    assert fake_daemon.received == [wire.Touch((A, B, C), 0, 0, 1, 1024, 0.75)]
    manager.touch([A, B, C])
    manager.flush()
    assert fake_daemon.received[1:] == [wire.Touch((A, B, C))]


def test_many_touches_are_sent_at_once(fake_daemon: FakeDaemon, manager: OffloadingManager) -> None:
    keys = [n.to_bytes(4) for n in range(MAX_TOUCHED + 10)]
    for _ in range(3):  # they count once
        manager.touch(keys[:MAX_TOUCHED])
    assert fake_daemon.received == []
    manager.touch(keys[MAX_TOUCHED:])
    manager.touch(keys)
    manager.touch([A])
    touched = [len(touch.keys) for touch in fake_daemon.received_of(wire.Touch)]
    assert touched == [MAX_TOUCHED, 10, MAX_TOUCHED]


# Reset


def test_a_reset_hides_all_keys_at_once(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    offer(manager, C)
    manager.touch([A])
    fake_daemon.slow = True
    manager.reset_cache()
    assert [type(message) for message in fake_daemon.received] == [wire.Reset]
    assert answers(manager, A, B, C) == [MISS, MISS, MISS]
    with pytest.raises(Refused):
        manager.prepare_load([A])
    assert offer(manager, A, B, C) == (A, B, C)
    assert manager.lookup(A) is PENDING
    manager.complete_store([A, B, C])
    fake_daemon.finish_resets()
    fake_daemon.store(B)
    assert answers(manager, A, B, C) == [MISS, HIT, MISS]


def test_epochs_are_those_of_the_mirror_and_of_the_last_own_reset(
    fake_daemon: FakeDaemon, manager: OffloadingManager
) -> None:
    manager.reset_cache("weights 2")
    (reset,) = fake_daemon.received_of(wire.Reset)
    assert reset.label == "weights 2"
    manager.poll()
    assert (manager.epochs, manager.reset_epochs) == ((1,), (1,))
    fake_daemon.send_events((EventKind.CLEARED,))
    manager.poll()
    assert (manager.epochs, manager.reset_epochs) == ((2,), (1,))


def test_a_load_from_before_a_reset_is_completed_after_it(manager: OffloadingManager) -> None:
    manager.prepare_load([A])
    manager.reset_cache()
    manager.complete_load([A])
    assert manager.usage.pinned == 0


# Timeouts of pending keys


def test_a_key_that_is_pending_too_long_is_a_miss_and_may_be_offered(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    now = 100.0
    client.open_namespace(FINGERPRINT)
    manager = OffloadingManager(client, pending_timeout=5.0, clock=lambda: now)
    fake_daemon.reserve(B)
    assert offer(manager, C) == (C,)
    assert answers(manager, B, C) == [PENDING, PENDING]
    now += 5.0
    assert manager.lookup(B) is PENDING
    assert offer(manager, B) == ()
    now += 0.1
    assert answers(manager, B, C) == [
        MISS,
        PENDING,
    ]  # a key that this manager offered does not time out
    assert offer(manager, B, C) == (B,)
    assert manager.lookup(B) is PENDING
    manager.complete_store([B])
    assert manager.lookup(B) is PENDING  # and its timeout restarts
    now += 5.1
    assert manager.lookup(B) is MISS
    fake_daemon.store(B)
    assert manager.lookup(B) is HIT
    fake_daemon.send_events((EventKind.REMOVED, B), (EventKind.PENDING, B))
    assert manager.lookup(B) is PENDING  # as if it had not been pending before


# The end


def test_shutdown_sends_pending_touches_and_closes(fake_daemon: FakeDaemon) -> None:
    with open_manager(fake_daemon) as manager:
        manager.touch([A])
    assert [type(message) for message in fake_daemon.received] == [wire.Touch, wire.Goodbye]
    assert fake_daemon.closed
    assert manager.lookup(A) is MISS


def test_a_manager_needs_a_mirror(fake_daemon: FakeDaemon, client: OffloadClient) -> None:
    with pytest.raises(Refused, match="open_namespace"):
        OffloadingManager([client])
    client.open_namespace(FINGERPRINT, mirror=False)
    with pytest.raises(Refused, match="mirror=True"):
        OffloadingManager([client])
    client.open_namespace(FINGERPRINT)
    OffloadingManager([client]).shutdown()
    assert not fake_daemon.closed  # the client was given


def test_a_store_has_the_epoch_in_which_its_request_began(
    manager: OffloadingManager, fake_daemon: FakeDaemon
) -> None:
    """Without the epochs of that time, it began with its decision."""
    before = manager.prepare_store([C])
    began = manager.epochs
    fake_daemon.send_events((EventKind.CLEARED,))
    after, late = manager.prepare_store([D]), manager.prepare_store([A], began)
    specs = [each.store_spec for each in (before, after, late) if each is not None]
    assert [spec.epoch for spec in specs] == [0, 1, 0]


# Events


def test_events_name_new_hits_and_removed_hits(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    fake_daemon.reserve(B)
    manager = open_manager(fake_daemon, events=True)
    assert manager.take_events() == [stored(A)]
    assert manager.take_events() == []
    fake_daemon.store(B, C)
    fake_daemon.evict(A)
    assert manager.take_events() == [removed(A), stored(B, C)]
    fake_daemon.evict(B)
    fake_daemon.store(B)
    fake_daemon.send_events((EventKind.ABANDONED, D))
    assert manager.take_events() == []
    fake_daemon.store(A)
    assert manager.take_events() == [stored(A)]


def test_events_of_a_reset_are_returned_once(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    manager = open_manager(fake_daemon, events=True)
    manager.take_events()
    fake_daemon.slow = True
    manager.reset_cache()
    assert manager.take_events() == [removed(A)]
    fake_daemon.finish_resets()
    fake_daemon.store(C)
    assert manager.take_events() == [stored(C)]


def test_missed_events_arrive_with_the_next_snapshot(fake_daemon: FakeDaemon) -> None:
    fake_daemon.store(A)
    manager = open_manager(fake_daemon, events=True)
    manager.take_events()
    fake_daemon.lossy = True
    fake_daemon.store(B)
    fake_daemon.evict(A)
    fake_daemon.lossy = False
    fake_daemon.store(C)
    manager.lookup(C)
    removal, addition = manager.take_events()
    assert (removal, set(addition.keys)) == (removed(A), {B, C})
