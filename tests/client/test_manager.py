"""What a scheduler asks and says, over one daemon and over those of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pytest

from kvferry.client import (
    Code,
    Fingerprint,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    Refused,
)
from kvferry.client.manager import TOUCHES
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.keys import EventKind
from kvferry.proto.specs import MAX_KEYS

if TYPE_CHECKING:
    from client.conftest import StandIn

FINGERPRINT = Fingerprint("llama", 4096, key_bytes=4)
A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"
HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY

Start: TypeAlias = "Callable[..., StandIn]"


def open_manager(*daemons: StandIn, events: bool = False) -> OffloadingManager:
    manager = OffloadingManager.open(
        [daemon.directory for daemon in daemons],
        engine="engine",
        fingerprint=FINGERPRINT,
        events=events,
    )
    for daemon in daemons:
        daemon.said.clear()
    return manager


@pytest.fixture
def manager(stand_in: StandIn) -> OffloadingManager:
    """Over one daemon that has A, and stores B."""
    stand_in.store(A)
    stand_in.reserve(B)
    return open_manager(stand_in)


def answers(manager: OffloadingManager, *keys: bytes) -> list[Lookup]:
    return [manager.lookup(key) for key in keys]


def offer(manager: OffloadingManager, *keys: bytes) -> tuple[bytes, ...]:
    """Offer keys, and the keys to store. Those that are there, or on their way, are to be kept."""
    absent = {key for key in keys if manager._find(key) in (Lookup.MISS, Lookup.RETRY)}
    output = manager.prepare_store(keys)
    assert output is not None
    wanted = output.keys_to_store
    keep = tuple(key for key in dict.fromkeys(keys) if key not in absent) if wanted else ()
    specs = (KeyLoadStoreSpec(wanted, 1, keep),) * len(output.store_specs)
    assert output == PrepareStoreOutput(output.keys_to_store, specs)
    assert output.store_spec == specs[0]
    return output.keys_to_store


# Store


def test_what_is_there_or_on_its_way_is_left_out(manager: OffloadingManager) -> None:
    assert answers(manager, A, B, C) == [HIT, PENDING, MISS]
    assert offer(manager, A, D, B, C, D) == (D, C)


def test_what_was_offered_is_pending_until_it_is_completed(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    assert offer(manager, C, D) == (C, D)
    assert answers(manager, C, D) == [PENDING, PENDING]
    assert offer(manager, C, D) == ()
    stand_in.store(C)
    manager.complete_store([C, D])
    assert answers(manager, C, D) == [HIT, MISS]  # the daemon skipped D
    assert offer(manager, C, D) == (D,)
    manager.complete_store([D], success=False)
    manager.complete_store([D, A], success=False)
    assert answers(manager, A, D) == [HIT, MISS]
    assert offer(manager, D, b"eeee") == (D, b"eeee")
    manager.complete_store([D])
    assert answers(manager, D, b"eeee") == [MISS, PENDING]


def test_more_keys_than_blocks_are_none(start_stand_in: Start) -> None:
    daemon = start_stand_in(num_blocks=3)
    daemon.store(A)
    manager = open_manager(daemon)
    assert manager.num_blocks == 3
    assert manager.prepare_store([A, B, C, D]) is None
    assert answers(manager, B) == [MISS]
    assert offer(manager, B, C, A, A) == (B, C)
    assert offer(manager, D) == (D,)


def test_a_mirror_that_knows_nothing_yet_offers_all(stand_in: StandIn) -> None:
    manager = open_manager(stand_in)
    stand_in.lossy = True
    stand_in.store(A)
    stand_in.lossy = False
    stand_in.store(B)
    answers(manager, A)
    assert offer(manager, B, C) == (C,)


def test_nothing_is_said_to_offer_keys(stand_in: StandIn, manager: OffloadingManager) -> None:
    offer(manager, C, D)
    manager.complete_store([C, D])
    assert stand_in.said == []


# Load


def test_what_is_loaded_is_pinned_until_it_was(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    stand_in.store(C)
    assert manager.prepare_load([C, A]) == KeyLoadStoreSpec((C, A))
    manager.prepare_load(iter([A]))
    assert manager.usage.pinned == 2
    manager.complete_load([A, C])
    manager.complete_load([A])
    assert stand_in.said == [
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
def test_only_a_hit_is_loaded(stand_in: StandIn, manager: OffloadingManager, key: bytes) -> None:
    offer(manager, D)
    with pytest.raises(Refused) as refused:
        manager.prepare_load([A, key])
    assert (refused.value.code, refused.value.value) == (Code.KEY_ABSENT, repr(key))
    assert stand_in.said == []


@pytest.mark.parametrize("verb", ["prepare_store", "prepare_load", "touch"])
def test_keys_of_another_kind_are_refused(manager: OffloadingManager, verb: str) -> None:
    with pytest.raises(Refused) as refused:
        getattr(manager, verb)([A, b"aaaaa"])
    assert refused.value.code == Code.BAD_KEY
    assert manager.lookup(b"aaaaa") is MISS


def test_more_keys_than_travel_at_once_go_in_pieces(start_stand_in: Start) -> None:
    daemon = start_stand_in(num_blocks=1 << 17)
    manager = open_manager(daemon)
    keys = tuple(n.to_bytes(4) for n in range(MAX_KEYS + 10))
    manager.touch(keys)
    manager.lookup(A)
    manager.flush()
    first, rest = keys[:MAX_KEYS], keys[MAX_KEYS:]
    assert daemon.said == [wire.Touch(first, 0, 1), wire.Touch(rest)]
    assert offer(manager, *keys) == first  # a transfer has no more
    assert offer(manager, *keys) == rest
    daemon.store(*first)
    daemon.store(*rest)
    daemon.said.clear()
    manager.prepare_load(keys)
    manager.complete_load(keys)
    pins = [wire.Pin(first), wire.Pin(rest), wire.Unpin(first), wire.Unpin(rest)]
    assert daemon.said == pins
    with pytest.raises(Refused, match="4 bytes"):
        manager.touch([*keys, b"aaaaa"])


# Touches and counts


def test_touches_are_said_together_the_last_first(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    manager.touch([A, B])
    manager.touch([C, B])
    manager.touch([D, D])
    assert stand_in.said == []
    manager.flush()
    assert stand_in.said == [wire.Touch((D, C, B, A))]
    manager.flush()
    assert len(stand_in.said) == 1


def test_lookups_are_counted_and_said_once(stand_in: StandIn, manager: OffloadingManager) -> None:
    answers(manager, A, B, C, A, D, A)
    offer(manager, C)
    assert stand_in.said == [wire.Touch((), 3, 2)]
    manager.lookup(A)
    manager.touch([A])
    manager.prepare_load([A])
    manager.flush()
    assert stand_in.said[1:] == [wire.Pin((A,)), wire.Touch((A,), 1, 0)]
    assert (manager.hits, manager.misses) == (4, 2)
    manager.take_events()
    assert len(stand_in.said) == 3
    manager.lookup(C)
    manager.take_events()
    assert stand_in.said[3:] == []
    manager.complete_store([C])
    manager.lookup(C)
    manager.take_events()
    assert stand_in.said[3:] == [wire.Touch((), 0, 1)]


def test_many_touches_do_not_wait(stand_in: StandIn, manager: OffloadingManager) -> None:
    keys = [n.to_bytes(4) for n in range(TOUCHES + 10)]
    manager.touch(keys[:TOUCHES])
    assert stand_in.said == []
    manager.touch(keys[TOUCHES:])
    manager.touch(keys)
    manager.touch([A])
    assert [len(touch.keys) for touch in stand_in.heard(wire.Touch)] == [TOUCHES, TOUCHES + 10]


def test_the_same_keys_touched_again_are_not_more(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    keys = [n.to_bytes(4) for n in range(TOUCHES)]
    for _ in range(3):
        manager.touch(keys)
    assert stand_in.said == []
    manager.flush()
    assert stand_in.said == [wire.Touch(tuple(keys))]


def test_usage(manager: OffloadingManager) -> None:
    usage = manager.usage
    assert (usage.blocks, usage.ready, usage.pending, usage.pinned, usage.free) == (8, 1, 1, 0, 6)


# Reset


def test_a_reset_holds_at_once(stand_in: StandIn, manager: OffloadingManager) -> None:
    offer(manager, C)
    manager.touch([A])
    stand_in.slow = True
    manager.reset_cache()
    assert [type(message) for message in stand_in.said] == [wire.Reset]
    assert answers(manager, A, B, C) == [MISS, MISS, MISS]
    with pytest.raises(Refused):
        manager.prepare_load([A])
    assert offer(manager, A, B, C) == (A, B, C)
    assert manager.lookup(A) is PENDING
    manager.complete_store([A, B, C])
    stand_in.finish_resets()
    stand_in.store(B)
    assert answers(manager, A, B, C) == [MISS, HIT, MISS]


def test_a_load_of_before_a_reset_is_completed_after_it(manager: OffloadingManager) -> None:
    manager.prepare_load([A])
    manager.reset_cache()
    manager.complete_load([A])
    assert manager.usage.pinned == 0


# Events


def stored(*keys: bytes) -> OffloadingEvent:
    return OffloadingEvent(keys, removed=False)


def removed(*keys: bytes) -> OffloadingEvent:
    return OffloadingEvent(keys, removed=True)


def test_events_are_what_became_a_hit_and_what_ceased_to_be_one(stand_in: StandIn) -> None:
    stand_in.store(A)
    stand_in.reserve(B)
    manager = open_manager(stand_in, events=True)
    assert manager.take_events() == [stored(A)]
    assert manager.take_events() == []
    stand_in.store(B, C)
    stand_in.evict(A)
    assert manager.take_events() == [removed(A), stored(B, C)]
    stand_in.evict(B)
    stand_in.store(B)
    stand_in.happen((EventKind.ABANDONED, D))
    assert manager.take_events() == []
    stand_in.store(A)
    assert manager.take_events() == [stored(A)]


def test_events_of_a_reset_come_once(stand_in: StandIn) -> None:
    stand_in.store(A)
    manager = open_manager(stand_in, events=True)
    manager.take_events()
    stand_in.slow = True
    manager.reset_cache()
    assert manager.take_events() == [removed(A)]
    stand_in.finish_resets()
    stand_in.store(C)
    assert manager.take_events() == [stored(C)]


def test_what_was_missed_comes_with_the_repair(stand_in: StandIn) -> None:
    stand_in.store(A)
    manager = open_manager(stand_in, events=True)
    manager.take_events()
    stand_in.lossy = True
    stand_in.store(B)
    stand_in.evict(A)
    stand_in.lossy = False
    stand_in.store(C)
    manager.lookup(C)
    gone, come = manager.take_events()
    assert (gone, set(come.keys)) == (removed(A), {B, C})


def test_no_events_are_kept_where_nobody_wants_them(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    stand_in.store(C)
    assert manager.take_events() == []


# Two ranks


@pytest.fixture
def ranks(start_stand_in: Start) -> tuple[StandIn, StandIn]:
    return start_stand_in(), start_stand_in(num_blocks=5)


def test_each_rank_has_a_namespace_of_its_own(ranks: tuple[StandIn, StandIn]) -> None:
    manager = OffloadingManager.open(
        [daemon.directory for daemon in ranks],
        engine="engine",
        fingerprint=FINGERPRINT,
        cpu_bytes_to_use=1 << 20,
        eviction_policy="arc",
        store_threshold=2,
    )
    for rank, daemon in enumerate(ranks):
        (opened,) = daemon.heard(wire.OpenNamespace)
        assert opened.fingerprint == msgspec.structs.replace(FINGERPRINT, rank=rank, world_size=2)
        assert (opened.quota_bytes, opened.policy, opened.store_threshold) == (1 << 20, "arc", 2)
        assert daemon.heard(wire.Hello)[0].engine == "engine"
    assert manager.num_blocks == 5
    assert manager.usage.blocks == 13


def test_one_rank_opens_the_fingerprint_as_it_is(stand_in: StandIn) -> None:
    own = msgspec.structs.replace(FINGERPRINT, rank=3, world_size=8)
    OffloadingManager.open([stand_in.directory], engine="engine", fingerprint=own)
    assert stand_in.heard(wire.OpenNamespace)[0].fingerprint == own


def test_a_hit_is_one_at_all_ranks(ranks: tuple[StandIn, StandIn]) -> None:
    one, two = ranks
    one.store(A, C)
    one.reserve(B)
    two.store(A, B)
    manager = open_manager(one, two)
    assert answers(manager, A, B, C, D) == [HIT, PENDING, MISS, MISS]
    one.store(B)
    two.reserve(B)
    assert answers(manager, B) == [PENDING]
    assert offer(manager, A, B, C, D) == (C, D)
    assert (manager.hits, manager.misses) == (1, 2)
    manager.prepare_load([A])
    manager.touch([A])
    manager.flush()
    manager.complete_load([A])
    for daemon in ranks:
        assert daemon.said == [
            wire.Touch((), 1, 2),
            wire.Pin((A,)),
            wire.Touch((A,)),
            wire.Unpin((A,)),
        ]


@pytest.mark.parametrize("turn", [1, -1])
def test_a_rank_that_does_not_know_says_retry(start_stand_in: Start, turn: int) -> None:
    one, two = (start_stand_in(), start_stand_in())[::turn]
    one.store(A)
    one.reserve(B)
    manager = open_manager(*(one, two)[::turn])
    two.lossy = True
    two.store(A)
    two.lossy = False
    two.deaf = True
    two.reserve(D)
    assert answers(manager, A, B, C) == [RETRY, RETRY, MISS]
    assert two.said == [wire.Subscribe()]
    assert offer(manager, A, B, C) == (A, B, C)


def test_events_are_those_of_all_ranks_together(ranks: tuple[StandIn, StandIn]) -> None:
    one, two = ranks
    one.store(A, B)
    two.store(B)
    manager = open_manager(one, two, events=True)
    assert manager.take_events() == [stored(B)]
    two.store(A, C)
    assert manager.take_events() == [stored(A)]
    one.evict(A)
    two.evict(A, C)
    assert manager.take_events() == [removed(A)]
    one.evict(B)
    one.store(B)
    assert manager.take_events() == []


def test_with_one_daemon_gone_offloading_is_off(ranks: tuple[StandIn, StandIn]) -> None:
    for daemon in ranks:
        daemon.store(A, B)
    manager = open_manager(*ranks)
    manager.prepare_load([A])
    assert offer(manager, C) == (C,)
    ranks[1].dead = True
    assert answers(manager, A, C) == [MISS, MISS]
    assert offer(manager, C, D) == ()
    with pytest.raises(Refused) as refused:
        manager.prepare_load([B])
    assert refused.value.code == Code.KEY_ABSENT
    manager.complete_load([A])
    manager.complete_store([C], success=False)
    manager.touch([A])
    manager.reset_cache()
    manager.take_events()
    assert [type(message) for message in ranks[0].said[-2:]] == [wire.Unpin, wire.Reset]
    assert manager.usage.ready == 0


def test_what_was_opened_is_closed_where_another_cannot_be(ranks: tuple[StandIn, StandIn]) -> None:
    ranks[1].refusal = ErrorInfo(Code.POOL_FULL, "no room")
    with pytest.raises(Refused, match="no room"):
        open_manager(*ranks)
    assert [daemon.closed for daemon in ranks] == [True, True]


# Patience


def test_a_key_that_stays_pending_is_a_miss_in_the_end_and_may_be_offered(
    stand_in: StandIn, client: OffloadClient
) -> None:
    now = 100.0
    client.open_namespace(FINGERPRINT)
    manager = OffloadingManager(client, patience=5.0, clock=lambda: now)
    stand_in.reserve(B)
    assert offer(manager, C) == (C,)
    assert answers(manager, B, C) == [PENDING, PENDING]
    now += 5.0
    assert manager.lookup(B) is PENDING
    assert offer(manager, B) == ()
    now += 0.1
    assert answers(manager, B, C) == [MISS, PENDING]  # what was offered here is waited for
    assert offer(manager, B, C) == (B,)
    assert manager.lookup(B) is PENDING
    manager.complete_store([B])
    assert manager.lookup(B) is PENDING  # and its patience begins anew
    now += 5.1
    assert manager.lookup(B) is MISS


@pytest.mark.parametrize("how", ["ready", "absent", "reset"])
def test_patience_begins_anew_for_a_key_that_was_not_pending_in_between(
    stand_in: StandIn, client: OffloadClient, how: str
) -> None:
    now = 0.0
    client.open_namespace(FINGERPRINT)
    manager = OffloadingManager(client, patience=5.0, clock=lambda: now)
    stand_in.reserve(B)
    assert manager.lookup(B) is PENDING
    if how == "ready":
        stand_in.store(B)
    elif how == "absent":
        stand_in.happen((EventKind.ABANDONED, B))
    else:
        manager.reset_cache()
        stand_in.happen((EventKind.CLEARED,))
    assert manager.lookup(B) is (HIT if how == "ready" else MISS)
    stand_in.happen((EventKind.REMOVED, B), (EventKind.PENDING, B))
    now += 5.1
    assert manager.lookup(B) is PENDING


def test_only_so_many_first_lookups_are_remembered(
    stand_in: StandIn, client: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.client.manager.PENDING_REMEMBERED", 2)
    now = 0.0
    client.open_namespace(FINGERPRINT)
    manager = OffloadingManager(client, patience=5.0, clock=lambda: now)
    stand_in.reserve(A, B, C)
    assert answers(manager, A, B, C) == [PENDING] * 3
    assert len(manager._pending_since) == 2
    now += 5.1
    assert answers(manager, B, C) == [MISS, MISS]
    assert manager.lookup(A) is PENDING


# The end


def test_shutdown_says_what_is_left_and_closes(stand_in: StandIn) -> None:
    with open_manager(stand_in) as manager:
        manager.touch([A])
    assert [type(message) for message in stand_in.said] == [wire.Touch, wire.Goodbye]
    assert stand_in.closed
    assert manager.lookup(A) is MISS


def test_clients_of_others_stay_open(stand_in: StandIn, client: OffloadClient) -> None:
    client.open_namespace(FINGERPRINT)
    manager = OffloadingManager(client)
    assert offer(manager, A) == (A,)
    manager.shutdown()
    assert not stand_in.closed


def test_a_manager_needs_a_mirror(client: OffloadClient) -> None:
    with pytest.raises(Refused, match="open_namespace"):
        OffloadingManager([client])
    client.open_namespace(FINGERPRINT, mirror=False)
    with pytest.raises(Refused, match="mirror=True"):
        OffloadingManager([client])


def test_a_daemon_that_has_just_gone_is_offered_nothing(
    stand_in: StandIn, manager: OffloadingManager
) -> None:
    stand_in.dead = True
    assert offer(manager, C) == ()
    assert manager.lookup(C) is MISS


def test_a_store_carries_the_generation_that_was_known(
    manager: OffloadingManager, stand_in: StandIn
) -> None:
    """One decided on before a reset must be told from one after it."""
    before = manager.prepare_store([C])
    stand_in.happen((EventKind.CLEARED,))
    after = manager.prepare_store([D])
    assert before is not None
    assert after is not None
    assert [before.store_spec.generation, after.store_spec.generation] == [1, 2]
