"""Resets of a namespace by a client, and its lookups until they are done."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.client import (
    Code,
    Gone,
    OffloadClient,
    Refused,
)
from kvferry.proto import messages as wire
from kvferry.proto.errors import ErrorInfo
from support.client_keys import FINGERPRINT, HIT, MISS, PENDING, A, B, C, answers
from support.fake_daemon import FakeDaemon


def test_a_reset_sends_its_label_and_returns_the_tiers_that_do_not_have_it_yet(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    assert tenant.reset("weights 2") == ()
    fake_daemon.unpublished = ("store",)
    assert tenant.reset("weights 3") == ("store",)
    tenant.reset_async("weights 4")
    fake_daemon.store(C)
    assert answers(tenant, A, B, C) == [MISS, MISS, HIT]
    labels = [each.label for each in fake_daemon.received_of(wire.Reset)]
    assert labels == ["weights 2", "weights 3", "weights 4"]


def test_a_reset_that_reconnecting_does_returns_the_same(fake_daemon: FakeDaemon) -> None:
    fake_daemon.unpublished = ("store",)
    with OffloadClient(fake_daemon.directory, engine="engine", timeout=2.0) as client:
        client.open_namespace(FINGERPRINT)
        fake_daemon.disconnected = True
        client.poll()
        fake_daemon.disconnected = False
        assert client.gone is not None
        assert client.reset("weights 2") == ("store",)
    assert [each.label for each in fake_daemon.received_of(wire.Reset)] == ["weights 2"]


@pytest.mark.parametrize("label", ["l" * 257, 7])
def test_a_reset_with_a_wrong_label_changes_nothing(
    fake_daemon: FakeDaemon, tenant: OffloadClient, label: Any
) -> None:
    for reset in (tenant.reset, tenant.reset_async):
        with pytest.raises(Refused) as refused:
            reset(label)
        assert refused.value.code == Code.BAD_MESSAGE
    assert fake_daemon.received_of(wire.Reset) == []
    assert answers(tenant, A, B, C) == [HIT, PENDING, MISS]


def test_an_unfinished_reset_hides_all_keys_at_once(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.slow = True
    with pytest.raises(Gone) as gone:
        tenant.reset(timeout=0.01)
    assert gone.value.code == Code.TIMEOUT
    tenant.reset_async()
    fake_daemon.store(C)
    assert answers(tenant, A, C) == [MISS, MISS]
    fake_daemon.finish_resets()
    fake_daemon.store(B)
    assert answers(tenant, A, B, C) == [MISS, HIT, MISS]


def test_between_two_resets_everything_is_absent(
    fake_daemon: FakeDaemon, tenant: OffloadClient
) -> None:
    fake_daemon.slow = True
    tenant.reset_async()
    tenant.reset_async()
    first = fake_daemon.received_of(wire.Reset)[0].request_id
    fake_daemon.send_to_client(wire.Done(first))
    fake_daemon.store(C)
    assert tenant.lookup(C) is MISS
    assert tenant.get_finished() == []


def test_a_refused_reset_changes_nothing(fake_daemon: FakeDaemon, tenant: OffloadClient) -> None:
    fake_daemon.refusal = ErrorInfo(Code.FORBIDDEN, "not now")
    with pytest.raises(Refused, match="not now"):
        tenant.reset()
    assert answers(tenant, A, B, C) == [HIT, PENDING, MISS]
    tenant.reset_async()
    with pytest.raises(Refused, match="not now"):
        tenant.get_finished()
    assert tenant.lookup(A) is MISS


def test_a_mirror_that_is_opened_during_a_reset_is_cleared_by_it(
    fake_daemon: FakeDaemon, client: OffloadClient
) -> None:
    fake_daemon.store(A)
    fake_daemon.slow = True
    client.open_namespace(FINGERPRINT, mirror=False)
    client.reset_async()
    client.open_namespace(FINGERPRINT)
    assert client.lookup(A) is MISS
    fake_daemon.finish_resets()
    fake_daemon.store(B)
    assert answers(client, A, B) == [MISS, HIT]
