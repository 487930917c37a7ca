"""OffloadingManager with the daemons of two ranks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import pytest

from kvferry.client import (
    Code,
    OffloadingManager,
    Refused,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from support.client_keys import (
    FINGERPRINT,
    HIT,
    MISS,
    PENDING,
    RETRY,
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

Ranks: TypeAlias = tuple[FakeDaemon, FakeDaemon]


@pytest.fixture
def ranks(start_fake_daemon: Start) -> Ranks:
    return start_fake_daemon(), start_fake_daemon(num_blocks=5)


def test_each_rank_of_several_has_a_namespace_of_its_own(ranks: Ranks) -> None:
    manager = OffloadingManager.connect(
        [daemon.directory for daemon in ranks],
        engine="engine",
        fingerprint=FINGERPRINT,
        cpu_bytes_to_use=1 << 20,
        eviction_policy="arc",
        store_threshold=2,
    )
    for rank, daemon in enumerate(ranks):
        (opened,) = daemon.received_of(wire.OpenNamespace)
        assert opened.fingerprint == msgspec.structs.replace(FINGERPRINT, rank=rank, world_size=2)
        assert (opened.quota_bytes, opened.policy, opened.store_threshold) == (1 << 20, "arc", 2)
        assert daemon.received_of(wire.Hello)[0].engine == "engine"
    assert manager.num_blocks == 5
    assert manager.usage.blocks == 13
    ranks[0].received.clear()
    own = msgspec.structs.replace(FINGERPRINT, rank=3, world_size=8)
    OffloadingManager.connect([ranks[0].directory], engine="engine", fingerprint=own)
    assert ranks[0].received_of(wire.OpenNamespace)[0].fingerprint == own


def test_a_key_is_a_hit_if_all_ranks_have_it(ranks: Ranks) -> None:
    first, second = ranks
    first.store(A, C)
    first.reserve(B)
    second.store(A, B)
    manager = open_manager(first, second)
    assert answers(manager, A, B, C, D) == [HIT, PENDING, MISS, MISS]
    first.store(B)
    second.reserve(B)
    assert answers(manager, B) == [PENDING]
    assert offer(manager, A, B, C, D) == (C, D)
    assert (manager.hits, manager.misses) == (1, 2)
    manager.prepare_load([A])
    manager.touch([A])
    manager.flush()
    manager.complete_load([A])
    for daemon in ranks:
        assert daemon.received == [
            wire.Touch((), 1, 2),
            wire.Pin((A,)),
            wire.Touch((A,)),
            wire.Unpin((A,)),
        ]


@pytest.mark.parametrize("order", [1, -1])
def test_an_incomplete_mirror_of_a_rank_returns_retry(start_fake_daemon: Start, order: int) -> None:
    first, second = (start_fake_daemon(), start_fake_daemon())[::order]
    first.store(A)
    first.reserve(B)
    manager = open_manager(*(first, second)[::order])
    second.lossy = True
    second.store(A)
    second.lossy = False
    second.silent = True
    second.reserve(D)
    assert answers(manager, A, B, C) == [RETRY, RETRY, MISS]
    assert second.received == [wire.Subscribe()]
    assert offer(manager, A, B, C) == (A, B, C)


def test_an_event_needs_a_change_of_all_ranks_together(ranks: Ranks) -> None:
    first, second = ranks
    first.store(A, B)
    second.store(B)
    manager = open_manager(first, second, events=True)
    assert manager.take_events() == [stored(B)]
    second.store(A, C)
    assert manager.take_events() == [stored(A)]
    first.evict(A)
    second.evict(A, C)
    assert manager.take_events() == [removed(A)]
    first.evict(B)
    first.store(B)
    assert manager.take_events() == []


def test_offloading_is_off_without_the_daemon_of_one_rank(ranks: Ranks) -> None:
    for daemon in ranks:
        daemon.store(A, B)
    manager = open_manager(*ranks)
    manager.prepare_load([A])
    assert offer(manager, C) == (C,)
    ranks[1].disconnected = True
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
    assert [type(message) for message in ranks[0].received[-2:]] == [wire.Unpin, wire.Reset]
    assert manager.usage.ready == 0


def test_connect_closes_all_ranks_if_one_is_refused(ranks: Ranks) -> None:
    ranks[1].refusal = ErrorInfo(Code.POOL_FULL, "no room")
    with pytest.raises(Refused, match="no room"):
        open_manager(*ranks)
    assert [daemon.closed for daemon in ranks] == [True, True]
