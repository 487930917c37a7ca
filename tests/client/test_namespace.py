"""A session in a namespace: what is asked, answered from the mirror, refused here, said."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvferry.client import (
    Code,
    CPULoadStoreSpec,
    Fingerprint,
    Gone,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    Lookup,
    OffloadClient,
    Refused,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.specs import MAX_KEYS

if TYPE_CHECKING:
    from client.conftest import StandIn

FINGERPRINT = Fingerprint("llama", 4096, key_bytes=4)
A, B, C = b"aaaa", b"bbbb", b"cccc"
HIT, MISS, PENDING, RETRY = Lookup.HIT, Lookup.MISS, Lookup.HIT_PENDING, Lookup.RETRY
GPU = GPULoadStoreSpec([1])


@pytest.fixture
def inside(stand_in: StandIn, client: OffloadClient) -> OffloadClient:
    """In a namespace where A is ready and B pending; what was said to get there is forgotten."""
    stand_in.store(A)
    stand_in.reserve(B)
    client.open_namespace(FINGERPRINT)
    stand_in.said.clear()
    return client


def answers(client: OffloadClient, *keys: bytes) -> list[Lookup]:
    return [client.lookup(key) for key in keys]


# Opening


def test_opening_says_what_is_wanted_and_waits_for_the_mirror(
    stand_in: StandIn, client: OffloadClient
) -> None:
    stand_in.store(A)
    opened = client.open_namespace(
        FINGERPRINT, cpu_bytes_to_use=1 << 30, eviction_policy="arc", store_threshold=2
    )
    assert opened == wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "arc", 2)
    assert stand_in.heard(wire.OpenNamespace) == [
        wire.OpenNamespace(1, FINGERPRINT, 1 << 30, "arc", 2)
    ]
    assert len(stand_in.heard(wire.Subscribe)) == 1
    assert client.namespace.mirror.whole
    assert answers(client, A, C) == [HIT, MISS]


def test_a_worker_needs_no_mirror(stand_in: StandIn, client: OffloadClient) -> None:
    opened = client.open_namespace(FINGERPRINT, mirror=False)
    assert stand_in.heard(wire.Subscribe) == []
    with pytest.raises(Refused, match="mirror=True") as refused:
        client.lookup(A)
    assert refused.value.code == Code.UNKNOWN_NAMESPACE
    assert client.open_namespace(FINGERPRINT) == opened
    assert client.lookup(A) is MISS
    assert len(stand_in.heard(wire.OpenNamespace)) == 1


def test_opened_again_it_is_as_it_was(stand_in: StandIn, inside: OffloadClient) -> None:
    opened = inside.open_namespace(FINGERPRINT, eviction_policy="arc")
    assert opened.policy == "lru"
    assert stand_in.said == []


def test_another_namespace_is_refused(stand_in: StandIn, inside: OffloadClient) -> None:
    with pytest.raises(Refused, match="another client") as refused:
        inside.open_namespace(msgspec.structs.replace(FINGERPRINT, dtype="fp8"))
    assert refused.value.code == Code.NAMESPACE_MISMATCH
    assert "dtype: 'fp8' here, '' there" in refused.value.value
    assert stand_in.said == []


def test_what_the_daemon_refuses_is_not_opened(stand_in: StandIn, client: OffloadClient) -> None:
    stand_in.refusal = ErrorInfo(Code.POOL_FULL, "no room")
    with pytest.raises(Refused, match="no room"):
        client.open_namespace(FINGERPRINT)
    with pytest.raises(Refused, match="open_namespace first"):
        client.lookup(A)


def test_a_mirror_that_is_late_fills_later(
    stand_in: StandIn, client: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.store(A)
    monkeypatch.setattr(stand_in, "_snapshot", lambda: [wire.Snapshot(1, 0, False, (A,))])
    with pytest.raises(Gone) as gone:
        client.open_namespace(FINGERPRINT, timeout=0.01)
    assert gone.value.code == Code.TIMEOUT
    assert answers(client, A, B) == [RETRY, RETRY]
    stand_in.send_back(wire.Snapshot(1, 1, False, (), True))
    assert answers(client, A, B) == [HIT, MISS]


def test_a_daemon_that_goes_while_a_mirror_is_awaited(
    stand_in: StandIn, client: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "_snapshot", lambda: [wire.Goodbye("stopping")])
    with pytest.raises(Gone, match="stopping"):
        client.open_namespace(FINGERPRINT, timeout=20)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.lookup(A),
        lambda client: client.pin([A]),
        lambda client: client.unpin([A]),
        lambda client: client.touch([A]),
        lambda client: client.reset(),
        lambda client: client.reset_async(),
        lambda client: client.namespace,
    ],
)
def test_outside_of_a_namespace_its_verbs_are_refused(
    stand_in: StandIn, client: OffloadClient, ask: Callable[[OffloadClient], object]
) -> None:
    with pytest.raises(Refused, match="open_namespace") as refused:
        ask(client)
    assert refused.value.code == Code.UNKNOWN_NAMESPACE
    assert [type(message) for message in stand_in.said] == [wire.Hello]


# Lookups


def test_lookups_follow_the_news(stand_in: StandIn, inside: OffloadClient) -> None:
    assert answers(inside, A, B, C) == [HIT, PENDING, MISS]
    stand_in.store(B, C)
    stand_in.evict(A)
    assert answers(inside, A, B, C) == [MISS, HIT, HIT]
    assert stand_in.said == []


def test_a_gap_is_mended_by_one_more_follow(stand_in: StandIn, inside: OffloadClient) -> None:
    stand_in.lossy = True
    stand_in.store(C)
    stand_in.evict(A)
    stand_in.lossy = False
    assert answers(inside, A, C) == [HIT, MISS]
    stand_in.reserve(C)
    inside.poll()
    assert stand_in.said == [wire.Subscribe()]
    assert not inside.namespace.mirror.whole
    assert answers(inside, A, B, C) == [MISS, PENDING, PENDING]
    assert inside.namespace.mirror.whole
    assert stand_in.said == [wire.Subscribe()]


def test_lookups_look_at_what_arrived_now_and_then(
    stand_in: StandIn, inside: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvferry.client.nonblocking.FRESH", 1.0)
    monkeypatch.setattr("kvferry.client.nonblocking.time.monotonic", lambda: now[0])
    inside._stale_at = 0.0
    drains = stand_in.drains
    stand_in.store(C)
    assert inside.lookup(C) is HIT
    stand_in.evict(C)
    assert [inside.lookup(C) for _ in range(1000)] == [HIT] * 1000
    assert stand_in.drains == drains + 1
    now[0] += 1.5
    assert inside.lookup(C) is MISS
    assert stand_in.drains == drains + 2


def test_results_bring_the_news_along(stand_in: StandIn, inside: OffloadClient) -> None:
    stand_in.store(C)
    assert inside.get_finished() == []
    assert inside.namespace.mirror.lookup(C) is HIT


# Pins and touches


def test_pins_and_touches_are_said(stand_in: StandIn, inside: OffloadClient) -> None:
    inside.pin([A, B])
    inside.touch(iter([B, A]), hits=3, misses=1)
    inside.unpin((A,))
    assert stand_in.said == [wire.Pin((A, B)), wire.Touch((B, A), 3, 1), wire.Unpin((A,))]
    assert inside.namespace.pinned == 1


def test_pins_count(stand_in: StandIn, inside: OffloadClient) -> None:
    inside.pin([A, A])
    inside.pin([A, B])
    inside.unpin([A])
    inside.unpin([A, A])
    with pytest.raises(Refused) as refused:
        inside.unpin([A])
    assert (refused.value.code, refused.value.value) == (Code.NOT_PINNED, repr(A))
    assert inside.namespace.pinned == 1
    inside.unpin([B])
    assert inside.namespace.pinned == 0


@pytest.mark.parametrize("keys", [[C], [A, C], [A, A]])
def test_what_is_not_pinned_lets_nothing_go(
    stand_in: StandIn, inside: OffloadClient, keys: list[bytes]
) -> None:
    inside.pin([A])
    with pytest.raises(Refused) as refused:
        inside.unpin(keys)
    assert refused.value.code == Code.NOT_PINNED
    assert stand_in.said == [wire.Pin((A,))]
    inside.unpin([A])


WRONG_KEYS: list[Any] = [
    [b"aaa"],
    [A, b"aaaaa"],
    [b""],
    ["aaaa"],
    [bytearray(A)],
    [17],
    A,
    [A] * (MAX_KEYS + 1),
]


@pytest.mark.parametrize("keys", WRONG_KEYS)
@pytest.mark.parametrize("verb", ["pin", "unpin", "touch"])
def test_keys_that_no_namespace_of_this_kind_has(
    stand_in: StandIn, inside: OffloadClient, verb: str, keys: Any
) -> None:
    with pytest.raises(Refused) as refused:
        getattr(inside, verb)(keys)
    assert refused.value.code == Code.BAD_KEY
    assert stand_in.said == []
    if len(keys) <= MAX_KEYS:
        assert "is 4 bytes" in refused.value.message


# Transfers


@pytest.mark.parametrize(
    ("spec", "media"),
    [
        ((GPU, KeyLoadStoreSpec((A,))), ("GPU", "CPU")),
        ((KeyLoadStoreSpec((A,)), GPU), ("CPU", "GPU")),
        ((GPU, CPULoadStoreSpec([0])), ("GPU", "CPU")),
        ((CPULoadStoreSpec([0]), GPU), ("CPU", "GPU")),
    ],
)
def test_the_gpu_s_side_says_which_way_a_job_goes(
    stand_in: StandIn, inside: OffloadClient, spec: Any, media: tuple[str, str]
) -> None:
    inside.transfer_async(1, spec, wait_for=3)
    assert stand_in.said == [wire.Submit(1, spec[0], spec[1], 3)]
    stand_in.send_back(wire.Goodbye())
    (lost,) = inside.get_finished()
    assert (lost.outcome, lost.transfer_type) == ("lost", media)


@pytest.mark.parametrize("keys", [(b"aaaaa",), ("aaaa",), (A, b"")])
def test_a_transfer_of_other_keys_is_refused_here(
    stand_in: StandIn, inside: OffloadClient, keys: Any
) -> None:
    for spec in ((GPU, KeyLoadStoreSpec(keys)), (KeyLoadStoreSpec(keys), GPU)):
        with pytest.raises(Refused) as refused:
            inside.transfer_async(1, spec)
        assert refused.value.code == Code.BAD_KEY
    assert stand_in.said == []


def test_keys_may_be_submitted_by_who_opened_nothing(
    stand_in: StandIn, client: OffloadClient
) -> None:
    """Another process of the engine may have; how long keys are, the daemon knows."""
    client.transfer_async(1, (GPU, KeyLoadStoreSpec((b"of any length",))))
    assert len(stand_in.heard(wire.Submit)) == 1
    wrong: Any = ("no bytes",)
    with pytest.raises(Refused) as refused:
        client.transfer_async(2, (GPU, KeyLoadStoreSpec(wrong)))
    assert refused.value.code == Code.BAD_KEY


def test_in_a_namespace_there_is_no_region(stand_in: StandIn, inside: OffloadClient) -> None:
    layout: Any = None
    for register in (inside.register_kv_caches, inside.allocate_kv_caches):
        with pytest.raises(Refused, match="cpu_bytes_to_use") as refused:
            register(layout, host_bytes=1 << 20)
        assert refused.value.code == Code.BAD_LAYOUT
    assert stand_in.said == []


# Resets


def test_a_reset_returns_once_it_is_done(stand_in: StandIn, inside: OffloadClient) -> None:
    inside.reset()
    assert answers(inside, A, B) == [MISS, MISS]
    stand_in.store(C)
    assert answers(inside, A, C) == [MISS, HIT]


def test_a_reset_that_is_late_holds_here_at_once(stand_in: StandIn, inside: OffloadClient) -> None:
    stand_in.slow = True
    with pytest.raises(Gone) as gone:
        inside.reset(timeout=0.01)
    assert gone.value.code == Code.TIMEOUT
    inside.reset_async()
    stand_in.store(C)
    assert answers(inside, A, C) == [MISS, MISS]
    stand_in.finish_resets()
    stand_in.store(B)
    assert answers(inside, A, B, C) == [MISS, HIT, MISS]


def test_between_two_resets_everything_is_absent(stand_in: StandIn, inside: OffloadClient) -> None:
    stand_in.slow = True
    inside.reset_async()
    inside.reset_async()
    first = stand_in.heard(wire.Reset)[0].request_id
    stand_in.send_back(wire.Done(first))
    stand_in.store(C)
    assert inside.lookup(C) is MISS
    assert inside.get_finished() == []


def test_a_reset_is_one_where_its_news_were_dropped(
    stand_in: StandIn, inside: OffloadClient
) -> None:
    stand_in.lossy = True
    inside.reset()
    assert answers(inside, A, B) == [MISS, MISS]


def test_a_refused_reset_has_reset_nothing(stand_in: StandIn, inside: OffloadClient) -> None:
    stand_in.refusal = ErrorInfo(Code.FORBIDDEN, "not now")
    with pytest.raises(Refused, match="not now"):
        inside.reset()
    assert answers(inside, A, B, C) == [HIT, PENDING, MISS]


def test_a_refused_reset_that_nobody_waits_for_is_raised_where_it_arrives(
    stand_in: StandIn, inside: OffloadClient
) -> None:
    stand_in.refusal = ErrorInfo(Code.FORBIDDEN, "not now")
    inside.reset_async()
    with pytest.raises(Refused, match="not now"):
        inside.get_finished()
    assert inside.lookup(A) is MISS


def test_a_mirror_made_during_a_reset_knows_of_it(stand_in: StandIn, client: OffloadClient) -> None:
    stand_in.store(A)
    stand_in.slow = True
    client.open_namespace(FINGERPRINT, mirror=False)
    client.reset_async()
    client.open_namespace(FINGERPRINT)
    assert client.lookup(A) is MISS
    stand_in.finish_resets()
    stand_in.store(B)
    assert answers(client, A, B) == [MISS, HIT]


# Without the daemon


@pytest.mark.parametrize("how", ["killed", "goodbye"])
def test_an_engine_goes_on_when_the_daemon_is_gone(
    stand_in: StandIn, inside: OffloadClient, how: str
) -> None:
    inside.pin([A])
    if how == "killed":
        stand_in.dead = True
    else:
        stand_in.send_back(wire.Goodbye("stopping"))
    assert answers(inside, A, B, C) == [MISS, MISS, MISS]
    assert isinstance(inside.gone, Gone)
    stand_in.said.clear()
    inside.pin([B])
    inside.touch([A])
    inside.unpin([A, B])
    with pytest.raises(Refused):
        inside.unpin([A])
    assert stand_in.said == []
    calls: list[Callable[[], object]] = [
        inside.reset_async,
        inside.reset,
        lambda: inside.transfer_async(1, (GPU, KeyLoadStoreSpec((A,)))),
    ]
    for call in calls:
        with pytest.raises(Gone):
            call()


def test_what_comes_after_the_end_brings_nothing_back(
    stand_in: StandIn, inside: OffloadClient
) -> None:
    stand_in.slow = True
    inside.reset_async()
    stand_in.send_back(wire.Goodbye("stopping"))
    stand_in.finish_resets()
    stand_in.store(C)
    assert inside.get_finished() == []
    assert answers(inside, A, C) == [MISS, MISS]


def test_a_closed_client_finds_nothing(stand_in: StandIn, inside: OffloadClient) -> None:
    inside.close()
    assert answers(inside, A) == [MISS]
    assert stand_in.closed
