"""A client in a namespace: messages, lookups in the mirror, and refusals by the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.client import (
    Code,
    Gone,
    GPULoadStoreSpec,
    KeyLoadStoreSpec,
    OffloadClient,
    Refused,
)
from kvferry.client.namespace import ClientNamespace
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from kvferry.proto.specs import MAX_KEYS
from support.client_keys import FINGERPRINT, HIT, MISS, RETRY, A, B, C, answers
from support.fake_daemon import FakeDaemon
from support.time_limits import TIMEOUT

GPU = GPULoadStoreSpec([1])


# Opening


def test_opening_sends_the_arguments_and_waits_for_the_mirror(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    fake_daemon.store(A)
    opened = client.open_namespace(
        FINGERPRINT, cpu_bytes_to_use=1 << 30, eviction_policy="arc", store_threshold=2
    )
    assert opened == wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "arc", 2)
    assert fake_daemon.received_of(wire.OpenNamespace) == [
        wire.OpenNamespace(1, FINGERPRINT, 1 << 30, "arc", 2)
    ]
    assert len(fake_daemon.received_of(wire.Subscribe)) == 1
    assert client.namespace.mirror.complete
    assert answers(client, A, C) == [HIT, MISS]


def test_a_namespace_says_what_it_got_and_why_it_is_less_than_was_asked_for() -> None:
    namespace = ClientNamespace(wire.OpenNamespace(1, FINGERPRINT))
    assert (namespace.host_bytes, namespace.shortfall) == (0, "")
    opened = wire.Opened(1, FINGERPRINT.name, 8, 4096, False, "lru", 1, shortfall="in use")
    namespace.reopened(opened)
    assert (namespace.host_bytes, namespace.shortfall) == (8 * 4096, "in use")


def test_an_error_in_the_same_batch_does_not_delay_the_request_for_a_snapshot(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    """Until a snapshot, keys are a RETRY, and no other message may follow."""
    fake_daemon.lossy = True
    fake_daemon.store(C)
    fake_daemon.lossy = False
    fake_daemon.evict(A)
    fake_daemon.send_to_client(wire.Error(None, ErrorInfo(Code.BUSY, "too many pins")))
    with pytest.raises(Refused, match="too many pins"):
        tenant.poll()
    tenant.poll()
    assert answers(tenant, A, C) == [MISS, HIT]


def test_a_worker_needs_no_mirror(fake_daemon: FakeDaemon, client: OffloadClient) -> None:
    opened = client.open_namespace(FINGERPRINT, mirror=False)
    assert fake_daemon.received_of(wire.Subscribe) == []
    with pytest.raises(Refused, match="mirror=True") as refused:
        client.lookup(A)
    assert refused.value.code == Code.UNKNOWN_NAMESPACE
    assert client.open_namespace(FINGERPRINT) == opened
    assert client.lookup(A) is MISS
    assert len(fake_daemon.received_of(wire.OpenNamespace)) == 1


def test_opening_a_namespace_again_changes_nothing_and_another_is_refused(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    opened = tenant.open_namespace(FINGERPRINT, eviction_policy="s3fifo")
    assert opened.policy == "lru"
    with pytest.raises(Refused, match="another client") as refused:
        tenant.open_namespace(msgspec.structs.replace(FINGERPRINT, dtype="fp8"))
    assert refused.value.code == Code.NAMESPACE_MISMATCH
    assert "dtype: 'fp8' here, '' there" in refused.value.value
    assert fake_daemon.received == []


def test_a_late_snapshot_fills_the_mirror_later(
    fake_daemon: FakeDaemon, client: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_daemon.store(A)
    monkeypatch.setattr(fake_daemon, "_snapshot", lambda: [wire.Snapshot(1, 0, False, (A,))])
    with pytest.raises(Gone) as gone:
        client.open_namespace(FINGERPRINT, timeout=0.01)
    assert gone.value.code == Code.TIMEOUT
    assert answers(client, A, B) == [RETRY, RETRY]
    fake_daemon.send_to_client(wire.Snapshot(1, 1, False, (), True))
    assert answers(client, A, B) == [HIT, MISS]


def test_a_daemon_that_disconnects_before_the_mirror_is_complete(
    fake_daemon: FakeDaemon, client: OffloadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_daemon, "_snapshot", lambda: [wire.Goodbye("stopping")])
    with pytest.raises(Gone, match="stopping"):
        client.open_namespace(FINGERPRINT, timeout=TIMEOUT)


def test_methods_of_a_namespace_are_refused_outside_of_one(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    fake_daemon.refusal = ErrorInfo(Code.POOL_FULL, "no room")
    with pytest.raises(Refused, match="no room"):
        client.open_namespace(FINGERPRINT)
    fake_daemon.received.clear()
    calls: list[Callable[[], object]] = [
        lambda: client.lookup(A),
        lambda: client.pin([A]),
        lambda: client.unpin([A]),
        lambda: client.touch([A]),
        client.reset,
        client.reset_async,
        lambda: client.namespace,
    ]
    for call in calls:
        with pytest.raises(Refused, match="open_namespace first") as refused:
            call()
        assert refused.value.code == Code.UNKNOWN_NAMESPACE
    assert fake_daemon.received == []


# Lookups


def test_lookups_receive_messages_if_the_mirror_is_too_old(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.mirror_max_age = 3600.0
    fake_daemon.store(C)
    assert tenant.lookup(C) is HIT
    drains = fake_daemon.drains
    fake_daemon.evict(C)
    assert [tenant.lookup(C) for _ in range(1000)] == [HIT] * 1000
    assert fake_daemon.drains == drains
    tenant._mirror_expires -= 3601.0  # as if an hour had passed
    assert tenant.lookup(C) is MISS
    assert fake_daemon.drains == drains + 1


# Pins and touches


def test_pins_and_touches_are_sent(fake_daemon: FakeDaemon, tenant: OffloadClient) -> None:
    tenant.pin([A, B])
    tenant.touch(iter([B, A]), hits=3, misses=1)
    tenant.unpin((A,))
    assert fake_daemon.received == [wire.Pin((A, B)), wire.Touch((B, A), 3, 1), wire.Unpin((A,))]
    assert tenant.namespace.pinned == 1


@pytest.mark.parametrize("keys", [[C], [A, C], [A, A, A]])
def test_pins_count(fake_daemon: FakeDaemon, tenant: OffloadClient, keys: list[bytes]) -> None:
    """If one of the keys is not pinned so often, none is unpinned."""
    tenant.pin([A, A])
    with pytest.raises(Refused) as refused:
        tenant.unpin(keys)
    assert (refused.value.code, refused.value.value) == (Code.NOT_PINNED, repr(keys[-1]))
    assert fake_daemon.received == [wire.Pin((A, A))]
    tenant.unpin([A])
    assert tenant.namespace.pinned == 1
    tenant.unpin([A])
    assert tenant.namespace.pinned == 0


def test_hold_pins_keys_and_returns_how_many_are_loadable(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.store(A)
    assert tenant.hold([A, C, A]) == 1
    assert tenant.namespace.pinned == 2
    tenant.unpin([A, C, A])
    many = (A,) * (MAX_KEYS + 2)
    assert tenant.hold(many) == len(many)
    tenant.unpin(many)
    assert tenant.hold((C, *many)) == 0
    assert tenant.hold(()) == 0


@pytest.mark.parametrize("reason", ["silent", "refused", "gone"])
def test_a_hold_without_an_answer_pins_nothing(
    fake_daemon: FakeDaemon, tenant: OffloadClient, reason: str
) -> None:
    fake_daemon.silent = reason == "silent"
    if reason == "refused":
        fake_daemon.refusal = ErrorInfo(Code.BUSY, "too many pins")
    if reason == "gone":
        tenant.abandon()
    with pytest.raises(Refused if reason == "refused" else Gone):
        tenant.hold([A, B], timeout=0.001)
    assert tenant.namespace.pinned == 0
    unpinned = [message.keys for message in fake_daemon.received_of(wire.Unpin)]
    assert unpinned == ([(A, B)] if reason == "silent" else [])


WRONG_KEYS: list[Any] = [
    [b"aaa"],
    [A, b"aaaaa"],
    [b""],
    ["aaaa"],
    [bytearray(A)],
    [17],
    A,
]


@pytest.mark.parametrize("keys", WRONG_KEYS)
def test_keys_of_another_type_or_length_are_refused(
    fake_daemon: FakeDaemon, tenant: OffloadClient, keys: Any
) -> None:
    client = tenant
    calls: list[Callable[[], object]] = [
        lambda: client.pin(keys),
        lambda: client.unpin(keys),
        lambda: client.touch(keys),
        lambda: client.transfer_async(1, (GPU, KeyLoadStoreSpec(keys))),
        lambda: client.transfer_async(1, (KeyLoadStoreSpec(keys), GPU)),
    ]
    for call in calls:
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.code == Code.BAD_KEY
    assert "have 4 bytes" in refused.value.message
    assert fake_daemon.received == []


# Transfers


def test_keys_may_be_submitted_without_opening_the_namespace(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    """Another process of the engine may have opened it. The daemon checks the keys' length."""
    client.transfer_async(1, (GPU, KeyLoadStoreSpec((b"of any length",))))
    assert len(fake_daemon.received_of(wire.Submit)) == 1
    wrong: Any = ("no bytes",)
    with pytest.raises(Refused) as refused:
        client.transfer_async(2, (GPU, KeyLoadStoreSpec(wrong)))
    assert refused.value.code == Code.BAD_KEY


def test_host_bytes_in_a_namespace_is_refused(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    layout: Any = None
    for register in (
        tenant.register_kv_caches,
        tenant.allocate_kv_caches,
    ):
        with pytest.raises(Refused, match="cpu_bytes_to_use") as refused:
            register(layout, host_bytes=1 << 20)
        assert refused.value.code == Code.BAD_LAYOUT
    assert fake_daemon.received == []


# Without the daemon


@pytest.mark.parametrize("how", ["killed", "goodbye"])
def test_without_a_daemon_lookups_miss_and_pins_do_not_fail(
    fake_daemon: FakeDaemon, tenant: OffloadClient, how: str
) -> None:
    tenant.pin([A])
    if how == "killed":
        fake_daemon.disconnected = True
    else:
        fake_daemon.send_to_client(wire.Goodbye("stopping"))
    assert answers(tenant, A, B, C) == [MISS, MISS, MISS]
    assert isinstance(tenant.gone, Gone)
    fake_daemon.received.clear()
    tenant.pin([B])
    tenant.touch([A])
    tenant.unpin([A, B])
    with pytest.raises(Refused):
        tenant.unpin([A])
    assert fake_daemon.received == []
    calls: list[Callable[[], object]] = [
        tenant.reset_async,
        tenant.reset,
        lambda: tenant.transfer_async(1, (GPU, KeyLoadStoreSpec((A,)))),
    ]
    for call in calls:
        with pytest.raises(Gone):
            call()


def test_messages_after_the_end_change_nothing(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.slow = True
    tenant.reset_async()
    fake_daemon.send_to_client(wire.Goodbye("stopping"))
    fake_daemon.finish_resets()
    fake_daemon.store(C)
    assert tenant.get_finished() == []
    assert answers(tenant, A, C) == [MISS, MISS]
    tenant.close()
    assert answers(tenant, A) == [MISS]
    assert fake_daemon.closed
